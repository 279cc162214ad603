"""Attention on one tile in pure jnp: logits, online softmax, probabilities, gradients of logits.

Every implementation computes with these. Softmax runs in base 2: `scale2` is the factor from a
score to log2 units, so scale * log2(e) for a raw q.k and log2(e) for a finished logit; row maxima
are kept in log2 units, log-sum-exp leaves in natural log. `q_axis` says which axis of the tile
holds the queries. No masks here: a hidden score arrives as -inf. Only `alibi` knows positions.
"""

import jax.numpy as jnp
from jax import lax

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453


def spread(per_query, shape: tuple[int, ...], q_axis: int = 0):
    """One value a query, repeated along the other axis of a tile of `shape`."""
    return lax.broadcast_in_dim(per_query, shape, (q_axis,))


def soft_capped(logits, cap):
    """cap * tanh(logits / cap)."""
    return cap * jnp.tanh(logits / cap)


def alibi(slope, q_pos, kv_pos, shift: int):
    """-slope * |kv_pos - q_pos - shift|, the broadcast of the three, in the dtype of slope.

    The difference of the int32 positions is taken before it is rounded to a float: it is exact
    wherever they stand. Source: Press et al., ALiBi (arXiv 2108.12409), section 3.
    """
    return -slope * jnp.abs((kv_pos - q_pos - shift).astype(slope.dtype))


def grown_max(scores, scale2, row_max, q_axis: int = 0):
    """The running row maximum (log2 units) with this tile included."""
    return jnp.maximum(row_max, scores.max(axis=1 - q_axis) * scale2)


def finite_pivot(row_max):
    """The maximum to subtract: 0 for a row that has seen no key yet, so that -inf stays -inf."""
    return jnp.where(row_max == -jnp.inf, 0.0, row_max)


def weights(scores, scale2, pivot, q_axis: int = 0):
    """Unnormalised probabilities 2^(scale2 * score - pivot)."""
    return jnp.exp2(scores * scale2 - spread(pivot, scores.shape, q_axis))


def dlogits(probs, dprobs, *, has_hidden: bool):
    """Gradient of the logits from probabilities and their gradient less delta.

    A hidden pair gets 0 whatever dprobs is there: hidden values may be so large that it overflowed.
    """
    product = probs * dprobs
    return jnp.where(probs > 0.0, product, 0.0) if has_hidden else product


def reciprocal_sum(row_sum):
    """1 / row_sum, 0 for a row without keys: its output is 0."""
    return jnp.where(row_sum > 0.0, 1.0 / row_sum, 0.0)


def log_sum_exp(row_max, row_sum):
    """Natural log-sum-exp from a maximum in log2 units; -inf for a row without keys."""
    return (row_max + jnp.log2(row_sum)) * LN2
