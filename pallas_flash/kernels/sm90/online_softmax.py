"""The online softmax of one consumer of the forward: 64 rows, a tile of keys at a time.

Base 2: maxima are in log2 units. Exact in whatever order tiles come; nothing here waits or loads.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash import masks, tile_math
from pallas_flash.kernels.sm90 import logits, registers, tiles
from pallas_flash.kernels.sm90.forward_common import Work

Int = masks.Int
_SUM_COLS = 8  # columns of the running row sums: 2 a lane, so a step needs no shuffle


class Softmax(NamedTuple):
    """Running softmax: pivot (the maximum, or 0; log2 units) [64], row sums in parts [64, 8]."""

    row_max: Any
    row_sum: Any


class Growth(NamedTuple):
    """How the accumulator must follow: times `factor`, in rows where `row_max` > `limit`."""

    factor: Any
    row_max: Any
    limit: Any


def first(work: Work) -> Softmax:
    """Before any key: nothing, or the sink, whose weight is 1 where it is the maximum."""
    row_max, weight = -jnp.inf if work.plan.has_pivot else 0.0, 0.0
    if "sinks" in work.plan.terms:
        sinks, tile = work.extras.sinks, work.tile
        row_max = sinks[(*work.plan.entry(sinks, tile.batch), tile.head)] * tile_math.LOG2E
        weight = jnp.where(row_max > -jnp.inf, 1.0 / _SUM_COLS, 0.0)  # a power of two: exact
    full = lambda shape, value: lax.broadcast_in_dim(jnp.float32(value), shape, ())
    return Softmax(
        plgpu.layout_cast(full((tiles.WG_ROWS,), row_max), registers.ROW_LAYOUT),
        plgpu.layout_cast(full((tiles.WG_ROWS, _SUM_COLS), weight), registers.ACC_LAYOUT),
    )


def step(work: Work, i: Int, scores, softmax: Softmax, *, masked: bool):
    """One step of the online softmax: (softmax, weights float32 [64, block_kv], growth or None)."""
    plan, threshold = work.plan, work.plan.config.rescale_threshold
    scores, _ = logits.finish(
        plan, work.extras, work.place(i), work.tile.bounds, work.units, scores, masked=masked
    )
    scale2 = work.units.log2
    if not plan.has_pivot:
        weights = tile_math.weights(scores, scale2)
        softmax = softmax._replace(row_sum=_with_weights(softmax.row_sum, weights))
        return softmax, work.kept(weights, i), None
    grown = tile_math.grown_max(scores, scale2, softmax.row_max)
    limit = softmax.row_max + threshold
    row_max = jnp.where(grown > limit, grown, softmax.row_max) if threshold else grown
    pivot = row_max if plan.facts.sees_at_once else tile_math.finite_pivot(row_max)
    factor = jnp.exp2(softmax.row_max - pivot)
    weights = tile_math.weights(scores, scale2, pivot)
    row_sum = softmax.row_sum * tile_math.spread(factor, softmax.row_sum.shape)
    row_sum = _with_weights(row_sum, weights)
    return Softmax(row_max, row_sum), work.kept(weights, i), Growth(factor, grown, limit)


def _with_weights(row_sum, weights):
    """Row sums in parts with a tile's weights added."""
    for col in range(0, weights.shape[1], _SUM_COLS):
        row_sum = row_sum + weights[:, col : col + _SUM_COLS]
    return row_sum


def rescale(work: Work, out, growth: Growth | None) -> None:
    """The accumulator follows the maximum. No wgmma may be in flight."""
    if growth is None:
        return
    op = work.plan.op
    acc = op.load(out, None)

    def scaled():
        return acc * tile_math.spread(growth.factor, acc.shape)

    if work.plan.config.rescale_threshold:
        grows = op.any_greater(growth.row_max, growth.limit)
        op.set(out, lax.cond(grows, scaled, lambda: acc))
    else:
        op.set(out, scaled())
