"""Flash-attention forward for Hopper (sm_90a), one fused kernel.

The algorithm, for one tile of block_q queries, keys from last to first in steps of block_kv:

    m = -inf, l = 0, O = 0
    for each step:
        S = Q K^T                              (wgmma, float32), on top of bias and ALiBi
        S = tanh(S) with a soft cap; hide what the mask forbids, in the steps that it cuts
        m' = max(m, rowmax(S) * scale2)        (log2 units; scale2 = scale * log2(e))
        P = 2^(scale2 * S - m'), l = l * 2^(m - m') + rowsum(P), O = O * 2^(m - m')
        O += P V                               (wgmma, P rounded to the input dtype)
    out = O / l, lse = (m + log2 l) * ln 2

Who does what. One block is `compute_wgs` consumer warpgroups and one producer. The producer loads
the Q tile and rings of K and V by TMA (`_produce`). Each consumer owns 64 query rows (`_consume`).
The consumers take turns on the tensor cores by a token, so that one does softmax while another
multiplies; the token is passed when the products are issued, not when they are complete (the
latter costs 31 % at head_dim 64 on an H200). Two orders of a step:

    _step_in_turn      QK(i), pass token; softmax(i); take token; PV(i)
    _step_overlapped   take token; QK(i), PV(i-1); pass token; softmax(i) while PV(i-1) runs

A block does one tile, or (static masks, a moderate number of tiles) the tiles of its row in a
schedule made on the host. Tiles of one head group follow each other, longest first.

In shared memory (`_Scratch`): q [q_stages, block_q, head_dim], k [num_stages, block_kv, head_dim],
v [num_stages, block_kv, head_dim_v], lse [compute_wgs, 64], a bias that can be copied by TMA
[num_stages, block_q, block_kv], freed with K, and, unless the output leaves through
the Q slot, out [block_q, head_dim_v].

    barrier     slots       who arrives                  who waits
    q_ready     q_stages    TMA, 1 a tile                every consumer
    q_consumed  q_stages    every consumer, 1 a tile     producer
    k_ready     num_stages  TMA, 1 a step, 2 with bias   every consumer
    k_consumed  num_stages  every consumer, 1 a step     producer
    v_ready     num_stages  TMA, 1 a step                every consumer
    v_consumed  num_stages  every consumer, 1 a step     producer
    token       one a       the consumer before, 1 an    that consumer (named barrier of the
                consumer    issue                        two warpgroups; no data depends on it)

Slots are used round robin over all steps (tiles) of the block. Which keys a tile walks, and where
it must mask, comes from `masks.Bounds` or a table of `visits`; what a score is, from `logits`. What
GPU and interpret mode spell differently is `mma.ops`.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash import dropout, hardware, io_kernels, masks, tile_math
from pallas_flash.config import ForwardConfig
from pallas_flash.kernels.sm90 import logits, registers, smem, tails, tiles
from pallas_flash.kernels.sm90.call import (
    NO_EXTRAS,
    Extras,
    ceil_div,
    div,
    rem,
    with_bias,
)
from pallas_flash.kernels.sm90.cost import cost_estimate
from pallas_flash.kernels.sm90.visits import prepared

_SUM_COLS = 8  # columns of the running row sums: 2 a lane, so a step needs no shuffle


Array = Any
Int = masks.Int


def flash_forward(
    q: Array,
    k: Array,
    v: Array,
    scale: Array,
    *,
    mask: masks.Mask,
    q_len: int,
    kv_len: int,
    extras: Extras = NO_EXTRAS,
    alibi_shift: int = 0,
    dropout_rate: float = 0.0,
    logit_bound: float | None = None,
    config: ForwardConfig,
    num_sms: int = hardware.SM90.num_sms,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Attention output and log-sum-exp.

    B batch, T queries, S keys, N query heads, K kv heads, H head_dim, Hv head_dim_v.

    Args:
      q: (B, T, N, H), bfloat16 or float16; T and S are multiples of 8, zero past q_len and kv_len.
      k: (B, S, K, H).
      v: (B, S, K, Hv); query head n reads kv head n // (N / K).
      scale: float32 (B,), positive.
      mask: what hides pairs.
      q_len: true number of queries, at most T and more than T - 8.
      kv_len: true number of keys, at most S and more than S - 8.
      extras: arrays of the mask and of further terms. Behind a kv length k and v may hold anything.
      alibi_shift: of the diagonal where ALiBi's distance is 0.
      dropout_rate: with `extras.dropout_rows`.
      logit_bound: no logit is larger, up or down; None where nothing is known.
      config: tiles, rings and order.
      num_sms: blocks of a scheduled launch.
      interpret: run in Pallas' interpret mode.

    Returns:
      out (B, T, N, Hv) in the dtype of q, and lse (B, N, Tl), float32, natural log, Tl the next
      multiple of 64 of q_len. A row that sees no key has out 0 and lse -inf. Rows at or past
      q_len mean nothing.

    Raises:
      ValueError: where the scratch of `config` does not fit in shared memory.
    """
    batch, _, num_q_heads, head_dim = q.shape
    plan = _Plan(
        batch=batch,
        q_len=q_len,
        kv_len=kv_len,
        num_q_heads=num_q_heads,
        num_kv_heads=k.shape[2],
        head_dim=head_dim,
        head_dim_v=v.shape[3],
        dtype=jnp.dtype(q.dtype).name,
        mask=mask,
        terms=extras.present(),
        alibi_shift=alibi_shift,
        dropout_rate=dropout_rate,
        has_pivot="sinks" in extras.present()
        or tile_math.needs_pivot(logit_bound, jnp.dtype(q.dtype)),
        facts=tiles.mask_facts(mask, q_len, kv_len, config),
        config=config,
        num_sms=num_sms,
        interpret=interpret,
    )
    if "bias" in plan.terms:  # may hide any pair
        plan = dataclasses.replace(plan, facts=plan.facts._replace(sees_at_once=False))
    plan = with_bias(plan, extras.bias, _scratch)
    on_gpu = dataclasses.replace(plan, interpret=False)
    smem.check_smem(f"{config} with head_dim={head_dim}, head_dim_v={v.shape[3]}", _scratch(on_gpu))
    kv_lengths = extras.kv_lengths
    operands = _Gmem(
        q=q,
        k=k,
        v=v,
        scale=scale,
        extras=prepared(plan, extras, at_least_one=True),
        v_tail=None if kv_lengths is None else tails.tail_tile(v, kv_lengths, config.block_kv),
        schedule=jnp.asarray(tiles.schedule(plan)) if plan.is_scheduled else None,
    )
    operands, structure = jax.tree.flatten(operands)
    lse_rows = ceil_div(q_len, tiles.WG_ROWS) * tiles.WG_ROWS

    def flash_forward_kernel(*refs, scratch):
        gmem = jax.tree.unflatten(structure, refs[:-2])._replace(out=refs[-2], lse=refs[-1])
        wg = lax.axis_index("wg")
        pl.when(wg < config.compute_wgs)(lambda: _consume(plan, gmem, scratch, wg))
        pl.when(wg == config.compute_wgs)(lambda: _produce(plan, gmem, scratch))

    return plgpu.kernel(
        flash_forward_kernel,
        out_type=[
            jax.ShapeDtypeStruct((*q.shape[:3], v.shape[3]), q.dtype),
            jax.ShapeDtypeStruct((batch, num_q_heads, lse_rows), jnp.float32),
        ],
        scratch_types=dict(scratch=_scratch(plan)),
        grid=(plan.num_blocks,),
        grid_names=("block",),
        num_threads=config.compute_wgs + 1,
        thread_name="wg",
        **cost_estimate(plan, io_kernels.forward_kernel),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else None,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
    )(*operands)


