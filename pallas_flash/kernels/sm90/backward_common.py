"""What both splits of the fused backward share: the launch, the walk over q tiles, the producer.

Knows which tiles a block of keys visits and how they come into shared memory; not what is computed
from them.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash import masks
from pallas_flash.config import BackwardConfig
from pallas_flash.kernels.sm90 import mma
from pallas_flash.kernels.sm90.smem import tiled_smem
from pallas_flash.kernels.sm90.tiles import div, fitting_group, interleaved

CONSUMERS = 2  # warpgroups that compute; one more loads
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 240, 24

Int = masks.Int
Ref = Any


class Gmem(NamedTuple):
    """Arrays in global memory, in the order the kernel receives them; None where absent.

    Attributes:
      q, dout: (B, T, N, H) and (B, T, N, Hv).
      k, v: (B, S, K, H) and (B, S, K, Hv).
      neg_lse: float32 (B, N, q tiles * block_q), -lse / scale: where the scores start from.
      neg_delta: float32, the same shape, -delta: where the gradients of P start from.
      scale: float32 (B,).
      query_lengths, kv_lengths: int32 (B,).
      q_tail, dout_tail, k_tail, v_tail: the tile that a length cuts, zeroed behind it.
      dq: float32 (writers, B, N * q tiles, block_q * H), added into; see `mma.add_dq`.
      dk, dv: (B, S, K, H) and (B, S, K, Hv).
    """

    q: Ref
    k: Ref
    v: Ref
    dout: Ref
    neg_lse: Ref
    neg_delta: Ref
    scale: Ref = None
    query_lengths: Ref = None
    kv_lengths: Ref = None
    q_tail: Ref = None
    dout_tail: Ref = None
    k_tail: Ref = None
    v_tail: Ref = None
    dq: Ref = None
    dk: Ref = None
    dv: Ref = None


@dataclasses.dataclass(frozen=True)
class Launch:
    """All that is static about one kernel."""

    batch: int
    q_len: int
    kv_len: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: np.dtype
    mask: masks.Mask
    config: BackwardConfig
    make_dq: bool
    interpret: bool

    @property
    def op(self):
        return mma.ops(self.interpret)

    @property
    def q_per_kv(self) -> int:
        return self.num_q_heads // self.num_kv_heads

    @property
    def num_q_tiles(self) -> int:
        return -(-self.q_len // self.config.block_q)

    @property
    def num_kv_blocks(self) -> int:
        return -(-self.kv_len // self.config.block_kv)

    @property
    def num_blocks(self) -> int:
        return self.batch * self.num_kv_heads * self.num_kv_blocks

    @property
    def head_group(self) -> int:
        """Consecutive (batch, kv head) pairs whose blocks are interleaved.

        One where walks are short against the launch, or equally long: then L2 is worth more.
        """
        if self.q_per_kv == 1 or not self.mask.parts():
            return 1
        return fitting_group(self.config.head_group, self.batch * self.num_kv_heads)


class Walk(NamedTuple):
    """Which tiles one block of keys visits: for each query head of the group, q tiles in order.

    Attributes:
      b, kv_head, ki: the block's place. kv0 = ki * block_kv.
      bounds: what a masked step tests, and the q tiles found from it:
      first <= plain <= plain_end <= last: q tiles [plain, plain_end) see the whole block and run
        without a test. Without a lower bound plain_end is last.
    """

    b: Int
    kv_head: Int
    ki: Int
    kv0: Int
    bounds: masks.Bounds
    first: Int
    plain: Int
    plain_end: Int
    last: Int

    def in_one_loop(self) -> "Walk":
        """The same tiles, for a role that tests no bounds."""
        return self._replace(bounds=masks.Bounds(), plain=self.first, plain_end=self.last)

    def over_tiles(self, launch: Launch, step, carry):
        """carry = step(carry, head, qi, masked) for every tile."""
        group = launch.q_per_kv

        def loop(head, masked, lo, hi, carry):
            body = lambda qi, carry: step(carry, head, qi, masked)
            return lax.fori_loop(_i32(lo), _i32(hi), body, carry)

        def one_head(g, carry):
            head = self.kv_head * group + g
            if self.bounds != masks.Bounds():
                carry = loop(head, True, self.first, self.plain, carry)
            carry = loop(head, False, self.plain, self.plain_end, carry)
            if self.bounds.lower is not None:
                carry = loop(head, True, self.plain_end, self.last, carry)
            return carry

        if group == 1:
            return one_head(np.int32(0), carry)
        return lax.fori_loop(np.int32(0), np.int32(group), one_head, carry)


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

    def first_carry(self) -> tuple[Int, Int]:
        """(tiles done, dq row of the tile before): before the first tile zeros are added to it."""
        launch, walk = self.launch, self.walk
        first = masks.smaller(walk.first, launch.num_q_tiles - 1)
        return jnp.int32(0), jnp.int32(self.dq_row(walk.kv_head * launch.q_per_kv, first))

    def dq_part(self, row: Int, offset: Int, size: int) -> Ref:
        """`size` elements of a tile of dq, from `offset` on."""
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
    pair, ki = interleaved(lax.axis_index("block"), launch.num_kv_blocks, launch.head_group)
    b, kv_head = div(pair, launch.num_kv_heads), lax.rem(pair, jnp.int32(launch.num_kv_heads))
    kv0 = ki * block_kv

    values = masks.MaskValues(
        query_length=None if gmem.query_lengths is None else gmem.query_lengths[b],
        kv_length=None if gmem.kv_lengths is None else gmem.kv_lengths[b],
    )
    bounds = launch.mask.bounds(values)
    if launch.kv_len % block_kv:
        bounds = bounds & masks.Bounds(kv_end=launch.kv_len)
    lo, hi = bounds.q_any(kv0, kv0 + block_kv, launch.q_len)
    first = div(lo, block_q)
    last = masks.larger(first, div(hi + (block_q - 1), block_q))
    # Rows past a query length start from -inf, so a step need not test for them.
    bounds = dataclasses.replace(bounds, q_end=None)
    if bounds == masks.Bounds():
        return Walk(b, kv_head, ki, kv0, bounds, first, first, last, last)

    lo, hi = bounds.q_all(kv0, kv0 + block_kv, launch.num_q_tiles * block_q)
    plain = masks.larger(first, div(lo + (block_q - 1), block_q))
    plain_end = masks.smaller(last, div(hi, block_q))
    if bounds.lower is None and bounds.kv_end is None:  # hi is the end: at most `plain` is past it
        return Walk(b, kv_head, ki, kv0, bounds, first, masks.smaller(plain, last), last, last)
    none = plain >= plain_end
    plain = jnp.where(none, last, plain)
    plain_end = jnp.where(none, last, plain_end)
    return Walk(b, kv_head, ki, kv0, bounds, first, plain, plain_end, last)


def tile_smem(launch: Launch) -> dict[str, Any]:
    """The ring of q tiles, and the block's keys and values."""
    config, dtype = launch.config, launch.dtype
    stages, block_q, block_kv = config.num_stages, config.block_q, config.block_kv
    return dict(
        q=tiled_smem((stages, block_q, launch.head_dim), dtype),
        dout=tiled_smem((stages, block_q, launch.head_dim_v), dtype),
        neg_lse=plgpu.SMEM((stages, block_q), jnp.float32),
        neg_delta=plgpu.SMEM((stages, block_q), jnp.float32),
        k=tiled_smem((block_kv, launch.head_dim), dtype),
        v=tiled_smem((block_kv, launch.head_dim_v), dtype),
    )


