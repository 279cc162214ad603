"""The split for head dims up to 128: each consumer owns 64 of the block's 128 keys.

A consumer keeps dk and dv of its keys in registers for the whole walk. dS of both consumers meets
in shared memory, because dq needs all keys of the block: consumer 0 makes one half of each dq
tile, consumer 1 the other (rows of a 128-row tile, columns of a 64-row one). K's columns are cut
between swizzles: of 80, 96 and 112 consumer 0 makes 48, 64 and 64. Then each has code of its own.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash import dropout, masks
from pallas_flash.kernels.sm90 import backward_common as common
from pallas_flash.kernels.sm90 import cluster_sums, logits
from pallas_flash.kernels.sm90.backward_common import Block, Ref
from pallas_flash.kernels.sm90.backward_launch import Launch
from pallas_flash.kernels.sm90.smem import tiled_smem

Int = masks.Int

ROWS = 64  # keys of one consumer
# Whoever writes dS of tile i has seen both consumers finish tile i - 3: four slots need no barrier
# that says "consumed". With two stages three are enough, as tile i comes when both are done with
# tile i - 2: that makes room for a cluster's mailbox, and for the statistics of 128 queries.
DS_SLOTS, FEWER_DS_SLOTS = 4, 3


class Smem(NamedTuple):
    """Shared memory. `accumulators` is empty on a GPU."""

    q: Ref  # [num_stages, block_q, head_dim]
    dout: Ref  # [num_stages, block_q, head_dim_v]
    parts: Ref  # [num_stages, block_q, 8], or None like each of the next two
    neg_lse: Ref  # [num_stages, block_q]
    neg_delta: Ref  # [num_stages, block_q]
    bias: Ref  # [num_stages, block_q, 128], or None
    k: Ref  # [128, head_dim], at the end dk
    v: Ref  # [128, head_dim_v], at the end dv
    ds: Ref  # [slots, 128, block_q]
    accumulators: dict[str, Ref]
    mailbox: cluster_sums.Mailbox | None = None


class Barriers(NamedTuple):
    """See the table in backward.py."""

    kv_ready: Ref
    tile_ready: Ref
    tile_consumed: Ref
    done: Ref
    ds_ready: Ref
    summed: Ref = None


class Accumulators(NamedTuple):
    dk: Any  # [64, head_dim]
    dv: Any  # [64, head_dim_v]
    s: Any  # [64, block_q]
    dp: Any  # [64, block_q]
    dq: Any = None  # a consumer's part of [block_q, head_dim]


def _first_columns(launch: Launch) -> int:
    """Columns of a dq tile that consumer 0 makes: half, up to whole swizzles of K."""
    if launch.config.block_q == 128:
        return launch.head_dim
    swizzle = math.gcd(launch.head_dim, 64)
    return -(-launch.head_dim // (2 * swizzle)) * swizzle


def _has_halves(launch: Launch) -> bool:
    """Both consumers make as much of dq, or none: one code does for both."""
    is_uneven = launch.config.block_q == 64 and 2 * _first_columns(launch) != launch.head_dim
    return not (launch.make_dq and is_uneven)


def _dq_shape(launch: Launch, wg) -> tuple[int, int]:
    """Of this consumer's part of a dq tile."""
    first = _first_columns(launch)
    return (64, first if _has_halves(launch) or wg == 0 else launch.head_dim - first)


def _accumulator_shapes(launch: Launch, wg) -> dict[str, tuple[int, int]]:
    block_q = launch.config.block_q
    shapes = dict(
        dk=(ROWS, launch.head_dim),
        dv=(ROWS, launch.head_dim_v),
        s=(ROWS, block_q),
        dp=(ROWS, block_q),
    )
    return shapes | (dict(dq=_dq_shape(launch, wg)) if launch.make_dq else {})


