"""From an accumulator of q.k to what the softmax takes, and back: everything a score can have.

The three kernels ask here, and only here, for what bias, ALiBi, soft cap, masks and dropout do to
a tile. A tile is [64, n] with queries or keys in rows (`Place.q_axis`); the arithmetic is that of
`tile_math`, the masks are asked for `allowed`.

An additive term costs no registers: the accumulator starts from it, divided by the scale, and the
product is added on top. Scores are in units of the scale, with a soft cap in log2 units or those of
the cap, so that logits * log2(e) = scores * Units.log2 either way.
"""

import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp

from pallas_flash import dropout, masks, tile_math
from pallas_flash.kernels.sm90.call import Call, Extras

Int = masks.Int

ADDITIVE = frozenset({"bias", "alibi_slopes"})


class Units(NamedTuple):
    """Scalars of one batch row.

    Attributes:
      log2: from scores to log2 units.
      inverse_scale: from additive terms to accumulators.
      squash: scale / cap, or None without a soft cap.
      top: what a score is where the tanh of a soft cap is 1.
    """

    log2: Any
    inverse_scale: Any = None
    squash: Any = None
    top: Any = None


class Place(NamedTuple):
    """A tile of scores: queries from q0, keys from kv0, in rows the queries (q_axis 0) or keys."""

    batch: Int
    head: Int
    q0: Int
    kv0: Int
    q_axis: int
    shape: tuple[int, int]


class Staged(NamedTuple):
    """A tile of the bias [queries, keys] in shared memory, and where in it the rows begin."""

    tile: Any
    first_row: Int


def units(call: Call, extras: Extras, scale, b: Int, *, keeps_tanh: bool = False) -> Units:
    """`scale` is the array (1|B,). keeps_tanh: with a soft cap scores are the tanh itself."""
    scale = scale[call.entry(scale, b)]
    inverse = 1.0 / scale if call.terms & ADDITIVE else None
    if "soft_cap" not in call.terms:
        return Units(scale * tile_math.LOG2E, inverse)
    cap = extras.soft_cap[call.entry(extras.soft_cap, b)]
    cap2 = cap * tile_math.LOG2E
    log2, top = (cap2, 1.0) if keeps_tanh else (1.0, cap2)
    return Units(log2, inverse, scale / cap, top)


class Start(NamedTuple):
    """What the accumulator of q.k starts from.

    Attributes:
      scores: a tile; None for zero.
      is_tame: the bias in it hides nothing and rounds to nothing; False where it may.
    """

    scores: Any
    is_tame: Any


def start(
    call: Call, extras: Extras, place: Place, u: Units, staged: Staged | None = None
) -> Start:
    """Bias and ALiBi of a tile."""
    terms, is_tame = [], True
    if "bias" in call.terms:
        if staged is not None:
            bias = call.op.load_staged(staged.tile, staged.first_row, place.shape, place.q_axis)
        else:
            load = functools.partial(call.op.load_tile, whole=call.is_whole)
            bias = _pairs(call, extras.bias, place, load)
        bias, is_tame = tile_math.bias_in_scores(bias, u.inverse_scale, call.op.all_within)
        terms.append(bias)
    if "alibi_slopes" in call.terms:
        slope = extras.alibi_slopes[(*call.entry(extras.alibi_slopes, place.batch), place.head)]
        ahead = 1 if place.q_axis == 0 else -1
        kv_minus_q = call.op.count_from(
            place.kv0 - place.q0, place.shape, row_step=-ahead, col_step=ahead
        )
        terms.append(tile_math.alibi(slope * u.inverse_scale, 0, kv_minus_q, call.alibi_shift))
    return Start(sum(terms[1:], terms[0]) if terms else None, is_tame)


class Scores(NamedTuple):
    """A tile of them.

    Attributes:
      scores: -inf where hidden.
      squashed: what a soft cap made before anything is hidden; None without one.
    """

    scores: Any
    squashed: Any


def finish(
    call: Call,
    extras: Extras,
    place: Place,
    bounds: masks.Bounds,
    u: Units,
    products,
    *,
    masked: bool,
) -> Scores:
    """Scores from the finished accumulator."""
    scores, squashed = products, None
    if u.squash is not None:
        ways = _ways_to_squash(call, place.q_axis, masked=masked, in_parts=False)
        scores = squashed = tile_math.squashed(products, u.squash, u.top, **ways)
    scores = _hidden(call, extras, place, bounds, scores, products, masked=masked)
    return Scores(scores, squashed)


