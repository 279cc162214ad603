"""Which tiles a problem visits, counted on the host: for whoever wants to know the work ahead.

The mask algebra is asked, nothing is compared here: `Bounds` for causal, windows and lengths,
`tiles_beyond_bounds` for segments and mask arrays, which is what the kernels ask, too. All in
NumPy integers. Knows nothing of bytes.
"""

from typing import NamedTuple

import numpy as np

from pallas_flash import masks
from pallas_flash.problem import Operands, Problem

NO_OPERANDS = Operands(None, None, None)
_PAIRS_AT_ONCE = 2**24


class Walks(NamedTuple):
    """What each row of tiles visits, for every batch row and head; a first axis of 1 means all.

    A row is a q tile that visits kv tiles, or, by "kv", the other way round.

    Attributes:
      tiles: int64 (1|B, 1|N, rows of tiles), tiles visited.
      across: int64, the same shape: positions (keys, or queries) in the visited tiles.
      own: int64 (rows of tiles,), positions of the row's own tile.
      repeats: how many (batch row, head) pairs an entry of the first two axes stands for.
    """

    tiles: np.ndarray
    across: np.ndarray
    own: np.ndarray
    repeats: int

    @property
    def count(self) -> int:
        """Visited tiles of all batch rows and heads."""
        return int(self.tiles.sum()) * self.repeats

    @property
    def sum_across(self) -> int:
        """Positions across, over all visited tiles."""
        return int(self.across.sum()) * self.repeats

    @property
    def sum_own(self) -> int:
        """Positions of the row's own tile, over all visited tiles."""
        return int((self.tiles * self.own).sum()) * self.repeats

    @property
    def pairs(self) -> int:
        """Pairs of positions, over all visited tiles."""
        return int((self.across * self.own).sum()) * self.repeats


def tile_walks(
    problem: Problem,
    operands: Operands,
    block_q: int,
    block_kv: int,
    *,
    by: str = "q",
    at_least_one: bool = False,
    empty_too: bool = False,
    row_tile: int = 1,
) -> Walks:
    """The walks of a tiled algorithm that skips a tile where every pair is hidden.

    Args:
      problem: its sizes and its mask.
      operands: what the mask needs, concrete.
      block_q: queries of a tile.
      block_kv: keys of a tile.
      by: "q" or "kv", whose tiles are the rows.
      at_least_one: a row that sees nothing visits one tile.
      empty_too: where a row's interval ends before it begins, but in the same tile, that tile is
        visited: so the fused backward walks bounds.
      row_tile: arrays are as long as the next multiple of this: what a copy of a tile reads.
    """
    batch, heads = problem.batch, problem.num_q_heads
    own_len, own_block = (problem.q_len, block_q) if by == "q" else (problem.kv_len, block_kv)
    other_len, other_block = (problem.kv_len, block_kv) if by == "q" else (problem.q_len, block_q)
    own = _sizes(own_len, own_block, row_tile)
    sizes = _sizes(other_len, other_block, row_tile)
    if problem.mask.is_bounds:
        first, last, is_empty = _intervals(problem, operands, own_block, other_block, by)
        if at_least_one:
            last = np.maximum(last, 1)
            first = np.minimum(first, last - 1)
        elif not empty_too:
            last = np.where(is_empty, first, last)
        ends = np.concatenate([[0], np.cumsum(sizes)])
        # A window may begin past the end, and so do the queries that see the keys behind them all.
        first, last = (np.minimum(x, len(sizes)) for x in (first, np.maximum(first, last)))
        tiles, across = last - first, ends[last] - ends[first]
    else:
        visited = _visited(problem, operands, block_q, block_kv)
        visited = visited if by == "q" else np.swapaxes(visited, 2, 3)
        if at_least_one:
            visited = visited.copy()
            visited[..., 0] |= ~visited.any(-1)
        tiles, across = visited.sum(-1), visited @ sizes
    repeats = batch // tiles.shape[0] * (heads // tiles.shape[1])
    return Walks(tiles.astype(np.int64), across.astype(np.int64), own, repeats)