def check(launch: Launch) -> None:
    """Raises ValueError where this split cannot cut the problem."""
    needed = 64 if launch.head_dim > 64 else 128
    if launch.head_dim > 128 or launch.head_dim_v > 128:
        raise ValueError(
            f"head_dim={launch.head_dim}, head_dim_v={launch.head_dim_v}: split='keys' holds at "
            "most 128 of each in registers; use split='roles'"
        )
    if launch.make_dq and launch.config.block_q != needed:
        raise ValueError(
            f"block_q={launch.config.block_q}: with head_dim={launch.head_dim} each consumer's "
            f"part of dq is at most 64 x 64 only with block_q={needed}"
        )


def scratch(launch: Launch) -> dict[str, Any]:
    """Shared memory and barriers of one block."""
    ds_tile = (2 * ROWS, launch.config.block_q)
    ds = tiled_smem((_num_ds_slots(launch), *ds_tile), launch.dtype, beside=launch.head_dim)
    mailbox = None
    if launch.cluster > 1:
        mailbox = cluster_sums.mailbox(ds_tile, launch.dtype, launch.cluster)
    shapes = _accumulator_shapes(launch, 0)  # consumer 0 has the larger ones
    accumulators = launch.op.accumulator_scratch(common.CONSUMERS, **shapes)
    return dict(
        smem=Smem(
            ds=ds if launch.make_dq else None,
            mailbox=mailbox,
            accumulators=accumulators,
            **common.tile_smem(launch),
        ),
        bars=Barriers(
            ds_ready=plgpu.Barrier(
                num_barriers=_num_ds_slots(launch), num_arrivals=common.CONSUMERS
            ),
            **_cluster_barriers(launch),
            **common.tile_barriers(launch),
        ),
    )


def _cluster_barriers(launch: Launch) -> dict[str, Any]:
    if launch.cluster == 1:
        return {}
    return dict(summed=plgpu.ClusterBarrier(collective_axes=("peer",), num_arrivals=1))


def _num_ds_slots(launch: Launch) -> int:
    config = launch.config
    spare = launch.cluster > 1 or config.block_q == 128
    return FEWER_DS_SLOTS if spare and config.num_stages == 2 else DS_SLOTS


def run_roles(block: Block, wg) -> None:
    """What warpgroup `wg` does."""
    if _has_halves(block.launch):
        pl.when(wg < common.CONSUMERS)(lambda: _consume(block, wg))
    else:
        for consumer in range(common.CONSUMERS):
            pl.when(wg == consumer)(functools.partial(_consume, block, consumer))
    pl.when(wg == common.CONSUMERS)(lambda: _produce(block))


@dataclasses.dataclass(frozen=True)
class _Consumer:
    """One consumer warpgroup: its keys, its part of dq, its accumulators."""

    block: Block
    wg: Any
    units: logits.Units
    acc: Accumulators

    @property
    def kv0(self):
        return self.block.walk.kv0 + self.wg * ROWS


def _consume(block: Block, wg) -> None:
    """A consumer warpgroup: all tiles of the walk, then dk and dv leave."""
    plgpu.set_max_registers(block.launch.registers[0], action="increase")
    launch, smem, bars = block.launch, block.smem, block.bars
    if launch.make_dq:  # dS of the tile before the first: zero
        mine = pl.ds(wg * ROWS, ROWS)
        zeros = common.zeros((ROWS, launch.config.block_q)).astype(launch.dtype)
        last = _num_ds_slots(launch) - 1
        smem.ds[last, mine] = zeros
        launch.op.fence_async()
        plgpu.barrier_arrive(bars.ds_ready.at[last])
    units = block.units()
    plgpu.barrier_wait(bars.kv_ready)
    dk, dv = launch.op.with_accumulators(
        lambda **acc: _walk(_Consumer(block, wg, units, Accumulators(**acc))),
        smem.accumulators,
        wg,
        **_accumulator_shapes(launch, wg),
    )
    _finish(block, wg, dk, dv)


