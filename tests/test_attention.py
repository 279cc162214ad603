"""Every case on every implementation that takes it: values, lse and all gradients."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_flash import api, dispatch, dot_product_attention, reference, tuned
from pallas_flash.arguments import Arguments, normalize
from pallas_flash.kernels.interpret import interpret_kernels
from tests.cases import CASES, FUSED, UNFUSED, Case
from tests.races import races_raise
from tests.tolerance import assert_close

ON_GPU = jax.default_backend() == "gpu"
QKV = ("query", "key", "value")
DIFFERENTIABLE = ("bias", "scale", "logits_soft_cap", "sinks", "alibi_slopes")


def _inexact(kwargs):
    return {n: x for n, x in kwargs.items() if n in DIFFERENTIABLE and isinstance(x, jax.Array)}


def value_and_gradients(function, qkv, kwargs, dout, dlse):
    """out, lse and the gradients of query, key, value and every float operand, by name."""
    inexact = _inexact(kwargs)
    rest = {n: x for n, x in kwargs.items() if n not in inexact}
    static = {n: x for n, x in rest.items() if not isinstance(x, jax.Array)}
    traced = {n: x for n, x in rest.items() if isinstance(x, jax.Array)}

    @jax.jit
    def run(qkv, inexact, traced, dout, dlse):
        call = lambda qkv, inexact: function(*qkv, **inexact, **traced, **static)
        (out, lse), vjp = jax.vjp(call, qkv, inexact)
        dqkv, dinexact = vjp((dout, dlse))
        return out, lse, dict(zip(QKV, dqkv, strict=True)) | dinexact

    return run(qkv, inexact, traced, dout, dlse)


def lse_cotangent(case: Case):
    """Random, and finite also where lse is -inf: it must do no harm there."""
    rng = np.random.default_rng(2)
    shape = (case.batch, case.q_len, case.heads[0])
    return jnp.asarray(rng.standard_normal(shape).astype(np.float32))


@contextlib.contextmanager
def runnable(implementation):
    """The kernels run for real on a GPU, in interpret mode elsewhere."""
    if implementation == "mosaic_gpu" and not ON_GPU:
        with interpret_kernels(), races_raise():
            yield
    else:
        yield


# In interpret mode a case takes seconds: one of each kind there, all of them on a GPU.
SLOW_WITHOUT_GPU = {
    "both-lengths-causal-gqa",
    "bias-full-deterministic",
    "bias-bf16-d128-gqa",
    "mla-192-128-causal",
    "decode-3-queries-window-soft-cap",
    "bias-f32-broadcast",
    "segments-packed-d128-causal",
    "mask-blocks",
    "window-gqa-d128-causal",
    "long-kv-d128",
    "head-dim-1",
    "narrow-head-dims-112-90-gqa",
    "bottom-right-empty-rows",
    "dropout",
    "sinks-causal",
    "alibi-causal-gqa",
    "gqa4-causal-ragged",
    "segments-causal",
    "gqa-d256-causal",
    "kv-lengths-with-zero",
    "soft-cap",
    "scale-negative",
    "one-query",
    "everything-deterministic",
    "tile-edge-129-causal",
    "window-left-causal",
    "decode-gqa4-lengths-sinks",
    "decode-16-queries-gqa4",
    "decode-gqa8-in-parts",
    "decode-4-queries-d256-soft-cap",
    "decode-more-tiles-than-blocks-d128-f16",
    "full-f16",
    "causal-bf16",
    "scale-traced",
    "query-lengths-d128",
    "causal-f16-d128",
    "tile-exact-192-causal",
    "long-q-causal",
    "one-key",
    "ragged-63-65",
    "mqa-d128",
    "full-d256",
    "wide-value-64-200",
    "lengths-d256-causal",
    "window-both",
    "window-bottom-right",
    "window-d256",
    "segments-any-order-d256",
    "mask-per-batch",
    "mask-f16-causal",
    "bias-bf16-row",
    "bias-full-d256",
    "soft-cap-traced",
    "alibi-per-batch-long-kv",
    "alibi-soft-cap-bottom-right-f16",
}

# What is special of them is in the kernels, and not in interpret mode.
_PREFIXES = ("bias-shared-by", "bias-own", "soft-cap-with")
ONLY_ON_GPU = {case.name for case in CASES if case.name.startswith(_PREFIXES)}
SLOW_WITHOUT_GPU |= ONLY_ON_GPU


def _selected():
    for case in CASES:
        if case.name not in ONLY_ON_GPU:
            yield pytest.param(case, "xla", id=f"{case}-xla")
        if case in FUSED:
            gpu_only = [pytest.mark.gpu] if case.name in SLOW_WITHOUT_GPU else []
            yield pytest.param(case, "mosaic_gpu", id=f"{case}-mosaic_gpu", marks=gpu_only)


@pytest.mark.parametrize(("case", "implementation"), list(_selected()))
def test_matches_oracle(case, implementation):
    _check(case, implementation)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [c for c in FUSED if c.heads[0] > c.heads[1]], ids=str)
def test_matches_oracle_with_a_group_in_one_block(case, monkeypatch):
    """The cases are so short that the backward gives each query head of a group its own block."""
    monkeypatch.setattr(tuned, "kv_parts", lambda problem, cut: 1)
    jax.clear_caches()
    _check(case, "mosaic_gpu")
    jax.clear_caches()


def _check(case: Case, implementation):
    qkv, kwargs = case.arguments()
    dout, dlse = case.cotangent(), lse_cotangent(case)
    with runnable(implementation):
        function = lambda *qkv, **kw: dot_product_attention(
            *qkv, **kw, implementation=implementation, return_residual=True
        )
        got = value_and_gradients(function, qkv, kwargs, dout, dlse)
        got = jax.tree.map(np.asarray, got)
    problem, operands = normalize(Arguments(*qkv, **kwargs))
    dlse = jnp.swapaxes(dlse, 1, 2)
    oracle = reference.oracle(operands, problem, dout, dlse)
    # Compiled only where it is asked for: a few roundings are enough for most results.
    plain = functools.cache(lambda: reference.plain_gradients(operands, problem, dout, dlse))
    assert_close(got[0], oracle[0], lambda: plain()[0], case.dtype, "out")
    assert_close(np.swapaxes(got[1], 1, 2), oracle[1], lambda: plain()[1], case.dtype, "lse")
    for name, gradient in got[2].items():
        key = {"logits_soft_cap": "soft_cap"}.get(name, name)
        given = qkv[QKV.index(name)] if name in QKV else kwargs[name]
        assert (gradient.shape, gradient.dtype) == (given.shape, given.dtype), name
        right = oracle[2][key].reshape(given.shape)  # normal form: 2-D
        rough = lambda key=key, shape=given.shape: plain()[2][key].reshape(shape)
        assert_close(gradient, right, rough, case.dtype, "d" + name)


@pytest.mark.parametrize("case", UNFUSED, ids=str)
def test_unfused_is_refused_with_its_reason(case):
    qkv, kwargs = case.arguments()
    with dispatch.assume_device("gpu", (9, 0)):
        told = api.explain(*qkv, **kwargs)
    assert told.implementation == "xla"
    [verdict] = [v for v in told.verdicts if v.implementation == "mosaic_gpu"]
    assert not verdict.ok
    assert "not fused" in verdict.why or "dtype" in verdict.why


# Each on one of the two versions that CI runs, beside what test_aot compiles on the newest.
# Of those that run on a GPU only: one bias for all that is summed in a cluster; and what must come
# in parts as small as a soft cap's.
LOWERED_TOO = {
    "bias-shared-by-8-f16-window-dropout",
    "soft-cap-with-mask-d128",
    "soft-cap-with-dropout-d128",
    "soft-cap-with-segments-alibi-d128",
}
ONE_OF_ITS_KIND = [
    case for case in FUSED if case.name not in ONLY_ON_GPU or case.name in LOWERED_TOO
]
LOWERED = ONE_OF_ITS_KIND[jax.__version_info__ < (0, 12) :: 2]


@pytest.mark.parametrize("case", LOWERED, ids=str)
def test_fused_lowers_for_cuda(case):
    """Forward and backward of every fused case, cross-lowered, with no fallback in them."""
    qkv, kwargs = case.arguments()
    arrays = {n: x for n, x in kwargs.items() if isinstance(x, jax.Array)}
    static = {n: x for n, x in kwargs.items() if n not in arrays}

    def loss(qkv, arrays):
        return dot_product_attention(*qkv, **arrays, **static).astype(jnp.float32).sum()

    with dispatch.assume_device("gpu", (9, 0)):
        traced = jax.jit(jax.grad(loss)).trace(qkv, arrays)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu") >= 2
