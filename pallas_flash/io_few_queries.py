"""Whether a forward call of few queries, as in decoding, is better run another way.

As it is, a query head has a tile of its own. The other way is kernels/sm90/few_queries.py: query
heads that share keys are rows of one tile, and the keys are cut into parts, each with its block.
Which is better is told by the times of both, the longer of products (whole tiles) and of bytes
(device memory) on as many multiprocessors as there are blocks. What only the arrays of a call know,
such as lengths and windows, counts as if it hid nothing.
"""

import dataclasses
import functools
from typing import NamedTuple

from pallas_flash import hardware, io_kernels, masks, tuned
from pallas_flash.config import ROW_TILE, ForwardConfig
from pallas_flash.problem import Problem

MOST_ROWS = 64  # of one consumer
FEWEST_KEYS = 256  # of a part; a call with fewer is short whatever is done
WHOLE_KEYS = 128  # the longest step
KEYS_OF_A_START = 128  # that arrive while a block begins and ends
# Where keys come at the rate of memory either way, the launch with more of them under way is taken,
# though its rearranging costs a little. How little it may be is a guess, not a measurement.
_TIE = 1.05


class Launch(NamedTuple):
    """One way to run a call.

    Attributes:
      flops: of its products, whole tiles.
      dram_bytes: each byte once.
      blocks: that make the products.
      streams: of keys: blocks that read the same keys wait for the same bytes.
    """

    flops: int
    dram_bytes: int
    blocks: int
    streams: int

    def time_s(
        self,
        speeds: hardware.GpuSpeeds = hardware.H200,
        limits: hardware.GpuLimits = hardware.SM90,
    ) -> float:
        """The longer of products and bytes, a multiprocessor having its share of either speed."""
        share = lambda n: min(1.0, n / limits.num_sms)
        return speeds.floor_s(
            self.flops / share(self.blocks), self.dram_bytes / share(self.streams)
        )


def applies(problem: Problem) -> bool:
    """Whether a call is run as rows and parts."""
    rows = _rearranged(problem)
    return rows is not None and rows.time_s() <= _TIE * _as_it_is(problem).time_s()


def told(problem: Problem) -> str:
    """Why a call is run as rows and parts, in a line; empty where it is not."""
    rows = _rearranged(problem)
    if rows is None or not applies(problem):
        return ""
    num_rows, (_, parts) = problem.q_len * problem.q_per_kv, cut(problem)
    this, other = (f"{1e6 * way.time_s():.3g}" for way in (rows, _as_it_is(problem)))
    return (
        f"few queries: {problem.q_per_kv} heads in one tile of {num_rows} rows, keys in {parts} "
        f"parts: forward about {this} us, with a tile for each head {other} us"
    )


def num_parts(pairs: int, kv_len: int, blocks_per_sm: int) -> int:
    """Equal parts of the keys, as many as are read soonest.

    A block on every multiprocessor is enough for all the bandwidth there is: only where the last
    blocks are fewer do keys come slower.

    Args:
      pairs: of a batch row and a kv head.
      kv_len: a multiple of 8, or else nothing is cut.
      blocks_per_sm: that run at a time on a multiprocessor.
    """
    sms = hardware.SM90.num_sms

    def keys_read(parts: int) -> int:
        """Before the last block ends, and what could have been read meanwhile."""
        rounds, last = divmod(pairs * parts, sms * blocks_per_sm)
        blocks = rounds * sms * blocks_per_sm + (max(last, sms) if last else 0)
        return blocks * (kv_len // parts + KEYS_OF_A_START)

    possible = range(2, kv_len // FEWEST_KEYS + 1)
    return min([1, *(p for p in possible if kv_len % (ROW_TILE * p) == 0)], key=keys_read)


def is_length(problem: Problem) -> bool:
    """What the mask hides is a length of the keys: of a single query, without a lower bound."""
    return problem.q_len == 1 and problem.mask.is_bounds and not problem.mask.has_lower


def is_written_out(problem: Problem) -> bool:
    """The mask becomes an array of a few rows."""
    return bool(problem.mask.parts()) and not is_length(problem)


def cut(problem: Problem) -> tuple[ForwardConfig, int]:
    """How the kernel is cut, and into how many parts the keys are."""
    config_of = functools.partial(
        tuned.few_queries,
        *map(ForwardConfig().padded, (problem.head_dim, problem.head_dim_v)),
        has_soft_cap=problem.soft_cap is not None,
    )
    pairs = problem.batch * problem.num_kv_heads
    parts = num_parts(pairs, problem.kv_len, config_of(is_masked=False).blocks_per_sm)
    is_whole = problem.kv_len // parts % WHOLE_KEYS == 0
    return config_of(is_masked=bool(problem.mask.parts()) or not is_whole), parts


def _as_it_is(problem: Problem) -> Launch:
    one = io_kernels.forward_kernel(io_kernels.known_ahead(problem))
    q_tiles = -(-problem.q_len // tuned.forward_of(problem).block_q)
    return _launch(
        one,
        blocks=problem.batch * problem.num_q_heads * q_tiles,
        streams=problem.batch * problem.num_kv_heads * q_tiles,
    )


def _rearranged(problem: Problem) -> Launch | None:
    """None where the call cannot be run as rows: positions matter, or they do not fit."""
    num_rows = problem.q_len * problem.q_per_kv
    needs_position = (
        problem.bias_shape is not None
        or problem.alibi_shift is not None
        or problem.dropout_rate > 0
    )
    if needs_position or num_rows > MOST_ROWS or problem.kv_len < FEWEST_KEYS:
        return None
    known, (config, parts) = io_kernels.known_ahead(problem), cut(problem)
    _, keys = known.mask.bounds(masks.MaskValues()).kv_any(0, problem.q_len, problem.kv_len)
    rows = dataclasses.replace(
        known,
        batch=problem.batch * parts,
        q_len=num_rows,
        num_q_heads=problem.num_kv_heads,
        kv_len=max(1, -(-keys // parts)),
        mask=masks.And(),
    )
    more = 0
    if parts > 1 or problem.q_len > 1:  # q is copied to each part; the parts of out meet
        n = io_kernels.kernel_sizes(rows, config)
        more += (n.q + n.out + n.lse) * (parts + 1) // parts
    if is_written_out(problem):  # written out in bytes, read into bits
        more += 2 * problem.batch * num_rows * problem.kv_len
    blocks = rows.batch * rows.num_q_heads
    return _launch(
        io_kernels.forward_kernel(rows, cut=config), blocks=blocks, streams=blocks, more=more
    )


def _launch(one: io_kernels.Pass, *, blocks: int, streams: int, more: int = 0) -> Launch:
    return Launch(one.flops, one.distinct + more, blocks, streams)
