"""Bytes and products of naive and of tiled attention by pass and tensor: exact integers.

Both as in FlashAttention (arXiv 2205.14135), forward and backward, a list of passes over memory:

    naive    scores and probabilities stored      algorithms 0 and 3
    paper    its tiles, their sizes from M        algorithms 1, 2 and 4, skipping as algorithm 5

A pass says of each tensor how many bytes it moves, repetitions included, and how many of them are
different ones. The paper counts the former. On a GPU with a large L2 the former is what goes
between L2 and shared memory, and device memory sees the latter as long as what is read again is
still in L2: `io_model` says when. Our own kernels are counted in `io_kernels`.
"""

import dataclasses
from typing import NamedTuple

from pallas_flash.problem import Operands, Problem
from pallas_flash.tile_walks import NO_OPERANDS, tile_walks

FLOAT32_BYTES = 4
_DROP_MASK_BYTES = 1  # whether one weight is dropped


class Access(NamedTuple):
    """What a pass reads or writes of one tensor.

    Attributes:
      tensor: its name.
      moved: bytes, each as often as it is moved.
      distinct: bytes, each once.
    """

    tensor: str
    moved: int
    distinct: int


class Product(NamedTuple):
    """A matrix product: flops count a multiplication and an addition."""

    name: str
    flops: int


# How many multiplications, and as many additions, a product takes for each pair.
_WIDTHS = {
    "S = Q K^T": "head_dim",
    "O = P V": "head_dim_v",
    "dV = P^T dO": "head_dim_v",
    "dP = dO V^T": "head_dim_v",
    "dQ = dS K": "head_dim",
    "dK = dS^T Q": "head_dim",
}


def products(problem: Problem, pairs: int, *names: str) -> tuple[Product, ...]:
    """These products over so many pairs of query and key; a name may end in ", again"."""
    widths = (getattr(problem, _WIDTHS[name.removesuffix(", again")]) for name in names)
    return tuple(Product(n, 2 * pairs * width) for n, width in zip(names, widths, strict=True))


@dataclasses.dataclass(frozen=True)
class Pass:
    """One pass over device memory: a kernel, or a loop of the paper's algorithm.

    Attributes:
      name: what it does.
      source: the step of the algorithm, or the file, that it counts.
      reads, writes: by tensor. What is added to in place is in both.
      products: its matrix products.
    """

    name: str
    source: str
    reads: tuple[Access, ...] = ()
    writes: tuple[Access, ...] = ()
    products: tuple[Product, ...] = ()

    @property
    def distinct(self) -> int:
        """Bytes read and written, each once."""
        return sum(a.distinct for a in (*self.reads, *self.writes))

    @property
    def flops(self) -> int:
        """Of the matrix products."""
        return sum(product.flops for product in self.products)


@dataclasses.dataclass(frozen=True)
class Counts:
    """The passes of one direction.

    Attributes:
      passes: in order.
      extra: arrays beyond inputs and results that are alive at its peak, bytes by name.
    """

    passes: tuple[Pass, ...]
    extra: tuple[tuple[str, int], ...] = ()

    @property
    def reads(self) -> int:
        """Bytes read, repetitions included."""
        return sum(a.moved for p in self.passes for a in p.reads)

    @property
    def writes(self) -> int:
        """Bytes written, repetitions included."""
        return sum(a.moved for p in self.passes for a in p.writes)

    @property
    def moved(self) -> int:
        return self.reads + self.writes

    @property
    def distinct(self) -> int:
        """Bytes if every pass met each byte once."""
        return sum(p.distinct for p in self.passes)

    @property
    def flops(self) -> int:
        """Of the matrix products."""
        return sum(p.flops for p in self.passes)

    @property
    def extra_bytes(self) -> int:
        return sum(size for _, size in self.extra)


def once(**sizes: int) -> tuple[Access, ...]:
    """Each tensor once."""
    return tuple(Access(name, size, size) for name, size in sizes.items() if size)


class Sizes(NamedTuple):
    """Bytes of the tensors of a problem as the user has them."""

    q: int
    k: int
    v: int
    out: int
    lse: int


def sizes(problem: Problem) -> Sizes:
    item, rows = problem.np_dtype.itemsize, problem.batch * problem.q_len * problem.num_q_heads
    keys = problem.batch * problem.kv_len * problem.num_kv_heads
    return Sizes(
        q=rows * problem.head_dim * item,
        k=keys * problem.head_dim * item,
        v=keys * problem.head_dim_v * item,
        out=rows * problem.head_dim_v * item,
        lse=rows * FLOAT32_BYTES,
    )


def compulsory(problem: Problem, *, backward: bool = False) -> int:
    """Bytes that any algorithm must move: each input read once, each result written once."""
    n = sizes(problem)
    forward = n.q + n.k + n.v + n.out
    return forward + n.out + n.q + n.k + n.v if backward else forward  # dout in, dq, dk, dv out


