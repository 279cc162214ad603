"""-lse and -delta in parts, so that a matrix product adds them to every key of a tile.

A step of the backward needs both statistics of its queries. Read from shared memory, by each thread
for its own columns, they took 18 % of its cycles at head_dim 128 (Nsight Compute, H200), and shared
memory is what the kernel is bound by. So a query has a row of bfloat16: three parts of each
statistic, whose sum is the float32 to the last bit. A product of that row with ones, for the
columns of one statistic, and zeros for the others starts the accumulator: 16 bytes a query are
read, by the tensor cores, and no register is written before the product that follows.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.kernels.sm90 import issue_mma
from pallas_flash.kernels.sm90.registers import (
    ACC_LAYOUT,
    accumulator,
    inline_mgpu,
    values_of,
)

COLUMNS = 8  # of a row: 16 bytes, the narrowest that wgmma reads; column 3 and 7 are zero
LSE, DELTA = 0, 4  # first of the three columns of a statistic
HIDDEN = -(2.0**127)  # for -inf, which times zero would be NaN
_TOP_HALF = np.int32(-(1 << 16))


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
    """A statistic of each query, in every row of an accumulator [64, queries]; see `issue_mma`.

    Args:
      parts: [queries, COLUMNS] in shared memory, rows one after the other.
      first: column of its first part.
      onto: a tile that it is added to.
    """
    queries = parts.shape[0]
    out = plgpu.ShapeDtypeStruct((64, queries), jnp.dtype(jnp.float32), layout=ACC_LAYOUT)

    def product(_, parts, onto=None):
        # Eight rows of 16 bytes follow eight rows. Columns 8 to 15 are the same bytes again, which
        # meet zeros.
        rows = issue_mma.descriptor(parts, leading=0, stride=8 * COLUMNS * 2)
        values = issue_mma.issue(
            None if onto is None else values_of(onto),
            [["ones", "ones", "zeros", "zeros"]],
            [rows],
            queries,
            dtype="bfloat16",
            b_transposed=False,
            ahead=_ones_and_zeros(first),
        )
        return accumulator(values, (64, queries), is_signed=None)

    if onto is None:
        return inline_mgpu(arg_types=(plgpu.RefType(),), return_type=out)(product)(parts)
    types = (plgpu.RefType(), ACC_LAYOUT)
    return inline_mgpu(arg_types=types, return_type=out)(product)(parts, onto)


def _ones_and_zeros(first: int) -> str:
    """A lane's two neighbours in a row of eight: 1 in columns first to first + 2, else 0.

    Made by the instruction's own text, anew in every step: values kept over the loops would cost
    them their last registers, and ptxas would let no product run beside another. A shift by more
    than 31 leaves zero.
    """
    return (
        ".reg .b32 ones, zeros; mov.b32 zeros, 0;"
        f" mov.u32 ones, %laneid; and.b32 ones, ones, 3; sub.u32 ones, ones, {first // 2};"
        " shl.b32 ones, ones, 4; shr.u32 ones, 0x3f803f80, ones;"
    )
