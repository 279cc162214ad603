"""The tensor-core seam: what a GPU and Pallas' interpret mode must spell differently, no more.

`ops(interpret)` returns one of two classes with the same static methods. A kernel calls them as
`op.wgmma(...)` and reads the same in both modes. GPU bodies that Pallas has no word for are written
with `inline_mgpu`; each is unit-tested alone on a GPU. In interpret mode accumulators are float32
shared memory, a matrix product is `lax.dot` on plain loads (which the race detector sees), and
`commit_smem` stands wherever the GPU needs only a fence.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector
from jaxlib.mlir.dialects import math as mlir_math

from pallas_flash import masks

ACC_LAYOUT = plgpu.Layout.WGMMA
ROW_LAYOUT = plgpu.Layout.WGMMA.reduce(1)  # one value a row of an accumulator
COL_LAYOUT = plgpu.Layout.WGMMA.reduce(0)  # one value a column of an accumulator
SCALAR_LAYOUT = plgpu.Layout.WG_SPLAT

# Named barriers from here on are ours: 0 is the block's, 1 + warpgroup are Mosaic's.
FIRST_NAMED_BARRIER = 6


def ops(interpret: bool):
    """The operations of this mode."""
    return InterpretOps if interpret else GpuOps


def _inline_mgpu(**types: Any) -> Any:
    """A body of MLIR: its arguments are the launch context and what `types` says."""
    return plgpu.inline_mgpu(**types)


def _i32_const(value: int):
    return mgpu.utils.c(value, ir.IntegerType.get_signless(32))


def _void_asm(operands, text: str, constraints: str) -> None:
    void = ir.Type.parse("!llvm.void")
    llvm.inline_asm(void, operands, text, constraints, has_side_effects=True)


def _thread_in_warpgroup():
    return arith.andi(mgpu.utils.thread_idx(), _i32_const(127))


def _first_element():
    """Row and column of this thread's first element of an accumulator [64, n]."""
    thread = _thread_in_warpgroup()
    lane = arith.andi(thread, _i32_const(31))
    warp_row = arith.muli(arith.shrui(thread, _i32_const(5)), _i32_const(16))
    row = arith.addi(arith.shrui(lane, _i32_const(2)), warp_row)
    return row, arith.muli(arith.andi(lane, _i32_const(3)), _i32_const(2))


