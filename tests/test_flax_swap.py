"""`attention_fn` in Flax's own modules: the same values and gradients, and no keyword lost."""

import functools
import inspect
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import pallas_flash
import pallas_flash.linen
import pallas_flash.nnx
from pallas_flash import dispatch
from tests.flax_checks import assert_differ, assert_near, fast_jit

B, T, FEATURES, HEADS, HEAD_DIM = 2, 10, 16, 4, 4
ADAPTERS = {
    "linen": (pallas_flash.linen.attention_fn, nn.dot_product_attention),
    "nnx": (pallas_flash.nnx.attention_fn, nnx.dot_product_attention),
}
both = pytest.mark.parametrize("library", ADAPTERS)
causal_linen = functools.partial(pallas_flash.linen.attention_fn, is_causal=True)


def _inputs(seed=0, length=T, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), (B, length, FEATURES), dtype)


@functools.cache
def _qkv(heads=HEADS, q_len=T):
    rng = np.random.default_rng(1)
    shapes = (B, q_len, HEADS, HEAD_DIM), (B, T, heads, HEAD_DIM), (B, T, heads, HEAD_DIM)
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def _dense(query, key, value, mask=True, bias=0.0):
    """What Flax's own functions compute, in NumPy: it compiles nothing."""
    query, key, value = (np.asarray(x) for x in (query, key, value))
    logits = np.einsum("...qhd,...khd->...hqk", query, key) / np.sqrt(HEAD_DIM)
    logits = np.where(np.asarray(mask), logits + np.asarray(bias), np.finfo(np.float32).min)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("...hqk,...khd->...qhd", weights, value)


def _value_and_grads(apply, params, x):
    cotangent = jax.random.normal(jax.random.key(7), x.shape)
    loss = lambda params, x: jnp.sum(apply(params, x) * cotangent)
    return fast_jit(jax.value_and_grad(loss, argnums=(0, 1)))(params, x)


def test_linen_swap_gives_the_values_and_gradients_of_linen():
    x = _inputs()
    own = nn.MultiHeadDotProductAttention(num_heads=HEADS)
    ours = nn.MultiHeadDotProductAttention(num_heads=HEADS, attention_fn=causal_linen)
    params = own.init(jax.random.key(0), x)
    mask = nn.make_causal_mask(x[..., 0])
    want = _value_and_grads(lambda p, x: own.apply(p, x, mask=mask), params, x)
    assert_near(_value_and_grads(ours.apply, params, x), want, 2e-5)


def test_nnx_swap_gives_the_values_and_gradients_of_nnx():
    x = _inputs()
    make = lambda **kw: nnx.MultiHeadAttention(
        HEADS, FEATURES, decode=False, rngs=nnx.Rngs(0), **kw
    )
    results = []
    for module in (make(), make(attention_fn=pallas_flash.nnx.attention_fn)):
        graph, state = nnx.split(module)
        apply = lambda state, x, graph=graph: nnx.merge(graph, state)(x, is_causal=True)
        value, (grads, dx) = _value_and_grads(apply, state, x)
        results.append((value, nnx.to_pure_dict(grads), dx))
    assert_near(results[1], results[0], 2e-5)


@both
def test_every_keyword_of_flax_is_named_in_the_signature(library):
    ours, own = ADAPTERS[library]
    named = inspect.signature(functools.partial(ours, is_causal=True)).parameters
    assert set(inspect.signature(own).parameters) <= set(named)
    defaults = {n: p.default for n, p in inspect.signature(own).parameters.items()}
    assert all(inspect.signature(ours).parameters[n].default == d for n, d in defaults.items())


def test_linen_passes_the_mask_through_a_partial():
    x, mask = _inputs(), jnp.arange(T) < 6
    module = nn.MultiHeadDotProductAttention(num_heads=HEADS, attention_fn=causal_linen)
    params = module.init(jax.random.key(0), x)
    out = module.apply(params, x, mask=mask[None, None, None])
    own = nn.MultiHeadDotProductAttention(num_heads=HEADS)
    both_masks = nn.make_causal_mask(x[..., 0]) * mask
    assert_near(out, own.apply(params, x, mask=both_masks))


