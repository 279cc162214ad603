"""What the roles of the forward share: the launch, its operands and shared memory, and a q tile.

Knows where things are, not what is computed from them.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash import masks
from pallas_flash.config import ForwardConfig
from pallas_flash.kernels.sm90 import logits, smem, tiles
from pallas_flash.kernels.sm90.call import Extras, rem

Int = masks.Int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(tiles.Plan):
    """Everything static about one launch.

    Attributes:
      has_pivot: weights are relative to the maximum of their row, which the softmax keeps; where
        logits are bounded there is no maximum to find and nothing to rescale.
    """

    config: ForwardConfig
    has_pivot: bool = True

    @property
    def output_through_q(self) -> bool:
        return self.config.output_through_q and self.head_dim_v == self.head_dim

    @property
    def has_token(self) -> bool:
        """Consumers take turns on the tensor cores; one alone would wait for itself."""
        return self.config.compute_wgs > 1


class Scratch(NamedTuple):
    """Shared memory of a block; the module's docstring says who uses it."""

    q: Any
    k: Any
    v: Any
    bias: Any
    out: Any
    lse: Any
    accumulators: Any
    q_ready: Any
    q_consumed: Any
    k_ready: Any
    k_consumed: Any
    v_ready: Any
    v_consumed: Any


def scratch_of(plan: Plan) -> Scratch:
    c, dtype = plan.config, jnp.dtype(plan.dtype)
    ready, consumed = plgpu.Barrier, functools.partial(plgpu.Barrier, num_arrivals=c.compute_wgs)
    return Scratch(
        q=smem.tiled_smem((c.q_stages, c.block_q, plan.head_dim), dtype),
        k=smem.tiled_smem((c.num_stages, c.block_kv, plan.head_dim), dtype),
        v=smem.tiled_smem((c.num_stages, c.block_kv, plan.head_dim_v), dtype),
        bias=plan.bias_tiles(c.num_stages),
        out=None if plan.output_through_q else smem.tiled_smem((c.block_q, plan.head_dim_v), dtype),
        lse=plgpu.SMEM((c.compute_wgs, tiles.WG_ROWS), jnp.float32),
        accumulators=plan.op.accumulator_scratch(
            c.compute_wgs, scores=(tiles.WG_ROWS, c.block_kv), out=(tiles.WG_ROWS, plan.head_dim_v)
        ),
        q_ready=ready(num_barriers=c.q_stages),
        q_consumed=consumed(num_barriers=c.q_stages),
        k_ready=ready(num_barriers=c.num_stages, num_arrivals=2 if plan.staged_bias else 1),
        k_consumed=consumed(num_barriers=c.num_stages),
        v_ready=ready(num_barriers=c.num_stages),
        v_consumed=consumed(num_barriers=c.num_stages),
    )


class Gmem(NamedTuple):
    """Operands and results by name; None where absent."""

    q: Any
    k: Any
    v: Any
    scale: Any
    extras: Extras
    v_tail: Any = None
    schedule: Any = None
    out: Any = None
    lse: Any = None


class Work(NamedTuple):
    """One q tile in the hands of one consumer warpgroup.

    Attributes:
      q: its rows of the Q slot. [64, head_dim]
    """

    plan: Plan
    scratch: Scratch
    extras: Extras
    wg: Int
    tile: tiles.Tile
    q: Any
    units: logits.Units

    @property
    def row0(self) -> Int:
        """First query of this consumer."""
        return self.tile.q_lo + self.wg * tiles.WG_ROWS

    def place(self, i: Int) -> logits.Place:
        """Where the scores of step i are."""
        block_kv = self.plan.config.block_kv
        kv0 = self.tile.walk.kv_tile(i) * block_kv
        shape = (tiles.WG_ROWS, block_kv)
        return logits.Place(self.tile.batch, self.tile.head, self.row0, kv0, 0, shape)

    def start_scores(self, scores, i: Int) -> None:
        """Bias and ALiBi are in the accumulator before the product. No wgmma may run.

        K of step i must be there, and with it the tile of the bias.
        """
        if self.plan.terms & logits.ADDITIVE:
            staged = None
            if self.plan.staged_bias:
                tile = self.scratch.bias.at[self.slot(i)]
                staged = logits.Staged(tile, self.wg * tiles.WG_ROWS)
            start = logits.start(self.plan, self.extras, self.place(i), self.units, staged)
            self.plan.op.set(scores, start.scores)

    def kept(self, weights, i: Int):
        """The weights that dropout leaves."""
        keep = (
            logits.kept(self.plan, self.extras, self.place(i)) if self.plan.dropout_rate else None
        )
        return weights if keep is None else jnp.where(keep, weights, 0.0)

    def slot(self, i: Int) -> Int:
        """The ring slot of step i."""
        return rem(self.tile.step0 + i, self.plan.config.num_stages)

    def take_token(self) -> None:
        if self.plan.has_token:
            self.plan.op.token_take(self.wg)

    def pass_token(self) -> None:
        if self.plan.has_token:
            num_wgs = self.plan.config.compute_wgs
            self.plan.op.token_pass(rem(self.wg + 1, num_wgs), num_wgs)

    def with_scores(self, body):
        """body(scores=accumulator [64, block_kv] of zeros)."""
        shape = (tiles.WG_ROWS, self.plan.config.block_kv)
        accumulators = self.scratch.accumulators
        return self.plan.op.with_accumulators(body, accumulators, self.wg, scores=shape)