def _element(i: int) -> tuple[int, int]:
    """How many rows and columns this thread's element `i` lies behind its first."""
    return 8 * (i % 4 // 2), 8 * (i // 4) + i % 2


def _opaque(value):
    """The same number, about which the compiler knows nothing: what is added stays an immediate.

    Otherwise the sums of thread and element would be hoisted out of the loops, into 32 registers.
    """
    return llvm.inline_asm(value.type, [value], "mov.b32 $0, $1;", "=r,r", has_side_effects=True)


def _accumulator(values, shape: tuple[int, int], *, is_signed: bool | None):
    """One value an element, in the order of `_element` -> a FragmentedArray in ACC_LAYOUT."""
    layout = fa.WGMMA_LAYOUT_ACC_32BIT
    registers = np.empty(layout.registers_shape(shape), dtype=object)
    for i, value in enumerate(values):
        vector_type = ir.VectorType.get((1,), value.type)
        registers.flat[i] = vector.broadcast(vector_type, value)
    return fa.FragmentedArray(_registers=registers, _layout=layout, _is_signed=is_signed).to_layout(
        fa.WGMMA_LAYOUT
    )


_LINE_BYTES = 8 * 128  # rows and bytes that the swizzle works on: pieces of 16, by the row


def _times(x, n: int):
    return arith.muli(x, _i32_const(n))


def _shifted(x, n: int):
    return arith.shrui(x, _i32_const(n))


def _mod(x, n: int):
    """x mod n, a power of two."""
    return arith.andi(x, _i32_const(n - 1))


def _sum(*terms):
    return functools.reduce(arith.addi, terms)


def _load_matrices(ref, lines: int, first_row, shape: tuple[int, int], q_axis: int):
    """Values of `load_staged` of 16 bits: ldmatrix deals them out as an accumulator has them.

    A matrix is 8 x 8. Four come at once: the upper and the lower 8 of this warp's 16 rows, in two
    neighbouring groups of 8 columns; each lane names a row of one of them. lines: side by side.
    """
    i32 = ir.IntegerType.get_signless(32)
    base = llvm.ptrtoint(i32, mgpu.utils.memref_ptr(ref))
    stored = ir.MemRefType(ref.type).element_type
    thread = _thread_in_warpgroup()
    is_lower, is_right = (_mod(_shifted(thread, bit), 2) for bit in (3, 4))
    across = _sum(first_row, _times(_shifted(thread, 5), 16), _times(is_lower, 8))
    along, within = _times(is_right, 8), _mod(thread, 8)
    row, col, trans = across, along, ""
    if q_axis == 1:
        row, col, trans = along, across, ".trans"
    line = _times(_sum(_times(_shifted(row, 3), lines), _shifted(col, 6)), _LINE_BYTES)
    piece = arith.xori(_mod(_shifted(col, 3), 8), within)
    at = _opaque(_sum(base, line, _times(within, 128), _times(piece, 16)))
    four, values = llvm.StructType.get_literal([i32] * 4), []
    for group in range(0, shape[1] // 8, 2):
        if q_axis == 1:
            address = arith.addi(at, _i32_const(group * lines * _LINE_BYTES))
        else:
            address = arith.xori(at, _i32_const(group % 8 * 16))
            address = arith.addi(address, _i32_const(group // 8 * _LINE_BYTES))
        found = llvm.inline_asm(
            four,
            [address],
            f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{$0, $1, $2, $3}}, [$4];",
            "=r,=r,=r,=r,r",
            has_side_effects=True,
        )
        for k in range(4):
            pair = ir.VectorType.get((2,), stored)
            pair = llvm.bitcast(pair, llvm.extractvalue(i32, found, [k]))
            halves = (vector.extract(pair, [], [j]) for j in range(2))
            values += [arith.extf(ir.F32Type.get(), half) for half in halves]
    return values


def _load_words(ref, lines: int, first_row, shape: tuple[int, int], q_axis: int):
    """Values of `load_staged` of 32 bits."""
    base, f32 = mgpu.utils.memref_ptr(ref), ir.F32Type.get()
    row, col = _first_element()
    row = _opaque(arith.addi(first_row, row))
    count, values = shape[0] * shape[1] // 128, []

    def load_at(offset, static: int, width: int):
        offset = arith.addi(offset, _i32_const(static))
        at = mgpu.utils.getelementptr(base, [offset], ir.IntegerType.get_signless(8))
        loaded = llvm.load(ir.VectorType.get((width,), f32), at)
        return [vector.extract(loaded, [], [i]) for i in range(width)]

    if q_axis == 0:  # a row is a query: pieces of its lines, two neighbours at a time
        line = _sum(_times(_shifted(row, 3), lines * _LINE_BYTES), _times(_mod(row, 8), 128))
        within = _times(col, 4)
        piece = arith.xori(_times(_shifted(within, 4), 16), _times(_mod(row, 8), 16))
        line = arith.addi(line, _mod(within, 16))
        for i in range(0, count, 2):
            drow, dcol = _element(i)
            offset = arith.addi(line, arith.xori(piece, _i32_const(dcol % 32 * 4)))
            values += load_at(offset, (drow // 8 * lines + dcol // 32) * _LINE_BYTES, 2)
        return values
    offsets = {}  # a row is a key, a column a query: a line for every 8 columns
    for drow, parity in itertools.product((0, 8), (0, 1)):
        key, query = arith.addi(row, _i32_const(drow)), arith.addi(col, _i32_const(parity))
        within = _times(_mod(key, 32), 4)
        piece = arith.xori(_shifted(within, 4), query)
        line = _sum(_times(_shifted(key, 5), _LINE_BYTES), _times(query, 128))
        offsets[drow, parity] = _sum(line, _times(piece, 16), _mod(within, 16))
    for i in range(count):
        drow, dcol = _element(i)
        values += load_at(offsets[drow, dcol % 2], dcol // 8 * lines * _LINE_BYTES, 1)
    return values


def _bound_tests(bounds: masks.Bounds, q0, kv0, q_axis: int):
    """Bounds as tests on (column - row), column and row of a tile whose first pair is (q0, kv0).

    Returns a dict of int32 scalars, absent keys are no bound: 'ge' and 'le' bound column - row,
    'col_end' and 'row_end' bound column and row.
    """
    shift = q0 - kv0
    if q_axis == 0:  # rows are queries: column - row = kv_pos - q_pos + shift
        tests = {"ge": bounds.lower, "le": bounds.upper}
        ends = dict(row_end=(bounds.q_end, q0), col_end=(bounds.kv_end, kv0))
        tests = {k: b + shift for k, b in tests.items() if b is not None}
    else:  # rows are keys: column - row = q_pos - kv_pos - shift
        tests = dict(ge=bounds.upper, le=bounds.lower)
        ends = dict(row_end=(bounds.kv_end, kv0), col_end=(bounds.q_end, q0))
        tests = {k: -b - shift for k, b in tests.items() if b is not None}
    tests |= {k: end - origin for k, (end, origin) in ends.items() if end is not None}
    return {k: jnp.int32(v) for k, v in tests.items()}


class GpuOps:
    """Hopper's own instructions."""

    interpret = False

    @staticmethod
    def accumulator_scratch(num_wgs: int, **shapes):
        """Scratch to declare for `with_accumulators`: none, accumulators are registers."""
        del num_wgs, shapes
        return {}

    @staticmethod
    def with_accumulators(body, scratch, wg, **shapes):
        """body(**accumulators): zero-initialised float32 accumulators of these shapes."""
        del scratch, wg
        return pl.run_scoped(body, **{n: plgpu.ACC(s, jnp.float32) for n, s in shapes.items()})

    @staticmethod
    def set(acc, value) -> None:
        """acc = value. With any wgmma in flight only zero is free (C7517 otherwise)."""
        acc[...] = value

    @staticmethod
    def wgmma(acc, a, b) -> None:
        """Issues acc += a @ b; a in shared memory or registers, b in shared memory."""
        plgpu.wgmma(acc, a, b)

    @staticmethod
    def load(acc, in_flight: int | None = 0):
        """Reads acc once at most `in_flight` later wgmma groups run; None does not wait."""
        return plgpu.wgmma_accumulator_load(acc, wait_n=in_flight)

    @staticmethod
    def wait(in_flight: int) -> None:
        """Waits until at most `in_flight` wgmma groups run."""
        plgpu.wgmma_wait(in_flight)

    @staticmethod
    def fence_async() -> None:
        """My shared-memory writes become visible to wgmma and TMA; orders no other thread."""

        @_inline_mgpu()
        def fence(_):
            _void_asm([], "fence.proxy.async.shared::cta;", "")

        fence()

    @staticmethod
    def token_pass(to, num_wgs: int) -> None:
        """Hands the tensor-core token to consumer warpgroup `to` of `num_wgs`, without waiting."""
        del num_wgs
        GpuOps._named_barrier("arrive", to)

    @staticmethod
    def token_take(wg) -> None:
        """Waits for the tensor-core token."""
        GpuOps._named_barrier("sync", wg)

    @staticmethod
    def _named_barrier(op: str, wg) -> None:
        @_inline_mgpu(arg_types=(SCALAR_LAYOUT,))
        def barrier(_, i):
            _void_asm([i.registers[()]], f"bar.{op} $0, 256;", "r")

        barrier(jnp.int32(wg + FIRST_NAMED_BARRIER))

    @staticmethod
    def any_greater(a, b):
        """a > b for any row held by this warp, as a scalar that may differ between warps.

        Only for a branch around plain arithmetic: never around a barrier or a wgmma.
        """
        answer = plgpu.ShapeDtypeStruct((), jnp.dtype(bool), layout=SCALAR_LAYOUT)

        @_inline_mgpu(arg_types=(ROW_LAYOUT, ROW_LAYOUT), return_type=answer)
        def vote(_, x, y):
            found = None
            for u, w in zip(x.registers.flat, y.registers.flat, strict=True):
                u, w = (
                    vector.extract(z, [], [0]) if isinstance(z.type, ir.VectorType) else z
                    for z in (u, w)
                )
                greater = arith.cmpf(arith.CmpFPredicate.OGT, u, w)
                found = greater if found is None else arith.ori(found, greater)
            vote_any = nvvm.vote_sync(_i32_const(-1), found, "any")
            return mgpu.FragmentedArray.splat(vote_any, (), is_signed=False)

        return vote(a, b)

    @staticmethod
    def all_within(tile, limit):
        """|x| <= limit for all that this warp holds of an accumulator; see `any_greater`."""
        answer = plgpu.ShapeDtypeStruct((), jnp.dtype(bool), layout=SCALAR_LAYOUT)

        @_inline_mgpu(arg_types=(ACC_LAYOUT, SCALAR_LAYOUT), return_type=answer)
        def vote(_, x, limit):
            x = x.to_layout(fa.WGMMA_LAYOUT_ACC_32BIT)
            most = None
            for register in x.registers.flat:
                size = mlir_math.absf(vector.extract(register, [], [0]))
                most = size if most is None else arith.maximumf(most, size)
            within = arith.cmpf(arith.CmpFPredicate.OLE, most, limit.registers.flat[0])
            vote_all = nvvm.vote_sync(_i32_const(-1), within, "all")
            return mgpu.FragmentedArray.splat(vote_all, (), is_signed=False)

        return vote(tile, jnp.float32(limit))

    @staticmethod
    def hide_outside(scores, bounds: masks.Bounds, q0, kv0, q_axis: int):
        """Accumulator [64, n] of the tile at (q0, kv0) with -inf where bounds do not allow.

        One compare with an immediate an element and bound: iotas are loop-invariant, LLVM would
        hoist them out of the loop into some 30 registers.
        """
        tests = _bound_tests(bounds, q0, kv0, q_axis)
        if not tests:
            return scores
        names = tuple(tests)
        out = plgpu.ShapeDtypeStruct(scores.shape, scores.dtype, layout=ACC_LAYOUT)

        @_inline_mgpu(arg_types=(ACC_LAYOUT, *[SCALAR_LAYOUT] * len(names)), return_type=out)
        def hide(_, acc, *limits):
            layout, acc = acc.layout, acc.to_layout(fa.WGMMA_LAYOUT_ACC_32BIT)
            limit = {n: x.registers.flat[0] for n, x in zip(names, limits, strict=True)}
            row, col = _first_element()
            at = {
                "ge": lambda: arith.addi(limit["ge"], arith.subi(row, col)),
                "le": lambda: arith.addi(limit["le"], arith.subi(row, col)),
                "col_end": lambda: arith.subi(limit["col_end"], col),
                "row_end": lambda: arith.subi(limit["row_end"], row),
            }
            at = {n: at[n]() for n in names}
            less_equal, greater = arith.CmpIPredicate.sle, arith.CmpIPredicate.sgt
            greater_equal = arith.CmpIPredicate.sge
            f32 = ir.F32Type.get()
            minus_inf = arith.constant(f32, ir.FloatAttr.get(f32, float("-inf")))
            registers = np.empty_like(acc.registers)
            for i, value in enumerate(acc.registers.flat):
                drow, dcol = _element(i)
                test = {
                    "ge": (less_equal, dcol - drow),
                    "le": (greater_equal, dcol - drow),
                    "col_end": (greater, dcol),
                    "row_end": (greater, drow),
                }
                keep = None
                for n in names:
                    predicate, offset = test[n]
                    one = arith.cmpi(predicate, at[n], _i32_const(offset))
                    keep = one if keep is None else arith.andi(keep, one)
                kept = arith.select(keep, llvm.extractelement(value, _i32_const(0)), minus_inf)
                registers.flat[i] = llvm.insertelement(
                    llvm.mlir_undef(value.type), kept, _i32_const(0)
                )
            return fa.FragmentedArray(
                _registers=registers, _layout=acc.layout, _is_signed=None
            ).to_layout(layout)

        return hide(scores, *tests.values())

    @staticmethod
    def count_from(first, shape: tuple[int, int], *, row_step: int = 0, col_step: int = 0):
        """int32 [64, n] like an accumulator: first + row_step * row + col_step * column."""
        out = plgpu.ShapeDtypeStruct(shape, jnp.dtype(jnp.int32), layout=ACC_LAYOUT)

        @_inline_mgpu(arg_types=(SCALAR_LAYOUT,), return_type=out)
        def count(_, first):
            row, col = _first_element()
            base = first.registers.flat[0]
            for step, offset in ((row_step, row), (col_step, col)):
                if step:
                    base = arith.addi(base, arith.muli(offset, _i32_const(step)))
            base = _opaque(base)
            values = []
            for i in range(shape[0] * shape[1] // 128):
                drow, dcol = _element(i)
                values.append(arith.addi(base, _i32_const(row_step * drow + col_step * dcol)))
            return _accumulator(values, shape, is_signed=True)

        return count(jnp.int32(first))

    @staticmethod
    def load_along(ref, first, shape: tuple[int, int], axis: int):
        """ref[first + position along `axis`], the same along the other, as an accumulator."""
        layout = ROW_LAYOUT if axis == 0 else COL_LAYOUT
        part = ref.at[pl.ds(first, shape[axis])]
        values = plgpu.load(part, layout=layout, optimized=False)
        return lax.broadcast_in_dim(values, shape, (axis,))

    @staticmethod
    def whole_tiles(x, rows: int, cols: int):
        """An array that `load_tile` will read, as it wants it: here as it is."""
        del rows, cols
        return x

    @staticmethod
    def load_tile(ref, entry, q0, kv0, shape: tuple[int, int], q_axis: int, *, whole: bool):
        """Tile of ref[entry], a global array [b, n, queries or 1, keys or 1], as an accumulator.

        An axis of size 1 is repeated. Past the array's end its last row or column is read, which
        stands for nothing; `whole` says that no tile reaches there. Arrives as float32.
        """
        out = plgpu.ShapeDtypeStruct(shape, jnp.dtype(jnp.float32), layout=ACC_LAYOUT)
        sizes, count = ref.shape, shape[0] * shape[1] // 128

        @_inline_mgpu(arg_types=(plgpu.RefType(), *[SCALAR_LAYOUT] * 4), return_type=out)
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
                last = _i32_const(sizes[axis] - (width if axis == 3 else 1))
                at = {s: arith.minsi(arith.addi(start, _i32_const(s)), last) for s in steps}
                return {s: offset(i, axis) for s, i in at.items()}

            row, col = _first_element()
            row_axis, col_axis = (2, 3) if q_axis == 0 else (3, 2)
            rows = offsets(row_axis, row, sorted({_element(i)[0] for i in range(count)}))
            cols = offsets(col_axis, col, sorted({_element(i)[1] for i in range(0, count, width)}))
            loaded = ir.VectorType.get((width,), stored)
            values = []
            for i in range(0, count, width):
                drow, dcol = _element(i)
                at = arith.addi(rows[drow], cols[dcol])
                pair = llvm.load(loaded, mgpu.utils.getelementptr(base, [at], stored))
                for j in range(width):
                    value = vector.extract(pair, [], [j])
                    if stored != ir.F32Type.get():
                        value = arith.extf(ir.F32Type.get(), value)
                    values.append(value)
            return _accumulator(values, shape, is_signed=None)

        return load(ref, *(jnp.int32(x) for x in (*entry, q0, kv0)))

    @staticmethod
    def load_staged(ref, first_row, shape: tuple[int, int], q_axis: int):
        """Tile [queries, keys] in shared memory (`tiled_smem`), as a float32 accumulator [64, n].

        Rows from `first_row` on: queries with q_axis 0, keys with q_axis 1. Mosaic's own load has
        no word for the latter.
        """
        out = plgpu.ShapeDtypeStruct(shape, jnp.dtype(jnp.float32), layout=ACC_LAYOUT)
        size = jnp.dtype(ref.dtype).itemsize
        swizzled = plgpu.RefType(
            (plgpu.TilingTransform((8, 128 // size)), plgpu.SwizzleTransform(128))
        )
        load_values, lines = (_load_matrices, _load_words)[size // 4], ref.shape[1] * size // 128

        @_inline_mgpu(arg_types=(swizzled, SCALAR_LAYOUT), return_type=out)
        def load(_, ref, first_row):
            values = load_values(ref, lines, first_row.registers.flat[0], shape, q_axis)
            return _accumulator(values, shape, is_signed=None)

        return load(ref, jnp.int32(first_row))

    @staticmethod
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

        @_inline_mgpu(arg_types=(plgpu.RefType(), *[SCALAR_LAYOUT] * 4), return_type=out)
        def load(_, ref, *origin):
            i32, i64 = (ir.IntegerType.get_signless(n) for n in (32, 64))
            *entry, row0, col0 = (x.registers.flat[0] for x in origin)
            base = mgpu.utils.memref_ptr(ref)

            def offset(index, axis):
                stride = mgpu.utils.c(int(np.prod(sizes[axis + 1 :])), i64)
                last = _i32_const(sizes[axis] - 1)
                return arith.muli(arith.extsi(i64, arith.minsi(index, last)), stride)

            first = arith.addi(offset(entry[0], 0), offset(entry[1], 1))
            row, col = _first_element()
            row, word0 = arith.addi(row0, row), arith.shrui(col0, _i32_const(5))
            words = {}
            for drow in (0, 8):
                at_row = offset(arith.addi(row, _i32_const(drow)), row_axis)
                for w in range(shape[1] // 32):
                    at_word = offset(arith.addi(word0, _i32_const(w)), word_axis)
                    at = arith.addi(first, arith.addi(at_row, at_word))
                    word = llvm.load(i32, mgpu.utils.getelementptr(base, [at], i32))
                    words[drow, w] = arith.shrui(word, col)  # this thread's first column to bit 0
            values = []
            for i in range(count):
                drow, dcol = _element(i)
                bit = 1 << dcol % 32  # never the sign: the last column of a thread is bit 25
                values.append(arith.andi(words[drow, dcol // 32], _i32_const(bit)))
            return _accumulator(values, shape, is_signed=True)

        return load(ref, *(jnp.int32(x) for x in (*entry, row0, col0)))

    @staticmethod
    def dq_writers(num_blocks: int) -> int:
        """Slices of the dq buffer a tile needs: all blocks add into one."""
        del num_blocks
        return 1

    @staticmethod
    def add_dq(dq, ref) -> None:
        """ref (GMEM, flat float32) += dq, in register order [m/64, n/8, 128 threads, 4].

        A warp's red.v4 covers 512 contiguous bytes; scalar atomic_add took 3x the kernel's time.
        """

        @_inline_mgpu(arg_types=(ACC_LAYOUT, plgpu.RefType()))
        def red_add(_, acc, out):
            acc = acc.to_layout(fa.WGMMA_LAYOUT_ACC_32BIT)
            values = [llvm.extractelement(v, _i32_const(0)) for v in acc.registers.flat]
            f32 = ir.F32Type.get()
            offset = arith.muli(_thread_in_warpgroup(), _i32_const(4))
            base = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(out), [offset], f32)
            for g in range(len(values) // 4):
                _void_asm(
                    [mgpu.utils.getelementptr(base, [g * 512], f32), *values[4 * g : 4 * g + 4]],
                    "red.relaxed.gpu.global.add.v4.f32 [$0], {$1, $2, $3, $4};",
                    "l,f,f,f,f",
                )

        red_add(dq, ref)

    @staticmethod
    def order_dq(dq: jax.Array, m: int, n: int) -> jax.Array:
        """[..., m * n] as `add_dq` left it -> [..., m, n]."""
        lead = dq.shape[:-1]
        # m/64, n/8, warp, lane / 4, lane % 4, row half, column
        dq = dq.reshape(*lead, m // 64, n // 8, 4, 8, 4, 2, 2)
        k = len(lead)
        order = (k, k + 2, k + 5, k + 3, k + 1, k + 4, k + 6)
        return dq.transpose(*range(k), *order).reshape(*lead, m, n)


class _SmemAccumulator:
    """An accumulator in interpret mode: this warpgroup's slice of a float32 scratch."""

    def __init__(self, ref, shape):
        self.ref = ref
        self.shape = shape

    def __getitem__(self, index):
        return self.ref[index]


class InterpretOps:
    """The same operations in words that Pallas' interpret mode knows."""

    interpret = True

    @staticmethod
    def accumulator_scratch(num_wgs: int, **shapes):
        return {n: plgpu.SMEM((num_wgs, *s), jnp.float32) for n, s in shapes.items()}

    @staticmethod
    def with_accumulators(body, scratch, wg, **shapes):
        accs = {n: _SmemAccumulator(scratch[n].at[wg], s) for n, s in shapes.items()}
        for acc in accs.values():
            acc.ref[...] = jnp.zeros(acc.shape, jnp.float32)
        return body(**accs)

    @staticmethod
    def set(acc, value) -> None:
        acc.ref[...] = value

    @staticmethod
    def wgmma(acc, a, b) -> None:
        a = a if isinstance(a, jax.Array) else a[...]
        acc.ref[...] += lax.dot(a, b[...], preferred_element_type=jnp.float32)
        plgpu.commit_smem()  # orders these plain reads before a later TMA write of the slot

    @staticmethod
    def load(acc, in_flight: int | None = 0):
        del in_flight
        return acc.ref[...]

    @staticmethod
    def wait(in_flight: int) -> None:
        del in_flight

    @staticmethod
    def fence_async() -> None:
        plgpu.commit_smem()

    @staticmethod
    def token_pass(to, num_wgs: int) -> None:
        """Nothing: the token orders work, correctness does not lean on it."""
        del to, num_wgs

    @staticmethod
    def token_take(wg) -> None:
        del wg

    @staticmethod
    def any_greater(a, b):
        return jnp.any(a > b)

    @staticmethod
    def all_within(tile, limit):
        return jnp.abs(tile).max() <= limit

    @staticmethod
    def hide_outside(scores, bounds: masks.Bounds, q0, kv0, q_axis: int):
        shape = scores.shape
        q_pos = q0 + lax.broadcasted_iota(jnp.int32, shape, q_axis)
        kv_pos = kv0 + lax.broadcasted_iota(jnp.int32, shape, 1 - q_axis)
        return masks.hide(scores, bounds.allowed(q_pos, kv_pos))

    @staticmethod
    def count_from(first, shape: tuple[int, int], *, row_step: int = 0, col_step: int = 0):
        row, col = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
        return jnp.int32(first) + jnp.int32(row_step) * row + jnp.int32(col_step) * col

    @staticmethod
    def load_along(ref, first, shape: tuple[int, int], axis: int):
        return lax.broadcast_in_dim(ref[pl.ds(first, shape[axis])], shape, (axis,))

    @staticmethod
    def whole_tiles(x, rows: int, cols: int):
        """Padded: a load past the end is an error here."""
        tiles = (rows, cols)
        pads = [(0, -n % t if n > 1 else 0) for n, t in zip(x.shape[-2:], tiles, strict=True)]
        return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + pads)

    @staticmethod
    def load_tile(ref, entry, q0, kv0, shape: tuple[int, int], q_axis: int, *, whole: bool):
        del whole
        ref = ref.at[entry]
        sizes = shape if q_axis == 0 else shape[::-1]
        origins = (q0, kv0)
        at = [
            pl.ds(0, 1) if n == 1 else pl.ds(origin, size)
            for n, origin, size in zip(ref.shape[-2:], origins, sizes, strict=True)
        ]
        tile = jnp.broadcast_to(ref[at[0], at[1]].astype(jnp.float32), sizes)
        return tile if q_axis == 0 else tile.T

    @staticmethod
    def load_staged(ref, first_row, shape: tuple[int, int], q_axis: int):
        rows = pl.ds(first_row, shape[0])
        tile = ref[rows] if q_axis == 0 else ref[:, rows].T
        return tile.astype(jnp.float32)

    @staticmethod
    def load_bits(ref, entry, q0, kv0, shape: tuple[int, int], q_axis: int):
        rows, cols = shape
        row0, col0 = (q0, kv0) if q_axis == 0 else (kv0, q0)
        ref = ref.at[entry]
        num_rows, num_words = ref.shape if q_axis == 0 else ref.shape[::-1]
        at_rows = pl.ds(0, 1) if num_rows == 1 else pl.ds(row0, rows)
        at_words = pl.ds(0, 1) if num_words == 1 else pl.ds(col0 // 32, cols // 32)
        words = ref[at_rows, at_words] if q_axis == 0 else ref[at_words, at_rows].T
        words = jnp.broadcast_to(words, (rows, cols // 32)).repeat(32, axis=1)
        bit = lax.broadcasted_iota(jnp.int32, shape, 1) % 32
        return (words >> bit) & 1

    @staticmethod
    def dq_writers(num_blocks: int) -> int:
        return num_blocks  # no atomics here: one slice a block, summed outside

    @staticmethod
    def add_dq(dq, ref) -> None:
        m, n = dq.shape  # columns in eights, as on the GPU: a tile is its column parts in a row
        dq = dq.reshape(m // 64, 64, n // 8, 8).transpose(0, 2, 1, 3)
        ref[...] += dq.reshape(-1)

    @staticmethod
    def order_dq(dq: jax.Array, m: int, n: int) -> jax.Array:
        lead = dq.shape[:-1]
        dq = dq.reshape(*lead, m // 64, n // 8, 64, 8)
        return jnp.swapaxes(dq, -3, -2).reshape(*lead, m, n)