def _sizes(length: int, block: int, row_tile: int) -> np.ndarray:
    """Positions of each tile."""
    starts = np.arange(0, length, block)
    padded = -(-length // row_tile) * row_tile
    return np.minimum(padded - starts, block)


def _row_bounds(problem: Problem, operands: Operands) -> list[masks.Bounds]:
    """Bounds of each batch row; one where they are all the same."""
    arrays = (operands.query_lengths, operands.kv_lengths)
    rows = problem.batch if any(x is not None for x in arrays) else 1
    left, right = (None, None) if operands.window is None else map(int, operands.window)
    pick = lambda x, b: None if x is None else int(x[b])
    return [
        problem.mask.bounds(
            masks.MaskValues(
                query_length=pick(operands.query_lengths, b),
                kv_length=pick(operands.kv_lengths, b),
                window_left=left,
                window_right=right,
            )
        )
        for b in range(rows)
    ]


def _intervals(problem: Problem, operands: Operands, own_block: int, other_block: int, by: str):
    """First and one past the last tile, and whether none is visited: of bounds alone.

    Each (1|B, 1, rows of tiles).
    """
    own_len, other_len = problem.q_len, problem.kv_len
    if by == "kv":
        own_len, other_len = other_len, own_len
    lo = np.arange(0, own_len, own_block)
    hi = np.minimum(lo + own_block, own_len)
    found = [
        (bounds.kv_any if by == "q" else bounds.q_any)(lo, hi, other_len)
        for bounds in _row_bounds(problem, operands)
    ]
    any_lo, any_hi = (
        np.stack([np.broadcast_to(x, lo.shape) for x in ends]) for ends in zip(*found, strict=True)
    )
    any_lo, any_hi = any_lo[:, None], any_hi[:, None]
    return any_lo // other_block, -(-any_hi // other_block), any_hi <= any_lo


def _visited(problem: Problem, operands: Operands, block_q: int, block_kv: int) -> np.ndarray:
    """Bool (1|B, 1|N, q tiles, kv tiles): the tiles that no part of the mask hides."""
    first, last, is_empty = _intervals(problem, operands, block_q, block_kv, "q")
    last = np.where(is_empty, first, last)
    ki = np.arange(-(-problem.kv_len // block_kv))
    visited = (ki >= first[..., None]) & (ki < last[..., None])
    values = masks.MaskValues(
        query_segments=operands.query_segments,
        kv_segments=operands.kv_segments,
        dense=operands.mask,
    )
    for part in problem.mask.parts():
        tiles = part.tiles_beyond_bounds(values, block_q, block_kv)
        if tiles is not None:
            visited = visited & np.asarray(tiles[0])
    return visited


def visible_pairs(problem: Problem, operands: Operands = NO_OPERANDS) -> int:
    """Pairs of query and key that the mask leaves, of all batch rows and query heads."""
    if problem.mask.is_bounds:
        return tile_walks(problem, operands, 1, 1).count
    step = max(1, _PAIRS_AT_ONCE // problem.kv_len)
    arrays = (operands.query_lengths, operands.kv_lengths)
    leads = [x.shape[:2] for x in (operands.mask,) if x is not None]
    leads += [
        (x.shape[0], 1) for x in (operands.query_segments, operands.kv_segments) if x is not None
    ]
    leads += [(problem.batch, 1) for x in arrays if x is not None]
    rows, heads = (max(sizes) for sizes in zip(*leads, strict=True))
    found = 0
    for b in range(rows):
        for head in range(heads):
            for q0 in range(0, problem.q_len, step):
                found += _visible_of(problem, operands, b, head, q0, min(q0 + step, problem.q_len))
    return found * (problem.batch // rows) * (problem.num_q_heads // heads)


def _visible_of(problem: Problem, operands: Operands, b: int, head: int, q0: int, q1: int) -> int:
    """Visible pairs of queries [q0, q1) of one batch row and head."""
    entry = lambda x, i, axis: min(i, x.shape[axis] - 1)
    ids = lambda x: None if x is None else np.asarray(x)[entry(x, b, 0)]
    q_ids, kv_ids = ids(operands.query_segments), ids(operands.kv_segments)
    dense = operands.mask
    if dense is not None:
        dense = np.asarray(dense)[entry(dense, b, 0), entry(dense, head, 1)]
        dense = dense[q0:q1] if dense.shape[0] > 1 else dense
    bounds = _row_bounds(problem, operands)
    q_pos, kv_pos = np.arange(q0, q1)[:, None], np.arange(problem.kv_len)[None]
    values = masks.MaskValues(
        query_segments=None if q_ids is None else q_ids[q0:q1, None],
        kv_segments=None if kv_ids is None else kv_ids[None],
        dense=dense,
    )
    tests = (
        bounds[min(b, len(bounds) - 1)].allowed(q_pos, kv_pos),
        problem.mask.allowed_beyond_bounds(q_pos, kv_pos, values),
    )
    allowed = np.ones((q1 - q0, problem.kv_len), bool)
    for test in tests:
        if test is not None:
            allowed = allowed & np.asarray(test)
    return int(allowed.sum())
