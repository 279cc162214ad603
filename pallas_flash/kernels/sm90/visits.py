"""Tables of the tiles to visit, for masks that are more than bounds: small arrays made in XLA.

Segment ids and mask arrays can hide any tile, so there is no interval to walk: each row of tiles
gets a list. Its size is the number of tiles, 1 / 8192 or less of the number of pairs.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_flash import masks
from pallas_flash.kernels.sm90.call import Call, Extras, Visits


def needs_visits(mask: masks.Mask) -> bool:
    """A mask of bounds is walked by intervals instead."""
    return not mask.is_bounds


def prepared(call: Call, extras: Extras, *, by_kv: bool = False, at_least_one: bool) -> Extras:
    """The extras as the kernel reads them: the table made, per-position arrays in whole tiles."""
    if needs_visits(call.mask):
        visits = make_visits(call, extras, by_kv=by_kv, at_least_one=at_least_one)
        extras = extras._replace(visits=visits)
    block_q, block_kv = call.config.block_q, call.config.block_kv

    def pad(x, block):
        if x is None or x.shape[-1] % block == 0:
            return x
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % block)])

    tiled = lambda x, *block: None if x is None else call.op.whole_tiles(x, *block)
    words = (block_q // 32, block_kv) if by_kv else (block_q, block_kv // 32)
    mask_bits = None if extras.mask is None else _packed(extras.mask, axis=2 if by_kv else 3)
    return extras._replace(
        query_segments=pad(extras.query_segments, block_q),
        kv_segments=pad(extras.kv_segments, block_kv),
        dropout_rows=pad(extras.dropout_rows, block_q),
        mask=None,
        mask_bits=tiled(mask_bits, *words),
        bias=tiled(extras.bias, block_q, block_kv),
    )


def _packed(mask: jax.Array, axis: int) -> jax.Array:
    """32 entries along `axis` in a word, the first in its lowest bit; an axis of size 1 stays one.

    A kernel reads a tile of a mask in a few words a thread where it would read 64 single bytes,
    and reads it again in the backward pass: that is worth a copy of an eighth of its size.
    """
    if mask.shape[axis] == 1:
        return -mask.astype(jnp.int32)  # all bits or none
    pads = [(0, -n % 32 if i == axis else 0) for i, n in enumerate(mask.shape)]
    bits = jnp.pad(mask, pads).astype(jnp.uint32)
    bits = bits.reshape(*mask.shape[:axis], -1, 32, *mask.shape[axis + 1 :])
    shifts = lax.broadcasted_iota(jnp.uint32, bits.shape, axis + 1)
    words = (bits << shifts).sum(axis + 1, dtype=jnp.uint32)
    return lax.bitcast_convert_type(words, jnp.int32)


def make_visits(call: Call, extras: Extras, *, by_kv: bool = False, at_least_one: bool) -> Visits:
    """The table of one launch.

    Args:
      call: its sizes, its tiles, its mask.
      extras: the arrays that the mask needs.
      by_kv: rows are kv tiles that visit q tiles, not q tiles that visit kv tiles.
      at_least_one: a row that has nothing to visit visits one tile, under the mask.
    """
    some, every = _band(call, extras)
    values = masks.MaskValues(
        query_segments=extras.query_segments, kv_segments=extras.kv_segments, dense=extras.mask
    )
    block_q, block_kv = call.config.block_q, call.config.block_kv
    for part in call.mask.parts():
        tiles = part.tiles_beyond_bounds(values, block_q, block_kv)
        if tiles is not None:
            some, every = _both(some, tiles[0]), _both(every, tiles[1])
    some = jnp.broadcast_to(some, (*some.shape[:2], call.num_q_tiles, call.num_kv_tiles))
    every = jnp.broadcast_to(every, some.shape)
    if by_kv:
        some, every = jnp.swapaxes(some, 2, 3), jnp.swapaxes(every, 2, 3)
    every &= some
    rank = jnp.where(every, 1, jnp.where(some, 0, 2)).astype(jnp.int8)
    order = jnp.argsort(rank, axis=-1, stable=True).astype(jnp.int32)
    visited = some.sum(-1, dtype=jnp.int32)
    masked = visited - every.sum(-1, dtype=jnp.int32)
    if at_least_one:
        masked = jnp.where(visited == 0, 1, masked)
        visited = jnp.maximum(visited, 1)
    return Visits(order, jnp.stack([masked, visited], axis=-1))


def _both(a: jax.Array, b: jax.Array) -> jax.Array:
    """a & b, where one may have a row for several batch rows of the other."""
    rows = max(a.shape[0], b.shape[0])
    a, b = (jnp.repeat(x, rows // x.shape[0], axis=0) for x in (a, b))
    return a & b


def _band(call: Call, extras: Extras) -> tuple[jax.Array, jax.Array]:
    """Of the mask's bounds, for every tile: does any pair, do all pass? (1|B, 1, q, kv tiles)."""
    block_q, block_kv = call.config.block_q, call.config.block_kv
    kv_lo = lax.iota(jnp.int32, call.num_kv_tiles) * block_kv
    kv_hi = kv_lo + block_kv

    def row(b, qi):
        bounds = call.bounds(extras, b)
        q_lo = qi * block_q
        q_hi = masks.smaller(q_lo + block_q, call.q_len)
        any_lo, any_hi = bounds.kv_any(q_lo, q_hi, call.kv_len)
        all_lo, all_hi = bounds.kv_all(q_lo, q_hi, call.kv_len)
        return (kv_lo < any_hi) & (kv_hi > any_lo), (kv_lo >= all_lo) & (kv_hi <= all_hi)

    per_row = (extras.query_lengths, extras.kv_lengths, extras.window)
    differs = any(x is not None and x.shape[0] > 1 for x in per_row)
    batch = lax.iota(jnp.int32, call.batch if differs else 1)
    q_tiles = lax.iota(jnp.int32, call.num_q_tiles)
    some, every = jax.vmap(lambda b: jax.vmap(lambda qi: row(b, qi))(q_tiles))(batch)
    return some[:, None], every[:, None]