def _walk(c: _Consumer):
    """All tiles; returns dk (before the scale) and dv of this consumer's keys."""
    block, launch, op = c.block, c.block.launch, c.block.launch.op
    step = functools.partial(_step, c)
    if _queries_in_turn(launch):
        op.token_start(c.wg, common.CONSUMERS)
    done, before, turn = block.walk.over_tiles(launch, step, (jnp.int32(0),) * 3)
    if launch.make_dq:
        _issue_dq(c, _ds_slots(launch, done, turn)[1])
        _put_dq(c, done - 1, before, in_flight=0)
    return op.load(c.acc.dk), op.load(c.acc.dv, None)


def _step(c: _Consumer, carry, head, qi, masked: bool):
    """One q tile. dq is one tile late: nobody waits for the other consumer's current dS.

    Both statistics go in before the first product: with one in flight ptxas would make an
    accumulator that gets anything but zero wait for it.
    """
    launch, smem, bars, acc = c.block.launch, c.block.smem, c.block.bars, c.acc
    op, config, dtype = launch.op, launch.config, launch.dtype
    i, before, turn = carry
    slot = common.ring(i, config.num_stages)
    q, dout = smem.q.at[slot], smem.dout.at[slot]
    place = c.block.place(head, qi, c.kv0, ROWS)

    plgpu.barrier_wait(bars.tile_ready.at[slot])
    is_tame = c.block.start_scores(acc.s, slot, place, c.units)
    c.block.start_dprobs(acc.dp, slot, ROWS)
    keys = common.unhoisted(c.wg, ROWS, i)
    op.wgmma(acc.s, smem.k.at[keys], common.transposed(q))  # S^T - lse / scale
    op.wgmma(acc.dp, smem.v.at[keys], common.transposed(dout))  # dP^T - delta
    p, products_of_dv = _probs(c, slot, place, masked=masked, is_tame=is_tame)
    dp = op.load(acc.dp, products_of_dv)
    dlogits = c.block.dlogits(p, dp, slot, has_hidden=c.block.hides(masked, is_tame))
    c.block.add_dbias(dlogits, place, c.block.walk.ki, c.wg)
    ds = dlogits.astype(dtype)
    ds_slot, ds_slot_before = _ds_slots(launch, i, turn)
    _share_ds(c, ds_slot, ds)
    _issue_dq(c, ds_slot_before)
    _publish_ds(c, ds_slot)
    op.wgmma(acc.dk, ds, q)
    _put_dq(c, i - 1, before, in_flight=1)
    op.wait(0)
    if launch.cluster > 1:
        cluster_sums.release_to_cluster()
    plgpu.barrier_arrive(bars.tile_consumed.at[slot])
    return i + 1, c.block.dq_row(head, qi), _next_turn(launch, turn)


def _probs(c: _Consumer, slot, place: logits.Place, *, masked: bool, is_tame):
    """P [64 keys, block_q], with a cap times its slope, and how many products of dv it issued.

    They are issued before dP is awaited: work for the tensor cores during dS. The tanh of a cap
    makes P come late, so there a part of dv begins as soon as it has its columns of P.
    """
    op, launch, dout = c.block.launch.op, c.block.launch, c.block.smem.dout.at[slot]
    block_q, width = launch.config.block_q, _columns_at_a_time(launch)
    part_at = lambda first: place._replace(q0=place.q0 + first, shape=(ROWS, width))
    load_lse = lambda first: c.block.neg_lse_apart(slot, first, part_at(first))
    parts = []
    # Behind exponentials in the queue a load takes 90 cycles. With dropout or for a whole tile
    # there are no registers for what is ahead: at head_dim 64, 316 bytes of spills for 224.
    looks_ahead = width < block_q and not launch.dropout_rate
    lse_ahead = load_lse(0) if looks_ahead else None
    in_turn = _queries_in_turn(launch)
    if in_turn:
        op.token_take(c.wg)
    products = op.load(c.acc.s, 1)
    for first in range(0, block_q, width):
        some, neg_lse = part_at(first), lse_ahead
        if not looks_ahead:
            neg_lse = load_lse(first)
        elif first + width < block_q:
            lse_ahead = load_lse(first + width)
        if in_turn and first == in_turn:
            op.token_pass(1 - c.wg, common.CONSUMERS)
        weights, slope = c.block.weights(
            products[:, first : first + width],
            neg_lse,
            some,
            c.units,
            masked=masked,
            is_tame=is_tame,
        )
        p = c.block.signed_by_dropout(weights, some)
        p_kept = c.block.kept(p).astype(launch.dtype)
        parts.append(p if slope is None else p * slope)
        if width == block_q:
            op.wgmma(c.acc.dv, p_kept, dout)
        else:
            op.wgmma_rows(c.acc.dv, p_kept, dout, first)
    if in_turn == block_q:
        op.token_pass(1 - c.wg, common.CONSUMERS)
    return jnp.concatenate(parts, 1) if len(parts) > 1 else parts[0], len(parts)


