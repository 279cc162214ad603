"""What every kernel of this family is told: sizes, mask and terms of one launch, all static."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash import masks
from pallas_flash.kernels.sm90 import mma
from pallas_flash.kernels.sm90.smem import fits_smem, tiled_smem

Ref = Any
Int = masks.Int


def div(a: Int, b: int) -> Int:
    """a // b for a >= 0."""
    if b == 1:
        return a
    return a // b if isinstance(a, int) else lax.div(a, jnp.int32(b))


def rem(a: Int, b: int) -> Int:
    return a % b if isinstance(a, int) else lax.rem(a, jnp.int32(b))


def ceil_div(a: Int, b: int) -> Int:
    return div(a + (b - 1), b)


def interleaved(t: Int, num_tiles: int, head_group: int) -> tuple[Int, Int]:
    """Tile number -> (pair of batch and head, tile): of a group, first all tiles 0, then all 1."""
    group, rest = div(t, num_tiles * head_group), rem(t, num_tiles * head_group)
    return group * head_group + rem(rest, head_group), div(rest, head_group)


def fitting_group(head_group: int, pairs: int) -> int:
    """The largest number of pairs up to `head_group` that divides them all."""
    return next(g for g in range(min(head_group, pairs), 0, -1) if pairs % g == 0)


class Visits(NamedTuple):
    """Which tiles a row of tiles visits, where the mask is more than bounds. Made by `visits`.

    A row is a q tile (its columns are kv tiles) or, in the fused backward, the other way round.

    Attributes:
      order: int32 (1|B, 1|N, rows, columns), the columns to visit: tiles that need the mask, then
        those that every pair passes; what follows means nothing.
      counts: int32 (1|B, 1|N, rows, 2), how many need the mask, how many are visited.
    """

    order: Ref
    counts: Ref


class Extras(NamedTuple):
    """Arrays that a call may have beside q, k, v and the scale; None where absent.

    B batch, N query heads, T queries, S keys. A first axis shorter than B divides it: row b reads
    entry b // (B / length), so that what a batch shares is never repeated.

    Attributes:
      query_lengths, kv_lengths: int32 (B,), in [0, T] and [0, S].
      window: int32 (1|B, 2), left and right side.
      query_segments, kv_segments: int32 (1|B, T) and (1|B, S).
      mask: bool (1|B, 1|N, 1|T, 1|S), True where visible.
      bias: (1|B, 1|N, 1|T, 1|S), float32, bfloat16 or float16.
      alibi_slopes: float32 (1|B, N).
      soft_cap: float32 (1|B,), positive.
      sinks: float32 (1|B, N).
      dropout_rows: uint32 (1|B, 1|N, 2, T), `dropout.row_keys` of each query.
      mask_bits: int32, the mask with 32 columns of a tile in a word, made by the launch itself.
      visits: made by the launch itself.
    """

    query_lengths: Ref = None
    kv_lengths: Ref = None
    window: Ref = None
    query_segments: Ref = None
    kv_segments: Ref = None
    mask: Ref = None
    bias: Ref = None
    alibi_slopes: Ref = None
    soft_cap: Ref = None
    sinks: Ref = None
    dropout_rows: Ref = None
    mask_bits: Ref = None
    visits: Visits | None = None

    def present(self) -> frozenset[str]:
        """Names of the arrays that there are."""
        return frozenset(name for name, x in self._asdict().items() if x is not None)


