"""Tiles in the shared memory of the blocks of a cluster, summed over the cluster and stored once.

What batch rows that run in one cluster have in common gets its gradient so: no block adds into
global memory, nothing has to be zeroed before or rearranged after, and the sum has a fixed order.
Each block sums a part of the rows: the others send it theirs.

    open_mailbox                          once, and all blocks meet
    send_parts, await_parts, store_sum    for every tile, and all blocks meet

GPU only: interpret mode has no way to a neighbour's shared memory.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

from pallas_flash.kernels.sm90.registers import (
    SCALAR_LAYOUT,
    added,
    floats_of,
    i32_const,
    inline_mgpu,
    load_matrices,
    low,
    opaque,
    shared_address,
    shifted,
    thread_in_warpgroup,
    times,
    void_asm,
)
from pallas_flash.kernels.sm90.smem import tiled_smem

_WARPS = 4  # of the warpgroup that sums
_TILE_BYTES = 8 * 128  # 8 rows of 128 bytes: what the swizzle permutes
_SWIZZLED = plgpu.RefType((plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)))
_COPY = (
    "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];"
)


def release_to_cluster() -> None:
    """Shared-memory accesses of this warpgroup come before its next arrival in a cluster.

    One thread arrives for all. A multiprocessor serves its own shared memory in order; a fence for
    the cluster would also wait for adds into global memory.
    """

    @inline_mgpu()
    def release(_):
        mgpu.utils.warpgroup_barrier()

    release()


class Mailbox(NamedTuple):
    """Shared memory into which the other blocks of a cluster copy what this one sums.

    Attributes:
      parts: [(peers - 1) * keys, queries], of each other block the keys that fall to this one,
        beginning with the next block.
      arrived: an mbarrier, which the copies complete. Not a `plgpu.Barrier`: there is no way to the
        address of one.
    """

    parts: Any
    arrived: Any


def mailbox(tile: tuple[int, int], dtype, peers: int) -> Mailbox:
    """For tiles [all keys, queries] of 16 bits."""
    keys, queries = tile
    parts = tiled_smem(((peers - 1) * keys // peers, queries), dtype)
    return Mailbox(parts, plgpu.SMEM((2,), jnp.int32))


def open_mailbox(box: Mailbox) -> None:
    """Before any block of the cluster copies into it."""

    @inline_mgpu(arg_types=(plgpu.RefType(),))
    def initialize(_, arrived):
        first = mgpu.utils.single_thread_predicate(mgpu.utils.ThreadSubset.WARPGROUP)
        nvvm.mbarrier_init(mgpu.utils.memref_ptr(arrived), i32_const(1), predicate=first)
        void_asm([], "fence.mbarrier_init.release.cluster;", "")
        mgpu.utils.warpgroup_barrier()

    initialize(box.arrived)


def send_parts(box: Mailbox, tile, *, rank, peers: int) -> None:
    """Sends every other block its part of this tile.

    By the copy engine: warps that read the others' memory take longer than a tile, warps that write
    to it even more (H200, T 4096, B 4: 3.07 and 3.74 ms for 2.83; reading its own memory, 2.50).

    Args:
      box: in every block at one place.
      tile: [all keys, queries], 16 bits.
      rank: of this block in its cluster.
      peers: blocks of the cluster.
    """
    part = tile.shape[0] * tile.shape[1] * 2 // peers  # bytes

    @inline_mgpu(arg_types=(_SWIZZLED, _SWIZZLED, plgpu.RefType(), SCALAR_LAYOUT))
    def copy(_, parts, tile, arrived, rank):
        rank = rank.registers.flat[0]
        with mgpu.utils.when(mgpu.utils.single_thread_predicate(mgpu.utils.ThreadSubset.WARPGROUP)):
            _barrier(arrived).arrive_expect_tx(part * (peers - 1))
            source, target, signal = (shared_address(x) for x in (tile, parts, arrived))
            for ahead in range(1, peers):
                to = low(added(rank, i32_const(ahead)), peers)
                place = added(target, i32_const((peers - 1 - ahead) * part))
                operands = [
                    _in_block(place, to),
                    added(source, times(to, part)),
                    i32_const(part),
                    _in_block(signal, to),
                ]
                void_asm(operands, _COPY, "r,r,r,r")

    copy(box.parts, tile, box.arrived, jnp.int32(rank))


def await_parts(box: Mailbox, i) -> None:
    """Waits for the parts of the other blocks; i: how often this was done before."""

    @inline_mgpu(arg_types=(plgpu.RefType(), SCALAR_LAYOUT))
    def wait(_, arrived, i):
        parity = arith.trunci(ir.IntegerType.get_signless(1), low(i.registers.flat[0], 2))
        _barrier(arrived).wait_parity(parity)

    wait(box.arrived, jnp.int32(i))


def _barrier(words):
    """For those who know its phase themselves: `phases` is a stand-in."""
    zero = i32_const(0)
    return mgpu.utils.BarrierRef(
        mgpu.utils.memref_ptr(words), offset=zero, phases=zero, num_barriers=1
    )


def store_sum(tile, others, out, where, *, rank, peers: int, factor: float) -> None:
    """out[entry, row0 + query, col0 + key] = factor * (tile + sum over others)[key, query].

    where = (entry, row0, col0) is the place of the keys of all blocks: this one stores those from
    rank * keys on. When it returns, all is read. A lane stores eight neighbouring keys of a query.

    Args:
      tile: [all keys, queries] in shared memory (`tiled_smem`), 16 bits.
      others: `Mailbox.parts`, or None.
      out: the array in global memory, [entries, rows, columns], of the same dtype.
      where: of the tile.
      rank: of this block in its cluster.
      peers: parts, and blocks of the cluster.
      factor: static.
    """
    keys, queries = tile.shape[0] // peers, tile.shape[1]
    octets = min(keys // 8, 4)  # of keys, in one read of a warp; what is left are more queries
    down, across = 8 * octets, 32 // octets
    reads = keys // down * (queries // across)
    lines, (_, rows, columns) = queries // 64, out.shape

    @inline_mgpu(arg_types=(_SWIZZLED, _SWIZZLED, plgpu.RefType(), *[SCALAR_LAYOUT] * 4))
    def store(_, tile, others, out, *where):
        entry, row0, col0, rank = (x.registers.flat[0] for x in where)
        stored = ir.MemRefType(tile.type).element_type
        thread = thread_in_warpgroup()
        warp, lane = shifted(thread, 5), low(thread, 32)
        source_key, source_query = _read_from(lane, octets)
        turns = low(lane, 4)
        my_key, my_query = _in_octets(turns, octets)
        my_query = added(my_query, shifted(lane, 2))

        bases = [added(shared_address(tile), times(rank, keys * queries * 2))]
        for other in range(peers - 1):
            bases.append(added(shared_address(others), i32_const(other * keys * queries * 2)))
        for first in range(0, reads, _WARPS):
            unit = added(warp, i32_const(first))
            key0 = times(low(unit, keys // down), down)
            query0 = times(shifted(unit, (keys // down).bit_length() - 1), across)
            at = opaque(_offset(added(key0, source_key), added(query0, source_query), lines))
            words = _sum_of([added(base, at) for base in bases], factor, stored)
            row = added(times(entry, rows), row0, query0, my_query)
            col = added(col0, times(rank, keys), key0, my_key)
            _store_words(out, row, col, columns, _turned_back(words, turns), stored)
        mgpu.utils.warpgroup_barrier()

    others = tile if others is None else others
    store(tile, others, out, *(jnp.int32(x) for x in (*where, rank)))


def _in_octets(place, octets: int):
    """First key and first query of one of the four octets of a read."""
    return times(low(place, octets), 8), times(shifted(place, octets.bit_length() - 1), 8)


def _read_from(lane, octets: int):
    """Key and first of eight queries that this lane names to a transposing ldmatrix of four.

    A matrix is eight keys of eight queries, and gives lane 4 q + i its keys 2 i and 2 i + 1 of
    query q. Matrix m has of octet i the pair (m + i) mod 4: so a lane gets its octet whole, and the
    keys of a matrix are unlike in their last three bits, by which the swizzle keeps banks apart.
    """
    matrix, i = shifted(lane, 3), shifted(low(lane, 8), 1)
    key, query = _in_octets(i, octets)
    return added(key, times(low(added(matrix, i), 4), 2), low(lane, 2)), query


def _turned_back(words, turns):
    """words[(i - turns) mod 4] for i in order; turns: 0 to 3, of this lane."""
    for bit in range(2):
        turned = arith.cmpi(arith.CmpIPredicate.ne, low(shifted(turns, bit), 2), i32_const(0))
        words = [arith.select(turned, words[i - (1 << bit)], words[i]) for i in range(4)]
    return words


def _sum_of(addresses, factor: float, stored):
    """factor * the sum of what ldmatrix reads at these addresses: four pairs of 16 bits."""
    first, *rest = addresses
    words = load_matrices(first, transposed=True)
    if not rest and factor == 1.0:
        return words
    sums = floats_of(words, stored)
    for address in rest:  # one after the other, in few registers
        read = floats_of(load_matrices(address, transposed=True), stored)
        sums = [arith.addf(*pair) for pair in zip(sums, read, strict=True)]
    if factor != 1.0:
        f32 = ir.F32Type.get()
        scale = arith.constant(f32, ir.FloatAttr.get(f32, factor))
        sums = [arith.mulf(x, scale) for x in sums]
    i32, pair = ir.IntegerType.get_signless(32), ir.VectorType.get((2,), stored)
    halves = [arith.truncf(stored, x) for x in sums]
    pairs = (vector.from_elements(pair, halves[i : i + 2]) for i in range(0, 8, 2))
    return [llvm.bitcast(i32, x) for x in pairs]


def _store_words(out, row, col, columns: int, words, stored) -> None:
    """Eight neighbours of out[row, col], which the shapes keep at multiples of 16 bytes."""
    i64 = ir.IntegerType.get_signless(64)
    first = arith.muli(arith.extsi(i64, row), mgpu.utils.c(columns, i64))
    first = arith.addi(first, arith.extsi(i64, col))
    pointer = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(out), [first], stored)
    void_asm([pointer, *words], "st.global.v4.b32 [$0], {$1, $2, $3, $4};", "l,r,r,r,r")


def _offset(key, query, lines: int):
    """Bytes from the start of a swizzled tile of 16 bits to [key, query]; lines: 128 bytes wide."""
    line = added(times(shifted(key, 3), lines * _TILE_BYTES), times(shifted(query, 6), _TILE_BYTES))
    piece = arith.xori(low(shifted(query, 3), 8), low(key, 8))
    return added(line, times(low(key, 8), 128), times(piece, 16), times(low(query, 8), 2))


def _in_block(address, block):
    """The same shared-memory address in another block of the cluster."""
    i32 = ir.IntegerType.get_signless(32)
    text = "mapa.shared::cluster.u32 $0, $1, $2;"
    return llvm.inline_asm(i32, [address, block], text, "=r,r,r")
