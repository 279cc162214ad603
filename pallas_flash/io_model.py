"""What attention costs in bytes and time: the counts, the caches, the floors.

    python -m pallas_flash.io_model --seq-len 8192 --head-dim 128 --heads 16 --causal --backward

`io_counts` and `io_kernels` count exactly. Here is what turns counts into predictions: which of the
bytes between L2 and shared memory reach device memory (`dram`), and floors, the least time that
bytes and products can take, for one GPU that does nothing else. `io_report` is the command line.

L2 and its regimes. All blocks that run at the same time read the same few heads again and again.
While what they share fits in L2, device memory sees each byte once: resident. Each half of an L2 of
this size may keep its own copy of what its multiprocessors read, so what needs more than half of
it is borderline; beyond the whole it is streaming, and only blocks in step share a load.
"""

import dataclasses
from typing import NamedTuple

from pallas_flash import hardware, io_counts, io_few_queries, io_kernels, tuned
from pallas_flash.io_counts import Access, Counts
from pallas_flash.problem import LOW_PRECISION, Operands, Problem
from pallas_flash.tile_walks import NO_OPERANDS, Walks, tile_walks, visible_pairs

RESIDENT, BORDERLINE, STREAMING = "resident", "borderline", "streaming"
NUM_SMS = hardware.SM90.num_sms  # each runs one block at a time


# --- the least that any implementation can take --------------------------------------------------


def visible_flops(
    problem: Problem, operands: Operands = NO_OPERANDS, *, backward: bool = False
) -> int:
    """Of the products over visible pairs: two forward, five backward (nothing stored: S again)."""
    h, hv = problem.head_dim, problem.head_dim_v
    return visible_pairs(problem, operands) * 2 * (3 * h + 2 * hv if backward else h + hv)


def problem_floor_s(
    problem: Problem,
    operands: Operands = NO_OPERANDS,
    *,
    backward: bool = False,
    speeds: hardware.GpuSpeeds = hardware.H200,
) -> float:
    """The least time of a problem, by its visible pairs and its compulsory bytes."""
    flops = visible_flops(problem, operands, backward=backward)
    return speeds.floor_s(flops, io_counts.compulsory(problem, backward=backward))


# --- caches --------------------------------------------------------------------------------------


class Residency(NamedTuple):
    """What the blocks that run at the same time have in common.

    Attributes:
      active_bytes: read by several of them.
      sharing: how many of them read the same.
      regime: RESIDENT, BORDERLINE or STREAMING.
      again_bytes: read once more by blocks that run later than the others of their head.
    """

    active_bytes: int
    sharing: float
    regime: str
    again_bytes: int = 0


def _residency(active_bytes: float, sharing: float, speeds: hardware.GpuSpeeds) -> Residency:
    regime = RESIDENT if active_bytes <= speeds.l2_bytes / 2 else BORDERLINE
    if active_bytes > speeds.l2_bytes:
        regime = STREAMING
    return Residency(round(active_bytes), max(sharing, 1.0), regime)


def _at_once(heads: int, tiles: int, head_group: int) -> float:
    """Heads whose blocks run at the same time: `tiles` blocks each, interleaved by groups."""
    return min(heads, max(head_group, NUM_SMS / tiles))


def _span(walks: Walks, heads: float, own_block: int, length: int) -> float:
    """Positions across that the blocks of a head, neighbours of so many heads, walk together."""
    return min(length, int(walks.across.max()) + (NUM_SMS / heads - 1) * own_block)


def _position_bytes(problem: Problem, cut: io_kernels.Cut) -> int:
    """A key in K and V, or a query in q and dout, as the kernels see them."""
    wide = io_kernels.padded(problem, cut)
    return (wide.head_dim + wide.head_dim_v) * problem.np_dtype.itemsize


def forward_residency(
    problem: Problem,
    operands: Operands = NO_OPERANDS,
    speeds: hardware.GpuSpeeds = hardware.H200,
) -> Residency:
    """K and V of the heads whose q tiles run at the same time, a block a multiprocessor."""
    cut = tuned.forward_of(problem)
    walks = tile_walks(problem, operands, cut.block_q, cut.block_kv)
    group = cut.head_group if problem.mask.parts() else 1
    heads = _at_once(problem.batch * problem.num_q_heads, len(walks.own), group)
    kv_heads = max(1.0, heads / problem.q_per_kv)
    keys = _span(walks, heads, cut.block_q, problem.kv_len)
    shared = kv_heads * keys * _position_bytes(problem, cut)
    return _residency(shared, NUM_SMS / kv_heads, speeds)


