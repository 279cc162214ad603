"""What both splits of the fused backward share: the walk over q tiles, the producer.

Knows which tiles a block of keys visits and how they come into shared memory; not what is computed
from them.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash import dropout, masks, tile_math
from pallas_flash.kernels.sm90 import logits, query_parts, registers
from pallas_flash.kernels.sm90.backward_launch import Gmem, Launch
from pallas_flash.kernels.sm90.call import (
    Visits,
    div,
    rem,
)
from pallas_flash.kernels.sm90.smem import tiled_smem

CONSUMERS = 2  # warpgroups that compute; one more loads

Int = masks.Int
Ref = Any


class Walk(NamedTuple):
    """Which tiles one block of keys visits: for each query head of its share, q tiles in order.

    Attributes:
      b, share, ki: the block's place. kv0 = ki * block_kv.
      bounds: what a masked step tests, and the q tiles found from it:
      first <= plain <= plain_end <= last: q tiles [plain, plain_end) see the whole block and run
        without a test. Without a lower bound plain_end is last.
      hides: a masked step may hide something.
      visits: a table instead, for masks that are more than bounds.
    """

    b: Int
    share: Int
    ki: Int
    kv0: Int
    bounds: masks.Bounds
    first: Int
    plain: Int
    plain_end: Int
    last: Int
    hides: bool
    visits: Visits | None = None

    def over_tiles(self, launch: Launch, step, carry, *, tests: bool = True):
        """carry = step(carry, head, qi, masked) for every tile.

        tests: False for a role that does not ask whether a step is masked: one loop.
        """
        one_head = self._interval if self.visits is None else self._table
        group = launch.heads_a_share
        walk_head = lambda g, carry: one_head(launch, step, tests, self.share * group + g, carry)
        if group == 1:
            return walk_head(np.int32(0), carry)
        return lax.fori_loop(np.int32(0), np.int32(group), walk_head, carry)

    def _interval(self, launch: Launch, step, tests: bool, head: Int, carry):
        if not self.hides:
            step = self._staggered(launch, step)
        plain, plain_end = (self.plain, self.plain_end) if tests else (self.first, self.last)
        tests = tests and self.hides
        if tests:
            carry = _loop(step, head, True, self.first, plain, carry)
        carry = _loop(step, head, False, plain, plain_end, carry)
        if tests and self.bounds.lower is not None:
            carry = _loop(step, head, True, plain_end, self.last, carry)
        return carry

    def _staggered(self, launch: Launch, step):
        """The step, with q tiles from this block's own place on and round.

        Blocks that run together would otherwise add to one tile of dq at a time. Under a diagonal
        they begin at different tiles as it is.
        """
        q_tiles = launch.num_q_tiles
        start = div(self.ki * q_tiles, launch.num_kv_tiles)

        def staggered(carry, head, j, masked):
            qi = j + start
            return step(carry, head, jnp.where(qi >= q_tiles, qi - q_tiles, qi), masked)

        return staggered

    def _table(self, launch: Launch, step, tests: bool, head: Int, carry):
        visits = self.visits
        assert visits is not None
        row = (*launch.entry(visits.order, self.b, head), self.ki)
        masked, visited = (visits.counts[(*row, i)] for i in (0, 1))
        order = visits.order.at[row]
        listed = lambda carry, head, j, masked: step(carry, head, order[j], masked)
        if not tests:
            return _loop(listed, head, False, 0, visited, carry)
        carry = _loop(listed, head, True, 0, masked, carry)
        return _loop(listed, head, False, masked, visited, carry)


def _loop(step, head: Int, masked: bool, lo: Int, hi: Int, carry):
    body = lambda qi, carry: step(carry, head, qi, masked)
    return lax.fori_loop(_i32(lo), _i32(hi), body, carry)


@dataclasses.dataclass(frozen=True)
class Block:
    """One block of keys at work: what every role sees."""

    launch: Launch
    gmem: Gmem
    smem: Any
    bars: Any
    walk: Walk

    def dq_row(self, head: Int, qi: Int) -> Int:
        """Row of `Gmem.dq` that holds this tile."""
        return head * self.launch.num_q_tiles + qi

    def place(self, head: Int, qi: Int, kv0: Int, rows: int) -> logits.Place:
        """Where the scores of keys [kv0, kv0 + rows) and q tile qi are."""
        block_q = self.launch.config.block_q
        return logits.Place(self.walk.b, head, qi * block_q, kv0, 1, (rows, block_q))

    def start_scores(self, acc, slot: Int, place: logits.Place, units: logits.Units):
        """Bias, ALiBi and -lse (the last after a soft cap) go in ahead of the product.

        Returns whether the bias is tame, see `logits.Start`.
        """
        staged = None
        if self.launch.staged_bias:
            staged = logits.Staged(self.smem.bias.at[slot], place.kv0 - self.walk.kv0)
        start = logits.start(self.launch, self.gmem.extras, place, units, staged)
        scores = start.scores
        if units.squash is None:
            scores = self._with_statistic(query_parts.LSE, slot, place.shape[0], scores)
        self.launch.op.set(acc, zeros(place.shape) if scores is None else scores)
        return start.is_tame

    def start_dprobs(self, acc, slot: Int, rows: int) -> None:
        """-delta goes in ahead of the product; acc has this many rows."""
        self.launch.op.set(acc, self._with_statistic(query_parts.DELTA, slot, rows, None))

    def _with_statistic(self, which: int, slot: Int, rows: int, onto):
        """A tile [rows, block_q] that an accumulator starts from."""
        if self.smem.parts is not None:
            return self.launch.op.in_every_row(self.smem.parts.at[slot], which, onto)
        alone = self.smem.neg_lse if which == query_parts.LSE else self.smem.neg_delta
        statistic = per_query(alone.at[slot], rows)
        return statistic if onto is None else statistic + onto

    def neg_lse_apart(self, slot: Int, first: int, place: logits.Place):
        """What a soft cap's exponents add for the queries from `first` on, in a tile of `place`.

        None without one.
        """
        if "soft_cap" not in self.launch.terms:
            return None
        rows, queries = place.shape
        return per_query(self.smem.neg_lse.at[slot, pl.ds(first, queries)], rows)

    def weights(self, products, neg_lse, place, units, *, masked: bool, is_tame):
        """P from the finished accumulator, and None.

        With a soft cap P over `tile_math.SHARE_OF_SLOPE`, and that share of the cap's slope.

        neg_lse: as `neg_lse_apart` has it.
        """
        at = self.launch, self.gmem.extras, place, self.walk.bounds, units, products
        if neg_lse is None:
            scores = logits.finish(*at, masked=masked).scores
            exponents, slope, most = scores * units.log2, None, 0.0
        else:
            in_parts = place.shape[1] < self.launch.config.block_q
            exponents, below = logits.capped_exponents(
                *at, neg_lse, masked=masked, in_parts=in_parts
            )
            slope = tile_math.share_of_slope(below)
            most = -math.log2(tile_math.SHARE_OF_SLOPE)
        # Rounding at large biases: a weight is at most 1.
        at_most = lambda: jnp.minimum(exponents, most)
        exponents = tile_math.if_any(is_tame, lambda: exponents, at_most)
        return jnp.exp2(exponents), slope

    def of_p(self, dv):
        """From sums of these weights times dout to those of P."""
        return dv * tile_math.SHARE_OF_SLOPE if "soft_cap" in self.launch.terms else dv

    def signed_by_dropout(self, p, place: logits.Place):
        """P, negative where dropped: whoever has it knows both, in no more registers."""
        keep = logits.kept(self.launch, self.gmem.extras, place)
        return p if keep is None else jnp.where(keep, p, -p)

    def kept(self, p):
        """What dropout leaves of a signed P."""
        return jnp.maximum(p, 0.0) if self.launch.dropout_rate else p

    def dlogits(self, p, dp, slot: Int, *, has_hidden):
        """Gradient of the logits before a cap, over `dropout.keep_scale`.

        From a signed P, with a cap times its slope: taken ahead of dP, the tanh need not be kept.
        """
        if self.launch.dropout_rate:
            dropped = per_query(self.smem.neg_delta.at[slot], p.shape[0])
            dp = jnp.where(p >= 0.0, dp, dropped)
            p = jnp.abs(p)
        return tile_math.dlogits(p, dp, has_hidden=has_hidden)

    def undropped(self, grad):
        """Times the factor on what dropout leaves."""
        rate = self.launch.dropout_rate
        return grad * dropout.keep_scale(rate) if rate else grad

    def dk_factor(self):
        """From sums of dlogits times q to dk."""
        scale = self.gmem.scale
        return self.undropped(scale[self.launch.entry(scale, self.walk.b)])

    def hides(self, masked: bool, is_tame):
        """A step of this kind may hide pairs."""
        return masked or (is_tame is not True and jnp.logical_not(is_tame))

    def units(self) -> logits.Units:
        scale, extras = self.gmem.scale, self.gmem.extras
        return logits.units(self.launch, extras, scale, self.walk.b, keeps_tanh=True)

    def add_dbias(self, dlogits, place: logits.Place, ki: Int, part: Int) -> None:
        """Adds dlogits (keys in rows, float32), part `part` of its tile, to the bias gradient."""
        launch, dbias = self.launch, self.gmem.dbias
        if not launch.make_dbias or launch.peers:
            return
        tiles = (div(jnp.int32(place.q0), launch.config.block_q), ki)
        at = [t if n > 1 else 0 for t, n in zip(tiles, dbias.shape[2:4], strict=True)]
        size = dlogits.shape[0] * dlogits.shape[1]
        index = (*launch.entry(dbias, place.batch, place.head), *at, pl.ds(part * size, size))
        launch.op.add_dq(dlogits, dbias.at[index])

    def store_dq(self, dq, row: Int, first: tuple[Int, Int], *, where) -> None:
        """A part of a tile of dq, the tile of this row, to its place; first: its row and column."""
        launch, gmem = self.launch, self.gmem
        head, qi = div(row, launch.num_q_tiles), rem(row, launch.num_q_tiles)
        (rows, columns), (row0, column0) = dq.shape, first
        rows = pl.ds(qi * launch.config.block_q + row0, rows)
        out = gmem.dq.at[self.walk.b, rows, head, pl.ds(column0, columns)]
        factor = gmem.dq_factor[launch.entry(gmem.dq_factor, self.walk.b)]
        launch.op.store_dq((dq * factor).astype(launch.dtype), out, where=where)

    def dq_part(self, row: Int, offset: Int, size: int) -> Ref:
        """`size` elements of a tile of dq to add to, from `offset` on."""
        writer = 0 if self.launch.op.dq_writers(2) == 1 else self.walk.ki
        return self.gmem.dq.at[writer, self.walk.b, row, pl.ds(offset, size)]


def _i32(x: Int) -> Int:
    """Static numbers stay static, and 32 bits wide under x64."""
    return np.int32(x) if isinstance(x, int) else x


def ring(i: Int, slots: int) -> Int:
    """i mod slots, for i >= 0."""
    if slots & (slots - 1) == 0:
        return lax.bitwise_and(i, jnp.int32(slots - 1))
    return lax.rem(i, jnp.int32(slots))


def unhoisted(part: Int, rows: int, i: Int):
    """Rows of part `part`, in step i.

    i >> 30 is 0, but the compiler does not know. Without it the matrix descriptors of K and V are
    loop invariants, and ptxas keeps them in vector registers over both loops: 212 bytes of spills
    instead of 0 at head_dim 128, causal.
    """
    return pl.ds((part + (i >> 30)) * rows, rows)


def find_walk(launch: Launch, gmem: Gmem) -> Walk:
    """The walk of this block. Keys ascend in a group of heads: longest causal walks come first."""
    block_q, block_kv = launch.config.block_q, launch.config.block_kv
    pair, ki = launch.pair_and_tile()
    b, share = launch.split_pair(pair, launch.num_shares)
    kv0 = ki * block_kv

    bounds, visits = launch.bounds(gmem.extras, b), gmem.extras.visits
    if visits is not None:
        bounds = dataclasses.replace(bounds, q_end=None)  # see below
        return Walk(b, share, ki, kv0, bounds, 0, 0, 0, 0, True, visits)
    lo, hi = bounds.q_any(kv0, kv0 + block_kv, launch.q_len)
    first = div(lo, block_q)
    last = masks.larger(first, div(hi + (block_q - 1), block_q))
    # Rows past a query length start from -inf, so a step need not test for them.
    bounds = dataclasses.replace(bounds, q_end=None)
    if bounds == masks.Bounds():
        return Walk(b, share, ki, kv0, bounds, first, first, last, last, False)

    lo, hi = bounds.q_all(kv0, kv0 + block_kv, launch.num_q_tiles * block_q)
    plain = masks.larger(first, div(lo + (block_q - 1), block_q))
    plain_end = masks.smaller(last, div(hi, block_q))
    if bounds.lower is None and bounds.kv_end is None:  # hi is the end: at most `plain` is past it
        return Walk(b, share, ki, kv0, bounds, first, masks.smaller(plain, last), last, last, True)
    none = plain >= plain_end
    plain = jnp.where(none, last, plain)
    plain_end = jnp.where(none, last, plain_end)
    return Walk(b, share, ki, kv0, bounds, first, plain, plain_end, last, True)


def tile_smem(launch: Launch) -> dict[str, Any]:
    """The ring of q tiles, and the block's keys and values."""
    config, dtype = launch.config, launch.dtype
    stages, block_q, block_kv = config.num_stages, config.block_q, config.block_kv
    return dict(
        q=tiled_smem((stages, block_q, launch.head_dim), dtype),
        dout=tiled_smem((stages, block_q, launch.head_dim_v), dtype),
        **_statistics_smem(launch),
        bias=launch.bias_tiles(stages),
        k=tiled_smem((block_kv, launch.head_dim), dtype),
        v=tiled_smem((block_kv, launch.head_dim_v), dtype),
    )


