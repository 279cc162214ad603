"""Bytes and products of our Hopper kernels, with the tiles that they launch: exact integers.

Forward and backward as passes, like the algorithms of `io_counts`. What a pass moves is the traffic
between L2 and shared memory: copies by TMA, which leave out what lies past an array's end, and the
adds into dq, which L2 carries out. What of it is distinct is the least that device memory sees.

Not counted, being a hundredth of the rest or less: scalars, schedules and tables of visits, mask
bits, segment ids, dropout counters, the copied tile that a length cuts. Nor is what a gradient of
the bias takes.
"""

import dataclasses
import math
from typing import NamedTuple

import numpy as np

from pallas_flash import masks, tuned
from pallas_flash.config import ROW_TILE, BackwardConfig, DqConfig, ForwardConfig
from pallas_flash.io_counts import FLOAT32_BYTES, Access, Counts, Pass, Sizes, once, products, sizes
from pallas_flash.problem import Operands, Problem
from pallas_flash.tile_walks import NO_OPERANDS, Walks, tile_walks

STRIP = 64  # queries of a warpgroup, and of a block of the backward's first and last kernel

Cut = ForwardConfig | BackwardConfig  # which says what head dims are padded to


def padded(problem: Problem, cut: Cut) -> Problem:
    """The problem with head dims as a kernel sees them."""
    return dataclasses.replace(
        problem, head_dim=cut.padded(problem.head_dim), head_dim_v=cut.padded(problem.head_dim_v)
    )


def known_ahead(problem: Problem) -> Problem:
    """The problem with what its mask hides whatever the arrays of the call hold."""
    parts = tuple(part for part in problem.mask.parts() if isinstance(part, masks.Causal))
    return dataclasses.replace(problem, mask=masks.And(parts))


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def kernel_sizes(problem: Problem, cut: Cut) -> Sizes:
    """Bytes of the tensors as the kernels see them: positions in whole groups of ROW_TILE."""
    q_len, kv_len = (_up(length, ROW_TILE) for length in (problem.q_len, problem.kv_len))
    strips = problem.batch * problem.num_q_heads * _up(problem.q_len, STRIP)
    wide = dataclasses.replace(padded(problem, cut), q_len=q_len, kv_len=kv_len)
    return sizes(wide)._replace(lse=strips * FLOAT32_BYTES)


def _walks(problem: Problem, operands: Operands, cut, **kwargs) -> Walks:
    return tile_walks(problem, operands, cut.block_q, cut.block_kv, row_tile=ROW_TILE, **kwargs)


