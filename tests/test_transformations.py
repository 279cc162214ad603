"""The call inside programs: control flow, module remat, donation, x64, export, new numbers.

Derivatives and vmap are in test_autodiff.py, meshes in test_sharding.py. What only the lowered
program can show of the kernels is read off the text for CUDA.
"""

import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import pallas_flash.linen
import pallas_flash.nnx
from pallas_flash import dispatch, dot_product_attention
from pallas_flash.autodiff import LSE_NAME, OUT_NAME
from tests.test_attention import ON_GPU
from tests.test_autodiff import _calls_of

SHAPE = (2, 24, 2, 64)
IN_CUDA = dict(implementation="mosaic_gpu")


def _qkv(dtype=jnp.float32, shape=SHAPE):
    return tuple(jax.random.normal(jax.random.key(i), shape, dtype) for i in range(3))


def _dense(q, k, v):
    logits = jnp.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(q.shape[-1])
    logits = jnp.where(jnp.tril(jnp.ones(logits.shape[-2:], bool)), logits, -jnp.inf)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits), v)


def _square(x):
    return (x.astype(jnp.float32) ** 2).sum()


def _lowered(f, *args, **jit_options):
    with dispatch.assume_device("gpu", (9, 0)):
        traced = jax.jit(f, **jit_options).trace(*args)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def test_vmap_with_every_pattern_of_in_axes():
    q, k, v = _qkv(shape=(2, 1, 4, 1, 3))
    ours = functools.partial(dot_product_attention, is_causal=True)
    for axes in itertools.product((0, None), repeat=3):
        if axes == (None, None, None):
            continue
        given = [x if axis == 0 else x[0] for x, axis in zip((q, k, v), axes, strict=True)]
        gradients = lambda f, axes=axes: jax.jit(
            jax.vmap(jax.value_and_grad(lambda q, k, v: _square(f(q, k, v)), (0, 1, 2)), axes)
        )
        results = (jax.tree.leaves(gradients(f)(*given)) for f in (ours, _dense))
        for a, b in zip(*results, strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5 * np.abs(b).max())


# --- control flow ---------------------------------------------------------------------------------


def _cond(attend, q, k, v):
    return jax.lax.cond(q.sum() > -1e9, lambda q: attend(q, k, v), lambda q: q, q)


def _scan(attend, q, k, v):
    layer = lambda x, scale: (x + attend(x * scale, k, v), None)
    return jax.lax.scan(layer, q, jnp.array([0.5, 2.0], q.dtype))[0]


def _while(attend, q, k, v):
    body = lambda state: (state[0] + 1, attend(state[1], k, v))
    return jax.lax.while_loop(lambda state: state[0] < 3, body, (0, q))[1]


@pytest.mark.parametrize("flow", [_cond, _scan, _while])
def test_inside_control_flow(flow):
    """Forward and gradient; JAX differentiates no while loop in reverse, so that one forward."""
    q, k, v = _qkv()
    ours = functools.partial(dot_product_attention, is_causal=True)
    run = lambda attend: jax.jit(functools.partial(flow, attend))
    np.testing.assert_allclose(run(ours)(q, k, v), run(_dense)(q, k, v), atol=1e-5)
    loss = lambda attend, *x: _square(flow(attend, *x))
    if flow is not _while:
        grads = [jax.jit(jax.grad(functools.partial(loss, f), (0, 1, 2))) for f in (ours, _dense)]
        for got, wanted in zip(*(g(q, k, v) for g in grads), strict=True):
            np.testing.assert_allclose(got, wanted, atol=2e-5 * np.abs(wanted).max())

    on_cuda = functools.partial(dot_product_attention, is_causal=True, **IN_CUDA)
    x = _qkv(jnp.bfloat16)
    if flow is _while:
        text = _lowered(functools.partial(flow, on_cuda), *x)
    else:
        text = _lowered(jax.grad(functools.partial(loss, on_cuda), (0, 1, 2)), *x)
    assert "flash_forward" in text and ("flash_backward" in text or flow is _while)


