"""The linen attention module: linen's parameters and results, and what linen's lacks."""

import dataclasses
import functools

import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_flash.linen import MultiHeadAttention, MultiHeadDotProductAttention, attention_fn
from tests.flax_checks import assert_differ, assert_near, fast_jit

B, T, FEATURES, HEADS = 2, 10, 16, 4
X = jnp.asarray(np.random.default_rng(0).normal(size=(B, T, FEATURES)), jnp.float32)
KEY = jax.random.key(0)


def _init(module):
    """What `init` makes, with random parameters, and nothing compiled for it."""
    rng = np.random.default_rng(2)
    shapes = jax.eval_shape(module.init, KEY, X)
    fill = lambda x: jnp.asarray(rng.normal(size=x.shape, scale=0.3), x.dtype)
    zeros = lambda x: jnp.zeros(x.shape, x.dtype)
    params = jax.tree.map(fill, shapes["params"])
    return {**jax.tree.map(zeros, shapes), "params": params}


def _stepper(module):
    return fast_jit(functools.partial(module.apply, mutable=["cache"]))


def _causal_mask():
    return np.tril(np.ones((1, 1, T, T), np.float32))


def test_every_field_of_linen_is_kept_with_its_default():
    ours = {f.name: f for f in dataclasses.fields(MultiHeadDotProductAttention)}
    for field in dataclasses.fields(nn.MultiHeadDotProductAttention):
        if field.name not in ("attention_fn", "parent", "name"):
            assert ours[field.name].default == field.default, field.name
    assert ours["attention_fn"].default is attention_fn


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"normalize_qk": True, "qkv_features": 32, "out_features": 8, "param_dtype": jnp.bfloat16},
        {"use_bias": False, "dtype": jnp.bfloat16},
    ],
    ids=["plain", "norm-features-bf16-params", "bf16-no-bias"],
)
def test_a_checkpoint_of_linen_loads_and_gives_the_same_output(fields):
    own = nn.MultiHeadDotProductAttention(num_heads=HEADS, **fields)
    ours = MultiHeadDotProductAttention(num_heads=HEADS, is_causal=True, **fields)
    params = _init(own)
    shapes = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    assert shapes(jax.eval_shape(ours.init, KEY, X)) == shapes(params)
    want = own.apply(params, X, mask=_causal_mask())
    got = ours.apply(params, X)
    assert got.dtype == want.dtype
    tolerance = 2e-2 if jnp.bfloat16 in fields.values() else 3e-6
    assert_near(np.float32(got), np.float32(want), tolerance)


def test_names_in_a_parent_are_those_of_linen():
    def names(*classes):
        class Model(nn.Module):
            @nn.compact
            def __call__(self, x):
                for cls in classes:
                    x = cls(num_heads=HEADS)(x)
                return x

        return set(jax.eval_shape(Model().init, KEY, X)["params"])

    own = names(nn.MultiHeadDotProductAttention, nn.MultiHeadAttention)
    assert names(MultiHeadDotProductAttention, MultiHeadAttention) == own


def test_parameters_stay_float32_where_the_work_is_bfloat16():
    module = MultiHeadDotProductAttention(
        num_heads=HEADS, num_kv_heads=2, dtype=jnp.bfloat16, use_sinks=True, normalize_qk=True
    )
    params = jax.eval_shape(module.init, KEY, X)
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(jnp.float32)}
    assert jax.eval_shape(module.apply, params, X).dtype == jnp.bfloat16


def test_gradients_under_remat_are_those_of_linen():
    own = nn.MultiHeadDotProductAttention(num_heads=HEADS)
    ours = nn.remat(MultiHeadDotProductAttention)(num_heads=HEADS, is_causal=True)
    params = _init(own)
    loss = lambda apply: lambda params, x: jnp.sum(jnp.sin(apply(params, x)))
    grads = lambda apply: fast_jit(jax.grad(loss(apply), argnums=(0, 1)))(params, X)
    want = grads(functools.partial(own.apply, mask=_causal_mask()))
    assert_near(grads(ours.apply), want, 2e-5)


def _repeat_kv_heads(params, times):
    repeat = lambda path, x: jnp.repeat(x, times, axis=-2) if path[1].key in ("key", "value") else x
    return jax.tree.map_with_path(repeat, params)