def backward_residency(
    problem: Problem,
    operands: Operands = NO_OPERANDS,
    speeds: hardware.GpuSpeeds = hardware.H200,
) -> Residency:
    """q, dout and the sums of dq of the heads whose kv tiles run at the same time.

    The query heads of a share come one after the other: where all walks are equally long the
    blocks are at the same of them, else at any.
    """
    cut = tuned.backward_of(problem)
    walks = tile_walks(problem, operands, cut.block_q, cut.block_kv, by="kv")
    parts = tuned.kv_parts(problem, cut)
    pairs, kv_tiles = problem.batch * problem.num_kv_heads * parts, len(walks.own)
    heads_a_share = problem.q_per_kv // parts
    is_grouped = heads_a_share > 1 and bool(problem.mask.parts())
    shares = _at_once(pairs, kv_tiles, cut.head_group if is_grouped else 1)
    is_even = walks.tiles.mean() > 0.9 * walks.tiles.max()
    heads = shares * (1 if is_even else heads_a_share)
    queries = _span(walks, shares, cut.block_kv, problem.q_len)
    dq_bytes = cut.padded(problem.head_dim) * io_counts.FLOAT32_BYTES
    a_query = _position_bytes(problem, cut) + dq_bytes
    residency = _residency(heads * queries * a_query, NUM_SMS / heads, speeds)
    if problem.mask.parts() or residency.regime == STREAMING:
        return residency
    a_share = heads_a_share * problem.q_len * a_query
    again = _shares_again(pairs, kv_tiles, a_share, speeds) * a_share
    return residency._replace(again_bytes=again)


def _shares_again(pairs: int, kv_tiles: int, a_share: int, speeds: hardware.GpuSpeeds) -> int:
    """Shares that two waves of equally long blocks have a part in, where L2 cannot hold a wave.

    By the time the second wave begins with what the first one began with, that is gone.
    """
    if max(1.0, NUM_SMS / kv_tiles) * a_share <= speeds.l2_bytes:
        return 0
    ends = range(NUM_SMS, pairs * kv_tiles, NUM_SMS)
    return sum(end % kv_tiles != 0 for end in ends)


class Dram(NamedTuple):
    """Bytes of device memory.

    Attributes:
      reads, writes: predicted. Of the writes up to the size of L2 may still be there when the last
        kernel ends.
      least, most: reads and writes if nothing that is read again leaves L2, and if everything does.
    """

    reads: int
    writes: int
    least: int
    most: int

    @property
    def total(self) -> int:
        return self.reads + self.writes


def dram(counts: Counts, residency: Residency) -> Dram:
    """What of the counted bytes reaches device memory, each kernel starting with a cold cache."""

    def likely(access: Access, moved: int) -> int:
        if residency.regime != STREAMING:
            return access.distinct
        return max(access.distinct, int(moved / residency.sharing))

    reads, writes = residency.again_bytes, 0
    for one in counts.passes:
        added = {a.tensor: a.moved for a in one.writes}
        # What is added to in L2 moves nothing to a multiprocessor, but is fetched to be added to.
        reads += sum(likely(a, a.moved or added.get(a.tensor, 0)) for a in one.reads)
        writes += sum(likely(a, a.moved) for a in one.writes)
    return Dram(reads, writes, counts.distinct, max(counts.moved, counts.distinct))


# --- the whole of a problem ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Estimate:
    """One algorithm in one direction.

    Attributes:
      algorithm: 'naive', 'naive, fused softmax', 'paper' or 'kernels'.
      backward: the direction.
      counts: bytes and products.
      memory: what of the bytes reaches device memory.
      residency: of the shared data in L2.
      closed_form: bytes by the paper's bound, without its constant; 0 for kernels.
    """

    algorithm: str
    backward: bool
    counts: Counts
    memory: Dram
    residency: Residency
    closed_form: int

    def floor_s(self, speeds: hardware.GpuSpeeds = hardware.H200) -> float:
        """The least time of its own flops and bytes."""
        return speeds.floor_s(self.counts.flops, self.memory.total)

    @property
    def intensity(self) -> float:
        """Flops a byte of device memory."""
        return self.counts.flops / self.memory.total