# --- remat of modules -----------------------------------------------------------------------------

NAMED = jax.checkpoint_policies.save_only_these_names(OUT_NAME, LSE_NAME)
POLICIES = {"named": (NAMED, 1), "nothing": (jax.checkpoint_policies.nothing_saveable, 2)}
FEATURES = 128


def _linen(policy):
    layer = (
        nn.MultiHeadDotProductAttention
        if policy is None
        else nn.remat(nn.MultiHeadDotProductAttention, policy=policy)
    )
    attend = functools.partial(pallas_flash.linen.attention_fn, is_causal=True)
    module = layer(num_heads=2, attention_fn=attend, dtype=jnp.bfloat16, use_bias=False)
    x = jax.random.normal(jax.random.key(0), (1, 128, FEATURES), jnp.bfloat16)
    params = jax.jit(module.init)(jax.random.key(1), x)
    return lambda params, x: _square(module.apply(params, x)), params, x


def _nnx(policy):
    module = pallas_flash.nnx.MultiHeadAttention(
        num_heads=2,
        in_features=FEATURES,
        dtype=jnp.bfloat16,
        use_bias=False,
        decode=False,
        is_causal=True,
        rngs=nnx.Rngs(0),
    )
    graph, state = nnx.split(module)
    x = jax.random.normal(jax.random.key(0), (1, 128, FEATURES), jnp.bfloat16)
    call = lambda module, x: module(x)
    call = call if policy is None else nnx.remat(call, policy=policy)
    return lambda state, x: _square(call(nnx.merge(graph, state), x)), state, x


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("library", [_linen, _nnx])
def test_remat_of_a_module_runs_the_forward_kernel_once_or_twice(library, policy):
    policy, forward_kernels = POLICIES[policy]
    loss, params, x = library(policy)
    text = _lowered(jax.grad(loss), params, x)
    assert _calls_of(text, "flash_forward") == forward_kernels
    assert _calls_of(text, "flash_backward_statistics") == 1
    if forward_kernels == 1:
        losses = (library(p)[0] for p in (policy, None))  # fresh: traces are remembered
        gradients = (jax.jit(jax.grad(f))(params, x) for f in losses)
        for a, b in zip(*map(jax.tree.leaves, gradients), strict=True):
            np.testing.assert_allclose(a, b, atol=2e-2 * np.abs(np.asarray(b)).max())


# --- new numbers, donated buffers, dtypes ---------------------------------------------------------


@pytest.mark.parametrize("implementation", ["xla", "kernels"])
def test_new_numbers_trace_nothing(implementation):
    """Lengths, masks, windows, bias, scale, cap, slopes, sinks, ids, dropout keys are data."""
    q, k, v = _qkv(jnp.bfloat16 if implementation == "kernels" else jnp.float32)
    traces = []

    def loss(q, k, v, operands, rest):
        traces.append(1)
        out = dot_product_attention(q, k, v, **operands, **rest, dropout_rate=0.1)
        return _square(out)

    step = jax.jit(jax.grad(loss, (0, 3)))
    for i in range(3):
        normal = lambda *shape, i=i: jax.random.normal(jax.random.key(i), shape)
        ids = jnp.sort(jax.random.randint(jax.random.key(i), (2, 24), 0, 3))
        operands = dict(
            bias=normal(1, 2, 24, 24),
            scale=jnp.float32(i + 1),
            sinks=normal(2),
            logits_soft_cap=jnp.float32(i + 2),
            alibi_slopes=jnp.abs(normal(2)),
        )
        rest = dict(
            mask=normal(2, 1, 24, 24) < 1,
            query_seq_lengths=jnp.array([24, 20 - i]),
            key_value_seq_lengths=jnp.array([i + 3, 24]),
            local_window_size=jnp.int32(i),
            query_segment_ids=ids,
            key_value_segment_ids=ids,
            dropout_rng=jax.random.key(i),
        )
        if implementation == "xla" or ON_GPU:
            step(q, k, v, operands, rest)
        else:
            with dispatch.assume_device("gpu", (9, 0)):
                step.trace(q, k, v, operands, rest)
    assert len(traces) == 1


