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
the Q tile and rings of K and V by TMA (`produce`). Each consumer owns 64 query rows (`_consume`).
The consumers take turns on the tensor cores by a token, so that one does softmax while another
multiplies; the token is passed when the products are issued, not when they are complete (the
latter costs 31 % at head_dim 64 on an H200). A consumer alone has no token, and moves no registers,
so that two blocks of one have room on a multiprocessor. Two orders of a step:

    _step_in_turn      QK(i), pass token; softmax(i); take token; PV(i)
    _step_overlapped   take token; QK(i), PV(i-1); pass token; softmax(i) while PV(i-1) runs

A block does one tile, or (static masks, a moderate number of tiles) the tiles of its row in a
schedule made on the host. Tiles of one head group follow each other, longest first.

In shared memory (`Scratch`): q [q_stages, block_q, head_dim], k [num_stages, block_kv, head_dim],
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
                consumer    issue                        two warpgroups; no data depends on it;
                of several                               none where there is one)

Slots are used round robin over all steps (tiles) of the block. Which keys a tile walks, and where
it must mask, comes from `masks.Bounds` or a table of `visits`; what a score is, from `logits`; the
softmax is `online_softmax`. What GPU and interpret mode spell differently is `mma.ops`.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash import dropout, hardware, io_kernels, masks, tile_math
from pallas_flash.config import ForwardConfig
from pallas_flash.kernels.sm90 import logits, online_softmax, smem, tails, tiles
from pallas_flash.kernels.sm90.call import NO_EXTRAS, Extras, ceil_div, rem, with_bias
from pallas_flash.kernels.sm90.cost import cost_estimate
from pallas_flash.kernels.sm90.forward_common import Gmem, Plan, Scratch, Work, scratch_of
from pallas_flash.kernels.sm90.forward_load import produce
from pallas_flash.kernels.sm90.visits import prepared

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
      scale: float32 (1|B,), positive.
      mask: what hides pairs.
      q_len: true number of queries, at most T and more than T - 8.
      kv_len: true number of keys, at most S and more than S - 8.
      extras: arrays of the mask and of further terms. Behind a kv length k and v may hold anything.
      alibi_shift: of the diagonal where ALiBi's distance is 0.
      dropout_rate: with `extras.dropout_rows`.
      logit_bound: no logit is larger, up or down; None where nothing is known.
      config: tiles, rings and order.
      num_sms: multiprocessors that a scheduled launch is for.
      interpret: run in Pallas' interpret mode.

    Returns:
      out (B, T, N, Hv) in the dtype of q, and lse (B, N, Tl), float32, natural log, Tl the next
      multiple of 64 of q_len. A row that sees no key has out 0 and lse -inf. Rows at or past
      q_len mean nothing.

    Raises:
      ValueError: where the scratch of `config` does not fit in shared memory.
    """
    batch, _, num_q_heads, head_dim = q.shape
    plan = Plan(
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
    plan = with_bias(plan, extras.bias, scratch_of)
    on_gpu = dataclasses.replace(plan, interpret=False)
    smem.check_smem(
        f"{config} with head_dim={head_dim}, head_dim_v={v.shape[3]}", scratch_of(on_gpu)
    )
    kv_lengths = extras.kv_lengths
    operands = Gmem(
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
        pl.when(wg == config.compute_wgs)(lambda: produce(plan, gmem, scratch))

    return plgpu.kernel(
        flash_forward_kernel,
        out_type=[
            jax.ShapeDtypeStruct((*q.shape[:3], v.shape[3]), q.dtype),
            jax.ShapeDtypeStruct((batch, num_q_heads, lse_rows), jnp.float32),
        ],
        scratch_types=dict(scratch=scratch_of(plan)),
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
    plan = Plan(
        head_dim=head_dim, head_dim_v=head_dim_v, dtype=jnp.dtype(dtype).name, config=config
    )
    return smem.smem_bytes(scratch_of(plan))


def _consume(plan: Plan, gmem: Gmem, scratch: Scratch, wg: Int) -> None:
    """A consumer warpgroup: its 64 rows of every tile of this block."""
    num_wgs = plan.config.compute_wgs
    tiles.claim_registers(num_wgs)
    if plan.has_token:
        plan.op.token_start(wg, num_wgs)
    tiles.for_each_tile(plan, gmem, functools.partial(_consume_tile, plan, gmem, scratch, wg))
    plgpu.wait_smem_to_gmem(0)


def _consume_tile(plan: Plan, gmem: Gmem, scratch: Scratch, wg: Int, tile: tiles.Tile) -> None:
    slot = rem(tile.turn, plan.config.q_stages)
    q = scratch.q.at[slot, pl.ds(wg * tiles.WG_ROWS, tiles.WG_ROWS)]
    units = logits.units(plan, gmem.extras, gmem.scale, tile.batch)
    work = Work(plan, scratch, gmem.extras, wg, tile, q, units)
    softmax = online_softmax.first(work)
    plgpu.barrier_wait(scratch.q_ready.at[slot])
    attend = _attend_overlapped if plan.config.overlap else _attend_in_turn
    acc, softmax = plan.op.with_accumulators(
        functools.partial(attend, work, softmax),
        scratch.accumulators,
        wg,
        out=(tiles.WG_ROWS, plan.head_dim_v),
    )
    _finish(work, gmem, slot, acc, softmax)


def _issue_qk(work: Work, scores, i: Int) -> None:
    plan, op, k = work.plan, work.plan.op, work.scratch.k.at[work.slot(i)]
    if _starts_from_zero(plan):
        op.wgmma_from_zero(scores, work.q, k)
    else:
        op.wgmma(scores, work.q, k.transpose((1, 0)))


def _starts_from_zero(plan: Plan) -> bool:
    """QK overwrites the accumulator, which else is set to zero by 32 instructions, token in hand.

    Not needed in turn, where nothing stands between zeros and product, and ptxas overwrites. Gains
    2.6 % of the forward with a soft cap and with a window of run-time values (head_dim 128, H200);
    without terms ptxas orders the step so that it takes 1 % longer.
    """
    return plan.config.overlap and bool(plan.terms) and not plan.terms & logits.ADDITIVE


def _issue_pv(work: Work, out, weights, i: Int) -> None:
    work.plan.op.wgmma(out, weights, work.scratch.v.at[work.slot(i)])


def _attend_overlapped(work: Work, softmax: online_softmax.Softmax, *, out):
    """QK of the next step and PV of this one run together, softmax of the next during PV."""
    scratch, last = work.scratch, jnp.int32(work.tile.walk.steps) - 1
    dtype = jnp.dtype(work.plan.dtype)
    scores = work.with_scores(functools.partial(_first_scores, work))
    plgpu.barrier_arrive(scratch.k_consumed.at[work.slot(0)])
    softmax, weights, _ = online_softmax.step(
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


def _first_scores(work: Work, *, scores):
    plgpu.barrier_wait(work.scratch.k_ready.at[work.slot(0)])
    work.start_scores(scores, 0)
    work.take_token()
    _issue_qk(work, scores, 0)
    work.pass_token()
    return work.plan.op.load(scores)


def _step_overlapped(work: Work, out, i: Int, carry, *, masked: bool):
    op, scratch = work.plan.op, work.scratch
    softmax, weights = carry  # weights of step i - 1
    scores = work.with_scores(functools.partial(_next_scores, work, out, weights, i))
    plgpu.barrier_arrive(scratch.k_consumed.at[work.slot(i)])
    softmax, weights, growth = online_softmax.step(work, i, scores, softmax, masked=masked)
    softmax, weights = lax.optimization_barrier((softmax, weights))
    op.wait(0)
    plgpu.barrier_arrive(scratch.v_consumed.at[work.slot(i - 1)])
    # Not before the wait: the new weights would get registers that PV still reads, and ptxas would
    # then serialize every wgmma (note C7513).
    weights = weights.astype(work.plan.dtype)
    online_softmax.rescale(work, out, growth)
    return softmax, weights


def _next_scores(work: Work, out, weights, i: Int, *, scores):
    plgpu.barrier_wait(work.scratch.k_ready.at[work.slot(i)])
    work.start_scores(scores, i)
    work.take_token()
    _issue_qk(work, scores, i)
    plgpu.barrier_wait(work.scratch.v_ready.at[work.slot(i - 1)])
    _issue_pv(work, out, weights, i - 1)
    work.pass_token()
    return work.plan.op.load(scores, 1)


def _attend_in_turn(work: Work, softmax: online_softmax.Softmax, *, out):
    """QK, softmax, PV, one after the other; other warpgroups fill the tensor cores meanwhile."""
    work.take_token()
    softmax = tiles.for_each_step(
        work.plan.facts, work.tile.walk, 0, functools.partial(_step_in_turn, work, out), softmax
    )
    work.pass_token()
    return work.plan.op.load(out), softmax


def _step_in_turn(work: Work, out, i: Int, softmax: online_softmax.Softmax, *, masked: bool):
    op, scratch, slot = work.plan.op, work.scratch, work.slot(i)
    plgpu.barrier_wait(scratch.k_ready.at[slot])
    scores = work.with_scores(functools.partial(_scores, work, i))
    plgpu.barrier_arrive(scratch.k_consumed.at[slot])
    softmax, weights, growth = online_softmax.step(work, i, scores, softmax, masked=masked)
    weights = weights.astype(work.plan.dtype)
    online_softmax.rescale(work, out, growth)
    softmax, weights = lax.optimization_barrier((softmax, weights))
    plgpu.barrier_wait(scratch.v_ready.at[slot])
    work.take_token()
    _issue_pv(work, out, weights, i)
    op.wait(0)
    plgpu.barrier_arrive(scratch.v_consumed.at[slot])
    return softmax


def _scores(work: Work, i: Int, *, scores):
    work.start_scores(scores, i)
    _issue_qk(work, scores, i)
    work.pass_token()
    return work.plan.op.load(scores)


def _finish(work: Work, gmem: Gmem, slot: Int, acc, softmax: online_softmax.Softmax) -> None:
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