def _naive(problem: Problem, speeds: hardware.GpuSpeeds, backward: bool, fused: bool) -> Estimate:
    count = io_counts.naive_backward if backward else io_counts.naive_forward
    counts = count(problem, fused_softmax=fused)
    # What one pass writes and the next reads need not leave L2, if all of it fits.
    between = max(size for _, size in counts.extra)
    residency = _residency(between, 1.0, speeds)
    least = io_counts.compulsory(problem, backward=backward)
    memory = Dram(counts.reads, counts.writes, least, counts.moved)
    if residency.regime == RESIDENT:
        written = _results(problem, backward)
        memory = Dram(least - written, written, least, counts.moved)
    item, heads = problem.np_dtype.itemsize, problem.batch * problem.num_q_heads
    t, s = problem.q_len, problem.kv_len
    closed = heads * item * (t * max(problem.head_dim, problem.head_dim_v) + t * s)
    name = "naive, fused softmax" if fused else "naive"
    return Estimate(name, backward, counts, memory, residency, closed)


def _results(problem: Problem, backward: bool) -> int:
    n = io_counts.sizes(problem)
    return n.q + n.k + n.v if backward else n.out


def _paper(
    problem: Problem, operands: Operands, sram: int, speeds: hardware.GpuSpeeds, backward: bool
) -> Estimate:
    count = io_counts.paper_backward if backward else io_counts.paper_forward
    counts = count(problem, operands, sram_bytes=sram)
    # As the paper parallelises: a (batch row, head) for each multiprocessor, nothing shared.
    heads = problem.batch * problem.num_q_heads
    again = sum(a.distinct for a in counts.passes[1].reads) // heads
    residency = _residency(min(heads, NUM_SMS) * again, 1.0, speeds)
    d, item = max(problem.head_dim, problem.head_dim_v), problem.np_dtype.itemsize
    closed = heads * item * problem.q_len * problem.kv_len * d * d // (sram // item)
    return Estimate("paper", backward, counts, dram(counts, residency), residency, closed)


def _kernels(
    problem: Problem, operands: Operands, speeds: hardware.GpuSpeeds, backward: bool
) -> Estimate:
    count = io_kernels.kernels_backward if backward else io_kernels.kernels_forward
    reside = backward_residency if backward else forward_residency
    counts, residency = count(problem, operands), reside(problem, operands, speeds)
    return Estimate("kernels", backward, counts, dram(counts, residency), residency, 0)


def refusal(problem: Problem) -> str:
    """Why the kernels are not counted for this problem, or the empty string."""
    if problem.np_dtype not in LOW_PRECISION:
        return f"no kernel takes {problem.dtype}: float16 and bfloat16 only"
    if max(problem.head_dim, problem.head_dim_v) > max(tuned.HEAD_DIMS):
        return f"no kernel takes head dims above {max(tuned.HEAD_DIMS)}"
    if io_few_queries.applies(problem):
        return "few queries are rearranged by kernels/sm90/few_queries.py"
    return ""


def estimates(
    problem: Problem,
    operands: Operands = NO_OPERANDS,
    *,
    sram_bytes: int = hardware.SM90.smem_bytes,
    backward: bool = False,
    speeds: hardware.GpuSpeeds = hardware.H200,
) -> tuple[Estimate, ...]:
    """Every algorithm that can be counted for a problem, in one direction.

    Args:
      problem: its sizes, dtype, mask and dropout.
      operands: what its mask needs, concrete.
      sram_bytes: M of the paper, fast memory of one multiprocessor.
      backward: the direction.
      speeds: of the GPU.

    Raises:
      ValueError: see `io_counts.paper_blocks`.
    """
    found = [_naive(problem, speeds, backward, fused) for fused in (False, True)]
    found.append(_paper(problem, operands, sram_bytes, speeds, backward))
    if not refusal(problem):
        found.append(_kernels(problem, operands, speeds, backward))
    return tuple(found)


if __name__ == "__main__":
    from pallas_flash.io_report import main

    main()