def test_grouped_heads_equal_repeated_heads():
    grouped = MultiHeadDotProductAttention(num_heads=HEADS, num_kv_heads=2, is_causal=True)
    params = _init(grouped)
    assert params["params"]["key"]["kernel"].shape == (FEATURES, 2, FEATURES // HEADS)
    full = MultiHeadDotProductAttention(num_heads=HEADS, is_causal=True)
    assert_near(full.apply(_repeat_kv_heads(params, 2), X), grouped.apply(params, X))


SLOPES = (2.0, 1.0, 0.5, 0.25)
SEGMENTS = np.arange(T)[None] // np.array([[3], [5]])
OTHER = np.random.default_rng(1).normal(size=(B, T, FEATURES)).astype(np.float32)
CALLS = {
    "inputs_k": {"inputs_k": OTHER},
    "inputs_v": {"inputs_k": np.asarray(X), "inputs_v": OTHER},
    "inputs_kv": {"inputs_kv": OTHER},
    "mask": {"mask": _causal_mask()},
    "bias": {"bias": 3 * OTHER[:, None, :, :T]},
    "query_seq_lengths": {"query_seq_lengths": np.array([4, 7])},
    "key_value_seq_lengths": {"key_value_seq_lengths": np.array([4, 7])},
    "segment_ids": {"query_segment_ids": SEGMENTS, "key_value_segment_ids": SEGMENTS},
}
FIELDS = {
    "is_causal": {"is_causal": True},
    "local_window_size": {"local_window_size": (2, 1)},
    "logits_soft_cap": {"logits_soft_cap": 0.1},
    "alibi_slopes": {"alibi_slopes": SLOPES},
    "alibi_slopes array": {"alibi_slopes": np.float32(SLOPES)},
    "scale": {"scale": 3.0},
    "use_sinks": {"use_sinks": True},
    "attention_fn": {"attention_fn": functools.partial(attention_fn, is_causal=True)},
}


@functools.cache
def _plain():
    module = MultiHeadDotProductAttention(num_heads=HEADS)
    params = _init(module)
    return module, params, module.apply(params, X)


@pytest.mark.parametrize("call", CALLS)
def test_every_call_argument_changes_the_output(call):
    module, params, plain = _plain()
    assert_differ(module.apply(params, X, **CALLS[call]), plain)


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_changes_the_output(field):
    module, params, plain = _plain()
    changed = module.clone(**FIELDS[field])
    if field == "use_sinks":
        params = {"params": {**params["params"], "sinks": np.ones(HEADS, np.float32)}}
    assert_differ(changed.apply(params, X), plain)


def test_all_together_reach_attention_fn_as_they_are():
    seen = {}

    def spy(query, key, value, **options):
        seen.update(options)
        return attention_fn(query, key, value, **options)

    together = lambda table: dict(pair for some in table.values() for pair in some.items())
    call = {n: x for n, x in together(CALLS).items() if not n.startswith("inputs")}
    fields = together(FIELDS) | {"dropout_rate": 0.5, "attention_fn": spy}
    module, params, _ = _plain()
    sinks = np.ones(HEADS, np.float32)
    params = {"params": {**params["params"], "sinks": sinks}}
    module.clone(**fields).apply(params, X, **call, deterministic=False, dropout_rng=KEY)
    wanted = fields | call | {"sinks": sinks, "deterministic": False}
    for name in wanted.keys() - {"attention_fn", "use_sinks"}:
        np.testing.assert_array_equal(seen[name], wanted[name], name)
    assert seen["dropout_rng"] is KEY


def test_other_fields_reach_the_call():
    module, params, _ = _plain()
    with pytest.raises(ValueError, match="implementation"):
        module.clone(implementation="triton").apply(params, X)
    with pytest.raises(TypeError, match="deterministic_backward"):
        module.clone(deterministic_backward="yes").apply(params, X)
    with pytest.raises(ValueError, match="causal_alignment"):
        module.clone(causal_alignment="middle").apply(params, X)
    for name in ("qk_attn_weights_einsum", "attn_weights_value_einsum"):
        with pytest.raises(ValueError, match=name):
            module.clone(**{f"{name}_cls": lambda: jnp.einsum}).apply(params, X)


def test_dropout():
    _, params, plain = _plain()
    module = MultiHeadDotProductAttention(num_heads=HEADS, dropout_rate=0.5)
    rngs = {"dropout": jax.random.key(1)}
    apply = functools.partial(module.apply, params, X)
    assert_near(apply(deterministic=True), plain)
    assert_near(module.clone(deterministic=True).apply(params, X), plain)
    assert_differ(apply(deterministic=False, rngs=rngs), plain)
    assert_differ(
        apply(deterministic=False, dropout_rng=jax.random.key(2)),
        apply(deterministic=False, rngs=rngs),
    )
    assert_differ(
        module.clone(broadcast_dropout=False).apply(params, X, deterministic=False, rngs=rngs),
        apply(deterministic=False, rngs=rngs),
    )
    with pytest.raises(flax.errors.InvalidRngError, match="dropout"):
        apply(deterministic=False)
    with pytest.raises(ValueError, match="deterministic"):
        apply()


@pytest.mark.parametrize(
    ("fields", "chunks"),
    [
        ({}, (5, 1, 1, 1, 1, 1)),
        ({"num_kv_heads": 2, "use_sinks": True, "dtype": jnp.float32}, (1, 8, 1)),
        ({"local_window_size": 1, "num_kv_heads": 1}, (2, 2, 1, 2, 2, 1)),
        ({"local_window_size": (7, None), "causal_alignment": "bottom_right"}, (4, 1, 4, 1)),
        ({"alibi_slopes": SLOPES, "num_kv_heads": 2}, (5, 1, 1, 3)),
        ({"alibi_slopes": SLOPES, "logits_soft_cap": 0.5, "local_window_size": 3}, (1, 4, 3, 1, 1)),
    ],
    ids=["plain", "gqa-sinks", "window1-mqa", "window7", "alibi-gqa", "alibi-cap-window3"],
)
def test_decode_equals_one_causal_pass(fields, chunks):
    module = MultiHeadDotProductAttention(HEADS, is_causal=True, **fields)
    decoder = module.clone(decode=True)
    variables = _init(decoder)
    cache = variables["cache"]
    assert cache["cached_key"].shape == (B, T, fields.get("num_kv_heads", HEADS), 4)
    want = module.apply({"params": variables["params"]}, X)
    step = _stepper(decoder)
    outs = []
    for part in np.split(np.asarray(X), np.cumsum(chunks)[:-1], axis=1):
        out, changed = step({"params": variables["params"], "cache": cache}, part)
        cache = changed["cache"]
        outs.append(out)
    assert_near(np.concatenate(outs, axis=1), want)
    assert cache["cache_index"] == T


def test_decode_takes_lengths_and_segments_of_the_cache():
    module = MultiHeadDotProductAttention(HEADS, is_causal=True, local_window_size=(4, 0))
    decoder = module.clone(decode=True)
    variables = _init(decoder)
    ids = (np.arange(T)[None] >= np.array([[6], [7]])).astype(np.int32)
    mask = np.arange(T) != 6
    calls = {"key_value_segment_ids": ids, "mask": mask[None, None, None]}
    want = module.apply({"params": variables["params"]}, X, query_segment_ids=ids, **calls)
    step = _stepper(decoder)
    _, cache = step(variables, X[:, :7], query_segment_ids=ids[:, :7], **calls)
    variables = {**variables, **cache}
    out, _ = step(variables, X[:, 7:8], query_segment_ids=ids[:, 7:8], **calls)
    assert_near(out, want[:, 7:8])
    hidden, _ = step(variables, X[:, 7:8], key_value_seq_lengths=np.array([7, 7]))
    masked, _ = step(variables, X[:, 7:8], mask=(np.arange(T) < 7)[None, None, None])
    assert_near(hidden, masked)


def test_the_cache_is_linens():
    own = nn.MultiHeadDotProductAttention(num_heads=HEADS, decode=True)
    ours = MultiHeadDotProductAttention(num_heads=HEADS, decode=True)
    variables = _init(own)
    want, got = variables, variables
    own, ours = _stepper(own), _stepper(ours)
    for t in range(2):
        want_out, changed = own(want, X[:, t : t + 1])
        want = {**variables, **changed}
        got_out, changed = ours(got, X[:, t : t + 1])
        got = {**variables, **changed}
        assert_near((got_out, got), (want_out, want))


def test_errors_of_decode():
    decoder = MultiHeadDotProductAttention(HEADS, decode=True)
    variables = _init(decoder)
    with pytest.raises(ValueError, match="mutable"):
        decoder.apply(variables, X[:, :1])
    with pytest.raises(ValueError, match="cache overflow"):
        decoder.apply(variables, np.zeros((B, T + 1, FEATURES), np.float32), mutable=["cache"])
    full = {**variables, "cache": {**variables["cache"], "cache_index": jnp.int32(T)}}
    with pytest.raises(ValueError, match="cache_index=10"):
        decoder.apply(full, X[:, :1], mutable=["cache"])
    with pytest.raises(ValueError, match="make the cache with the batch"):
        decoder.apply(variables, X[:1, :1], mutable=["cache"])
    bound = functools.partial(attention_fn, local_window_size=(2, 0))
    with pytest.raises(ValueError, match="give local_window_size to the module"):
        decoder.clone(attention_fn=bound).apply(variables, X[:, :1], mutable=["cache"])
    bound = functools.partial(attention_fn, logits_soft_cap=2.0)
    decoder = decoder.clone(attention_fn=bound, alibi_slopes=SLOPES)
    with pytest.raises(ValueError, match="give logits_soft_cap to the module"):
        decoder.apply(variables, X[:, :1], mutable=["cache"])


def test_errors_of_the_module():
    init = lambda *args, **fields: MultiHeadDotProductAttention(**fields).init(KEY, *args)
    with pytest.raises(ValueError, match="multiple of num_kv_heads=3"):
        init(X, num_heads=4, num_kv_heads=3)
    with pytest.raises(ValueError, match="multiple of num_heads=3"):
        init(X, num_heads=3)
    with pytest.raises(ValueError, match="pass inputs_k"):
        init(X, None, X, num_heads=4)
    module, params, _ = _plain()
    with pytest.raises(ValueError, match="sow_weights"):
        module.apply(params, X, sow_weights=True)
    with pytest.raises(ValueError, match="inputs_kv"):
        module.apply(params, X, X, inputs_kv=X)
    with pytest.raises(ValueError, match="key_value_segment_ids is missing"):
        module.apply(params, X, query_segment_ids=SEGMENTS)
