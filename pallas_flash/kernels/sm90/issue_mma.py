"""wgmma written by hand, for what Mosaic's does not: no start value, and part of a swizzle's rows.

What is issued here is not waited for. The result is for `op.set` of an accumulator, and nothing may
read it before a product that was issued later is there.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_flash.kernels.sm90 import smem
from pallas_flash.kernels.sm90.registers import (
    ACC_LAYOUT,
    accumulator,
    inline_mgpu,
    shared_address,
    values_of,
)

STEP = 16  # numbers of 16 bits that one wgmma sums over
ATOM_BYTES = 8 * 128  # 8 rows of 128 bytes: what the widest swizzle permutes
_NAMES = {"bfloat16": "bf16", "float16": "f16"}


def issue(
    given: Sequence[ir.Value] | None,
    a: Sequence[ir.Value | Sequence[ir.Value | str]],
    b: Sequence[ir.Value],
    n: int,
    *,
    dtype: str,
    b_transposed: bool,
    ahead: str = "",
) -> list[ir.Value]:
    """An accumulator [64, n] plus a @ b, as this thread's values.

    Args:
      given: values of the accumulator so far; None for zero.
      a: of every step of 16 a descriptor (rows lie one after the other), or four words or names
        of registers that `ahead` declares.
      b: a descriptor of every step.
      n: columns.
      dtype: of a and b.
      b_transposed: rows of b lie in memory one after the other, not its columns.
      ahead: PTX to run before.
    """
    f32, count, name = ir.F32Type.get(), n // 2, _NAMES[dtype]
    operands = [*(given or [])]
    constraints = ["=f"] * count + [str(i) for i in range(len(operands))]
    results = ", ".join(f"${i}" for i in range(count))

    def operand(value: ir.Value, constraint: str) -> str:
        operands.append(value)
        constraints.append(constraint)
        return f"${len(constraints) - 1}"

    lines = ["wgmma.fence.sync.aligned;"]
    for step, (rows, columns) in enumerate(zip(a, b, strict=True)):
        if isinstance(rows, ir.Value):
            left, transposed = operand(rows, "l"), f"0, {int(b_transposed)}"
        else:
            words = [word if isinstance(word, str) else operand(word, "r") for word in rows]
            left, transposed = f"{{{', '.join(words)}}}", f"{int(b_transposed)}"
        lines.append(
            f"wgmma.mma_async.sync.aligned.m64n{n}k{STEP}.f32.{name}.{name} {{{results}}},"
            f" {left}, {operand(columns, 'l')}, {'more' if step else 'adds'}, 1, 1, {transposed};"
        )
    lines.append("wgmma.commit_group.sync.aligned;")
    adds = f".reg .pred adds, more; setp.ne.b32 adds, {int(given is not None)}, 0;"
    adds += " setp.ne.b32 more, 1, 0;"
    struct = llvm.StructType.get_literal([f32] * count)
    text = f"{{ {ahead} {adds} {' '.join(lines)} }}"
    made = llvm.inline_asm(struct, operands, text, ",".join(constraints), has_side_effects=True)
    return [llvm.extractvalue(f32, made, [i]) for i in range(count)]


def descriptor(ref, *, leading: int, stride: int, swizzle: int = 0, offset: int = 0) -> ir.Value:
    """Of an operand in shared memory.

    Args:
      ref: where the memory begins.
      leading: bytes to the next piece of the operand in its contiguous direction.
      stride: bytes to the next eight rows.
      swizzle: 0, 32, 64 or 128 bytes.
      offset: bytes from the beginning of `ref`.
    """
    i64 = ir.IntegerType.get_signless(64)
    const = lambda value: mgpu.utils.c(value, i64)
    address = arith.extui(i64, shared_address(ref))
    pieces = arith.shrui(arith.andi(address, const(0x3FFFF)), const(4))
    kind = {0: 0, 128: 1, 64: -2, 32: -1}[swizzle]  # two bits, as a signed number
    layout = (leading >> 4 << 16) | (stride >> 4 << 32) | (kind << 62)
    return arith.addi(arith.ori(pieces, const(layout)), const(offset >> 4))


def rows_times_rows(a, b) -> jax.Array:
    """a @ b^T, of tiles [64, n] and [m, n] in shared memory as `tiled_smem` has them."""
    n, dtype = b.shape[0], jnp.dtype(a.dtype).name
    out = plgpu.ShapeDtypeStruct((64, n), jnp.dtype(jnp.float32), layout=ACC_LAYOUT)
    tiled = plgpu.RefType(smem.transforms(a.shape[1], dtype))

    def product(_, a, b):
        rows, columns = _steps_of_rows(a), _steps_of_rows(b)
        values = issue(None, rows, columns, n, dtype=dtype, b_transposed=False)
        return accumulator(values, (64, n), is_signed=None)

    return inline_mgpu(arg_types=(tiled, tiled), return_type=out)(product)(a, b)


def _steps_of_rows(ref) -> list[ir.Value]:
    """A descriptor of every 16 columns of a tile as `tiled_smem` has it."""
    _, pieces, eight, width = ir.MemRefType(ref.type).shape
    piece = eight * 2 * width
    return [
        descriptor(
            ref,
            leading=0,  # not read: 16 columns lie in one swizzle
            stride=pieces * piece,
            swizzle=2 * width,
            offset=column // width * piece + column % width * 2,
        )
        for column in range(0, pieces * width, STEP)
    ]


def add_rows(given, a, b, first: int):
    """given + a @ b[first : first + a.shape[1]], in sixteens, where Mosaic wants whole swizzles.

    Args:
      given: an accumulator [64, n], which products in flight may still add to.
      a: [64, rows] in registers.
      b: [all rows, n] in shared memory, n a multiple of 64, as `tiled_smem` has it.
      first: static.
    """
    n, dtype = b.shape[1], jnp.dtype(a.dtype).name
    out = plgpu.ShapeDtypeStruct((64, n), jnp.dtype(jnp.float32), layout=ACC_LAYOUT)
    tiled = plgpu.RefType(smem.transforms(n, dtype))
    eight_rows = n // 64 * ATOM_BYTES
    starts = [row // 8 * eight_rows for row in range(first, first + a.shape[1], STEP)]

    def product(_, given, a, b):
        words = [llvm.bitcast(ir.IntegerType.get_signless(32), pair) for pair in a.registers.flat]
        rows = [
            descriptor(b, leading=ATOM_BYTES, stride=eight_rows, swizzle=128, offset=start)
            for start in starts
        ]
        steps = [words[4 * i : 4 * i + 4] for i in range(len(rows))]
        values = issue(values_of(given), steps, rows, n, dtype=dtype, b_transposed=True)
        return accumulator(values, (64, n), is_signed=None)

    return inline_mgpu(arg_types=(ACC_LAYOUT, ACC_LAYOUT, tiled), return_type=out)(product)(
        given, a, b
    )
