"""The oracle: attention written out densely, obviously right, quadratic in memory.

`attention_reference` in float64 (float32 without x64) says what every implementation should give;
in a narrower dtype it is the plain attention against whose error theirs is measured.
`oracle` says the same a second time in NumPy, with gradients derived by hand. Only tests, the
benchmark's check and a curious user call these.

B batch, T queries, S keys, N query heads, K kv heads, H head_dim, Hv head_dim_v.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_flash import dropout, tile_math
from pallas_flash.masks import MaskValues
from pallas_flash.problem import DIFFERENTIABLE, Operands, Problem

Array = Any


def attention_reference(
    operands: Operands, problem: Problem, dtype: Any = jnp.float64
) -> tuple[jax.Array, jax.Array]:
    """Dense attention.

    Args:
      operands: the arrays of the call.
      problem: what is static about it.
      dtype: of the matrix products and of `out`; softmax is at least float32. float64 becomes
        float32 where x64 is off.

    Returns:
      out, (B, T, N, Hv), and the natural log-sum-exp, (B, N, T). A query without a key has out 0
      and, without sinks, log-sum-exp -inf; its gradients are 0.
    """
    dtype = jax.dtypes.canonicalize_dtype(dtype)
    wide = jnp.promote_types(dtype, jnp.float32)
    q, k, v = (x.astype(dtype) for x in _without_tails(operands))
    k, v = (jnp.repeat(x, problem.q_per_kv, axis=2) for x in (k, v))

    visible = jnp.broadcast_to(_visible(operands, problem), _logits_shape(problem))
    logits = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=wide)
    # Both where's: hidden logits may be huge or NaN, and 0 * NaN would reach a gradient.
    logits = _finish_logits(jnp.where(visible, logits, 0.0), visible, operands, problem, wide)
    logits = jnp.where(visible, logits, -jnp.inf)
    if operands.sinks is not None:
        sink = operands.sinks.astype(wide)[None, :, None, None]
        logits = jnp.concatenate([logits, jnp.broadcast_to(sink, (*logits.shape[:3], 1))], axis=-1)

    top = jnp.max(logits, axis=-1, keepdims=True, initial=-jnp.inf)
    pivot = tile_math.finite_pivot(jax.lax.stop_gradient(top))
    weights = jnp.exp(logits - pivot)
    total = weights.sum(axis=-1, keepdims=True)
    safe_total = jnp.where(total > 0, total, 1.0)
    lse = jnp.where(total > 0, jnp.log(safe_total) + pivot, -jnp.inf)[..., 0]

    probs = (weights / safe_total)[..., : problem.kv_len]
    if problem.dropout_rate:
        kept = _kept(operands, problem)
        probs = jnp.where(kept, probs * dropout.keep_scale(problem.dropout_rate), 0.0)
    out = jnp.einsum("bnts,bsnh->btnh", probs.astype(dtype), v, preferred_element_type=wide)
    return out.astype(dtype), lse


def oracle(
    operands: Operands, problem: Problem, dout: Array, dlse: Array | None = None
) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Float64 values and gradients in NumPy, by hand: no autodiff, no x64, nothing to compile.

    Args:
      operands, problem: the call, concrete.
      dout: (B, T, N, Hv), cotangent of out.
      dlse: (B, N, T), cotangent of the log-sum-exp; None is zero. Ignored where lse is -inf.

    Returns:
      out, (B, T, N, Hv), lse, (B, N, T), and the gradient of every differentiable operand that is
      present, by its name and in its shape.
    """
    dense = _numpy_dense(operands, problem)
    dout = np.asarray(dout, np.float64)
    dlse = np.zeros(dense.lse.shape) if dlse is None else np.asarray(dlse, np.float64)
    dlse = np.where(np.isfinite(dense.lse), dlse, 0.0)

    delta = np.einsum("btnh,btnh->bnt", dout, dense.out) - dlse
    dprobs = dense.kept * np.einsum("btnh,bsnh->bnts", dout, dense.v)
    dcapped = dense.probs * (dprobs - delta[..., None])
    dlogits, dcap = dcapped, 0.0
    if dense.cap is not None:
        u = dense.logits / dense.cap
        slope = 1 - np.tanh(u) ** 2
        dlogits, dcap = dcapped * slope, (dcapped * (np.tanh(u) - u * slope)).sum()
    ddots = dlogits * dense.scale
    grads = {
        "query": np.einsum("bnts,bsnh->btnh", ddots, dense.k),
        "key": _sum_groups(problem, np.einsum("bnts,btnh->bsnh", ddots, dense.q)),
        "value": _sum_groups(problem, np.einsum("bnts,btnh->bsnh", dense.probs * dense.kept, dout)),
    }
    if operands.bias is not None:
        grads["bias"] = _sum_to(dlogits, operands.bias.shape)
    if operands.scale is not None:
        per_row = (dlogits * dense.dots).sum(axis=(1, 2, 3))
        grads["scale"] = per_row.sum() if operands.scale.ndim == 0 else per_row
    if operands.soft_cap is not None:
        grads["soft_cap"] = dcap
    if operands.sinks is not None:
        grads["sinks"] = -(dense.sink_probs * delta).sum(axis=(0, 2))
    if operands.alibi_slopes is not None:
        per_head = -(dlogits * _distance(problem)).sum(axis=(2, 3))
        grads["alibi_slopes"] = _sum_to(per_head, operands.alibi_slopes.shape)
    return dense.out, dense.lse, grads