def _statistics_smem(launch: Launch) -> dict[str, Any]:
    """None where the launch has no such statistic."""
    rows = launch.config.num_stages, launch.config.block_q
    kinds = dict(
        parts=plgpu.SMEM((*rows, query_parts.COLUMNS), jnp.bfloat16),
        neg_lse=plgpu.SMEM(rows, jnp.float32),
        neg_delta=plgpu.SMEM(rows, jnp.float32),
    )
    return {n: kind if n in launch.statistics else None for n, kind in kinds.items()}


def tile_barriers(launch: Launch) -> dict[str, Any]:
    """kv_ready, tile_ready, tile_consumed, done: see the table in backward.py."""
    stages, copies = launch.config.num_stages, 2 + len(launch.statistics)
    copies += 1 if launch.staged_bias else 0
    return dict(
        kv_ready=plgpu.Barrier(num_arrivals=2),
        tile_ready=plgpu.Barrier(num_barriers=stages, num_arrivals=copies),
        tile_consumed=_tile_consumed(launch),
        done=plgpu.Barrier(num_arrivals=CONSUMERS),
    )


def _tile_consumed(launch: Launch):
    """In a cluster all blocks must be done with a slot: each fills a part of the others' bias."""
    stages = launch.config.num_stages
    if launch.cluster == 1:
        return plgpu.Barrier(num_barriers=stages, num_arrivals=CONSUMERS)
    return plgpu.ClusterBarrier(
        collective_axes=("peer",), num_barriers=stages, num_arrivals=CONSUMERS
    )


