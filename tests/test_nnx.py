"""The nnx attention module: nnx's parameters and results, and what nnx's lacks."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pallas_flash.nnx import MultiHeadAttention, attention_fn
from tests.flax_checks import assert_differ, assert_near, fast_jit

B, T, FEATURES, HEADS = 2, 10, 16, 4
X = jnp.asarray(np.random.default_rng(0).normal(size=(B, T, FEATURES)), jnp.float32)


@functools.cache
def _weights(shape, dtype):
    return jnp.asarray(np.random.default_rng(2).normal(size=shape, scale=0.3), dtype)


def _make(cls=MultiHeadAttention, **options):
    """A module with random parameters, and nothing compiled for it."""
    build = lambda: cls(HEADS, FEATURES, rngs=nnx.Rngs(0), **options)
    graph, state = nnx.split(nnx.eval_shape(build))
    fill = lambda x: _weights(x.shape, x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x
    module = nnx.merge(graph, jax.tree.map(fill, state))
    if getattr(module, "rngs", None) is not None:
        module.rngs = nnx.Rngs(0).dropout.fork()
    return module


def test_every_argument_of_nnx_is_kept():
    for name in ("__init__", "__call__"):
        own = inspect.signature(getattr(nnx.MultiHeadAttention, name)).parameters
        ours = inspect.signature(getattr(MultiHeadAttention, name)).parameters
        takes_any = "nnx_options" in ours
        assert takes_any or set(own) <= set(ours)
        positional = [n for n, p in own.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert list(ours)[: len(positional)] == positional


@pytest.mark.parametrize(
    "options",
    [
        {"num_kv_heads": 2},
        {"normalize_qk": True, "qkv_features": 32, "out_features": 8, "param_dtype": jnp.bfloat16},
        {"use_bias": False, "dtype": jnp.bfloat16},
    ],
    ids=["gqa", "norm-features-bf16-params", "bf16-no-bias"],
)
def test_a_state_of_nnx_loads_and_gives_the_same_output(options):
    own = _make(nnx.MultiHeadAttention, decode=False, **options)
    ours = _make(is_causal=True, **options)
    shapes = lambda module: jax.tree.map(
        lambda x: (x.shape, x.dtype), nnx.to_pure_dict(nnx.state(module, nnx.Param))
    )
    assert shapes(ours) == shapes(own)
    nnx.update(ours, nnx.state(own, nnx.Param))
    want, got = own(X, is_causal=True), ours(X)
    assert got.dtype == want.dtype
    tolerance = 2e-2 if jnp.bfloat16 in options.values() else 3e-6
    assert_near(np.float32(got), np.float32(want), tolerance)


def test_the_same_seed_gives_the_parameters_of_nnx():
    state = lambda cls: nnx.to_pure_dict(
        nnx.state(cls(2, 4, decode=False, rngs=nnx.Rngs(0)), nnx.Param)
    )
    assert_near(state(MultiHeadAttention), state(nnx.MultiHeadAttention), 0)


def test_parameters_stay_float32_where_the_work_is_bfloat16():
    module = _make(num_kv_heads=2, dtype=jnp.bfloat16, use_sinks=True, normalize_qk=True)
    assert {x.dtype for x in jax.tree.leaves(nnx.state(module))} == {jnp.dtype(jnp.float32)}
    assert jax.eval_shape(lambda x: module(x), X).dtype == jnp.bfloat16


def test_grouped_heads_equal_repeated_heads():
    grouped, full = _make(num_kv_heads=2, is_causal=True), _make(is_causal=True)
    assert grouped.key.kernel.shape == (FEATURES, 2, FEATURES // HEADS)
    for name in ("key", "value"):
        few, many = getattr(grouped, name), getattr(full, name)
        many.kernel[...] = np.repeat(few.kernel[...], 2, axis=-2)
        many.bias[...] = np.repeat(few.bias[...], 2, axis=-2)
    assert_near(full(X), grouped(X))


def test_split_merge_jit_and_remat():
    module = _make(is_causal=True, num_kv_heads=2)
    graph, state = nnx.split(module)
    loss = lambda module, x: jnp.sum(jnp.sin(module(x)))
    merged = lambda loss: lambda state, x: loss(nnx.merge(graph, state), x)
    plain = fast_jit(jax.value_and_grad(merged(loss)))(state, X)
    remat = fast_jit(jax.value_and_grad(merged(nnx.remat(loss))))(state, X)
    assert_near(jax.tree.leaves(remat), jax.tree.leaves(plain))
    assert_near(nnx.jit(loss)(module, X), plain[0])


SLOPES = (2.0, 1.0, 0.5, 0.25)
SEGMENTS = np.arange(T)[None] // np.array([[3], [5]])
OTHER = np.random.default_rng(1).normal(size=(B, T, FEATURES)).astype(np.float32)
CALLS = {
    "inputs_k": {"inputs_k": OTHER},
    "inputs_v": {"inputs_k": np.asarray(X), "inputs_v": OTHER},
    "mask": {"mask": np.tril(np.ones((1, 1, T, T), np.float32))},
    "bias": {"bias": 3 * OTHER[:, None, :, :T]},
    "is_causal": {"is_causal": True},
    "query_seq_lengths": {"query_seq_lengths": np.array([4, 7])},
    "key_value_seq_lengths": {"key_value_seq_lengths": np.array([4, 7])},
    "segment_ids": {"query_segment_ids": SEGMENTS, "key_value_segment_ids": SEGMENTS},
}
OPTIONS = {
    "is_causal": {"is_causal": True},
    "local_window_size": {"local_window_size": (2, 1)},
    "logits_soft_cap": {"logits_soft_cap": 0.1},
    "alibi_slopes": {"alibi_slopes": SLOPES},
    "scale": {"scale": 3.0},
    "use_sinks": {"use_sinks": True, "sinks_init": nnx.initializers.ones},
    "rope": {"rope": nnx.RoPE()},
    "attention_fn": {"attention_fn": functools.partial(attention_fn, is_causal=True)},
}


@functools.cache
def _plain():
    return np.asarray(_make()(X))


@pytest.mark.parametrize("call", CALLS)
def test_every_call_argument_changes_the_output(call):
    assert_differ(_make()(X, **CALLS[call]), _plain())


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_changes_the_output(option):
    assert_differ(_make(**OPTIONS[option])(X), _plain())


def test_all_together_reach_attention_fn_as_they_are():
    seen = {}

    def spy(query, key, value, **options):
        seen.update(options)
        return attention_fn(query, key, value, **options)

    together = lambda table: dict(pair for some in table.values() for pair in some.items())
    call = {n: x for n, x in together(CALLS).items() if not n.startswith("inputs")}
    options = together(OPTIONS) | {"dropout_rate": 0.5, "attention_fn": spy}
    module = _make(**options)
    module(X, **call, deterministic=False, rngs=nnx.Rngs(1))
    wanted = options | call | {"deterministic": False}
    for name in wanted.keys() - {"attention_fn", "use_sinks", "sinks_init", "rope"}:
        np.testing.assert_array_equal(seen[name], wanted[name], name)
    sinks = module.sinks
    assert sinks is not None
    np.testing.assert_array_equal(seen["sinks"], sinks[...])
    assert "dropout_rng" in seen


def test_other_options_reach_the_call():
    for options, error in (
        ({"implementation": "triton"}, ValueError),
        ({"deterministic_backward": "yes"}, TypeError),
        ({"causal_alignment": "middle"}, ValueError),
    ):
        with pytest.raises(error, match=next(iter(options))):
            _make(**options)(X)


def test_the_call_overrides_the_module():
    module = _make(is_causal=True)
    assert_near(module(X, is_causal=False), _plain())
    assert_differ(module(X), _plain())


def test_dropout():
    module = _make(dropout_rate=0.5)
    assert_near(module(X, deterministic=True), _plain())
    drop = functools.partial(module, X, deterministic=False)
    first = drop(rngs=nnx.Rngs(1))
    assert_differ(first, _plain())
    assert_near(drop(rngs=nnx.Rngs(1)), first)
    assert_differ(drop(rngs=nnx.Rngs(2)), first)
    assert_differ(drop(), drop())  # the module's own rngs move on
    assert_differ(
        _make(dropout_rate=0.5, broadcast_dropout=False)(X, deterministic=False, rngs=nnx.Rngs(1)),
        first,
    )
    module.eval()
    assert_near(module(X), _plain())
    module.train()
    assert_near(module(X, rngs=nnx.Rngs(1)), first)
    with pytest.raises(ValueError, match="deterministic=True or False"):
        _make(dropout_rate=0.5)(X)
    with pytest.raises(ValueError, match="needs rngs"):
        _make(dropout_rate=0.5, keep_rngs=False)(X, deterministic=False)


@pytest.mark.parametrize(
    ("options", "chunks"),
    [
        ({}, (5, 1, 1, 1, 1, 1)),
        ({"num_kv_heads": 2, "use_sinks": True, "rope": nnx.RoPE()}, (1, 8, 1)),
        ({"local_window_size": 1, "num_kv_heads": 1, "rope": nnx.RoPE()}, (2, 2, 1, 2, 2, 1)),
        ({"local_window_size": (7, None), "causal_alignment": "bottom_right"}, (4, 1, 4, 1)),
        ({"alibi_slopes": SLOPES, "use_sinks": True}, (5, 1, 1, 3)),
    ],
    ids=["plain", "gqa-sinks-rope", "window1-mqa-rope", "window7", "alibi-sinks"],
)
def test_decode_equals_one_causal_pass(options, chunks):
    module = _make(is_causal=True, **options)
    want = module(X)
    module.init_cache(X.shape)
    assert module.cached_key.shape == (B, T, options.get("num_kv_heads", HEADS), 4)
    graph, state = nnx.split(module)

    @fast_jit
    def step(state, x):
        module = nnx.merge(graph, state)
        return module(x, decode=True), nnx.state(module)

    outs = []
    for part in np.split(np.asarray(X), np.cumsum(chunks)[:-1], axis=1):
        out, state = step(state, part)
        outs.append(out)
    assert_near(np.concatenate(outs, axis=1), want, 1e-5)
    assert state["cache_index"][...] == T


def test_decode_with_a_cache_of_another_dtype():
    module = _make(is_causal=True, dtype=jnp.bfloat16, decode=True)
    module.init_cache(X.shape)  # float32 unless told
    assert module(X[:, :5]).dtype == jnp.bfloat16
    module.init_cache(X.shape, jnp.bfloat16)
    out = module(X[:, :5])
    assert_near(np.float32(out), np.float32(module(X, decode=False)[:, :5]), 2e-2)


def test_the_cache_is_that_of_nnx():
    own, ours = _make(nnx.MultiHeadAttention, decode=True), _make(decode=True)
    for module in (own, ours):
        module.init_cache(X.shape)
    for t in range(2):
        assert_near(ours(X[:, t : t + 1]), own(X[:, t : t + 1]))
    caches = [nnx.to_pure_dict(nnx.state(m, nnx.Cache)) for m in (ours, own)]
    assert_near(*caches)


def test_errors_of_decode():
    module = _make(decode=True)
    with pytest.raises(ValueError, match="init_cache"):
        module(X[:, :1])
    module.init_cache(X.shape)
    with pytest.raises(ValueError, match="cache overflow"):
        module(np.zeros((B, T + 1, FEATURES), np.float32))
    with pytest.raises(ValueError, match="make the cache with the batch"):
        module(X[:1, :1])
    assert module.cache_index is not None
    module.cache_index[...] = jnp.int32(T)
    with pytest.raises(ValueError, match="cache_index=10"):
        module(X[:, :1])
    bound = functools.partial(attention_fn, rope=nnx.RoPE())
    module = _make(decode=True, attention_fn=bound)
    module.init_cache(X.shape)
    with pytest.raises(ValueError, match="give rope to the module"):
        module(X[:, :1])


def test_errors_of_the_module():
    with pytest.raises(ValueError, match="multiple of num_kv_heads=3"):
        MultiHeadAttention(4, 16, num_kv_heads=3, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="multiple of num_heads=3"):
        MultiHeadAttention(3, 16, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="no_such"):
        MultiHeadAttention(4, 16, rngs=nnx.Rngs(0), no_such=1)
    module = _make()
    with pytest.raises(ValueError, match="pass inputs_k"):
        module(X, None, X)
    with pytest.raises(ValueError, match="sow_weights"):
        module(X, sow_weights=True)
    with pytest.raises(ValueError, match="rope="):
        module(X, input_positions=np.arange(T))
    with pytest.raises(ValueError, match="key_value_segment_ids is missing"):
        module(X, query_segment_ids=SEGMENTS)