def numpy_attention(operands: Operands, problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """out and lse of `oracle`."""
    dense = _numpy_dense(operands, problem)
    return dense.out, dense.lse


def plain_gradients(
    operands: Operands,
    problem: Problem,
    dout: Array,
    dlse: Array | None = None,
    dtype: Any = None,
):
    """What `oracle` returns, from `attention_reference` and autodiff.

    dtype None is that of query: then it is what plain attention of that dtype gives.
    """
    dtype = operands.query.dtype if dtype is None else dtype
    return _plain_gradients(problem, jnp.dtype(dtype).name, operands, dout, dlse)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _plain_gradients(problem, dtype, operands, dout, dlse):
    names = [n for n in DIFFERENTIABLE if getattr(operands, n) is not None]

    def f(chosen):
        return attention_reference(operands._replace(**chosen), problem, dtype)

    (out, lse), vjp = jax.vjp(f, {n: getattr(operands, n) for n in names})
    dlse = jnp.zeros_like(lse) if dlse is None else dlse.astype(lse.dtype)
    return out, lse, vjp((dout.astype(out.dtype), dlse))[0]


class _Dense(NamedTuple):
    """Every intermediate of attention, float64; heads of k and v repeated."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    scale: np.ndarray  # (B|1, 1, 1, 1)
    cap: float | None
    dots: np.ndarray  # (B, N, T, S), as are logits, probs and kept
    logits: np.ndarray  # before the cap, 0 where hidden
    probs: np.ndarray  # before dropout
    sink_probs: np.ndarray  # (B, N, T)
    kept: np.ndarray  # 0, or 1 / (1 - rate)
    out: np.ndarray
    lse: np.ndarray


def _numpy_dense(operands, problem):
    shape = _logits_shape(problem)
    q, k, v = (np.asarray(x, np.float64) for x in _without_tails(operands))
    k, v = (np.repeat(x, problem.q_per_kv, axis=2) for x in (k, v))
    visible = np.broadcast_to(np.asarray(_visible(operands, problem)), shape)
    scale = problem.scale if operands.scale is None else np.asarray(operands.scale, np.float64)
    scale = np.reshape(scale, (-1, 1, 1, 1))
    cap = problem.soft_cap if operands.soft_cap is None else float(operands.soft_cap)

    dots = np.where(visible, np.einsum("btnh,bsnh->bnts", q, k), 0.0)
    logits = scale * dots
    if operands.bias is not None:
        logits = logits + np.where(visible, np.asarray(operands.bias, np.float64), 0.0)
    if operands.alibi_slopes is not None:
        slopes = np.asarray(operands.alibi_slopes, np.float64)[:, :, None, None]
        logits = logits - np.where(visible, slopes * _distance(problem), 0.0)
    capped = logits if cap is None else cap * np.tanh(logits / cap)
    capped = np.where(visible, capped, -np.inf)
    sinks = np.full((1, shape[1], 1, 1), -np.inf)
    if operands.sinks is not None:
        sinks = np.asarray(operands.sinks, np.float64).reshape(sinks.shape)
    top = np.maximum(capped.max(axis=-1, keepdims=True, initial=-np.inf), sinks)
    top = np.where(np.isfinite(top), top, 0.0)
    weights, sink_weights = np.exp(capped - top), np.exp(sinks - top)
    total = weights.sum(axis=-1, keepdims=True) + sink_weights
    safe = np.where(total > 0, total, 1.0)
    lse = np.where(total > 0, np.log(safe) + top, -np.inf)[..., 0]

    kept = np.ones(shape)
    if problem.dropout_rate:
        kept = np.asarray(_kept(operands, problem)) * dropout.keep_scale(problem.dropout_rate)
    probs = weights / safe
    out = np.einsum("bnts,bsnh->btnh", probs * kept, v)
    sink_probs = (sink_weights / safe)[..., 0]
    return _Dense(q, k, v, scale, cap, dots, logits, probs, sink_probs, kept, out, lse)


def _distance(problem):
    """What a slope is multiplied by, [T, S]."""
    ahead = np.arange(problem.kv_len)[None, :] - np.arange(problem.q_len)[:, None]
    return np.abs(ahead - problem.alibi_shift)


def _sum_groups(problem, x):
    """(B, S, N, H) summed over the query heads of each kv head."""
    b, s, _, h = x.shape
    return x.reshape(b, s, problem.num_kv_heads, problem.q_per_kv, h).sum(axis=3)


def _sum_to(x, shape):
    """x summed over the axes along which `shape` has size 1."""
    axes = tuple(i for i, size in enumerate(shape) if size == 1)
    return x.sum(axis=axes, keepdims=True)


def _logits_shape(problem):
    return problem.batch, problem.num_q_heads, problem.q_len, problem.kv_len


def _without_tails(operands):
    """query, key and value with zeros behind the lengths, where anything may be stored."""

    def cut(x, lengths):
        if lengths is None:
            return x
        inside = np.arange(x.shape[1])[None, :] < lengths[:, None]
        return jnp.where(inside[:, :, None, None], x, jnp.zeros((), x.dtype))

    return (
        cut(operands.query, operands.query_lengths),
        cut(operands.key, operands.kv_lengths),
        cut(operands.value, operands.kv_lengths),
    )


def _visible(operands, problem):
    """Bool that broadcasts to (B, N, T, S): everything that hides a pair, together."""
    pick = lambda x, *shape: None if x is None else jnp.asarray(x).reshape(shape)
    window = (None, None) if operands.window is None else operands.window
    values = MaskValues(
        query_length=pick(operands.query_lengths, -1, 1, 1, 1),
        kv_length=pick(operands.kv_lengths, -1, 1, 1, 1),
        window_left=window[0],
        window_right=window[1],
        query_segments=pick(operands.query_segments, problem.batch, 1, problem.q_len, 1),
        kv_segments=pick(operands.kv_segments, problem.batch, 1, 1, problem.kv_len),
        dense=operands.mask,
    )
    allowed = problem.mask.allowed(*_positions(problem), values)
    visible = jnp.ones((1, 1, 1, 1), bool) if allowed is None else allowed
    if operands.bias is not None:
        visible = visible & (operands.bias != -jnp.inf)
    return visible


def _positions(problem):
    """Of the queries, [T, 1], and of the keys, [1, S]."""
    q_pos = jnp.arange(problem.q_len, dtype=jnp.int32)[:, None]
    return q_pos, jnp.arange(problem.kv_len, dtype=jnp.int32)[None, :]


def _finish_logits(dots, visible, operands, problem, wide):
    """scale * dots + bias + alibi, soft-capped, where visible; anything finite elsewhere."""
    scale = problem.scale if operands.scale is None else operands.scale.astype(wide)
    logits = dots * (scale if jnp.ndim(scale) == 0 else scale[:, None, None, None])
    if operands.bias is not None:
        logits = logits + jnp.where(visible, operands.bias.astype(wide), 0.0)
    if operands.alibi_slopes is not None:
        assert problem.alibi_shift is not None
        slopes = operands.alibi_slopes.astype(wide)[:, :, None, None]
        logits = logits + tile_math.alibi(slopes, *_positions(problem), problem.alibi_shift)
    cap = problem.soft_cap if operands.soft_cap is None else operands.soft_cap.astype(wide)
    return logits if cap is None else tile_math.soft_capped(logits, cap)


def _kept(operands, problem):
    return dropout.dropout_keep_mask(
        operands.dropout_key,
        problem.dropout_rate,
        batch=problem.batch,
        num_heads=problem.num_q_heads,
        q_len=problem.q_len,
        kv_len=problem.kv_len,
        broadcast=problem.broadcast_dropout,
        origin=operands.dropout_origin,
    )