def transposed(ref: Ref) -> Ref:
    return ref.transpose((1, 0))


def zeros(shape: tuple[int, int], layout=registers.ACC_LAYOUT):
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)


def per_query(ref: Ref, rows: int) -> jax.Array:
    """One value a query -> [rows, block_q], the same in every key row."""
    values = plgpu.load(ref, layout=registers.COL_LAYOUT)
    return lax.broadcast_in_dim(values, (rows, ref.shape[0]), (1,))


def _copy_clean(source, tail, at, cut, dst, barrier) -> None:
    """source[at] -> dst, or the tail tile where a length cuts it (`cut` None: no lengths)."""
    b, rows, head = at
    if cut is None:
        plgpu.copy_gmem_to_smem(source.at[b, rows, head], dst, barrier)
        return
    copy = plgpu.copy_gmem_to_smem
    pl.when(cut)(lambda: copy(tail.at[b, :, head], dst, barrier))
    pl.when(jnp.logical_not(cut))(lambda: copy(source.at[b, rows, head], dst, barrier))


def produce(block: Block, sums: Any = None) -> None:
    """The producer warpgroup: K and V once, then the ring of q tiles.

    sums: makes sums over the cluster. sums.begin(i) is called when all blocks are done with tile i,
    before the next is asked for, sums.end(i, row) after that; row is that of the tile in dq.
    """
    launch, gmem, smem, bars, walk = block.launch, block.gmem, block.smem, block.bars, block.walk
    plgpu.set_max_registers(launch.registers[1], action="decrease")
    stages, block_q, block_kv = (
        launch.config.num_stages,
        launch.config.block_q,
        launch.config.block_kv,
    )

    cut = (
        None
        if gmem.extras.kv_lengths is None
        else gmem.extras.kv_lengths[walk.b] < walk.kv0 + block_kv
    )
    at = walk.b, pl.ds(walk.kv0, block_kv), div(walk.share, launch.kv_parts)
    _copy_clean(gmem.k, gmem.k_tail, at, cut, smem.k, bars.kv_ready)
    _copy_clean(gmem.v, gmem.v_tail, at, cut, smem.v, bars.kv_ready)

    def await_consumed(i):
        plgpu.barrier_wait(bars.tile_consumed.at[ring(i, stages)])
        if sums is not None:
            sums.begin(i)

    def fill(carry, head, qi, masked):
        del masked
        i, rows_before = carry
        slot, rows = ring(i, stages), pl.ds(qi * block_q, block_q)
        ready = bars.tile_ready.at[slot]
        pl.when(i >= stages)(lambda: await_consumed(i - stages))
        for name in launch.statistics:
            source, dst = (getattr(memory, name) for memory in (gmem, smem))
            plgpu.copy_gmem_to_smem(source.at[walk.b, head, rows], dst.at[slot], ready)
        if launch.staged_bias:
            dst = smem.bias.at[slot]
            peers = "peer" if launch.cluster > 1 else None
            at = walk.b, head, qi * block_q, walk.kv0
            launch.copy_bias(gmem.extras, *at, dst, ready, peers=peers)
        lengths = gmem.extras.query_lengths
        cut = None if lengths is None else lengths[walk.b] < (qi + 1) * block_q
        at = walk.b, rows, head
        _copy_clean(gmem.q, gmem.q_tail, at, cut, smem.q.at[slot], ready)
        _copy_clean(gmem.dout, gmem.dout_tail, at, cut, smem.dout.at[slot], ready)
        if sums is None:
            return i + 1, ()
        pl.when(i >= stages)(lambda: sums.end(i - stages, rows_before[0]))
        return i + 1, (*rows_before[1:], block.dq_row(head, qi))

    none_before = () if sums is None else (jnp.int32(0),) * stages
    filled, rows_before = walk.over_tiles(launch, fill, (jnp.int32(0), none_before), tests=False)

    def drain(i, rows):
        def finish():
            await_consumed(i)
            if sums is not None:
                sums.end(i, rows[0])

        pl.when(i >= 0)(finish)
        return (*rows[1:], *rows[:1])

    lax.fori_loop(filled - stages, filled, drain, rows_before)


def store_grad(block: Block, grad, buffer: Ref, out: Ref, row0: Int) -> None:
    """A gradient of keys or values [rows, head_dim] -> out, through a buffer no longer read."""
    rows = buffer.shape[0]
    buffer[...] = grad.astype(block.launch.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(buffer, out.at[block.walk.b, pl.ds(row0, rows), block.walk.share])
