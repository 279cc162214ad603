"""The two ends of the fused backward: kernels that only move memory, before it and after it.

    row_statistics  -lse and -rowsum(out * dout) for the kernel to add, zeros for it to add dq into
    zeros_after     what the gradient of a bias is added into
    finish_dq       dq in register order, times a factor, to where a gradient of the queries belongs

A block of the grid is 64 queries of one head, heads fastest: blocks that run together make whole
rows of (T, N, H). Nothing is pipelined inside a block: several of them are on an SM, so that some
copy while others compute. `row_statistics` reads by TMA, out and dout with 8 lanes to a row, and
stores its zeros while the copies come; `finish_dq` has one warpgroup for each 64 columns (for a row
that is no multiple of them, one), which reads the accumulator just as `mma.GpuOps.add_dq` added it.

Strips of 64 queries behind a query length (or T) are not read; `row_statistics` writes there what
keeps a row out of everything, `finish_dq` zeros.

| barrier | arrives | waits | count |
|---|---|---|---|
| ready (row_statistics) | copies of out, dout, lse, any dlse | the warpgroup | 1 of 3 or 4 |
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.kernels.sm90 import loads, logits, query_parts, registers
from pallas_flash.kernels.sm90.backward_launch import Launch
from pallas_flash.kernels.sm90.call import Call, div, rem
from pallas_flash.kernels.sm90.mma_interpret import InterpretOps
from pallas_flash.kernels.sm90.smem import tiled_smem

STRIP = 64  # queries of one block
COLUMNS = 64  # of head_dim, of one warpgroup of finish_dq
ZEROS = 4096  # of one block of zeros_after: most tiles of dq and of a bias are whole blocks


class Statistics(NamedTuple):
    """What the fused backward takes of each query beside q and dout.

    Which of the first three there are `Launch.statistics` says; the others are None.

    Attributes:
      parts: bfloat16 (B, N, q tiles * block_q, 8), the next two for a product, see `query_parts`.
      neg_lse: float32 (B, N, q tiles * block_q), -lse in units of the scores; with a soft cap,
        after which it is added, `logits.capped_offset` of lse. -inf for a row that sees no key or
        lies behind a length or T.
      neg_delta: float32, the same shape: dlse - rowsum(out * dout), over the factor of dropout, as
        dP arrives; 0 where neg_lse is -inf.
      dq: float32 zeros to add dq into, (writers, B, N * q tiles, block_q * H); None unless the
        launch adds up dq.
    """

    parts: jax.Array | None
    neg_lse: jax.Array | None
    neg_delta: jax.Array | None
    dq: jax.Array | None

    def total_neg_delta(self) -> jax.Array:
        """neg_delta, of its parts if need be."""
        if self.neg_delta is not None:
            return self.neg_delta
        assert self.parts is not None
        return query_parts.total(self.parts, query_parts.DELTA)


class _Rows(NamedTuple):
    """What `row_statistics` reads, in global memory; None where absent.

    per_lse: float32 (1|B,), from lse to the units of the scores, without a soft cap.
    soft_cap: float32 (1|B,).
    """

    out: Any
    dout: Any
    lse: Any
    dlse: Any
    per_lse: Any
    soft_cap: Any
    query_lengths: Any


def row_statistics(
    launch: Launch,
    out: jax.Array,
    dout: jax.Array,
    lse: jax.Array,
    dlse: jax.Array | None,
    scale: jax.Array,
    soft_cap: jax.Array | None = None,
    query_lengths: jax.Array | None = None,
) -> Statistics:
    """What runs before the fused backward of this launch.

    Args:
      launch: the kernel that it is for.
      out: (B, T, N, Hv), bfloat16 or float16, T a multiple of 8, Hv of 16. Behind a length it may
        hold anything.
      dout: (B, T, N, Hv), the same.
      lse: float32 (B, N, >= q_len), natural log; -inf for a row that sees no key.
      dlse: float32 (B, N, >= q_len), or None for 0.
      scale: float32 (1|B,), positive.
      soft_cap: float32 (1|B,), positive, where the launch has one.
      query_lengths: int32 (B,), in [0, q_len].
    """
    heads, strips = launch.num_q_heads, launch.num_q_tiles * launch.config.block_q // STRIP
    rows = _Rows(
        out=out,
        dout=dout,
        lse=whole_strips(launch, lse, -jnp.inf),
        dlse=None if dlse is None else whole_strips(launch, dlse, 0.0),
        per_lse=1.0 / scale if soft_cap is None else None,
        soft_cap=soft_cap,
        query_lengths=query_lengths,
    )
    given, structure = jax.tree.flatten(rows)
    shape = launch.batch, heads, strips * STRIP
    alone = jax.ShapeDtypeStruct(shape, jnp.float32)
    parts = jax.ShapeDtypeStruct((*shape, query_parts.COLUMNS), jnp.bfloat16)
    kinds = dict(parts=parts, neg_lse=alone, neg_delta=alone)
    made = {name: kinds[name] for name in launch.statistics}
    made |= dict(dq=_dq_sums(launch)) if launch.adds_dq else {}

    def body(*refs, tiles, read, alone, parts, ready):
        gmem = jax.tree.unflatten(structure, refs[: len(given)])
        out = dict(zip(made, refs[len(given) :], strict=True))
        b, strip, head = _place(strips, heads)
        row0 = strip * STRIP
        end = _first_without_meaning(launch, gmem.query_lengths, b, strips)

        def write(statistics):
            alone[0], alone[1] = statistics

        def run():
            plgpu.barrier_wait(ready)
            write(_statistics(launch, gmem, tiles, read, b, row0))

        copy = lambda: _copy_rows(gmem, b, row0, head, tiles, read, ready)
        _when_before(end, row0, copy)
        if launch.adds_dq:  # while the copies come
            _clear_strip(launch, out["dq"], b, head, strip)
        _when_before(end, row0, run, lambda: write(_no_statistics(launch)))
        plgpu.commit_smem()
        if "parts" in out:
            rows = (plgpu.load(alone.at[i], layout=registers.ROW_LAYOUT) for i in range(2))
            parts[...] = query_parts.split(*rows)
            plgpu.commit_smem()
        written = dict(parts=parts, neg_lse=alone.at[0], neg_delta=alone.at[1])
        for name in launch.statistics:
            plgpu.copy_smem_to_gmem(written[name], out[name].at[b, head, pl.ds(row0, STRIP)])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    results = _kernel(
        body,
        [*made.values()],
        "flash_backward_statistics",
        blocks=launch.batch * strips * heads,
        interpret=launch.interpret,
        tiles=[plgpu.SMEM((STRIP, launch.head_dim_v), x.dtype) for x in (out, dout)],
        read=plgpu.SMEM((2, STRIP), jnp.float32),
        alone=plgpu.SMEM((2, STRIP), jnp.float32),
        parts=plgpu.SMEM((STRIP, query_parts.COLUMNS), jnp.bfloat16),
        ready=plgpu.Barrier(num_arrivals=2 + len(_statistics_of(rows))),
    )(*given)
    none = dict.fromkeys(Statistics._fields)
    return Statistics(**none | dict(zip(made, results, strict=True)))


def whole_strips(call: Call, statistic, fill: float):
    """(B, N, >= q_len) -> (B, N, whole strips), `fill` behind q_len."""
    rows = -(-call.q_len // STRIP) * STRIP
    statistic = statistic[..., : call.q_len]
    if rows == call.q_len:
        return statistic
    padding = ((0, 0), (0, 0), (0, rows - call.q_len))
    return jnp.pad(statistic, padding, constant_values=fill)


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
      factor: float32 (1|B,).
      shape: (B, T, N, H), T = q_len rounded up to a multiple of 8.
      dtype: of the result, bfloat16, float16 or float32.
      block_q: rows of a tile of dq, 64 or 128.
      q_len: queries without padding.
      query_lengths: int32 (B,), in [0, q_len].
      interpret: the buffer comes from interpret mode.

    Returns:
      `shape`: dq * factor, 0 at and behind a query length.
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
            tile[...] = (loads.load_added(part, (STRIP, columns)) * _of_row(factors, b)).astype(
                dtype
            )

        def clear():
            zero = jnp.zeros((STRIP, columns), dtype)
            tile[...] = plgpu.layout_cast(zero, registers.ACC_LAYOUT)

        _when_before(refs[2][b] if has_lengths else None, row0, read, clear)
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


def _of_row(array, b):
    """Entry of batch row b of an array (1|B,)."""
    return array[b if array.shape[0] > 1 else 0]


def _when_before(end, row0, run, otherwise=None) -> None:
    """run() where row0 < end; always where end is None."""
    if end is None:
        run()
        return
    before = row0 < end
    pl.when(before)(run)
    if otherwise is not None:
        pl.when(jnp.logical_not(before))(otherwise)


def _strip_of_dq(block_q: int, head_dim: int, q_len: int, head, strip):
    """Row of the dq buffer that holds this strip, and its first float there."""
    strips_a_tile = block_q // STRIP
    row = head * -(-q_len // block_q) + div(strip, strips_a_tile)
    return row, rem(strip, strips_a_tile) * (STRIP * head_dim)


def _statistics_of(rows: _Rows) -> list[Any]:
    """lse and, if there is one, dlse."""
    return [x for x in (rows.lse, rows.dlse) if x is not None]


def _dq_sums(launch: Launch) -> jax.ShapeDtypeStruct:
    """What dq is added into, see `backward_launch.Gmem`."""
    writers = launch.op.dq_writers(launch.num_kv_tiles)
    tiles, tile = launch.num_q_heads * launch.num_q_tiles, launch.config.block_q * launch.head_dim
    return jax.ShapeDtypeStruct((writers, launch.batch, tiles, tile), jnp.float32)


def _first_without_meaning(launch: Launch, lengths, b, strips: int):
    """Row of batch row b from which on strips are not read; None where all of them are."""
    if lengths is not None:
        return lengths[b]
    return launch.q_len if launch.q_len <= (strips - 1) * STRIP else None


def _copy_rows(rows: _Rows, b, row0, head, tiles, read, ready) -> None:
    """Starts the copies of a strip: out and dout to `tiles`, lse and dlse to `read`."""
    here = pl.ds(row0, STRIP)
    for array, tile in zip((rows.out, rows.dout), tiles, strict=True):
        plgpu.copy_gmem_to_smem(array.at[b, here, head], tile, ready)
    for i, array in enumerate(_statistics_of(rows)):
        plgpu.copy_gmem_to_smem(array.at[b, head, here], read.at[i], ready)


def _clear_strip(launch: Launch, dq, b, head, strip) -> None:
    """Zeros to one strip of `Statistics.dq`, 16 bytes a thread and store."""
    block_q, head_dim, size = launch.config.block_q, launch.head_dim, STRIP * launch.head_dim
    row, first = _strip_of_dq(block_q, head_dim, launch.q_len, head, strip)
    zero = jnp.zeros((size,), jnp.float32)
    zero = plgpu.layout_cast(zero, plgpu.Layout.WG_STRIDED((size,), vec_size=4))
    for writer in range(dq.shape[0]):
        dq[writer, b, row, pl.ds(first, size)] = zero


def _statistics(launch: Launch, rows: _Rows, tiles, read, b, row0):
    """-lse and -delta of the strip at row0, as `Statistics` has them. [STRIP] each

    tiles: out and dout; read: lse and, if there is one, dlse, all in shared memory.
    """
    layout = _row_layout(launch.head_dim_v)
    neg_delta, lse = -_row_dots(*tiles), plgpu.load(read.at[0], layout=layout)
    if rows.dlse is not None:
        neg_delta = neg_delta + plgpu.load(read.at[1], layout=layout)
    if launch.dropout_rate:
        neg_delta = neg_delta * (1.0 - launch.dropout_rate)
    if rows.soft_cap is None:
        neg_lse = -lse * _of_row(rows.per_lse, b)
    else:
        neg_lse = logits.capped_offset(lse, _of_row(rows.soft_cap, b))
    sees = lse > -jnp.inf
    if rows.query_lengths is not None:
        row = row0 + plgpu.broadcasted_iota(jnp.int32, (STRIP,), 0, layout=layout)
        sees &= row < rows.query_lengths[b]
    return jnp.where(sees, neg_lse, -jnp.inf), jnp.where(sees, neg_delta, 0.0)


def _no_statistics(launch: Launch):
    """-lse and -delta of a strip without meaning. [STRIP] each"""
    layout = _row_layout(launch.head_dim_v)
    fill = lambda value: plgpu.layout_cast(jnp.full((STRIP,), value, jnp.float32), layout)
    return fill(-jnp.inf), fill(0.0)


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


def _row_layout(columns: int):
    """A layout for a value a row: that of the sums."""
    return _lanes_a_row(columns).reduce(1)


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
