"""The two ends of the fused backward: kernels that only move memory, before it and after it.

    row_dots     rowsum(out * dout)
    zeros_after  what dq and the gradient of a bias are added into
    finish_dq    dq in register order, times a factor, to where a gradient of the queries belongs

A block of the grid is 64 queries of one head, heads fastest: blocks that run together make whole
rows of (T, N, H). Nothing is pipelined inside a block: several of them are on an SM, so that some
copy while others compute. `row_dots` reads out and dout by TMA, 8 lanes to a row; `finish_dq` has
one warpgroup for each 64 columns (for a row that is no multiple of them, one), which reads the
accumulator just as `mma.GpuOps.add_dq` added it.

Strips of 64 queries behind a query length (or T) are not read; `finish_dq` writes zeros there.

| barrier | arrives | waits | count |
|---|---|---|---|
| ready (row_dots) | copies of out and dout | the warpgroup | 1 of 2 |
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.kernels.sm90 import loads, registers
from pallas_flash.kernels.sm90.call import div, rem
from pallas_flash.kernels.sm90.mma_interpret import InterpretOps
from pallas_flash.kernels.sm90.smem import tiled_smem

STRIP = 64  # queries of one block
COLUMNS = 64  # of head_dim, of one warpgroup of finish_dq
ZEROS = 4096  # of one block of zeros_after: most tiles of dq and of a bias are whole blocks


def row_dots(
    out: jax.Array,
    dout: jax.Array,
    *,
    q_len: int,
    query_lengths: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """rowsum(out * dout): what the backward kernel needs first.

    Args:
      out: (B, T, N, Hv), bfloat16 or float16, T a multiple of 8, Hv of 16. Behind a length it may
        hold anything.
      dout: (B, T, N, Hv).
      q_len: queries without padding.
      query_lengths: int32 (B,), in [0, q_len].
      interpret: run in Pallas' interpret mode.

    Returns:
      float32 (B, N, T rounded up to a multiple of 64). Rows at or behind a query length or q_len
      mean nothing.
    """
    batch, _, heads, head_dim_v = out.shape
    strips = -(-q_len // STRIP)
    has_lengths = query_lengths is not None

    def body(*refs, buffers, sums, ready):
        arrays, delta = refs[:2], refs[-1]
        b, strip, head = _place(strips, heads)
        row0 = strip * STRIP

        def run():
            for array, buffer in zip(arrays, buffers, strict=True):
                rows = array.at[b, pl.ds(row0, STRIP), head]
                plgpu.copy_gmem_to_smem(rows, buffer, ready)
            plgpu.barrier_wait(ready)
            sums[...] = _row_dots(*buffers)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(sums, delta.at[b, head, pl.ds(row0, STRIP)])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        _when_valid(refs[2] if has_lengths else None, b, row0, run)

    (delta,) = _kernel(
        body,
        [jax.ShapeDtypeStruct((batch, heads, strips * STRIP), jnp.float32)],
        "flash_backward_row_dots",
        blocks=batch * strips * heads,
        interpret=interpret,
        buffers=[plgpu.SMEM((STRIP, head_dim_v), x.dtype) for x in (out, dout)],
        sums=plgpu.SMEM((STRIP,), jnp.float32),
        ready=plgpu.Barrier(num_arrivals=2),
    )(out, dout, *([query_lengths] if has_lengths else []))
    return delta


def zeros_after(
    after: jax.Array, shape: tuple[int, ...], *, dtype: Any = jnp.float32, interpret: bool = False
) -> jax.Array:
    """Zeros of `shape`, rows of a multiple of 512, made no earlier than `after`.

    So whatever `after` was made from can be freed before. XLA's own fill reaches three quarters of
    the bandwidth.
    """
    size, row = math.prod(shape), shape[-1]
    piece = ZEROS if row % ZEROS == 0 else row

    def body(_, zeros):
        zero, vector = jnp.zeros((piece,), dtype), 16 // jnp.dtype(dtype).itemsize
        zero = plgpu.layout_cast(zero, plgpu.Layout.WG_STRIDED((piece,), vec_size=vector))
        zeros[lax.axis_index("block")] = zero

    (zeros,) = _kernel(
        body,
        [jax.ShapeDtypeStruct((size // piece, piece), dtype)],
        "flash_backward_zeros",
        blocks=size // piece,
        interpret=interpret,
    )(after)
    return zeros.reshape(shape)


def finish_dq(
    dq: jax.Array,
    factor: jax.Array,
    *,
    shape: tuple[int, int, int, int],
    dtype: Any,
    block_q: int,
    q_len: int,
    query_lengths: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """The gradient of the queries from the buffer that the backward kernel added into.

    Args:
      dq: float32 (writers, B, N * q tiles, block_q * H), each tile in the order of `mma.add_dq`.
      factor: float32 (B,).
      shape: (B, T, N, H), T = q_len rounded up to a multiple of 8.
      dtype: of the result, bfloat16, float16 or float32.
      block_q: rows of a tile of dq, 64 or 128.
      q_len: queries without padding.
      query_lengths: int32 (B,), in [0, q_len].
      interpret: the buffer comes from interpret mode.

    Returns:
      `shape`: dq * factor[b], 0 at and behind a query length.
    """
    if interpret:
        return _finish_in_xla(dq, factor, shape, dtype, block_q, query_lengths)
    batch, _, heads, head_dim = shape
    strips = -(-q_len // STRIP)
    has_lengths = query_lengths is not None
    columns = head_dim if head_dim % COLUMNS else COLUMNS  # of one warpgroup
    piece = STRIP * columns

    def body(*refs, staged):
        source, factors, out = refs[0], refs[1], refs[-1]
        b, strip, head = _place(strips, heads)
        wg = lax.axis_index("wg")
        row0, tile = strip * STRIP, staged.at[wg]

        def read():
            row, first = _strip_of_dq(block_q, head_dim, q_len, head, strip)
            part = source.at[0, b, row, pl.ds(first + wg * piece, piece)]
            tile[...] = (loads.load_added(part, (STRIP, columns)) * factors[b]).astype(dtype)

        def clear():
            zero = jnp.zeros((STRIP, columns), dtype)
            tile[...] = plgpu.layout_cast(zero, registers.ACC_LAYOUT)

        _when_valid(refs[2] if has_lengths else None, b, row0, read, clear)
        plgpu.commit_smem()
        at = b, pl.ds(row0, STRIP), head, pl.ds(wg * columns, columns)
        plgpu.copy_smem_to_gmem(tile, out.at[at])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    (result,) = _kernel(
        body,
        [jax.ShapeDtypeStruct(shape, dtype)],
        "flash_backward_finish_dq",
        blocks=batch * strips * heads,
        warpgroups=head_dim // columns,
        staged=tiled_smem((head_dim // columns, STRIP, columns), dtype),
    )(dq, factor, *([query_lengths] if has_lengths else []))
    return result


def _kernel(body, out_types, name: str, *, blocks: int, warpgroups=1, interpret=False, **scratch):
    return plgpu.kernel(
        body,
        out_type=out_types,
        scratch_types=scratch,
        grid=(blocks,),
        grid_names=("block",),
        num_threads=warpgroups,
        thread_name="wg",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=0,
            lowering_semantics=mgpu.LoweringSemantics.Lane,
        ),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else None,
    )


def _place(strips: int, heads: int):
    """Batch row, strip and head of this block."""
    block = lax.axis_index("block")
    row, head = div(block, heads), rem(block, heads)
    return div(row, strips), rem(row, strips), head


def _when_valid(lengths, b, row0, run, otherwise=None) -> None:
    """run() where the strip at row0 begins before the length of batch row b."""
    if lengths is None:
        run()
        return
    valid = row0 < lengths[b]
    pl.when(valid)(run)
    if otherwise is not None:
        pl.when(jnp.logical_not(valid))(otherwise)


def _strip_of_dq(block_q: int, head_dim: int, q_len: int, head, strip):
    """Row of the dq buffer that holds this strip, and its first float there."""
    strips_a_tile = block_q // STRIP
    row = head * -(-q_len // block_q) + div(strip, strips_a_tile)
    return row, rem(strip, strips_a_tile) * (STRIP * head_dim)


def _row_dots(x, y):
    """Sums over the rows of x * y, two tiles in shared memory, in float32."""
    layout = _lanes_a_row(x.shape[1])
    x, y = (plgpu.load(ref, layout=layout) for ref in (x, y))
    return (x.astype(jnp.float32) * y.astype(jnp.float32)).sum(1)


def _lanes_a_row(columns: int):
    """A layout for plain rows of a multiple of 16 columns: 16 bytes a lane, 8 lanes to a row.

    Of 64 columns a step, that is, or of the largest part of 64 that divides a row, by fewer lanes.
    A quarter warp reads 128 bytes in a row, or pieces whose rows are apart by an odd number of
    them: no bank conflicts. With 8 lanes a row's sum takes three shuffles.
    """
    step = math.gcd(columns, 64)
    lanes = step // 8
    tiling = fa.Tiling(((128 // lanes, step), (32 // lanes, step), (8,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


def _finish_in_xla(dq, factor, shape, dtype, block_q: int, query_lengths):
    """The same in XLA, for the buffer's order in interpret mode."""
    batch, q_len, heads, head_dim = shape
    dq = dq.sum(0).reshape(batch, heads, -1, block_q * head_dim)
    dq = InterpretOps.order_dq(dq, block_q, head_dim)  # (B, N, q tiles, block_q, H)
    dq = dq.reshape(batch, heads, -1, head_dim)[:, :, :q_len].swapaxes(1, 2)
    if query_lengths is not None:
        valid = jnp.arange(q_len)[None] < query_lengths[:, None]
        dq = jnp.where(valid[:, :, None, None], dq, 0.0)
    return (dq * factor[:, None, None, None]).astype(dtype)