def capped_offset(lse, soft_cap):
    """2 + cap - lse in log2 units: what `capped_exponents` adds, from a natural log-sum-exp."""
    return (soft_cap - lse) * tile_math.LOG2E - math.log2(tile_math.SHARE_OF_SLOPE)


def capped_exponents(
    call: Call,
    extras: Extras,
    place: Place,
    bounds: masks.Bounds,
    u: Units,
    products,
    offset,
    *,
    masked: bool,
    in_parts: bool,
):
    """With a soft cap, from the finished accumulator: log2 of 4 P, and r = (1 - tanh) / 2.

    A logit is cap - 2 cap r, and the slope of the cap 4 (r - r^2). So `capped_offset` has the cap,
    and P the 4 of the slope: one operation fewer than by way of the tanh.

    u: with `keeps_tanh`; in_parts: these are some columns of it.
    """
    ways = _ways_to_squash(call, place.q_axis, masked=masked, in_parts=in_parts)
    below = tile_math.half_below_one(products, u.squash, ways.get("reciprocal"))
    exponents = below * (-2.0 * u.log2) + offset
    return _hidden(call, extras, place, bounds, exponents, products, masked=masked), below


def _hidden(call: Call, extras: Extras, place: Place, bounds, scores, products, *, masked: bool):
    """Scores, or what adds to them, -inf where hidden; products: what they were made from."""
    if "soft_cap" in call.terms and "bias" in call.terms:  # of -inf: its tanh is finite
        scores = masks.hide(scores, products > -jnp.inf)
    if masked:
        scores = call.op.hide_outside(scores, bounds, place.q0, place.kv0, place.q_axis)
        values = _mask_values(call, extras, place)
        scores = masks.hide(scores, call.mask.allowed_beyond_bounds(None, None, values))
    return scores


def _ways_to_squash(call: Call, q_axis: int, *, masked: bool, in_parts: bool) -> dict[str, Any]:
    """How `tile_math.squashed` computes, as measured on an H200 (causal, T 8192).

    The backward has no registers for both sides of a branch. There the reciprocal gains 1.6 % in
    parts of a tile and loses with whole ones: 1.2 % at head_dim 128, 4 % at 256. Shared by two it
    gains 15 % of a forward with large logits and 8 % of the backward at head_dim 64; at 128, where
    the products leave more time, the backward loses 1 %. Two keys of a query share, and only where
    it sees both: a hidden key that is NaN must not reach another.
    """
    op, q_in_rows = call.op, q_axis == 0
    if not (q_in_rows or in_parts):
        return {}
    few_products = q_in_rows or call.head_dim_v <= 64
    shares = few_products and not masked and "bias" not in call.terms
    pair_axis = 1 - q_axis if shares else None
    ways: dict[str, Any] = dict(reciprocal=functools.partial(op.reciprocal, pair_axis=pair_axis))
    return ways | (dict(all_within=op.all_within) if q_in_rows else {})


def _mask_values(call: Call, extras: Extras, place: Place) -> masks.MaskValues:
    """What masks beyond bounds ask of a tile."""
    q_ids = kv_ids = dense = None
    if extras.query_segments is not None:
        q_ids = _along(call, extras.query_segments, place, place.q0, place.q_axis)
        kv_ids = _along(call, extras.kv_segments, place, place.kv0, 1 - place.q_axis)
    if extras.mask_bits is not None:
        dense = _pairs(call, extras.mask_bits, place, call.op.load_bits) != 0
    return masks.MaskValues(query_segments=q_ids, kv_segments=kv_ids, dense=dense)


def _pairs(call: Call, array, place: Place, load):
    """The tile of an array that has a query and a key axis."""
    entry = call.entry(array, place.batch, place.head)
    return load(array, entry, place.q0, place.kv0, place.shape, place.q_axis)


def _along(call: Call, array, place: Place, first: Int, axis: int):
    """array[entry, first + position along `axis`], repeated along the other."""
    (row,) = call.entry(array, place.batch)
    return call.op.load_along(array.at[row], first, place.shape, axis)


def kept(call: Call, extras: Extras, place: Place):
    """Which weights survive dropout, bool; None without dropout."""
    if not call.dropout_rate:
        return None
    rows = extras.dropout_rows
    index = call.entry(rows, place.batch, place.head)
    words = [
        call.op.load_along(rows.at[(*index, word)], place.q0, place.shape, place.q_axis)
        for word in (0, 1)
    ]
    steps = dict(col_step=1) if place.q_axis == 0 else dict(row_step=1)
    kv_pos = call.op.count_from(place.kv0, place.shape, **steps)
    return dropout.keep_in_row((words[0], words[1]), kv_pos, call.dropout_rate)
