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
        return sum(a.distinct for p in self.passes for a in (*p.reads, *p.writes))

    @property
    def flops(self) -> int:
        """Of the matrix products."""
        return sum(product.flops for p in self.passes for product in p.products)

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


def _pairs(problem: Problem) -> int:
    return problem.batch * problem.num_q_heads * problem.q_len * problem.kv_len


def _hides(problem: Problem) -> bool:
    return bool(problem.mask.parts())


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
    n, pairs, item = sizes(problem), _pairs(problem), problem.np_dtype.itemsize
    scores, probs = pairs * (score_bytes or item), pairs * item
    drops = bool(problem.dropout_rate)
    dropped = probs if drops else 0
    passes = [
        Pass(
            "S = Q K^T",
            "algorithm 0, line 1",
            once(q=n.q, k=n.k),
            once(S=scores),
            (Product("S = Q K^T", 2 * pairs * problem.head_dim),),
        )
    ]
    softmax = "algorithm 0, line 2"
    if fused_softmax:
        written = once(P=probs, dropped=dropped)
        passes.append(Pass("P = softmax(S)", softmax, once(S=scores), written))
    else:
        if _hides(problem):
            passes.append(Pass("mask", softmax, once(S=scores), once(S=scores)))
        passes.append(Pass("P = softmax(S)", softmax, once(S=scores), once(P=probs)))
        if drops:
            written = once(dropped=dropped, drop_mask=pairs * _DROP_MASK_BYTES)
            passes.append(Pass("dropout", softmax, once(P=probs), written))
    weights = dict(dropped=dropped) if drops else dict(P=probs)
    passes.append(
        Pass(
            "O = P V",
            "algorithm 0, line 3",
            once(**weights, v=n.v),
            once(out=n.out),
            (Product("O = P V", 2 * pairs * problem.head_dim_v),),
        )
    )
    extra = dict(S=scores, P=probs, dropped=dropped)
    extra["drop_mask"] = pairs * _DROP_MASK_BYTES if drops and not fused_softmax else 0
    return Counts(tuple(passes), tuple(_present(extra)))


def _present(sizes: dict[str, int]):
    return ((name, size) for name, size in sizes.items() if size)


def naive_backward(
    problem: Problem, *, fused_softmax: bool = True, score_bytes: int | None = None
) -> Counts:
    """Algorithm 3, from stored probabilities; arguments as `naive_forward`."""
    n, pairs, item = sizes(problem), _pairs(problem), problem.np_dtype.itemsize
    dscores, probs = pairs * (score_bytes or item), pairs * item
    drops = bool(problem.dropout_rate)
    dropped = probs if drops else 0
    drop_mask = pairs * _DROP_MASK_BYTES if drops and not fused_softmax else 0
    flops, flops_v = 2 * pairs * problem.head_dim, 2 * pairs * problem.head_dim_v
    weights = dict(dropped=dropped) if drops else dict(P=probs)
    passes = [
        Pass(
            "dV = P^T dO",
            "algorithm 3, line 1",
            once(**weights, dout=n.out),
            once(dv=n.v),
            (Product("dV = P^T dO", flops_v),),
        ),
        Pass(
            "dP = dO V^T",
            "algorithm 3, line 2",
            once(dout=n.out, v=n.v),
            once(dP=dscores),
            (Product("dP = dO V^T", flops_v),),
        ),
    ]
    if drop_mask:
        read = once(dP=dscores, drop_mask=drop_mask)
        passes.append(Pass("dropout", "algorithm 3, line 3", read, once(dP=dscores)))
    read = once(P=probs, dP=dscores, dropped=dropped if fused_softmax else 0)
    passes += [
        Pass("dS = P (dP - rowsum)", "algorithm 3, line 3", read, once(dS=dscores)),
        Pass(
            "dQ = dS K",
            "algorithm 3, line 4",
            once(dS=dscores, k=n.k),
            once(dq=n.q),
            (Product("dQ = dS K", flops),),
        ),
        Pass(
            "dK = dS^T Q",
            "algorithm 3, line 5",
            once(dS=dscores, q=n.q),
            once(dk=n.k),
            (Product("dK = dS^T Q", flops),),
        ),
    ]
    extra = dict(P=probs, dropped=dropped, drop_mask=drop_mask, dP=dscores, dS=dscores)
    return Counts(tuple(passes), tuple(_present(extra)))


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