def tile_barriers(launch: Launch) -> dict[str, Any]:
    """kv_ready, tile_ready, tile_consumed, done: see the table in backward.py."""
    stages = launch.config.num_stages
    return dict(
        kv_ready=plgpu.Barrier(num_arrivals=2),
        tile_ready=plgpu.Barrier(num_barriers=stages, num_arrivals=4),
        tile_consumed=plgpu.Barrier(num_barriers=stages, num_arrivals=CONSUMERS),
        done=plgpu.Barrier(num_arrivals=CONSUMERS),
    )


def transposed(ref: Ref) -> Ref:
    return ref.transpose((1, 0))


def zeros(shape: tuple[int, int], layout=mma.ACC_LAYOUT):
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)


def per_query(ref: Ref, rows: int) -> jax.Array:
    """One value a query -> [rows, block_q], the same in every key row."""
    values = plgpu.load(ref, layout=mma.COL_LAYOUT)
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


def produce(block: Block) -> None:
    """The producer warpgroup: K and V once, then the ring of q tiles."""
    plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
    launch, gmem, smem, bars, walk = block.launch, block.gmem, block.smem, block.bars, block.walk
    stages, block_q, block_kv = (
        launch.config.num_stages,
        launch.config.block_q,
        launch.config.block_kv,
    )

    cut = None if gmem.kv_lengths is None else gmem.kv_lengths[walk.b] < walk.kv0 + block_kv
    at = walk.b, pl.ds(walk.kv0, block_kv), walk.kv_head
    _copy_clean(gmem.k, gmem.k_tail, at, cut, smem.k, bars.kv_ready)
    _copy_clean(gmem.v, gmem.v_tail, at, cut, smem.v, bars.kv_ready)

    def fill(i, head, qi, masked):
        del masked
        slot, rows = ring(i, stages), pl.ds(qi * block_q, block_q)
        ready = bars.tile_ready.at[slot]
        pl.when(i >= stages)(lambda: plgpu.barrier_wait(bars.tile_consumed.at[slot]))
        for source, dst in ((gmem.neg_lse, smem.neg_lse), (gmem.neg_delta, smem.neg_delta)):
            plgpu.copy_gmem_to_smem(source.at[walk.b, head, rows], dst.at[slot], ready)
        lengths = gmem.query_lengths
        cut = None if lengths is None else lengths[walk.b] < (qi + 1) * block_q
        at = walk.b, rows, head
        _copy_clean(gmem.q, gmem.q_tail, at, cut, smem.q.at[slot], ready)
        _copy_clean(gmem.dout, gmem.dout_tail, at, cut, smem.dout.at[slot], ready)
        return i + 1

    filled = walk.in_one_loop().over_tiles(launch, fill, jnp.int32(0))

    def drain(i, carry):
        plgpu.barrier_wait(bars.tile_consumed.at[ring(i, stages)])
        return carry

    lax.fori_loop(lax.max(filled - stages, jnp.int32(0)), filled, drain, ())


def store_grad(block: Block, grad, buffer: Ref, out: Ref, row0: Int) -> None:
    """A gradient of keys or values [rows, head_dim] -> out, through a buffer no longer read."""
    rows = buffer.shape[0]
    buffer[...] = grad.astype(block.launch.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(buffer, out.at[block.walk.b, pl.ds(row0, rows), block.walk.kv_head])