@both
@pytest.mark.parametrize("kind", ["causal", "padding", "combined", "bool"])
def test_masks_as_flax_makes_them(library, kind):
    fn, _ = ADAPTERS[library]
    tokens = jnp.arange(1, T + 1) * jnp.array([[1], [1]]) % 8  # a zero is padding
    mask = {
        "causal": lambda: nn.make_causal_mask(tokens),
        "padding": lambda: nn.make_attention_mask(jnp.ones_like(tokens), tokens != 0),
        "combined": lambda: nn.combine_masks(
            nn.make_causal_mask(tokens), nn.make_attention_mask(tokens > -1, tokens > 0)
        ),
        "bool": lambda: nn.make_causal_mask(tokens, dtype=jnp.bool_),
    }[kind]()
    assert_near(fn(*_qkv(), mask=mask), _dense(*_qkv(), mask=mask))


@both
def test_bias_and_more_batch_axes(library):
    fn, _ = ADAPTERS[library]
    bias = np.random.default_rng(3).normal(size=(1, HEADS, T, T)).astype(np.float32)
    assert_near(fn(*_qkv(), bias=bias), _dense(*_qkv(), bias=bias))
    mask = np.random.default_rng(4).random((B, 1, T, T)) < 0.8
    mask |= np.eye(T, dtype=bool)
    want = _dense(*_qkv(), mask=mask)
    assert_near(fn(*[x[:, None] for x in _qkv()], mask=mask[:, None])[:, 0], want)
    assert_near(fn(*[x[0] for x in _qkv()], mask=mask[0]), want[0])


@both
def test_dropout(library):
    fn = functools.partial(ADAPTERS[library][0], *_qkv(), dropout_rate=0.5)
    plain = ADAPTERS[library][0](*_qkv())
    rng, other = jax.random.split(jax.random.key(5))
    dropped = fn(dropout_rng=rng, broadcast_dropout=False)
    assert_near(fn(dropout_rng=rng, deterministic=True), plain)
    assert_differ(dropped, plain)
    assert_differ(dropped, fn(dropout_rng=other, broadcast_dropout=False))
    assert_differ(dropped, fn(dropout_rng=rng, broadcast_dropout=True))
    with pytest.raises(ValueError, match="dropout_rng"):
        fn()


@both
def test_one_pattern_where_dropout_is_broadcast(library):
    query, key, value = (np.broadcast_to(x[:1, :, :1], x.shape) for x in map(np.asarray, _qkv()))
    fn = functools.partial(ADAPTERS[library][0], query, key, value, dropout_rate=0.5)
    out = fn(dropout_rng=jax.random.key(0))  # Flax's default broadcasts
    assert_near(out, np.broadcast_to(out[:1, :, :1], out.shape))


@both
def test_dtype_promotes(library):
    fn, _ = ADAPTERS[library]
    query, key, value = _qkv()
    as_bfloat16 = jax.eval_shape(functools.partial(fn, dtype=jnp.bfloat16), query, key, value)
    assert as_bfloat16.dtype == jnp.bfloat16
    assert jax.eval_shape(fn, query.astype(jnp.bfloat16), key, value).dtype == jnp.float32


@both
@pytest.mark.parametrize(
    "precision",
    ["highest", jax.lax.Precision.HIGHEST, "F32_F32_F32", ("highest", "highest")],
    ids=str,
)
def test_precision_reaches_the_products(library, precision):
    fn, _ = ADAPTERS[library]
    text = str(jax.make_jaxpr(functools.partial(fn, precision=precision))(*_qkv()))
    asked = "F32_F32_F32" if precision == "F32_F32_F32" else "HIGHEST"
    assert text.count("dot_general[") >= 2
    found = re.findall(r"precision=(\S+)", text)
    assert found and all(asked in p for p in found)


@both
def test_refusals_say_why(library):
    fn, _ = ADAPTERS[library]
    with pytest.raises(ValueError, match="sow_weights"):
        fn(*_qkv(), module=object())
    with pytest.raises(ValueError, match="differs between the operands"):
        fn(*_qkv(), precision=("highest", "default"))
    with pytest.raises(TypeError, match="no_such_option"):
        fn(*_qkv(), no_such_option=1)


@pytest.mark.parametrize(
    "name", ["einsum_dot_general", "qk_attn_weights_einsum", "attn_weights_value_einsum"]
)
def test_linen_refuses_other_products(name):
    with pytest.raises(ValueError, match=name):
        pallas_flash.linen.attention_fn(*_qkv(), **{name: jnp.einsum})


