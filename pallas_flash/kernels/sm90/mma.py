"""The tensor-core seam: what a GPU and Pallas' interpret mode must spell differently, no more.

`ops(interpret)` returns one of two classes with the same static methods. A kernel calls them as
`op.wgmma(...)` and reads the same in both modes. GPU bodies that Pallas has no word for are written
with `inline_mgpu`; each is unit-tested alone on a GPU. In interpret mode accumulators are float32
shared memory, a matrix product is `lax.dot` on plain loads (which the race detector sees), and
`commit_smem` stands wherever the GPU needs only a fence.
"""

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
            thread = _thread_in_warpgroup()
            lane = arith.andi(thread, _i32_const(31))
            warp_row = arith.muli(arith.shrui(thread, _i32_const(5)), _i32_const(16))
            row = arith.addi(arith.shrui(lane, _i32_const(2)), warp_row)
            col = arith.muli(arith.andi(lane, _i32_const(3)), _i32_const(2))
            # The thread's first element sits at (row, col); element i is (drow, dcol) further on.
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
                drow, dcol = 8 * (i % 4 // 2), 8 * (i // 4) + i % 2
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
    def hide_outside(scores, bounds: masks.Bounds, q0, kv0, q_axis: int):
        shape = scores.shape
        q_pos = q0 + lax.broadcasted_iota(jnp.int32, shape, q_axis)
        kv_pos = kv0 + lax.broadcasted_iota(jnp.int32, shape, 1 - q_axis)
        return masks.hide(scores, bounds.allowed(q_pos, kv_pos))

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