# --- naive attention -----------------------------------------------------------------------------


class _Stored(NamedTuple):
    """Bytes of what naive attention stores: arrays of an entry a pair, 0 where there is none.

    Attributes:
      scores: S, or dS, or dP.
      probs: P.
      dropped: P after dropout.
      drop_mask: a byte a weight, where dropout is a pass of its own.
    """

    scores: int
    probs: int
    dropped: int
    drop_mask: int

    @property
    def weights(self) -> dict[str, int]:
        """What V is multiplied by."""
        return dict(dropped=self.dropped) if self.dropped else dict(P=self.probs)


def _pairs(problem: Problem) -> int:
    return problem.batch * problem.num_q_heads * problem.q_len * problem.kv_len


def _stored(problem: Problem, fused_softmax: bool, score_bytes: int | None) -> _Stored:
    pairs, item = _pairs(problem), problem.np_dtype.itemsize
    drops = bool(problem.dropout_rate)
    return _Stored(
        scores=pairs * (score_bytes or item),
        probs=pairs * item,
        dropped=pairs * item if drops else 0,
        drop_mask=pairs * _DROP_MASK_BYTES if drops and not fused_softmax else 0,
    )


def _multiply(problem: Problem, name: str, source: str, reads: dict, writes: dict) -> Pass:
    """A pass that is one product."""
    made = products(problem, _pairs(problem), name)
    return Pass(name, source, once(**reads), once(**writes), made)


def naive_forward(
    problem: Problem, *, fused_softmax: bool = True, score_bytes: int | None = None
) -> Counts:
    """Algorithm 0: scores are written, read by the softmax, probabilities written and read.

    Args:
      problem: its sizes; every pair is computed, whatever the mask hides.
      fused_softmax: mask, softmax and dropout are one pass. Otherwise one each, as in PyTorch's
        operations: the mask is added, dropout also writes a byte a weight.
      score_bytes: of one stored score; None: as the inputs. Probabilities are as the inputs.
    """
    n, stored = sizes(problem), _stored(problem, fused_softmax, score_bytes)
    line = lambda i: f"algorithm 0, line {i}"
    passes = (
        _multiply(problem, "S = Q K^T", line(1), dict(q=n.q, k=n.k), dict(S=stored.scores)),
        *_softmax(problem, stored, line(2), fused_softmax),
        _multiply(problem, "O = P V", line(3), stored.weights | dict(v=n.v), dict(out=n.out)),
    )
    extra = dict(S=stored.scores, P=stored.probs, dropped=stored.dropped)
    return Counts(passes, _present(**extra, drop_mask=stored.drop_mask))


def _softmax(problem: Problem, stored: _Stored, source: str, fused: bool) -> list[Pass]:
    """From S to the weights: one pass, or one each of mask, softmax and dropout."""
    scores, probs = once(S=stored.scores), once(P=stored.probs)
    if fused:
        written = (*probs, *once(dropped=stored.dropped))
        return [Pass("P = softmax(S)", source, scores, written)]
    passes = [Pass("mask", source, scores, scores)] if problem.mask.parts() else []
    passes.append(Pass("P = softmax(S)", source, scores, probs))
    if stored.dropped:
        written = once(dropped=stored.dropped, drop_mask=stored.drop_mask)
        passes.append(Pass("dropout", source, probs, written))
    return passes


def _present(**sizes: int) -> tuple[tuple[str, int], ...]:
    return tuple((name, size) for name, size in sizes.items() if size)


def naive_backward(
    problem: Problem, *, fused_softmax: bool = True, score_bytes: int | None = None
) -> Counts:
    """Algorithm 3, from stored probabilities; arguments as `naive_forward`."""
    n, stored = sizes(problem), _stored(problem, fused_softmax, score_bytes)
    ds, dp = dict(dS=stored.scores), dict(dP=stored.scores)
    line = lambda i: f"algorithm 3, line {i}"
    passes = [
        _multiply(problem, "dV = P^T dO", line(1), stored.weights | dict(dout=n.out), dict(dv=n.v)),
        _multiply(problem, "dP = dO V^T", line(2), dict(dout=n.out, v=n.v), dp),
    ]
    if stored.drop_mask:
        read = once(**dp, drop_mask=stored.drop_mask)
        passes.append(Pass("dropout", line(3), read, once(**dp)))
    read = once(P=stored.probs, **dp, dropped=stored.dropped if fused_softmax else 0)
    passes += [
        Pass("dS = P (dP - rowsum)", line(3), read, once(**ds)),
        _multiply(problem, "dQ = dS K", line(4), ds | dict(k=n.k), dict(dq=n.q)),
        _multiply(problem, "dK = dS^T Q", line(5), ds | dict(q=n.q), dict(dk=n.k)),
    ]
    extra = dict(P=stored.probs, dropped=stored.dropped, drop_mask=stored.drop_mask)
    return Counts(tuple(passes), _present(**extra, **dp, **ds))