def _queries_in_turn(launch: Launch) -> int:
    """Of how many queries a consumer makes the weights while the other makes none; 0: no turns.

    With a cap both want exponentials and reciprocals at once, and the tensor cores wait for both.
    In turn, one multiplies meanwhile: 6 % of the kernel at head_dim 64, 5 % at 80 and 1 % at 128
    (causal, T 8192 and 4096, H200). With a bias it is a loss of 12 %, without a cap of up to 1 %.
    Who has most of its weights gives way: at 64 ptxas makes the tanh of all before the first
    product.
    """
    if not _makes_parts(launch):
        return 0
    block_q, width = launch.config.block_q, _columns_at_a_time(launch)
    if width == block_q:
        return block_q
    return width if launch.head_dim <= 64 else block_q - width


def _columns_at_a_time(launch: Launch) -> int:
    """Queries whose weights are made together.

    `wgmma_rows` wants lines of 128 bytes. Bits of a mask come in words of 32.
    """
    block_q = launch.config.block_q
    if not _makes_parts(launch) or launch.head_dim_v % 64:
        return block_q
    return max(block_q // 4, 32 if "mask" in launch.terms else 16)


def _makes_parts(launch: Launch) -> bool:
    """Weights are made in parts and in turn: with a soft cap, which makes them late.

    With a bias there are no registers for more than one product of dv in flight.
    """
    return "soft_cap" in launch.terms and "bias" not in launch.terms


def _ds_slots(launch: Launch, i, turn):
    """Where dS of tile i is, and that of the tile before.

    turn: i mod 3 where there are three, kept from step to step: the division would cost registers.
    """
    if _num_ds_slots(launch) == DS_SLOTS:
        return common.ring(i, DS_SLOTS), common.ring(i + DS_SLOTS - 1, DS_SLOTS)
    return turn, jnp.where(turn == 0, FEWER_DS_SLOTS - 1, turn - 1)


def _next_turn(launch: Launch, turn):
    if _num_ds_slots(launch) == DS_SLOTS:
        return turn
    return jnp.where(turn == FEWER_DS_SLOTS - 1, 0, turn + 1)


def _share_ds(c: _Consumer, slot, ds) -> None:
    if c.block.launch.make_dq:
        c.block.smem.ds[slot, pl.ds(c.wg * ROWS, ROWS)] = ds


def _publish_ds(c: _Consumer, slot) -> None:
    """Tells both consumers that this half of dS is there."""
    launch = c.block.launch
    if launch.make_dq:
        launch.op.fence_async()
        plgpu.barrier_arrive(c.block.bars.ds_ready.at[slot])


def _issue_dq(c: _Consumer, slot) -> None:
    """This consumer's part of dq from the dS in this slot."""
    launch, smem = c.block.launch, c.block.smem
    if not launch.make_dq:
        return
    op = launch.op
    m, n = _dq_shape(launch, c.wg)
    plgpu.barrier_wait(c.block.bars.ds_ready.at[slot])
    op.set(c.acc.dq, common.zeros((m, n)))
    if launch.config.block_q == m:
        columns = pl.ds(c.wg * _first_columns(launch), n)
        op.wgmma(c.acc.dq, common.transposed(smem.ds.at[slot]), smem.k.at[:, columns])
    else:
        op.wgmma(c.acc.dq, common.transposed(smem.ds.at[slot, :, pl.ds(c.wg * m, m)]), smem.k)


def _put_dq(c: _Consumer, i, row, in_flight: int) -> None:
    """The part that was issued, of tile i if there is one, is added to its place, or stored there.

    row: of this tile, see `Block.dq_row`.
    """
    launch, op = c.block.launch, c.block.launch.op
    if not launch.make_dq:
        return
    (m, n), first_columns = _dq_shape(launch, c.wg), _first_columns(launch)
    dq = op.load(c.acc.dq, in_flight)
    if launch.stores_dq:
        first = (0, c.wg * first_columns) if launch.config.block_q == m else (c.wg * m, 0)
        c.block.store_dq(dq, row, first, where=i >= 0)
        return
    part = c.block.dq_part(row, c.wg * (m * first_columns), m * n)
    op.add_dq(dq, part, where=i >= 0)


def _finish(block: Block, wg, dk, dv) -> None:
    """dk and dv leave through K and V, once both consumers have read them for the last time."""
    plgpu.barrier_arrive(block.bars.done)
    plgpu.barrier_wait(block.bars.done)
    mine, row0 = pl.ds(wg * ROWS, ROWS), block.walk.kv0 + wg * ROWS
    dk *= block.dk_factor()  # read again: kept, it would cost the loop a register
    dv = block.of_p(block.undropped(dv))
    common.store_grad(block, dk, block.smem.k.at[mine], block.gmem.dk, row0)
    common.store_grad(block, dv, block.smem.v.at[mine], block.gmem.dv, row0)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


@dataclasses.dataclass(frozen=True)
class _Sums:
    """The gradient of a bias from dS, summed over the cluster by the warpgroup that loads.

    No consumer waits for it. Tile i is asked for when all blocks have summed tile i - 3: what this
    one sent of it has arrived, and its dS may be overwritten.
    """

    block: Block

    def open(self) -> None:
        """Before the first tile is done with."""
        if self.block.launch.cluster > 1:
            cluster_sums.open_mailbox(self.block.smem.mailbox)
            plgpu.barrier_arrive(self.block.bars.summed)

    def begin(self, i) -> None:
        """All blocks are done with tile i."""
        if self.block.launch.cluster > 1:
            plgpu.barrier_wait(self.block.bars.summed)  # tile i - 1
            cluster_sums.send_parts(self.block.smem.mailbox, self._tile(i), **self._cluster())

    def end(self, i, row) -> None:
        """Sums and stores tile i, which has this row in dq."""
        block, launch = self.block, self.block.launch
        others, out = None, block.gmem.dbias
        if launch.cluster > 1:
            cluster_sums.await_parts(block.smem.mailbox, i)
            others = block.smem.mailbox.parts
        cluster_sums.store_sum(
            self._tile(i),
            others,
            out,
            (launch.entry(out, block.walk.b)[0], row * launch.config.block_q, block.walk.kv0),
            factor=dropout.keep_scale(launch.dropout_rate),
            **self._cluster(),
        )
        if launch.cluster > 1:
            plgpu.barrier_arrive(block.bars.summed)

    def close(self) -> None:
        """After the last tile: no block of the cluster reads this one's memory any more."""
        if self.block.launch.cluster > 1:
            plgpu.barrier_wait(self.block.bars.summed)

    def _tile(self, i):
        return self.block.smem.ds.at[common.ring(i, _num_ds_slots(self.block.launch))]

    def _cluster(self) -> dict[str, Any]:
        return dict(rank=self.block.launch.rank(), peers=self.block.launch.peers)


def _produce(block: Block) -> None:
    """The producer warpgroup."""
    if not block.launch.peers:
        common.produce(block)
        return
    sums = _Sums(block)
    sums.open()
    common.produce(block, sums)
    sums.close()