def test_donated_buffers_are_taken():
    q, k, v = _qkv()
    wanted = np.asarray(dot_product_attention(q, k, v))
    step = jax.jit(lambda q, k, v: dot_product_attention(q, k, v), donate_argnums=0)
    np.testing.assert_allclose(step(q, k, v), wanted, atol=1e-6)
    assert q.is_deleted() and not k.is_deleted()
    x = _qkv(jnp.bfloat16)
    assert "tf.aliasing_output" in _lowered(
        lambda q, k, v: dot_product_attention(q, k, v, **IN_CUDA), *x, donate_argnums=0
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_x64_changes_no_result(dtype):
    args = [np.asarray(x) for x in _qkv(dtype)]
    run = lambda *x: jax.vjp(functools.partial(dot_product_attention, is_causal=True), *x)

    def results():
        out, vjp = run(*map(jnp.asarray, args))
        return [out, *vjp(out)]

    wanted = results()
    with jax.enable_x64(True):
        got = results()
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == b.dtype == dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float8_e5m2", "complex64", "key"])
def test_other_dtypes_are_refused_by_name(dtype):
    q = jax.random.split(jax.random.key(0), (2, 4, 2, 8)) if dtype == "key" else None
    q = jnp.ones((2, 4, 2, 8), dtype) if q is None else q
    with pytest.raises(ValueError, match=f"query, key and value are {q.dtype}; .*cast them"):
        dot_product_attention(q, q, q)


def test_kernels_are_traced_under_debug_nans():
    """A trace under the flag is the same program: nothing in it looks at values."""
    x = _qkv(jnp.bfloat16)
    loss = lambda *x: _square(dot_product_attention(*x, is_causal=True, **IN_CUDA))
    with jax.debug_nans(True):
        assert "flash_backward" in _lowered(jax.grad(loss, (0, 1, 2)), *x)


@pytest.mark.gpu
def test_kernels_are_quiet_under_debug_nans():
    x = _qkv(jnp.bfloat16, (2, 264, 2, 64))
    loss = lambda *x: _square(dot_product_attention(*x, is_causal=True, **IN_CUDA))
    with jax.debug_nans(True):
        jax.block_until_ready(jax.grad(loss, (0, 1, 2))(*x))


# --- export ---------------------------------------------------------------------------------------

EXPORTED = (1, 264, 2, 64)
KERNEL_CHECKS = [  # JAX promises no stability of Mosaic's custom call: saying so is the user's part
    jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2"),
    jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu"),
]


def _exported() -> bytearray:
    attend = functools.partial(dot_product_attention, is_causal=True, **IN_CUDA)
    shape = jax.ShapeDtypeStruct(EXPORTED, jnp.bfloat16)
    with dispatch.assume_device("gpu", (9, 0)):
        exported = jax.export.export(
            jax.jit(attend), platforms=("cuda",), disabled_checks=KERNEL_CHECKS
        )(shape, shape, shape)
        return exported.serialize(vjp_order=1)


def test_export_for_cuda_from_any_machine():
    loaded = jax.export.deserialize(_exported())
    assert loaded.platforms == ("cuda",) and loaded.has_vjp()
    assert loaded.out_avals[0].shape == EXPORTED
    assert "flash_forward" in loaded.mlir_module() or "mosaic_gpu" in loaded.mlir_module()
    assert [x.shape for x in loaded.vjp().out_avals] == [EXPORTED] * 3


@pytest.mark.gpu
def test_what_was_exported_runs():
    x = _qkv(jnp.bfloat16, EXPORTED)
    loaded = jax.export.deserialize(_exported())
    got, vjp = jax.vjp(loaded.call, *x)
    wanted, plain_vjp = jax.vjp(_dense, *(y.astype(jnp.float32) for y in x))
    for a, b in zip((got, *vjp(got)), (wanted, *plain_vjp(wanted)), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b)
        assert np.linalg.norm(a - b) <= 2e-2 * np.linalg.norm(b)
