"""The tensor-core seam: what a GPU and Pallas' interpret mode must spell differently, no more.

`ops(interpret)` returns one of two classes with the same static methods, `GpuOps` or
`mma_interpret.InterpretOps`. A kernel calls them as `op.wgmma(...)` and reads the same in both
modes. GPU bodies that Pallas has no word for are written with `inline_mgpu`; each is unit-tested
alone on a GPU.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector
from jaxlib.mlir.dialects import math as mlir_math

from pallas_flash import masks
from pallas_flash.kernels.sm90 import issue_mma, loads, query_parts
from pallas_flash.kernels.sm90.mma_interpret import InterpretOps
from pallas_flash.kernels.sm90.registers import (
    ACC_LAYOUT,
    ROW_LAYOUT,
    SCALAR_LAYOUT,
    accumulator,
    element,
    first_element,
    i32_const,
    inline_mgpu,
    pairs_of,
    thread_in_warpgroup,
    values_of,
    void_asm,
)

# Named barriers from here on are ours: 0 is the block's, 1 + warpgroup are Mosaic's.
FIRST_NAMED_BARRIER = 6


def ops(interpret: bool):
    """The operations of this mode."""
    return InterpretOps if interpret else GpuOps


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

    load_along = staticmethod(loads.load_along)
    load_tile = staticmethod(loads.load_tile)
    load_staged = staticmethod(loads.load_staged)
    load_bits = staticmethod(loads.load_bits)
    count_from = staticmethod(loads.count_from)
    in_every_row = staticmethod(query_parts.in_every_row)

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
    def wgmma_rows(acc, a, b, first: int) -> None:
        """Issues acc += a @ b[first : first + a.shape[1]], in sixteens; a in registers."""
        acc[...] = issue_mma.add_rows(GpuOps.load(acc, None), a, b, first)

    @staticmethod
    def wgmma_from_zero(acc, a, b) -> None:
        """Issues acc = a @ b^T, both in shared memory, whatever acc was."""
        acc[...] = issue_mma.rows_times_rows(a, b)

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

        @inline_mgpu()
        def fence(_):
            void_asm([], "fence.proxy.async.shared::cta;", "")

        fence()

    @staticmethod
    def token_start(wg, num_wgs: int) -> None:
        """Consumer 0 has the first turn: it hands the token to itself."""
        pl.when(wg == 0)(lambda: GpuOps.token_pass(jnp.int32(0), num_wgs))

    @staticmethod
    def token_pass(to, num_wgs: int) -> None:
        """Hands the token to consumer warpgroup `to` of `num_wgs`, without waiting."""
        del num_wgs
        GpuOps._named_barrier("arrive", to)

    @staticmethod
    def token_take(wg) -> None:
        """Waits for the token: whose turn it is on the tensor cores, or on exponentials."""
        GpuOps._named_barrier("sync", wg)

    @staticmethod
    def _named_barrier(op: str, wg) -> None:
        @inline_mgpu(arg_types=(SCALAR_LAYOUT,))
        def barrier(_, i):
            void_asm([i.registers[()]], f"bar.{op} $0, 256;", "r")

        barrier(jnp.int32(wg + FIRST_NAMED_BARRIER))

    @staticmethod
    def any_greater(a, b):
        """a > b for any row held by this warp, as a scalar that may differ between warps.

        Only for a branch around plain arithmetic: never around a barrier or a wgmma.
        """
        answer = plgpu.ShapeDtypeStruct((), jnp.dtype(bool), layout=SCALAR_LAYOUT)

        @inline_mgpu(arg_types=(ROW_LAYOUT, ROW_LAYOUT), return_type=answer)
        def vote(_, x, y):
            found = None
            for u, w in zip(x.registers.flat, y.registers.flat, strict=True):
                u, w = (
                    vector.extract(z, [], [0]) if isinstance(z.type, ir.VectorType) else z
                    for z in (u, w)
                )
                greater = arith.cmpf(arith.CmpFPredicate.OGT, u, w)
                found = greater if found is None else arith.ori(found, greater)
            vote_any = nvvm.vote_sync(i32_const(-1), found, "any")
            return mgpu.FragmentedArray.splat(vote_any, (), is_signed=False)

        return vote(a, b)

    @staticmethod
    def reciprocal(tile, *, pair_axis: int | None = None):
        """1 / x of an accumulator, to an ulp: one instruction, of which a division takes five.

        pair_axis: two of a thread's elements along this axis share it, as the GPU makes few of
        them in the time of a product: 1 / x = y / (x y). Then x is at least 1, counts as 2^60 at
        the most (x y must be a float32), and NaN makes both NaN.
        """
        out = plgpu.ShapeDtypeStruct(tile.shape, tile.dtype, layout=ACC_LAYOUT)

        def shared(x, y):
            most = arith.constant(x.type, ir.FloatAttr.get(x.type, 2.0**60))
            x, y = (arith.minimumf(value, most) for value in (x, y))
            both = nvvm.rcp_approx_ftz_f(arith.mulf(x, y))
            return arith.mulf(both, y), arith.mulf(both, x)

        @inline_mgpu(arg_types=(ACC_LAYOUT,), return_type=out)
        def invert(_, x):
            values = values_of(x)
            if pair_axis is None:
                values = [nvvm.rcp_approx_ftz_f(value) for value in values]
            else:
                apart = (2, 1)[pair_axis]  # rows, columns: see `registers.element`
                for i in range(len(values)):
                    if i & apart == 0:
                        values[i], values[i + apart] = shared(values[i], values[i + apart])
            return accumulator(values, tile.shape, is_signed=None)

        return invert(tile)

    @staticmethod
    def all_within(tile, limit):
        """|x| <= limit for all that this warp holds of an accumulator; see `any_greater`."""
        answer = plgpu.ShapeDtypeStruct((), jnp.dtype(bool), layout=SCALAR_LAYOUT)

        @inline_mgpu(arg_types=(ACC_LAYOUT, SCALAR_LAYOUT), return_type=answer)
        def vote(_, x, limit):
            most = None
            for value in values_of(x):
                size = mlir_math.absf(value)
                most = size if most is None else arith.maximumf(most, size)
            within = arith.cmpf(arith.CmpFPredicate.OLE, most, limit.registers.flat[0])
            vote_all = nvvm.vote_sync(i32_const(-1), within, "all")
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

        @inline_mgpu(arg_types=(ACC_LAYOUT, *[SCALAR_LAYOUT] * len(names)), return_type=out)
        def hide(_, acc, *limits):
            layout, acc = acc.layout, acc.to_layout(fa.WGMMA_LAYOUT_ACC_32BIT)
            limit = {n: x.registers.flat[0] for n, x in zip(names, limits, strict=True)}
            row, col = first_element()
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
                drow, dcol = element(i)
                test = {
                    "ge": (less_equal, dcol - drow),
                    "le": (greater_equal, dcol - drow),
                    "col_end": (greater, dcol),
                    "row_end": (greater, drow),
                }
                keep = None
                for n in names:
                    predicate, offset = test[n]
                    one = arith.cmpi(predicate, at[n], i32_const(offset))
                    keep = one if keep is None else arith.andi(keep, one)
                kept = arith.select(keep, llvm.extractelement(value, i32_const(0)), minus_inf)
                registers.flat[i] = llvm.insertelement(
                    llvm.mlir_undef(value.type), kept, i32_const(0)
                )
            return fa.FragmentedArray(
                _registers=registers, _layout=acc.layout, _is_signed=None
            ).to_layout(layout)

        return hide(scores, *tests.values())

    @staticmethod
    def whole_tiles(x, rows: int, cols: int):
        """An array that `load_tile` will read, as it wants it: here as it is."""
        del rows, cols
        return x

    @staticmethod
    def dq_writers(num_blocks: int) -> int:
        """Slices of the dq buffer a tile needs: all blocks add into one."""
        del num_blocks
        return 1

    @staticmethod
    def add_dq(dq, ref, *, where=True) -> None:
        """ref (GMEM, flat float32) += dq, in register order [m/64, n/8, 128 threads, 4].

        A warp's red.v4 covers 512 contiguous bytes; scalar atomic_add took 3x the kernel's time.
        where: a scalar; False adds nothing, without a branch.
        """

        @inline_mgpu(arg_types=(ACC_LAYOUT, plgpu.RefType(), SCALAR_LAYOUT))
        def red_add(_, acc, out, where):
            where = where.registers.flat[0]
            values = values_of(acc)
            f32 = ir.F32Type.get()
            offset = arith.muli(thread_in_warpgroup(), i32_const(4))
            base = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(out), [offset], f32)
            for g in range(len(values) // 4):
                at = mgpu.utils.getelementptr(base, [g * 512], f32)
                void_asm(
                    [where, at, *values[4 * g : 4 * g + 4]],
                    "@$0 red.relaxed.gpu.global.add.v4.f32 [$1], {$2, $3, $4, $5};",
                    "b,l,f,f,f,f",
                )

        red_add(dq, ref, jnp.bool_(where))

    @staticmethod
    def store_dq(dq, ref, *, where) -> None:
        """ref (GMEM, rows of a larger array) = dq [64, n] of 16 bits; where: as in `add_dq`."""

        @inline_mgpu(arg_types=(ACC_LAYOUT, plgpu.RefType(), SCALAR_LAYOUT))
        def store(_, tile, out, where):
            where = where.registers.flat[0]
            (stride, _), _ = ir.MemRefType(out.type).get_strides_and_offset()
            row, col = first_element()
            dtype, i32 = tile.mlir_dtype, ir.IntegerType.get_signless(32)
            first = arith.addi(arith.muli(row, i32_const(stride)), col)
            base = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(out), [first], dtype)
            for i, pair in enumerate(pairs_of(tile)):
                drow, dcol = element(2 * i)
                at = mgpu.utils.getelementptr(base, [drow * stride + dcol], dtype)
                word = llvm.bitcast(i32, pair)
                void_asm([where, at, word], "@$0 st.global.b32 [$1], $2;", "b,l,r")

        store(dq, ref, jnp.bool_(where))

    @staticmethod
    def order_dq(dq: jax.Array, m: int, n: int) -> jax.Array:
        """[..., m * n] as `add_dq` left it -> [..., m, n]."""
        lead = dq.shape[:-1]
        # m/64, n/8, warp, lane / 4, lane % 4, row half, column
        dq = dq.reshape(*lead, m // 64, n // 8, 4, 8, 4, 2, 2)
        k = len(lead)
        order = (k, k + 2, k + 5, k + 3, k + 1, k + 4, k + 6)
        return dq.transpose(*range(k), *order).reshape(*lead, m, n)
