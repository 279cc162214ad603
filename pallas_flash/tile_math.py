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


_TAME_BIAS = 4096.0


def bias_in_scores(bias, inverse_scale, all_within):
    """A bias as an addend of q.k, finite where it is: only -inf hides. And whether it is tame.

    finfo.min is a common way to write a mask. Divided by the scale it would overflow. Tame: a tile
    that hides nothing and whose rounding is no more than other logits have. Most are, and take one
    product an element; `all_within` as for `squashed`.
    """
    scaled = lambda: bias * inverse_scale
    held = lambda: jnp.where(bias == -jnp.inf, bias, jnp.maximum(scaled(), -_MOST_BIAS))
    is_tame = all_within(bias, jnp.minimum(_MOST_BIAS / inverse_scale, _TAME_BIAS))
    return lax.cond(is_tame, scaled, held), is_tame


_SMALL = 1 / 3
# Odd polynomial for tanh up to _SMALL, fitted to an error of 4e-7.
_TANH = (0.9999925047875612, -0.33278553128163236, 0.12336379960)


def squashed(scores, factor, top, *, reciprocal=None, all_within=None):
    """top * tanh(factor * scores), the tanh to 4e-7, for factor > 0.

    reciprocal: of a tile; None: a division.
    all_within: (tile, limit) -> are all of some group of elements within +-limit? Most logits are
    small against their cap, and there tanh is a short polynomial: no exponential, of which a GPU
    makes few in the time of a product.
    """

    def any_tanh():
        return top - 2.0 * top * half_below_one(scores, factor, reciprocal)

    if all_within is None:
        return any_tanh()
    has_powers = (factor > 1e-6) & (factor < 1e6)  # the fifth is a float32
    is_small = all_within(scores, jnp.where(has_powers, _SMALL / factor, -1.0))
    return lax.cond(is_small, lambda: _small_tanh(scores, factor, top), any_tanh)


def half_below_one(scores, factor, reciprocal=None):
    """(1 - tanh(factor * scores)) / 2, for factor > 0; reciprocal: as in `squashed`."""
    power = 1.0 + jnp.exp2(scores * (factor * (2 * LOG2E)))
    return 1.0 / power if reciprocal is None else reciprocal(power)


def _small_tanh(scores, factor, top):
    """Horner's rule in scores^2, factor and top in the coefficients."""
    square = scores * scores
    first, cubed = top * factor, top * (factor * factor * factor)
    sum_ = _TANH[2] * (cubed * (factor * factor)) * square + _TANH[1] * cubed
    return scores * (sum_ * square + _TANH[0] * first)


def sloped(weights, squashed):
    """Times the derivative of a soft-capped logit by the logit, from its tanh; None: no cap."""
    return weights if squashed is None else weights * (1.0 - squashed * squashed)


SHARE_OF_SLOPE = 0.25


def share_of_slope(below):
    """SHARE_OF_SLOPE of that derivative, from `half_below_one`."""
    return below - below * below


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


def weights(scores, scale2, pivot=None, q_axis: int = 0):
    """Unnormalised probabilities 2^(scale2 * score - pivot); no pivot: 0."""
    exponents = scores * scale2
    return jnp.exp2(exponents if pivot is None else exponents - spread(pivot, scores.shape, q_axis))


_MOST_EXPONENT = 80.0


def needs_pivot(logit_bound: float | None, dtype) -> bool:
    """Whether weights must be taken relative to the maximum of their row.

    Not where every logit is within +-logit_bound (None: unknown) and 2^80 at most, in bfloat16,
    whose exponent is that of a float32: with sums of a million keys, values between 1e-13 and 1e9
    times the smallest and the largest float32 stay where they are.
    """
    return logit_bound is None or dtype != jnp.bfloat16 or logit_bound * LOG2E > _MOST_EXPONENT


def dlogits(probs, dprobs, *, has_hidden):
    """Gradient of the logits from probabilities and their gradient less delta.

    A hidden pair gets 0 whatever dprobs is there: hidden values may be so large that it overflowed.
    """
    product = lambda: probs * dprobs
    return if_any(has_hidden, lambda: jnp.where(probs > 0.0, product(), 0.0), product)


def if_any(condition, then, otherwise):
    """then() or otherwise(), by a bool that is known or one that is traced."""
    if isinstance(condition, bool):
        return then() if condition else otherwise()
    return lax.cond(condition, then, otherwise)


def reciprocal_sum(row_sum):
    """1 / row_sum, 0 for a row without keys: its output is 0."""
    return jnp.where(row_sum > 0.0, 1.0 / row_sum, 0.0)


def log_sum_exp(row_max, row_sum):
    """Natural log-sum-exp from a maximum in log2 units; -inf for a row without keys."""
    return (row_max + jnp.log2(row_sum)) * LN2