def test_sow_weights_raises_in_flax_modules():
    x = _inputs()
    module = nn.MultiHeadDotProductAttention(num_heads=HEADS, attention_fn=causal_linen)
    with pytest.raises(ValueError, match="sow_weights"):
        module.init(jax.random.key(0), x, sow_weights=True)
    module = nnx.MultiHeadAttention(
        HEADS, FEATURES, decode=False, attention_fn=pallas_flash.nnx.attention_fn, rngs=nnx.Rngs(0)
    )
    with pytest.raises(ValueError, match="sow_weights"):
        module(x, sow_weights=True)


SEGMENTS = jnp.arange(T)[None] // jnp.array([[3], [5]])
OPTIONS = {
    "is_causal": {"is_causal": True},
    "local_window_size": {"local_window_size": (2, 1)},
    "query_seq_lengths": {"query_seq_lengths": jnp.array([4, 7])},
    "key_value_seq_lengths": {"key_value_seq_lengths": jnp.array([4, 7])},
    "segment_ids": {"query_segment_ids": SEGMENTS, "key_value_segment_ids": SEGMENTS},
    "logits_soft_cap": {"logits_soft_cap": 0.5},
    "sinks": {"sinks": jnp.ones(HEADS)},
    "alibi_slopes": {"alibi_slopes": 0.5 ** jnp.arange(HEADS)},
    "scale": {"scale": 2.0},
}


@both
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_of_ours_reaches_the_call(library, option):
    fn, _ = ADAPTERS[library]
    options = OPTIONS[option]
    out = functools.partial(fn, **options)(*_qkv())
    assert_near(out, pallas_flash.dot_product_attention(*_qkv(), **options), 1e-7)
    assert_differ(out, fn(*_qkv()))


@both
def test_options_without_a_value_of_their_own_reach_the_call(library):
    fn, _ = ADAPTERS[library]
    aligned = functools.partial(fn, *_qkv(q_len=4), is_causal=True)
    assert_differ(aligned(causal_alignment="bottom_right"), aligned())
    with pytest.raises(ValueError, match="implementation"):
        fn(*_qkv(), implementation="triton")
    with pytest.raises(TypeError, match="deterministic_backward"):
        fn(*_qkv(), deterministic_backward="yes")
    assert_near(fn(*_qkv(heads=2)), pallas_flash.dot_product_attention(*_qkv(heads=2)), 1e-7)


def test_decode_of_linens_own_module_with_the_swap():
    x = _inputs()
    fields = {"num_heads": HEADS, "attention_fn": causal_linen}
    module = nn.MultiHeadDotProductAttention(**fields, decode=True)
    variables = module.init(jax.random.key(0), x)
    whole = nn.MultiHeadDotProductAttention(**fields).apply({"params": variables["params"]}, x)
    step = fast_jit(functools.partial(module.apply, mutable=["cache"]))
    for t in range(4):
        out, cache = step(variables, x[:, t : t + 1])
        variables = {**variables, **cache}
        assert_near(out[:, 0], whole[:, t])


def test_decode_of_nnxs_own_module_with_the_swap():
    x = _inputs()
    module = nnx.MultiHeadAttention(
        HEADS, FEATURES, decode=True, attention_fn=pallas_flash.nnx.attention_fn, rngs=nnx.Rngs(0)
    )
    whole = module(x, is_causal=True, decode=False)
    module.init_cache(x.shape)
    step = nnx.jit(lambda module, x: module(x, is_causal=True))
    for t in range(4):
        assert_near(step(module, x[:, t : t + 1])[:, 0], whole[:, t])


@both
@pytest.mark.parametrize(
    "option",
    [{"local_window_size": (2, 0)}, {"alibi_slopes": (0.5,) * HEADS}],
    ids=["window", "alibi"],
)
def test_what_needs_positions_raises_in_a_decode_step_of_flax(library, option):
    fn = functools.partial(ADAPTERS[library][0], **option)
    with pytest.raises(ValueError, match=f"{next(iter(option))} with one query.*decode=True"):
        fn(*_qkv(q_len=1), mask=jnp.ones((B, 1, 1, T)))