class _PaperWalk(NamedTuple):
    """Sums over the paper's double loop, of all batch rows and query heads.

    Attributes:
      k, v: bytes of K and of V that the outer loop loads.
      rows: queries that the inner loop loads.
      pairs: computed.
    """

    k: int
    v: int
    rows: int
    pairs: int


def _paper_walk(problem: Problem, operands: Operands, sram_bytes: int) -> _PaperWalk:
    block_q, block_kv = paper_blocks(problem, sram_bytes)
    walks = tile_walks(problem, operands, block_q, block_kv)
    n, group = sizes(problem), problem.q_per_kv
    return _PaperWalk(k=n.k * group, v=n.v * group, rows=walks.sum_own, pairs=walks.pairs)


def paper_forward(problem: Problem, operands: Operands = NO_OPERANDS, *, sram_bytes: int) -> Counts:
    """Algorithm 1 (2 with mask and dropout, which move nothing more).

    The outer loop is over K_j and V_j, the inner over Q_i, O_i, l_i and m_i; tiles without a
    visible pair are skipped as in algorithm 5. Each query head reads its own K and V.
    """
    n, walk = sizes(problem), _paper_walk(problem, operands, sram_bytes)
    row, row_v = (d * problem.np_dtype.itemsize for d in (problem.head_dim, problem.head_dim_v))
    tiled = lambda name, row_bytes, whole: Access(name, walk.rows * row_bytes, whole)
    begin = Pass(
        "O = 0, l = 0, m = -inf", "algorithm 1, line 2", (), once(out=n.out, l=n.lse, m=n.lse)
    )
    statistics = (tiled("l", FLOAT32_BYTES, n.lse), tiled("m", FLOAT32_BYTES, n.lse))
    out = tiled("out", row_v, n.out)
    loop = Pass(
        "for K_j, V_j: for Q_i",
        "algorithm 1, lines 5-15",
        (
            Access("k", walk.k, n.k),
            Access("v", walk.v, n.v),
            tiled("q", row, n.q),
            out,
            *statistics,
        ),
        (out, *statistics),
        (
            Product("S = Q K^T", 2 * walk.pairs * problem.head_dim),
            Product("O = P V", 2 * walk.pairs * problem.head_dim_v),
        ),
    )
    return Counts((begin, loop), (("l", n.lse), ("m", n.lse)))


def paper_backward(
    problem: Problem, operands: Operands = NO_OPERANDS, *, sram_bytes: int
) -> Counts:
    """Algorithm 4: P is computed again from Q, K, l and m; arguments as `paper_forward`."""
    n, walk = sizes(problem), _paper_walk(problem, operands, sram_bytes)
    row, row_v = (d * problem.np_dtype.itemsize for d in (problem.head_dim, problem.head_dim_v))
    flops, flops_v = 2 * walk.pairs * problem.head_dim, 2 * walk.pairs * problem.head_dim_v
    tiled = lambda name, row_bytes, whole: Access(name, walk.rows * row_bytes, whole)
    group = problem.q_per_kv
    # A query head has its own dk and dv; those of a group are added up afterwards.
    dk, dv = n.k * group, n.v * group
    begin = Pass("dQ = dK = dV = 0", "algorithm 4, line 5", (), once(dq=n.q, dk=dk, dv=dv))
    dq = tiled("dq", row, n.q)
    loop = Pass(
        "for K_j, V_j: for Q_i",
        "algorithm 4, lines 6-24",
        (
            Access("k", walk.k, n.k),
            Access("v", walk.v, n.v),
            tiled("q", row, n.q),
            tiled("out", row_v, n.out),
            tiled("dout", row_v, n.out),
            dq,
            tiled("l", FLOAT32_BYTES, n.lse),
            tiled("m", FLOAT32_BYTES, n.lse),
        ),
        (dq, *once(dk=dk, dv=dv)),
        (
            Product("S = Q K^T, again", flops),
            Product("dV = P^T dO", flops_v),
            Product("dP = dO V^T", flops_v),
            Product("dQ = dS K", flops),
            Product("dK = dS^T Q", flops),
        ),
    )
    return Counts((begin, loop), (("l", n.lse), ("m", n.lse)))
