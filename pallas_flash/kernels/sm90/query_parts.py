"""-lse and -delta in parts, so that a matrix product adds them to every key of a tile.

A step of the backward needs both statistics of its queries. Read from shared memory, by each thread
for its own columns, they take a twelfth of what shared memory can move at head_dim 128, and that is
what the kernel is bound by. So a query has a row of bfloat16: three parts of each statistic, whose
sum is the float32 to the last bit. A product of that row with ones, for the columns of one
statistic, and zeros for the others starts the accumulator: 16 bytes a query are read, by the tensor
cores, and no register is written before the product that follows.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_flash.kernels.sm90.registers import (
    ACC_LAYOUT,
    accumulator,
    inline_mgpu,
)

COLUMNS = 8  # of a row: 16 bytes, the narrowest that wgmma reads; column 3 and 7 are zero
LSE, DELTA = 0, 4  # first of the three columns of a statistic
HIDDEN = -(2.0**127)  # for -inf, which times zero would be NaN
_TOP_HALF = np.int32(-(1 << 16))
_MMA_COLUMNS = 16  # of one wgmma: it reads each row twice, and multiplies the second by zeros


def split(neg_lse, neg_delta):
    """Parts of two statistics, for a kernel to store.

    [n] each, float32, in `registers.ROW_LAYOUT` -> [n, COLUMNS], bfloat16
    """
    shape = (neg_lse.shape[0], COLUMNS)
    column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=ACC_LAYOUT)
    parts = jnp.zeros(shape, jnp.float32)
    parts = plgpu.layout_cast(parts, ACC_LAYOUT)
    for first, rest in ((LSE, jnp.maximum(neg_lse, HIDDEN)), (DELTA, neg_delta)):
        for i in range(3):
            part = _top_half(rest)
            rest = rest - part
            part = lax.broadcast_in_dim(part, shape, (0,))
            parts = jnp.where(column == first + i, part, parts)
    return parts.astype(jnp.bfloat16)


def _top_half(x):
    """x without its lower 16 bits: a bfloat16. No rounding, which a compiler might take out."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return lax.bitcast_convert_type(bits & _TOP_HALF, jnp.float32)


def total(parts: jax.Array, first: int) -> jax.Array:
    """The statistic again, outside of a kernel. (..., COLUMNS) -> (...), float32"""
    return parts[..., first : first + 3].astype(jnp.float32).sum(-1)


def in_every_row(parts, first: int, onto=None):
    """A statistic of each query, in every row of an accumulator [64, queries].

    Issued and not waited for: the result is for `op.set`, and nothing else may read it before a
    product that was issued later is there. Nothing may touch `onto` in between.

    Args:
      parts: [queries, COLUMNS] in shared memory, rows one after the other.
      first: column of its first part.
      onto: a tile that it is added to.
    """
    queries = parts.shape[0]
    out = plgpu.ShapeDtypeStruct((64, queries), jnp.float32, layout=ACC_LAYOUT)

    def product(_, parts, onto=None):
        f32, count = ir.F32Type.get(), queries // 2
        given = []
        if onto is not None:
            onto = onto.to_layout(fa.WGMMA_LAYOUT_ACC_32BIT)
            given = [vector.extract(register, [], [0]) for register in onto.registers.flat]
        results = ", ".join(f"${i}" for i in range(count))
        # Ones for k = first, first + 1, first + 2. A lane has k = 2 * (lane % 4) and the next, in
        # one register for two rows; two more registers are for k + 8. A shift past 31 makes zero.
        text = (
            "{ .reg .b32 ones, zeros; .reg .pred adds; mov.b32 zeros, 0;"
            f" mov.u32 ones, %laneid; and.b32 ones, ones, 3; sub.u32 ones, ones, {first // 2};"
            " shl.b32 ones, ones, 4; shr.u32 ones, 0x3f803f80, ones;"
            f" setp.ne.b32 adds, {int(bool(given))}, 0;"
            " wgmma.fence.sync.aligned;"
            f" wgmma.mma_async.sync.aligned.m64n{queries}k{_MMA_COLUMNS}.f32.bf16.bf16"
            f" {{{results}}}, {{ones, ones, zeros, zeros}}, ${count + len(given)}, adds, 1, 1, 0;"
            " wgmma.commit_group.sync.aligned; }"
        )
        constraints = ["=f"] * count + [str(i) for i in range(len(given))] + ["l"]
        struct = llvm.StructType.get_literal([f32] * count)
        operands = [*given, _descriptor(parts)]
        made = llvm.inline_asm(struct, operands, text, ",".join(constraints), has_side_effects=True)
        values = [llvm.extractvalue(f32, made, [i]) for i in range(count)]
        return accumulator(values, (64, queries), is_signed=None)

    if onto is None:
        return inline_mgpu(arg_types=(plgpu.RefType(),), return_type=out)(product)(parts)
    types = (plgpu.RefType(), ACC_LAYOUT)
    return inline_mgpu(arg_types=types, return_type=out)(product)(parts, onto)


def _descriptor(parts):
    """Of a wgmma operand without a swizzle: 8 rows of 16 bytes follow 8 rows.

    The next 8 columns are 0 bytes away: the same ones again.
    """
    i64 = ir.IntegerType.get_signless(64)
    const = lambda value: mgpu.utils.c(value, i64)
    address = llvm.ptrtoint(ir.IntegerType.get_signless(32), mgpu.utils.memref_ptr(parts))
    in_pieces = arith.shrui(arith.andi(arith.extui(i64, address), const(0x3FFFF)), const(4))
    return arith.ori(in_pieces, const((8 * 16 >> 4) << 32))
