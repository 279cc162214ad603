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


_MOST_BIAS = 1e37


def bias_in_scores(bias, inverse_scale):
    """A bias as an addend of q.k, finite where it is: only -inf hides.

    finfo.min is a common way to write a mask. Divided by the scale it would overflow.
    """
    return jnp.where(bias == -jnp.inf, bias, jnp.maximum(bias * inverse_scale, -_MOST_BIAS))


_SMALL = 0.75
# Odd polynomial for tanh up to _SMALL, fitted to an error of 4e-7.
_TANH = (0.999999463558197, -0.33328500390052795, 0.13261181116, -0.0501186065376, 0.0129848755896)


def squashed(scores, factor, all_within):
    """tanh(factor * scores), to 4e-7.

    all_within: (tile, limit) -> are all of some group of elements within +-limit? Most logits are
    small against their cap, and there tanh is a short polynomial: no exponential, of which a GPU
    makes few in the time of a product.
    """
    x = scores * factor
    if all_within is None:
        return _any_tanh(x)
    return lax.cond(all_within(x, _SMALL), lambda: _small_tanh(x), lambda: _any_tanh(x))


def _small_tanh(x):
    square, sum_ = x * x, _TANH[-1]
    for coefficient in _TANH[-2::-1]:
        sum_ = sum_ * square + coefficient
    return x * sum_


def _any_tanh(x):
    return 1.0 - 2.0 / (1.0 + jnp.exp2(x * (2 * LOG2E)))


def squash_slope(squashed):
    """The derivative of a soft-capped logit by the logit, from its tanh."""
    return 1.0 - squashed * squashed


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
