"""Tiles of arrays that are no operand of a product, loaded into the registers of an accumulator.

Pallas has no word for these: each is a body of MLIR, and unit-tested alone on a GPU. Addresses are
a thread's own part, computed once, and immediates.
"""

import itertools

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_flash.kernels.sm90.registers import (
    ACC_LAYOUT,
    COL_LAYOUT,
    ROW_LAYOUT,
    SCALAR_LAYOUT,
    accumulator,
    added,
    element,
    first_element,
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
)

_LINE_BYTES = 8 * 128  # rows and bytes that the swizzle works on: pieces of 16, by the row


def _load_matrices(ref, lines: int, first_row, shape: tuple[int, int], q_axis: int):
    """Values of `load_staged` of 16 bits: ldmatrix deals them out as an accumulator has them.

    A matrix is 8 x 8. Four come at once: the upper and the lower 8 of this warp's 16 rows, in two
    neighbouring groups of 8 columns; each lane names a row of one of them. lines: side by side.
    """
    base = shared_address(ref)
    stored = ir.MemRefType(ref.type).element_type
    thread = thread_in_warpgroup()
    is_lower, is_right = (low(shifted(thread, bit), 2) for bit in (3, 4))
    across = added(first_row, times(shifted(thread, 5), 16), times(is_lower, 8))
    along, within = times(is_right, 8), low(thread, 8)
    row, col = (across, along) if q_axis == 0 else (along, across)
    line = times(added(times(shifted(row, 3), lines), shifted(col, 6)), _LINE_BYTES)
    piece = arith.xori(low(shifted(col, 3), 8), within)
    at = opaque(added(base, line, times(within, 128), times(piece, 16)))
    values = []
    for group in range(0, shape[1] // 8, 2):
        if q_axis == 1:
            address = arith.addi(at, i32_const(group * lines * _LINE_BYTES))
        else:
            address = arith.xori(at, i32_const(group % 8 * 16))
            address = arith.addi(address, i32_const(group // 8 * _LINE_BYTES))
        values += floats_of(load_matrices(address, transposed=q_axis == 1), stored)
    return values


def _load_words(ref, lines: int, first_row, shape: tuple[int, int], q_axis: int):
    """Values of `load_staged` of 32 bits."""
    base, f32 = mgpu.utils.memref_ptr(ref), ir.F32Type.get()
    row, col = first_element()
    row = opaque(arith.addi(first_row, row))
    count, values = shape[0] * shape[1] // 128, []

    def load_at(offset, static: int, width: int):
        offset = arith.addi(offset, i32_const(static))
        at = mgpu.utils.getelementptr(base, [offset], ir.IntegerType.get_signless(8))
        loaded = llvm.load(ir.VectorType.get((width,), f32), at)
        return [vector.extract(loaded, [], [i]) for i in range(width)]

    if q_axis == 0:  # a row is a query: pieces of its lines, two neighbours at a time
        line = added(times(shifted(row, 3), lines * _LINE_BYTES), times(low(row, 8), 128))
        within = times(col, 4)
        piece = arith.xori(times(shifted(within, 4), 16), times(low(row, 8), 16))
        line = arith.addi(line, low(within, 16))
        for i in range(0, count, 2):
            drow, dcol = element(i)
            offset = arith.addi(line, arith.xori(piece, i32_const(dcol % 32 * 4)))
            values += load_at(offset, (drow // 8 * lines + dcol // 32) * _LINE_BYTES, 2)
        return values
    offsets = {}  # a row is a key, a column a query: a line for every 8 columns
    for drow, parity in itertools.product((0, 8), (0, 1)):
        key, query = arith.addi(row, i32_const(drow)), arith.addi(col, i32_const(parity))
        within = times(low(key, 32), 4)
        piece = arith.xori(shifted(within, 4), query)
        line = added(times(shifted(key, 5), _LINE_BYTES), times(query, 128))
        offsets[drow, parity] = added(line, times(piece, 16), low(within, 16))
    for i in range(count):
        drow, dcol = element(i)
        values += load_at(offsets[drow, dcol % 2], dcol // 8 * lines * _LINE_BYTES, 1)
    return values


def count_from(first, shape: tuple[int, int], *, row_step: int = 0, col_step: int = 0):
    """int32 [64, n] like an accumulator: first + row_step * row + col_step * column."""
    out = plgpu.ShapeDtypeStruct(shape, jnp.dtype(jnp.int32), layout=ACC_LAYOUT)

    @inline_mgpu(arg_types=(SCALAR_LAYOUT,), return_type=out)
    def count(_, first):
        row, col = first_element()
        base = first.registers.flat[0]
        for step, offset in ((row_step, row), (col_step, col)):
            if step:
                base = arith.addi(base, arith.muli(offset, i32_const(step)))
        base = opaque(base)
        values = []
        for i in range(shape[0] * shape[1] // 128):
            drow, dcol = element(i)
            values.append(arith.addi(base, i32_const(row_step * drow + col_step * dcol)))
        return accumulator(values, shape, is_signed=True)

    return count(jnp.int32(first))


def load_along(ref, first, shape: tuple[int, int], axis: int):
    """ref[first + position along `axis`], the same along the other, as an accumulator."""
    layout = ROW_LAYOUT if axis == 0 else COL_LAYOUT
    part = ref.at[pl.ds(first, shape[axis])]
    values = plgpu.load(part, layout=layout, optimized=False)
    return lax.broadcast_in_dim(values, shape, (axis,))


def load_tile(ref, entry, q0, kv0, shape: tuple[int, int], q_axis: int, *, whole: bool):
    """Tile of ref[entry], a global array [b, n, queries or 1, keys or 1], as an accumulator.

    An axis of size 1 is repeated. Past the array's end its last row or column is read, which
    stands for nothing; `whole` says that no tile reaches there. Arrives as float32.
    """
    out = plgpu.ShapeDtypeStruct(shape, jnp.dtype(jnp.float32), layout=ACC_LAYOUT)
    sizes, count = ref.shape, shape[0] * shape[1] // 128

    @inline_mgpu(arg_types=(plgpu.RefType(), *[SCALAR_LAYOUT] * 4), return_type=out)
    def load(_, ref, *origin):
        i64 = ir.IntegerType.get_signless(64)
        origin = [x.registers.flat[0] for x in origin]
        base, stored = mgpu.utils.memref_ptr(ref), ir.MemRefType(ref.type).element_type

        def offset(index, axis):
            """Elements to ref[..., index, ...] along one axis, 64 bits wide."""
            stride = int(np.prod(sizes[axis + 1 :]))
            return arith.muli(arith.extsi(i64, index), mgpu.utils.c(stride, i64))

        first = arith.addi(offset(origin[0], 0), offset(origin[1], 1))
        base = mgpu.utils.getelementptr(base, [first], stored)

        # Two neighbours of a row come in one load where they are neighbours in memory, too.
        width = 2 if q_axis == 0 and sizes[3] % 2 == 0 else 1

        def offsets(axis, start, steps):
            """The same, by distance from this thread's first row or column."""
            if sizes[axis] == 1:
                return {step: mgpu.utils.c(0, i64) for step in steps}
            start = arith.addi(origin[axis], start)
            if whole:  # one address, the rest are immediates
                start, stride = offset(start, axis), int(np.prod(sizes[axis + 1 :]))
                return {s: arith.addi(start, mgpu.utils.c(s * stride, i64)) for s in steps}
            last = i32_const(sizes[axis] - (width if axis == 3 else 1))
            at = {s: arith.minsi(arith.addi(start, i32_const(s)), last) for s in steps}
            return {s: offset(i, axis) for s, i in at.items()}

        row, col = first_element()
        row_axis, col_axis = (2, 3) if q_axis == 0 else (3, 2)
        rows = offsets(row_axis, row, sorted({element(i)[0] for i in range(count)}))
        cols = offsets(col_axis, col, sorted({element(i)[1] for i in range(0, count, width)}))
        loaded = ir.VectorType.get((width,), stored)
        values = []
        for i in range(0, count, width):
            drow, dcol = element(i)
            at = arith.addi(rows[drow], cols[dcol])
            pair = llvm.load(loaded, mgpu.utils.getelementptr(base, [at], stored))
            for j in range(width):
                value = vector.extract(pair, [], [j])
                if stored != ir.F32Type.get():
                    value = arith.extf(ir.F32Type.get(), value)
                values.append(value)
        return accumulator(values, shape, is_signed=None)

    return load(ref, *(jnp.int32(x) for x in (*entry, q0, kv0)))


def load_staged(ref, first_row, shape: tuple[int, int], q_axis: int):
    """Tile [queries, keys] in shared memory (`tiled_smem`), as a float32 accumulator [64, n].

    Rows from `first_row` on: queries with q_axis 0, keys with q_axis 1. Mosaic's own load has
    no word for the latter.
    """
    out = plgpu.ShapeDtypeStruct(shape, jnp.dtype(jnp.float32), layout=ACC_LAYOUT)
    size = jnp.dtype(ref.dtype).itemsize
    swizzled = plgpu.RefType((plgpu.TilingTransform((8, 128 // size)), plgpu.SwizzleTransform(128)))
    load_values, lines = (_load_matrices, _load_words)[size // 4], ref.shape[1] * size // 128

    @inline_mgpu(arg_types=(swizzled, SCALAR_LAYOUT), return_type=out)
    def load(_, ref, first_row):
        values = load_values(ref, lines, first_row.registers.flat[0], shape, q_axis)
        return accumulator(values, shape, is_signed=None)

    return load(ref, jnp.int32(first_row))


def load_bits(ref, entry, q0, kv0, shape: tuple[int, int], q_axis: int):
    """Bits of ref[entry], not 0 where set, as an int32 accumulator [64, n].

    ref: int32 [b, n, rows or 1, words or 1] with q_axis 0, [b, n, words or 1, rows or 1] with
    q_axis 1: 32 columns of the tile in a word, the first in its lowest bit. An axis of size 1
    is repeated; past its end the last is read, which stands for nothing.
    """
    out = plgpu.ShapeDtypeStruct(shape, jnp.dtype(jnp.int32), layout=ACC_LAYOUT)
    sizes, count = ref.shape, shape[0] * shape[1] // 128
    row_axis, word_axis = (2, 3) if q_axis == 0 else (3, 2)
    row0, col0 = (q0, kv0) if q_axis == 0 else (kv0, q0)

    @inline_mgpu(arg_types=(plgpu.RefType(), *[SCALAR_LAYOUT] * 4), return_type=out)
    def load(_, ref, *origin):
        i32, i64 = (ir.IntegerType.get_signless(n) for n in (32, 64))
        *entry, row0, col0 = (x.registers.flat[0] for x in origin)
        base = mgpu.utils.memref_ptr(ref)

        def offset(index, axis):
            stride = mgpu.utils.c(int(np.prod(sizes[axis + 1 :])), i64)
            last = i32_const(sizes[axis] - 1)
            return arith.muli(arith.extsi(i64, arith.minsi(index, last)), stride)

        first = arith.addi(offset(entry[0], 0), offset(entry[1], 1))
        row, col = first_element()
        row, word0 = arith.addi(row0, row), arith.shrui(col0, i32_const(5))
        words = {}
        for drow in (0, 8):
            at_row = offset(arith.addi(row, i32_const(drow)), row_axis)
            for w in range(shape[1] // 32):
                at_word = offset(arith.addi(word0, i32_const(w)), word_axis)
                at = arith.addi(first, arith.addi(at_row, at_word))
                word = llvm.load(i32, mgpu.utils.getelementptr(base, [at], i32))
                words[drow, w] = arith.shrui(word, col)  # this thread's first column to bit 0
        values = []
        for i in range(count):
            drow, dcol = element(i)
            bit = 1 << dcol % 32  # never the sign: the last column of a thread is bit 25
            values.append(arith.andi(words[drow, dcol // 32], i32_const(bit)))
        return accumulator(values, shape, is_signed=True)

    return load(ref, *(jnp.int32(x) for x in (*entry, row0, col0)))


def load_added(ref, shape: tuple[int, int]):
    """What `mma.GpuOps.add_dq` added to ref (GMEM, flat float32), as an accumulator [64, n]."""
    out = plgpu.ShapeDtypeStruct(shape, jnp.dtype(jnp.float32), layout=ACC_LAYOUT)

    @inline_mgpu(arg_types=(plgpu.RefType(),), return_type=out)
    def load(_, ref):
        f32 = ir.F32Type.get()
        at = lambda base, offset: mgpu.utils.getelementptr(base, [offset], f32)
        base = at(mgpu.utils.memref_ptr(ref), times(thread_in_warpgroup(), 4))
        four, values = ir.VectorType.get((4,), f32), []
        for group in range(shape[0] * shape[1] // 512):
            loaded = llvm.load(four, at(base, group * 512), alignment=16)
            values += [vector.extract(loaded, [], [k]) for k in range(4)]
        return accumulator(values, shape, is_signed=None)

    return load(ref)
