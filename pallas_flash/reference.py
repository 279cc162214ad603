"""The oracle: attention written out densely, obviously right, quadratic in memory.

`attention_reference` in float64 (float32 without x64) says what every implementation should give;
in a narrower dtype it is the plain attention against whose error theirs is measured.
`numpy_attention` says the same a second time with no JAX arithmetic in it. Only tests, the
benchmark's check and a curious user call these.

B batch, T queries, S keys, N query heads, K kv heads, H head_dim, Hv head_dim_v.
"""

from typing import Any

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
        logits = jnp.concatenate(
            [logits, jnp.broadcast_to(sink, (*logits.shape[:3], 1))], axis=-1
        )

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
    """Float64 values and gradients, whether or not x64 is on; not to be called under a trace.

    Args:
      operands, problem: the call.
      dout: (B, T, N, Hv), cotangent of out.
      dlse: (B, N, T), cotangent of the log-sum-exp; None is zero.

    Returns:
      out, lse, and the gradient of every differentiable operand present, by its name.
    """
    with jax.enable_x64(True):
        widen = lambda x: x.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x
        wide = jax.tree.map(lambda x: jnp.asarray(widen(np.asarray(x))), operands)
        dout = jnp.asarray(np.asarray(dout, np.float64))
        dlse = jnp.zeros(_logits_shape(problem)[:3]) if dlse is None else np.float64(dlse)
        out, lse, grads = _values_and_gradients(wide, problem, dout, jnp.asarray(dlse))
        return np.asarray(out), np.asarray(lse), {n: np.asarray(g) for n, g in grads.items()}


def plain_gradients(operands: Operands, problem: Problem, dout: Array, dlse: Array | None = None):
    """What `oracle` returns, from plain attention in the dtype of the operands."""
    if dlse is None:
        dlse = jnp.zeros(_logits_shape(problem)[:3], jnp.promote_types(problem.dtype, jnp.float32))
    return _values_and_gradients(operands, problem, dout, dlse)


def numpy_attention(operands: Operands, problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """`attention_reference` in float64 NumPy, one query row at a time; forward only."""
    shape = _logits_shape(problem)
    q, k, v = (np.asarray(x, np.float64) for x in _without_tails(operands))
    visible = np.broadcast_to(np.asarray(_visible(operands, problem)), shape)
    bias = np.zeros(()) if operands.bias is None else np.asarray(operands.bias, np.float64)
    bias = np.broadcast_to(bias, shape)
    scale = problem.scale if operands.scale is None else np.asarray(operands.scale, np.float64)
    scale = np.broadcast_to(scale, (problem.batch,))
    cap = problem.soft_cap if operands.soft_cap is None else float(operands.soft_cap)
    kept = np.ones(shape, bool)
    if problem.dropout_rate:
        kept = np.broadcast_to(np.asarray(_kept(operands, problem)), shape)

    out = np.zeros((problem.batch, problem.q_len, problem.num_q_heads, problem.head_dim_v))
    lse = np.full(shape[:3], -np.inf)
    for b, n, t in np.ndindex(*shape[:3]):
        keys = np.flatnonzero(visible[b, n, t])
        n_kv = n // problem.q_per_kv
        logits = scale[b] * (k[b, keys, n_kv] @ q[b, t, n]) + bias[b, n, t, keys]
        if cap is not None:
            logits = cap * np.tanh(logits / cap)
        values = v[b, keys, n_kv] * kept[b, n, t, keys, None]
        if operands.sinks is not None:
            logits = np.append(logits, np.float64(operands.sinks[n]))
            values = np.concatenate([values, np.zeros((1, values.shape[1]))])
        if logits.size:
            lse[b, n, t] = logits.max() + np.log(np.exp(logits - logits.max()).sum())
            out[b, t, n] = np.exp(logits - lse[b, n, t]) @ values
    return out * dropout.keep_scale(problem.dropout_rate), lse


def _values_and_gradients(operands, problem, dout, dlse):
    names = [n for n in DIFFERENTIABLE if getattr(operands, n) is not None]

    @jax.jit
    def run(operands, dout, dlse):
        def f(chosen):
            return attention_reference(operands._replace(**chosen), problem, operands.query.dtype)

        (out, lse), vjp = jax.vjp(f, {n: getattr(operands, n) for n in names})
        return out, lse, vjp((dout.astype(out.dtype), dlse.astype(lse.dtype)))[0]

    return run(operands, dout, dlse)


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
    q_pos = jnp.arange(problem.q_len, dtype=jnp.int32)[:, None]
    kv_pos = jnp.arange(problem.kv_len, dtype=jnp.int32)[None, :]
    allowed = problem.mask.allowed(q_pos, kv_pos, values)
    visible = jnp.ones((1, 1, 1, 1), bool) if allowed is None else allowed
    if operands.bias is not None:
        visible = visible & (operands.bias != -jnp.inf)
    return visible


def _finish_logits(dots, visible, operands, problem, wide):
    """scale * dots + bias, soft-capped, where visible; anything finite elsewhere."""
    scale = problem.scale if operands.scale is None else operands.scale.astype(wide)
    logits = dots * (scale if jnp.ndim(scale) == 0 else scale[:, None, None, None])
    if operands.bias is not None:
        logits = logits + jnp.where(visible, operands.bias.astype(wide), 0.0)
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
    )
