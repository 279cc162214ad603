"""How a tile lies in the registers of a warpgroup, and the few words of MLIR that say so.

A tile [64, n] in `ACC_LAYOUT` is what a wgmma accumulates: warp w holds rows 16 w to 16 w + 15, a
thread two neighbours of every eight columns, in two rows.
"""

import functools
from typing import Any

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

ACC_LAYOUT = plgpu.Layout.WGMMA
ROW_LAYOUT = plgpu.Layout.WGMMA.reduce(1)  # one value a row of an accumulator
COL_LAYOUT = plgpu.Layout.WGMMA.reduce(0)  # one value a column of an accumulator
SCALAR_LAYOUT = plgpu.Layout.WG_SPLAT


def inline_mgpu(**types: Any) -> Any:
    """A body of MLIR: its arguments are the launch context and what `types` says."""
    return plgpu.inline_mgpu(**types)


def i32_const(value: int):
    return mgpu.utils.c(value, ir.IntegerType.get_signless(32))


def times(x, n: int):
    return arith.muli(x, i32_const(n))


def shifted(x, n: int):
    """x >> n."""
    return arith.shrui(x, i32_const(n))


def low(x, n: int):
    """x mod n, a power of two."""
    return arith.andi(x, i32_const(n - 1))


def added(*terms):
    return functools.reduce(arith.addi, terms)


def shared_address(ref):
    """Where a buffer in shared memory begins, 32 bits."""
    return llvm.ptrtoint(ir.IntegerType.get_signless(32), mgpu.utils.memref_ptr(ref))


def load_matrices(address, *, transposed: bool) -> list[ir.Value]:
    """ldmatrix of four matrices, of each of which eight lanes name the rows: two numbers a word."""
    i32 = ir.IntegerType.get_signless(32)
    trans = ".trans" if transposed else ""
    found = llvm.inline_asm(
        llvm.StructType.get_literal([i32] * 4),
        [address],
        f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{$0, $1, $2, $3}}, [$4];",
        "=r,=r,=r,=r,r",
        has_side_effects=True,
    )
    return [llvm.extractvalue(i32, found, [i]) for i in range(4)]


def floats_of(words, stored) -> list[ir.Value]:
    """Words of two numbers of 16 bits each -> float32."""
    pair, f32, floats = ir.VectorType.get((2,), stored), ir.F32Type.get(), []
    for word in words:
        both = llvm.bitcast(pair, word)
        floats += [arith.extf(f32, vector.extract(both, [], [i])) for i in range(2)]
    return floats


def void_asm(operands, text: str, constraints: str) -> None:
    void = ir.Type.parse("!llvm.void")
    llvm.inline_asm(void, operands, text, constraints, has_side_effects=True)


def thread_in_warpgroup():
    return arith.andi(mgpu.utils.thread_idx(), i32_const(127))


def first_element():
    """Row and column of this thread's first element of an accumulator [64, n]."""
    thread = thread_in_warpgroup()
    lane = arith.andi(thread, i32_const(31))
    warp_row = arith.muli(arith.shrui(thread, i32_const(5)), i32_const(16))
    row = arith.addi(arith.shrui(lane, i32_const(2)), warp_row)
    return row, arith.muli(arith.andi(lane, i32_const(3)), i32_const(2))


def element(i: int) -> tuple[int, int]:
    """How many rows and columns this thread's element `i` lies behind its first."""
    return 8 * (i % 4 // 2), 8 * (i // 4) + i % 2


def opaque(value):
    """The same number, about which the compiler knows nothing: what is added stays an immediate.

    Otherwise the sums of thread and element would be hoisted out of the loops, into 32 registers.
    """
    return llvm.inline_asm(value.type, [value], "mov.b32 $0, $1;", "=r,r", has_side_effects=True)


def values_of(tile) -> list[ir.Value]:
    """A FragmentedArray in ACC_LAYOUT -> one value an element, in the order of `element`."""
    tile = tile.to_layout(fa.WGMMA_LAYOUT_ACC_32BIT)
    return [vector.extract(register, [], [0]) for register in tile.registers.flat]


def pairs_of(tile) -> list[ir.Value]:
    """The same of a tile of 16 bits: vectors of two neighbours of a row."""
    order = tile.to_layout(fa.WGMMA_LAYOUT)
    return list(order.registers.flat)


def accumulator(values, shape: tuple[int, int], *, is_signed: bool | None):
    """One value an element, in the order of `element` -> a FragmentedArray in ACC_LAYOUT."""
    layout = fa.WGMMA_LAYOUT_ACC_32BIT
    registers = np.empty(layout.registers_shape(shape), dtype=object)
    for i, value in enumerate(values):
        vector_type = ir.VectorType.get((1,), value.type)
        registers.flat[i] = vector.broadcast(vector_type, value)
    return fa.FragmentedArray(_registers=registers, _layout=layout, _is_signed=is_signed).to_layout(
        fa.WGMMA_LAYOUT
    )
