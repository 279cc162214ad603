"""The operations of `mma.GpuOps` in words that Pallas' interpret mode knows.

Accumulators are float32 shared memory, a matrix product is `lax.dot` on plain loads (which the race
detector sees), and `commit_smem` stands wherever the GPU needs only a fence.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash import masks
from pallas_flash.kernels.sm90 import query_parts


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
        at = lambda shape: (wg, *(pl.ds(0, size) for size in shape))  # maybe declared larger
        accs = {n: _SmemAccumulator(scratch[n].at[at(s)], s) for n, s in shapes.items()}
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
    def wgmma_rows(acc, a, b, first: int) -> None:
        InterpretOps.wgmma(acc, a, b.at[pl.ds(first, a.shape[1])])

    @staticmethod
    def wgmma_from_zero(acc, a, b) -> None:
        acc.ref[...] = jnp.zeros(acc.shape, jnp.float32)
        InterpretOps.wgmma(acc, a, b.transpose((1, 0)))

    @staticmethod
    def in_every_row(parts, first: int, onto=None):
        statistic = query_parts.total(parts[...], first)
        tile = jnp.broadcast_to(statistic, (64, *statistic.shape))
        return tile if onto is None else onto + tile

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
    def token_start(wg, num_wgs: int) -> None:
        """Nothing: the token orders work, correctness does not lean on it."""
        del wg, num_wgs

    @staticmethod
    def token_pass(to, num_wgs: int) -> None:
        del to, num_wgs

    @staticmethod
    def token_take(wg) -> None:
        del wg

    @staticmethod
    def any_greater(a, b):
        return jnp.any(a > b)

    @staticmethod
    def reciprocal(tile, *, pair_axis: int | None = None):
        del pair_axis
        return 1.0 / tile

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
    def add_dq(dq, ref, *, where=True) -> None:
        m, n = dq.shape  # columns in eights, as on the GPU: a tile is its column parts in a row
        dq = dq.reshape(m // 64, 64, n // 8, 8).transpose(0, 2, 1, 3)

        def add():
            ref[...] += dq.reshape(-1)

        pl.when(where)(add)

    @staticmethod
    def store_dq(dq, ref, *, where) -> None:
        def store():
            ref[...] = dq

        pl.when(where)(store)

    @staticmethod
    def order_dq(dq: jax.Array, m: int, n: int) -> jax.Array:
        lead = dq.shape[:-1]
        dq = dq.reshape(*lead, m // 64, n // 8, 64, 8)
        return jnp.swapaxes(dq, -3, -2).reshape(*lead, m, n)