def _touched(walks: Walks, problem: Problem, heads: int) -> int:
    """Positions of own tiles that anything visits; `heads` share an array each."""
    visited = walks.tiles > 0
    if visited.shape[1] > 1:  # heads of a group have their K and V in common
        visited = visited.reshape(visited.shape[0], heads, -1, visited.shape[2]).any(2)
    rows = (visited * walks.own).sum()
    return int(rows) * (problem.batch // visited.shape[0]) * (heads // visited.shape[1])


def _bias(problem: Problem, walks: Walks) -> tuple[Access, ...]:
    """The bias, for walks by q; of an axis along which it is repeated a tile reads one entry."""
    item = tuned.bias_bytes(problem)
    if problem.bias_shape is None or item is None:
        return ()
    _, _, rows, columns = problem.bias_shape
    entries = {
        (True, True): walks.pairs,
        (True, False): walks.sum_own,
        (False, True): walks.sum_across,
        (False, False): walks.count,
    }[rows > 1, columns > 1]
    return (Access("bias", entries * item, math.prod(problem.bias_shape) * item),)


def _copies(problem: Problem, cut: Cut, inputs: dict[str, str], results: dict[str, str]):
    """The copies that ragged sizes cost: inputs padded, results cut; empty where none."""
    wide, source = padded(problem, cut), "kernels/sm90/backend.py"
    ragged = problem.q_len % ROW_TILE or problem.kv_len % ROW_TILE
    if wide == problem and not ragged:
        return ()
    old, new = sizes(problem)._asdict(), kernel_sizes(problem, cut)._asdict()
    moves = [(name, old[of], new[of]) for name, of in inputs.items()]
    moves += [(name, new[of], old[of]) for name, of in results.items()]
    moves = [move for move in moves if move[1] != move[2]]
    reads = once(**{name: min(a, b) for name, a, b in moves})
    return (Pass("padded and cut copies", source, reads, once(**{n: b for n, _, b in moves})),)


class _OverKeys(NamedTuple):
    """What a kernel does whose q tiles walk over keys: the forward, and the dq kernel.

    Attributes:
      keys: K and V, a tile for every visit.
      bias: of the visited tiles, empty without.
      pairs: in visited tiles.
    """

    keys: tuple[Access, ...]
    bias: tuple[Access, ...]
    pairs: int


def _over_keys(
    problem: Problem, operands: Operands, cut: ForwardConfig | DqConfig, wide: Problem
) -> _OverKeys:
    """Tiles of `cut`, head dims of `wide`; a q tile that sees nothing visits one tile."""
    walks = _walks(problem, operands, cut, at_least_one=True)
    distinct, item = _touched_keys(problem, operands, cut), problem.np_dtype.itemsize
    keys = tuple(
        Access(name, walks.sum_across * d * item, distinct * d * item)
        for name, d in (("k", wide.head_dim), ("v", wide.head_dim_v))
    )
    pairs = walks.count * cut.block_q * cut.block_kv
    return _OverKeys(keys, _bias(problem, walks), pairs)


def _touched_keys(problem: Problem, operands: Operands, cut) -> int:
    """Keys that some q tile visits, of all batch rows and kv heads."""
    by_kv, by_q = _walks(problem, operands, cut, by="kv"), _walks(problem, operands, cut)
    by_kv.tiles[..., 0] += (by_q.tiles == 0).any(-1)  # what sees nothing visits the first tile
    return _touched(by_kv, problem, problem.num_kv_heads)


def forward_kernel(
    problem: Problem, operands: Operands = NO_OPERANDS, cut: ForwardConfig | None = None
) -> Pass:
    """kernels/sm90/forward.py: a q tile once, a tile of K and V for each step of its walk.

    Args:
      problem: what `io_model.refusal` has no objection to.
      operands: what the mask needs, concrete.
      cut: the tiles; None: as tuned.
    """
    cut = cut or tuned.forward_of(problem)
    n, wide = kernel_sizes(problem, cut), padded(problem, cut)
    over = _over_keys(problem, operands, cut, wide)
    return Pass(
        "forward",
        "kernels/sm90/forward.py",
        (*once(q=n.q), *over.keys, *over.bias),
        once(out=n.out, lse=n.lse),
        products(wide, over.pairs, "S = Q K^T", "O = P V"),
    )


def kernels_forward(problem: Problem, operands: Operands = NO_OPERANDS) -> Counts:
    """The whole forward call."""
    cut = tuned.forward_of(problem)
    copies = _copies(problem, cut, dict(q="q", k="k", v="v"), dict(out="out"))
    lse = kernel_sizes(problem, cut).lse
    return Counts(
        (*copies, forward_kernel(problem, operands)), (("lse", lse), *_copied_bytes(copies))
    )


def _copied_bytes(copies: tuple[Pass, ...]) -> tuple[tuple[str, int], ...]:
    size = sum(a.moved for p in copies for a in p.writes)
    return (("padded copies", size),) if size else ()


def backward_kernel(
    problem: Problem,
    operands: Operands = NO_OPERANDS,
    cut: BackwardConfig | None = None,
    *,
    make_dq: bool = True,
    kv_parts: int | None = None,
) -> Pass:
    """kernels/sm90/backward.py: K and V once, q and dout for each tile, dq added to in memory.

    Where a block has all keys of its queries dq is stored (not if the scale has a gradient, too).

    Args:
      problem: what `io_model.refusal` has no objection to.
      operands: what the mask needs, concrete.
      cut: the tiles; None: as tuned.
      make_dq: False in the deterministic backward.
      kv_parts: blocks for each tile of keys, with K and V once each; None: as tuned.
    """
    cut = cut or tuned.backward_of(problem)
    parts = kv_parts or tuned.kv_parts(problem, cut)
    n, wide = kernel_sizes(problem, cut), padded(problem, cut)
    item = problem.np_dtype.itemsize
    by_kv = _walks(problem, operands, cut, by="kv", empty_too=True)
    walks = _walks(problem, operands, cut)
    queries = _touched(walks, problem, problem.num_q_heads)
    visited = lambda name, d: Access(name, by_kv.sum_across * d * item, queries * d * item)
    rows, rows_once = (n * cut.block_q for n in (by_kv.count, _touched_tiles(walks, problem)))
    statistics = (
        Access(name, rows * size, rows_once * size)
        for name, size in _statistics(problem, cut).items()
    )
    pairs = by_kv.count * cut.block_q * cut.block_kv
    made = ["S = Q K^T, again", "dV = P^T dO", "dP = dO V^T", "dK = dS^T Q"]
    adds, fetched, name = (), (), "dk and dv"
    if make_dq:
        made.append("dQ = dS K")
    if make_dq and _stores_dq(problem, cut):
        adds, name = once(dq=n.q), "dk, dv and dq"
    elif make_dq:
        name = "dk, dv and sums of dq"
        tile = cut.block_q * wide.head_dim * FLOAT32_BYTES
        sums = _touched_tiles(walks, problem) * tile
        adds = (Access("dq sum", by_kv.count * tile, sums),)
        fetched = (Access("dq sum", 0, sums),)  # L2 adds: nothing comes back to a multiprocessor
    return Pass(
        name,
        "kernels/sm90/backward.py",
        (
            Access("k", parts * n.k, n.k),
            Access("v", parts * n.v, n.v),
            visited("q", wide.head_dim),
            visited("dout", wide.head_dim_v),
            *statistics,
            *_bias(problem, walks),
            *fetched,
        ),
        (*once(dk=parts * n.k, dv=parts * n.v), *adds),
        products(wide, pairs, *made),
    )


def _stores_dq(problem: Problem, cut: BackwardConfig) -> bool:
    return cut.stores_dq(problem.mask, problem.q_len, problem.kv_len)


def _statistics(problem: Problem, cut: BackwardConfig) -> dict[str, int]:
    """Arrays of -lse and -delta, and bytes a query in each."""
    dropout = problem.dropout_rate > 0
    found = cut.statistics(soft_cap=problem.soft_cap is not None, dropout=dropout)
    names = dict(parts="-lse and -delta, in parts", neg_lse="-lse", neg_delta="-delta")
    return {names[name]: size for name, size in found.items()}


def _delta_of_parts(problem: Problem, cut: BackwardConfig, n: Sizes, rows: int) -> list[Pass]:
    """-delta for the dq kernel, which reads it as it is."""
    found = _statistics(problem, cut)
    if "-delta" in found:
        return []
    ((parts, size),) = ((name, size) for name, size in found.items() if "parts" in name)
    ends = "kernels/sm90/backward_ends.py"
    return [Pass("-delta", ends, once(**{parts: rows * size}), once(**{"-delta": n.lse}))]


def _touched_tiles(walks: Walks, problem: Problem) -> int:
    """Own tiles that anything visits, of all batch rows and heads."""
    return _touched(walks._replace(own=np.ones_like(walks.own)), problem, problem.num_q_heads)


def dq_kernel(
    problem: Problem, operands: Operands = NO_OPERANDS, cut: DqConfig | None = None
) -> Pass:
    """kernels/sm90/backward_dq.py, of the deterministic backward: walks keys like the forward."""
    cut, fused = cut or tuned.dq_of(problem), tuned.backward_of(problem)  # whose arrays these are
    n, wide = kernel_sizes(problem, fused), padded(problem, fused)
    over = _over_keys(problem, operands, cut, wide)
    return Pass(
        "dq",
        "kernels/sm90/backward_dq.py",
        (
            *once(q=n.q, dout=n.out),
            *over.keys,
            *once(**{"lse": n.lse, "-delta": n.lse}),
            *over.bias,
        ),
        once(dq=n.q),
        products(wide, over.pairs, "S = Q K^T, again", "dP = dO V^T, again", "dQ = dS K"),
    )


def _strips(problem: Problem, operands: Operands, limit: int) -> int:
    """Queries in strips that begin before their length, clipped at `limit`, over all heads."""
    lengths = np.full(problem.batch, problem.q_len)
    if operands.query_lengths is not None:
        lengths = np.asarray(operands.query_lengths)
    return int(np.minimum(-(-lengths // STRIP) * STRIP, limit).sum()) * problem.num_q_heads


def kernels_backward(problem: Problem, operands: Operands = NO_OPERANDS) -> Counts:
    """The whole backward: statistics and zeros, the fused kernel, dq to its place.

    Or, with `deterministic_backward`, no sums of dq but a kernel for it; or dq by the fused kernel.
    """
    cut = tuned.backward_of(problem)
    n, wide = kernel_sizes(problem, cut), padded(problem, cut)
    item = problem.np_dtype.itemsize
    whole = _up(problem.q_len, cut.block_q)
    heads = problem.batch * problem.num_q_heads
    rows = _strips(problem, operands, _up(problem.q_len, ROW_TILE))
    strips = _strips(problem, operands, _up(problem.q_len, STRIP))
    extra = {name: heads * whole * size for name, size in _statistics(problem, cut).items()}
    ends = "kernels/sm90/backward_ends.py"
    dots = rows * wide.head_dim_v * item
    copies = _copies(
        problem,
        cut,
        dict(q="q", k="k", v="v", out="out", dout="out"),
        dict(dq="q", dk="k", dv="v"),
    )
    read = once(out=dots, dout=dots, lse=strips * FLOAT32_BYTES)
    if problem.deterministic_backward:
        passes = [
            *copies,
            Pass("statistics", ends, read, once(**extra)),
            backward_kernel(problem, operands, make_dq=False),
            *_delta_of_parts(problem, cut, n, heads * whole),
            dq_kernel(problem, operands),
        ]
    elif _stores_dq(problem, cut):
        passes = [
            *copies,
            Pass("statistics", ends, read, once(**extra)),
            backward_kernel(problem, operands),
        ]
    else:
        sums = heads * whole * wide.head_dim * FLOAT32_BYTES
        finished = strips * wide.head_dim * FLOAT32_BYTES
        extra["dq sum"] = sums
        passes = [
            *copies,
            Pass("statistics, dq sum = 0", ends, read, once(**extra)),
            backward_kernel(problem, operands),
            Pass("dq", ends, once(**{"dq sum": finished}), once(dq=n.q)),
        ]
    parts = tuned.kv_parts(problem, cut)
    if parts > 1:
        read, written = once(dk=parts * n.k, dv=parts * n.v), once(dk=n.k, dv=n.v)
        passes.append(Pass("dk, dv of parts", "kernels/sm90/backend.py", read, written))
        extra["dk and dv of parts"] = parts * (n.k + n.v)
    return Counts(tuple(passes), (*extra.items(), *_copied_bytes(copies)))
