"""Clean copies of the tile that a length cuts.

Behind a length an array may hold anything, NaN and Inf, too. Hidden scores are replaced by a
select, but a matrix product over those rows still computes 0 * NaN. So the one tile that a length
cuts is copied in XLA with the rows past the length zeroed, and kernels load it from the copy;
tiles before it are clean, tiles after it are never loaded.
"""

import jax
import jax.numpy as jnp
from jax import lax


def tail_tile(x: jax.Array, lengths: jax.Array, block: int) -> jax.Array:
    """The tile of each batch row that its length cuts, rows at or past the length zeroed.

    Args:
      x: (B, T, N, H); T may be anything.
      lengths: int32 (B,), in [0, T].
      block: rows a tile; tiles start at multiples of it.

    Returns:
      (B, block, N, H): rows [start, start + block) of x, start = lengths // block * block, zero at
      and past the length. All zero where the length is a multiple of block.
    """
    lengths = lengths.astype(jnp.int32)
    start = lengths // jnp.int32(block) * jnp.int32(block)
    row = start[:, None] + lax.iota(jnp.int32, block)[None]  # [B, block]
    rows = jnp.minimum(row, jnp.int32(x.shape[1] - 1))[:, :, None, None]
    tile = jnp.take_along_axis(x, rows, axis=1, mode="clip")
    keep = (row < lengths[:, None])[:, :, None, None]
    return jnp.where(keep, tile, jnp.zeros((), x.dtype))