NO_EXTRAS = Extras()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """The static half of one launch.

    Attributes:
      config: how the kernel is cut, with block_q and block_kv.
      head_dim, head_dim_v: padded, as `config.padded` of the forward or of the backward gives them.
      dtype: of q, k and v, by name.
      q_len, kv_len: without padding.
      mask: what hides pairs, a bias of -inf apart.
      terms: names of the `Extras` that are present.
      shares_bias: the batch rows have one bias: what reads the same of it should run together.
      staged_bias: dtype of a bias that comes by TMA into shared memory; None: read where it is.
      alibi_shift: of the diagonal where ALiBi's distance is 0.
      dropout_rate: probability of dropping a weight.
      interpret: run in Pallas' interpret mode.
    """

    config: Any
    head_dim: int
    head_dim_v: int
    dtype: str
    batch: int = 1
    q_len: int = 1
    kv_len: int = 1
    num_q_heads: int = 1
    num_kv_heads: int = 1
    mask: masks.Mask = masks.And()
    terms: frozenset[str] = frozenset()
    shares_bias: bool = False
    staged_bias: str | None = None
    alibi_shift: int = 0
    dropout_rate: float = 0.0
    interpret: bool = False

    @property
    def op(self):
        return mma.ops(self.interpret)

    @property
    def q_per_kv(self) -> int:
        return self.num_q_heads // self.num_kv_heads

    @property
    def num_q_tiles(self) -> int:
        return -(-self.q_len // self.config.block_q)

    @property
    def num_kv_tiles(self) -> int:
        return -(-self.kv_len // self.config.block_kv)

    def split_pair(self, pair: Int, num_heads: int) -> tuple[Int, Int]:
        """Number of a (batch row, head) -> the two; batch rows that share a bias in sequence."""
        if self.shares_bias:
            return rem(pair, self.batch), div(pair, self.batch)
        return div(pair, num_heads), rem(pair, num_heads)

    @property
    def sharing_group(self) -> int:
        """How many consecutive pairs share a bias, up to 8."""
        return fitting_group(8, self.batch) if self.shares_bias else 1

    @property
    def is_whole(self) -> bool:
        """No tile reaches past the last query or key."""
        return self.q_len % self.config.block_q == 0 and self.kv_len % self.config.block_kv == 0

    def bias_tiles(self, slots: int):
        """Shared memory for tiles of the bias, or None."""
        if self.staged_bias is None:
            return None
        tile = self.config.block_q, self.config.block_kv
        return tiled_smem((slots, *tile), jnp.dtype(self.staged_bias))

    def copy_bias(
        self, extras: Extras, b: Int, head: Int, q0: Int, kv0: Int, dst, ready, *, peers=None
    ) -> None:
        """Starts the copy of a tile of the bias; arrives at `ready`.

        peers: axis of a cluster whose blocks copy the same tile, each a part of it for all.
        """
        if self.staged_bias is not None:
            q, kv = pl.ds(q0, self.config.block_q), pl.ds(kv0, self.config.block_kv)
            source = extras.bias.at[(*self.entry(extras.bias, b, head), q, kv)]
            plgpu.copy_gmem_to_smem(source, dst, ready, collective_axes=peers)

    def entry(self, array: Ref, b: Int, head: Int | None = None) -> tuple[Int, ...]:
        """Index of (batch row, query head) into the first axes of an extra."""
        rows = array.shape[0]
        index = (0 if rows == 1 else div(b, self.batch // rows),)
        return index if head is None else (*index, head if array.shape[1] > 1 else 0)

    def bounds(self, extras: Extras, b: Int) -> masks.Bounds:
        """What the mask says of batch row b, and the end of the keys where it cuts a tile."""
        pick = lambda x: None if x is None else x[self.entry(x, b)]
        left = right = None
        if extras.window is not None:
            row = self.entry(extras.window, b)
            left, right = extras.window[(*row, 0)], extras.window[(*row, 1)]
        values = masks.MaskValues(
            query_length=pick(extras.query_lengths),
            kv_length=pick(extras.kv_lengths),
            window_left=left,
            window_right=right,
        )
        return with_ragged_end(self.mask.bounds(values), self.kv_len, self.config.block_kv)


def with_bias[C: Call](call: C, bias: Any, scratch: Callable[[C], Any]) -> C:
    """The call with its bias staged, where TMA can copy it and shared memory has room for it."""
    if bias is None:
        return call
    call = dataclasses.replace(call, shares_bias=bias.shape[0] == 1 < call.batch)
    if not _is_copyable(bias):
        return call
    staged = dataclasses.replace(call, staged_bias=jnp.dtype(bias.dtype).name)
    on_gpu = dataclasses.replace(staged, interpret=False)
    return staged if fits_smem(scratch(on_gpu)) else call


def _is_copyable(bias: Any) -> bool:
    """Nothing repeated, and whole pieces of 8 rows of 128 bytes."""
    *_, rows, columns = bias.shape
    return rows % 8 == 0 and columns * jnp.dtype(bias.dtype).itemsize % 128 == 0


def with_ragged_end(bounds: masks.Bounds, kv_len: int, block_kv: int) -> masks.Bounds:
    """Bounds that also hide the keys past kv_len in the last tile (lengths never exceed it)."""
    if kv_len % block_kv == 0 or bounds.kv_end is not None:
        return bounds
    return dataclasses.replace(bounds, kv_end=kv_len)