def forward_smem_bytes(config: ForwardConfig, head_dim: int, head_dim_v: int, dtype) -> int:
    """Bytes of shared memory that a launch takes, counted from its own scratch."""
    plan = _Plan(
        head_dim=head_dim, head_dim_v=head_dim_v, dtype=jnp.dtype(dtype).name, config=config
    )
    return smem.smem_bytes(_scratch(plan))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Plan(tiles.Plan):
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


class _Scratch(NamedTuple):
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


def _scratch(plan: _Plan) -> _Scratch:
    c, dtype = plan.config, jnp.dtype(plan.dtype)
    ready, consumed = plgpu.Barrier, functools.partial(plgpu.Barrier, num_arrivals=c.compute_wgs)
    return _Scratch(
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


class _Gmem(NamedTuple):
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


# --- producer ------------------------------------------------------------------------------------


def _produce(plan: _Plan, gmem: _Gmem, scratch: _Scratch) -> None:
    """The producer warpgroup: loads Q, K and V of every tile of this block."""
    c = plan.config
    plgpu.set_max_registers(tiles.REGISTERS[c.compute_wgs][1], action="decrease")
    tiles_done, steps = tiles.for_each_tile(
        plan, gmem, functools.partial(_produce_tile, plan, gmem, scratch)
    )
    tiles.drain(scratch.q_consumed, tiles_done, c.q_stages)
    tiles.drain(scratch.k_consumed, steps, c.num_stages)
    tiles.drain(scratch.v_consumed, steps, c.num_stages)


def _produce_tile(plan: _Plan, gmem: _Gmem, scratch: _Scratch, tile: tiles.Tile) -> None:
    c = plan.config
    slot = rem(tile.turn, c.q_stages)
    pl.when(tile.turn >= c.q_stages)(lambda: plgpu.barrier_wait(scratch.q_consumed.at[slot]))
    plgpu.copy_gmem_to_smem(
        gmem.q.at[tile.batch, pl.ds(tile.q_lo, c.block_q), tile.head],
        scratch.q.at[slot],
        scratch.q_ready.at[slot],
    )
    load_k = functools.partial(_load_k, plan, gmem, scratch, tile)
    load_v = functools.partial(_load_v, plan, gmem, scratch, tile)
    lag = 1 if c.overlap else 0  # in the order in which consumers wait
    if lag:
        load_k(jnp.int32(0))

    def load_both(i, _):
        load_k(i)
        load_v(i - lag)
        return ()

    steps = jnp.int32(tile.walk.steps)
    lax.fori_loop(jnp.int32(lag), steps, load_both, ())
    if lag:
        load_v(steps - 1)


def _free_slot(plan: _Plan, consumed, step: Int) -> Int:
    """The ring slot of this step (of the block), once its last use is over."""
    num_stages = plan.config.num_stages
    slot = rem(step, num_stages)
    pl.when(step >= num_stages)(lambda: plgpu.barrier_wait(consumed.at[slot]))
    return slot


def _load_k(plan: _Plan, gmem: _Gmem, scratch: _Scratch, tile: tiles.Tile, i: Int) -> None:
    block_kv, head = plan.config.block_kv, div(tile.head, plan.q_per_kv)
    slot = _free_slot(plan, scratch.k_consumed, tile.step0 + i)
    kv0, ready = tile.walk.kv_tile(i) * block_kv, scratch.k_ready.at[slot]
    plgpu.copy_gmem_to_smem(
        gmem.k.at[tile.batch, pl.ds(kv0, block_kv), head], scratch.k.at[slot], ready
    )
    if plan.staged_bias:
        dst = scratch.bias.at[slot]
        plan.copy_bias(gmem.extras, tile.batch, tile.head, tile.q_lo, kv0, dst, ready)


def _load_v(plan: _Plan, gmem: _Gmem, scratch: _Scratch, tile: tiles.Tile, i: Int) -> None:
    """V of step i; the tile that the kv length cuts comes from its clean copy."""
    block_kv, head = plan.config.block_kv, div(tile.head, plan.q_per_kv)
    slot = _free_slot(plan, scratch.v_consumed, tile.step0 + i)
    ki = tile.walk.kv_tile(i)

    def load(ref, first_key):
        plgpu.copy_gmem_to_smem(
            ref.at[tile.batch, pl.ds(first_key, block_kv), head],
            scratch.v.at[slot],
            scratch.v_ready.at[slot],
        )

    if gmem.v_tail is None:
        load(gmem.v, ki * block_kv)
        return
    is_cut = ki == div(gmem.extras.kv_lengths[tile.batch], block_kv)
    pl.when(is_cut)(lambda: load(gmem.v_tail, 0))
    pl.when(jnp.logical_not(is_cut))(lambda: load(gmem.v, ki * block_kv))


# --- consumers -----------------------------------------------------------------------------------


class _Work(NamedTuple):
    """One q tile in the hands of one consumer warpgroup.

    Attributes:
      q: its rows of the Q slot. [64, head_dim]
    """

    plan: _Plan
    scratch: _Scratch
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
        self.plan.op.token_take(self.wg)

    def pass_token(self) -> None:
        num_wgs = self.plan.config.compute_wgs
        self.plan.op.token_pass(rem(self.wg + 1, num_wgs), num_wgs)

    def with_scores(self, body):
        """body(scores=accumulator [64, block_kv] of zeros)."""
        shape = (tiles.WG_ROWS, self.plan.config.block_kv)
        accumulators = self.scratch.accumulators
        return self.plan.op.with_accumulators(body, accumulators, self.wg, scores=shape)


class _Softmax(NamedTuple):
    """Running softmax: pivot (the maximum, or 0; log2 units) [64], row sums in parts [64, 8]."""

    row_max: Any
    row_sum: Any


class _Growth(NamedTuple):
    """How the accumulator must follow: times `factor`, in rows where `row_max` > `limit`."""

    factor: Any
    row_max: Any
    limit: Any


def _consume(plan: _Plan, gmem: _Gmem, scratch: _Scratch, wg: Int) -> None:
    """A consumer warpgroup: its 64 rows of every tile of this block."""
    num_wgs = plan.config.compute_wgs
    plgpu.set_max_registers(tiles.REGISTERS[num_wgs][0], action="increase")
    pl.when(wg == 0)(lambda: plan.op.token_pass(jnp.int32(0), num_wgs))
    tiles.for_each_tile(plan, gmem, functools.partial(_consume_tile, plan, gmem, scratch, wg))
    plgpu.wait_smem_to_gmem(0)


def _consume_tile(plan: _Plan, gmem: _Gmem, scratch: _Scratch, wg: Int, tile: tiles.Tile) -> None:
    slot = rem(tile.turn, plan.config.q_stages)
    q = scratch.q.at[slot, pl.ds(wg * tiles.WG_ROWS, tiles.WG_ROWS)]
    units = logits.units(plan, gmem.extras, gmem.scale, tile.batch)
    work = _Work(plan, scratch, gmem.extras, wg, tile, q, units)
    softmax = _first_softmax(work)
    plgpu.barrier_wait(scratch.q_ready.at[slot])
    attend = _attend_overlapped if plan.config.overlap else _attend_in_turn
    acc, softmax = plan.op.with_accumulators(
        functools.partial(attend, work, softmax),
        scratch.accumulators,
        wg,
        out=(tiles.WG_ROWS, plan.head_dim_v),
    )
    _finish(work, gmem, slot, acc, softmax)


def _first_softmax(work: _Work) -> _Softmax:
    """Before any key: nothing, or the sink, whose weight is 1 where it is the maximum."""
    row_max, weight = -jnp.inf if work.plan.has_pivot else 0.0, 0.0
    if "sinks" in work.plan.terms:
        sinks, tile = work.extras.sinks, work.tile
        row_max = sinks[(*work.plan.entry(sinks, tile.batch), tile.head)] * tile_math.LOG2E
        weight = jnp.where(row_max > -jnp.inf, 1.0 / _SUM_COLS, 0.0)  # a power of two: exact
    full = lambda shape, value: lax.broadcast_in_dim(jnp.float32(value), shape, ())
    return _Softmax(
        plgpu.layout_cast(full((tiles.WG_ROWS,), row_max), registers.ROW_LAYOUT),
        plgpu.layout_cast(full((tiles.WG_ROWS, _SUM_COLS), weight), registers.ACC_LAYOUT),
    )


def _softmax_step(work: _Work, i: Int, scores, softmax: _Softmax, *, masked: bool):
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
    return _Softmax(row_max, row_sum), work.kept(weights, i), _Growth(factor, grown, limit)


def _with_weights(row_sum, weights):
    """Row sums in parts with a tile's weights added."""
    for col in range(0, weights.shape[1], _SUM_COLS):
        row_sum = row_sum + weights[:, col : col + _SUM_COLS]
    return row_sum


def _rescale(work: _Work, out, growth: _Growth | None) -> None:
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


def _issue_qk(work: _Work, scores, i: Int) -> None:
    work.plan.op.wgmma(scores, work.q, work.scratch.k.at[work.slot(i)].transpose((1, 0)))


def _issue_pv(work: _Work, out, weights, i: Int) -> None:
    work.plan.op.wgmma(out, weights, work.scratch.v.at[work.slot(i)])


def _attend_overlapped(work: _Work, softmax: _Softmax, *, out):
    """QK of the next step and PV of this one run together, softmax of the next during PV."""
    scratch, last = work.scratch, jnp.int32(work.tile.walk.steps) - 1
    dtype = jnp.dtype(work.plan.dtype)
    scores = work.with_scores(functools.partial(_first_scores, work))
    plgpu.barrier_arrive(scratch.k_consumed.at[work.slot(0)])
    softmax, weights, _ = _softmax_step(
        work, jnp.int32(0), scores, softmax, masked=work.plan.facts.hides
    )
    step = functools.partial(_step_overlapped, work, out)
    softmax, weights = tiles.for_each_step(
        work.plan.facts, work.tile.walk, 1, step, (softmax, weights.astype(dtype))
    )
    plgpu.barrier_wait(scratch.v_ready.at[work.slot(last)])
    _issue_pv(work, out, weights, last)
    acc = work.plan.op.load(out)
    plgpu.barrier_arrive(scratch.v_consumed.at[work.slot(last)])
    return acc, softmax


def _first_scores(work: _Work, *, scores):
    plgpu.barrier_wait(work.scratch.k_ready.at[work.slot(0)])
    work.start_scores(scores, 0)
    work.take_token()
    _issue_qk(work, scores, 0)
    work.pass_token()
    return work.plan.op.load(scores)


def _step_overlapped(work: _Work, out, i: Int, carry, *, masked: bool):
    op, scratch = work.plan.op, work.scratch
    softmax, weights = carry  # weights of step i - 1
    scores = work.with_scores(functools.partial(_next_scores, work, out, weights, i))
    plgpu.barrier_arrive(scratch.k_consumed.at[work.slot(i)])
    softmax, weights, growth = _softmax_step(work, i, scores, softmax, masked=masked)
    softmax, weights = lax.optimization_barrier((softmax, weights))
    op.wait(0)
    plgpu.barrier_arrive(scratch.v_consumed.at[work.slot(i - 1)])
    # Not before the wait: the new weights would get registers that PV still reads, and ptxas would
    # then serialize every wgmma (note C7513).
    weights = weights.astype(work.plan.dtype)
    _rescale(work, out, growth)
    return softmax, weights


def _next_scores(work: _Work, out, weights, i: Int, *, scores):
    plgpu.barrier_wait(work.scratch.k_ready.at[work.slot(i)])
    work.start_scores(scores, i)
    work.take_token()
    _issue_qk(work, scores, i)
    plgpu.barrier_wait(work.scratch.v_ready.at[work.slot(i - 1)])
    _issue_pv(work, out, weights, i - 1)
    work.pass_token()
    return work.plan.op.load(scores, 1)


def _attend_in_turn(work: _Work, softmax: _Softmax, *, out):
    """QK, softmax, PV, one after the other; other warpgroups fill the tensor cores meanwhile."""
    work.take_token()
    softmax = tiles.for_each_step(
        work.plan.facts, work.tile.walk, 0, functools.partial(_step_in_turn, work, out), softmax
    )
    work.pass_token()
    return work.plan.op.load(out), softmax


def _step_in_turn(work: _Work, out, i: Int, softmax: _Softmax, *, masked: bool):
    op, scratch, slot = work.plan.op, work.scratch, work.slot(i)
    plgpu.barrier_wait(scratch.k_ready.at[slot])
    scores = work.with_scores(functools.partial(_scores, work, i))
    plgpu.barrier_arrive(scratch.k_consumed.at[slot])
    softmax, weights, growth = _softmax_step(work, i, scores, softmax, masked=masked)
    weights = weights.astype(work.plan.dtype)
    _rescale(work, out, growth)
    softmax, weights = lax.optimization_barrier((softmax, weights))
    plgpu.barrier_wait(scratch.v_ready.at[slot])
    work.take_token()
    _issue_pv(work, out, weights, i)
    op.wait(0)
    plgpu.barrier_arrive(scratch.v_consumed.at[slot])
    return softmax


def _scores(work: _Work, i: Int, *, scores):
    work.start_scores(scores, i)
    _issue_qk(work, scores, i)
    work.pass_token()
    return work.plan.op.load(scores)


def _finish(work: _Work, gmem: _Gmem, slot: Int, acc, softmax: _Softmax) -> None:
    """Writes out and lse of these 64 rows and gives the Q slot back."""
    plan, scratch, tile = work.plan, work.scratch, work.tile
    row_sum = softmax.row_sum.sum(axis=1)
    if plan.output_through_q:
        staged = work.q
    else:
        staged = scratch.out.at[pl.ds(work.wg * tiles.WG_ROWS, tiles.WG_ROWS)]
        plgpu.barrier_arrive(scratch.q_consumed.at[slot])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # stores of the tile before
    factor = tile_math.reciprocal_sum(row_sum) * dropout.keep_scale(plan.dropout_rate)
    out = acc * tile_math.spread(factor, acc.shape)
    staged[...] = out.astype(plan.dtype)
    scratch.lse.at[work.wg][...] = tile_math.log_sum_exp(softmax.row_max, row_sum)
    plgpu.commit_smem()
    row0 = work.row0

    def store():
        rows = pl.ds(row0, tiles.WG_ROWS)
        plgpu.copy_smem_to_gmem(staged, gmem.out.at[tile.batch, rows, tile.head])
        lse = gmem.lse.at[tile.batch, tile.head, rows]
        plgpu.copy_smem_to_gmem(scratch.lse.at[work.wg], lse)

    if gmem.lse.shape[2] % plan.config.block_q == 0:
        store()
    else:
        # A contiguous copy is a plain bulk copy, clipped to the whole array only: rows past lse's
        # end would land in the next head.
        pl.when(row0 < gmem.lse.shape[2])(store)
    if plan.output_through_q:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(scratch.q_consumed.at[slot])