@pytest.mark.filterwarnings("ignore:'.value' access")  # by nnx.RoPE itself
def test_rope_as_nnx_does_it():
    rope = nnx.RoPE(embedding_size=HEAD_DIM, max_seq_len=2 * T)
    fn = functools.partial(pallas_flash.nnx.attention_fn, *_qkv(), rope=rope, is_causal=True)
    want = nnx.dot_product_attention_with_rope(*_qkv(), rope=rope, is_causal=True)
    assert_near(fn(), want)
    assert_near(fn(input_positions=jnp.arange(T)), want)
    assert_near(fn(input_positions=jnp.arange(T) + jnp.array([[3], [9]])), want, 1e-5)  # relative
    assert_differ(fn(input_positions=2 * jnp.arange(T)), want)


def test_input_positions_without_rope_and_rope_without_positions_raise():
    with pytest.raises(ValueError, match="rope="):
        pallas_flash.nnx.attention_fn(*_qkv(), input_positions=jnp.arange(T))
    with pytest.raises(ValueError, match="needs input_positions"):
        pallas_flash.nnx.attention_fn(*_qkv(q_len=1), rope=nnx.RoPE())


def test_rope_in_a_decode_step_takes_the_position_it_is_told():
    rope = nnx.RoPE()
    query, key, value = _qkv()
    whole = pallas_flash.nnx.attention_fn(query, key, value, rope=rope, is_causal=True)
    step = pallas_flash.nnx.attention_fn(
        query[:, 6:7],
        key,
        value,
        rope=rope,
        input_positions=jnp.array([6]),
        mask=(jnp.arange(T) <= 6)[None, None, None],
    )
    assert_near(step[:, 0], whole[:, 6])


# On a GPU: what the README promises for its swap, read from the lowered program.

LONG = 384


def _lowered(loss, *args):
    return jax.jit(jax.grad(loss)).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def _assert_fused(text):
    assert text.count("mosaic_gpu") >= 2  # forward and backward
    assert f"{LONG}x{LONG}" not in text


def _linen_loss(**fields):
    module = nn.MultiHeadDotProductAttention(num_heads=2, dtype=jnp.bfloat16, **fields)
    x = jnp.zeros((1, LONG, 128), jnp.bfloat16)
    params = jax.eval_shape(module.init, jax.random.key(0), x)
    return lambda p, x: jnp.sum(module.apply(p, x).astype(jnp.float32)), params, x


def test_linen_swap_runs_fused_on_hopper():
    with dispatch.assume_device("gpu", (9, 0)):
        _assert_fused(_lowered(*_linen_loss(attention_fn=causal_linen)))
    assert f"{LONG}x{LONG}" in _lowered(*_linen_loss())  # what the check looks for, in linen's own


def test_nnx_swap_runs_fused_on_hopper():
    module = nnx.MultiHeadAttention(
        2,
        128,
        decode=False,
        dtype=jnp.bfloat16,
        attention_fn=pallas_flash.nnx.attention_fn,
        rngs=nnx.Rngs(0),
    )
    graph, state = nnx.split(module)
    loss = lambda state, x: jnp.sum(nnx.merge(graph, state)(x, is_causal=True).astype(jnp.float32))
    with dispatch.assume_device("gpu", (9, 0)):
        _assert_fused(_lowered(loss, state, jnp.zeros((1, LONG, 128), jnp.bfloat16)))


@pytest.mark.parametrize("window", [None, (100, 0)], ids=["all", "window"])
def test_a_decode_step_of_our_module_runs_fused_on_hopper(window):
    module = pallas_flash.linen.MultiHeadDotProductAttention(
        4, num_kv_heads=2, local_window_size=window, dtype=jnp.bfloat16, decode=True
    )
    x = jnp.zeros((1, LONG, 256), jnp.bfloat16)
    variables = jax.eval_shape(module.init, jax.random.key(0), x)
    step = jax.jit(functools.partial(module.apply, mutable=["cache"]))
    with dispatch.assume_device("gpu", (9, 0)):
        text = step.trace(variables, x[:, :1]).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu") >= 1


def test_explain_says_fused_for_the_swap():
    qkv = jax.ShapeDtypeStruct((1, LONG, 2, 64), jnp.bfloat16)
    with dispatch.assume_device("gpu", (9, 0)):
        explanation = pallas_flash.explain(qkv, qkv, qkv, is_causal=True)
    assert explanation.implementation == "mosaic_gpu"
    assert "fused" in str(explanation)