# --- the paper's tiles ---------------------------------------------------------------------------


def paper_blocks(problem: Problem, sram_bytes: int) -> tuple[int, int]:
    """(B_r, B_c) of algorithm 1, line 1, from M = sram_bytes in elements of the inputs.

    Raises:
      ValueError: where M is less than the four rows that the paper needs.
    """
    elements = sram_bytes // problem.np_dtype.itemsize
    d = max(problem.head_dim, problem.head_dim_v)
    if not 4 * d <= elements:
        raise ValueError(
            f"sram={sram_bytes} bytes hold {elements} elements of {problem.dtype}; four rows of "
            f"head_dim {d} need {4 * d}: give more"
        )
    block_kv = -(-elements // (4 * d))
    return min(block_kv, d), block_kv


class _PaperLoop(NamedTuple):
    """The paper's double loop, summed over all batch rows and query heads.

    Attributes:
      keys: K and V, which the outer loop loads, each query head its own.
      by_query: what the inner loop can move that has a row a query, by tensor.
      pairs: computed.
    """

    keys: tuple[Access, ...]
    by_query: dict[str, Access]
    pairs: int

    def tiles(self, *names: str) -> tuple[Access, ...]:
        """These tensors, a tile for every step of the inner loop."""
        return tuple(self.by_query[name] for name in names)


def _paper_loop(problem: Problem, operands: Operands, sram_bytes: int) -> _PaperLoop:
    block_q, block_kv = paper_blocks(problem, sram_bytes)
    walks = tile_walks(problem, operands, block_q, block_kv)
    n, group = sizes(problem), problem.q_per_kv
    queries = problem.batch * problem.num_q_heads * problem.q_len
    row, row_v = (d * problem.np_dtype.itemsize for d in (problem.head_dim, problem.head_dim_v))
    rows = dict(q=row, dq=row, out=row_v, dout=row_v, l=FLOAT32_BYTES, m=FLOAT32_BYTES)
    return _PaperLoop(
        keys=(Access("k", n.k * group, n.k), Access("v", n.v * group, n.v)),
        by_query={name: Access(name, walks.sum_own * r, queries * r) for name, r in rows.items()},
        pairs=walks.pairs,
    )


def paper_forward(problem: Problem, operands: Operands = NO_OPERANDS, *, sram_bytes: int) -> Counts:
    """Algorithm 1 (2 with mask and dropout, which move nothing more).

    The outer loop is over K_j and V_j, the inner over Q_i, O_i, l_i and m_i; tiles without a
    visible pair are skipped as in algorithm 5. Each query head reads its own K and V.
    """
    n, loop = sizes(problem), _paper_loop(problem, operands, sram_bytes)
    zeroed, results = once(out=n.out, l=n.lse, m=n.lse), loop.tiles("out", "l", "m")
    passes = (
        Pass("O = 0, l = 0, m = -inf", "algorithm 1, line 2", (), zeroed),
        Pass(
            "for K_j, V_j: for Q_i",
            "algorithm 1, lines 5-15",
            (*loop.keys, *loop.tiles("q"), *results),
            results,
            products(problem, loop.pairs, "S = Q K^T", "O = P V"),
        ),
    )
    return Counts(passes, (("l", n.lse), ("m", n.lse)))


def paper_backward(
    problem: Problem, operands: Operands = NO_OPERANDS, *, sram_bytes: int
) -> Counts:
    """Algorithm 4: P is computed again from Q, K, l and m; arguments as `paper_forward`."""
    n, loop = sizes(problem), _paper_loop(problem, operands, sram_bytes)
    # A query head has its own dk and dv; those of a group are added up afterwards.
    own = once(dk=n.k * problem.q_per_kv, dv=n.v * problem.q_per_kv)
    dq = loop.tiles("dq")
    passes = (
        Pass("dQ = dK = dV = 0", "algorithm 4, line 5", (), (*once(dq=n.q), *own)),
        Pass(
            "for K_j, V_j: for Q_i",
            "algorithm 4, lines 6-24",
            (*loop.keys, *loop.tiles("q", "out", "dout"), *dq, *loop.tiles("l", "m")),
            (*dq, *own),
            products(
                problem,
                loop.pairs,
                "S = Q K^T, again",
                "dV = P^T dO",
                "dP = dO V^T",
                "dQ = dS K",
                "dK = dS^T Q",
            ),
        ),
    )
    return Counts(passes, (("l", n.lse), ("m", n.lse)))
