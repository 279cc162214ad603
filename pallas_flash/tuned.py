"""The tuned numbers, and nothing else: which configuration a problem runs with.

Rows are by (head_dim, head_dim_v), each 64, 128, 192 or 256, the next where it is none of these;
forward and backward have one for calls without a mask and one for calls with one. Beside a row
stands the figure that speaks for it: TFLOP/s on an H200, 2026-11-29, bfloat16, 16,384 tokens, model
width 2048, T 8192, JAX 0.11.2, CUPTI median of a short burst. A row without a figure was chosen
because it compiles clean and fits, by analogy with its neighbours, and is to be measured.
"""

import dataclasses

from pallas_flash import hardware
from pallas_flash.config import BackwardConfig, DqConfig, ForwardConfig
from pallas_flash.problem import LOW_PRECISION, Problem


@dataclasses.dataclass(frozen=True)
class Tuned[Config: (ForwardConfig, BackwardConfig, DqConfig)]:
    """A row.

    Attributes:
      config: how the kernel is cut.
      spill_bytes: most bytes a thread spills (stores), over both dtypes, without a mask and with
        causal and lengths, by ptxas 13.0. The ahead-of-time test fails above it.
      term_spill_bytes: the same with any one of: a window, segments, a mask array, a bias, a soft
        cap, dropout, ALiBi and sinks, four query heads a kv head.
    """

    config: Config
    spill_bytes: int = 0
    term_spill_bytes: int = 0


def _three_in_turn(**changes) -> ForwardConfig:
    base = ForwardConfig(compute_wgs=3, overlap=False, q_stages=2, output_through_q=False)
    return dataclasses.replace(base, **changes)


def _two_overlapped(**changes) -> ForwardConfig:
    return dataclasses.replace(ForwardConfig(rescale_threshold=8.0), **changes)


def _one_consumer(**changes) -> ForwardConfig:
    return _two_overlapped(compute_wgs=1, **changes)


_FORWARD = {
    (64, 64): (Tuned(_three_in_turn()),) * 2,  # 570 full, 532 causal
    (128, 128): (  # 719 full, 713 causal
        Tuned(_three_in_turn(output_through_q=True, rescale_threshold=8.0)),
        Tuned(_two_overlapped(q_stages=2), term_spill_bytes=24),  # 20 with dropout
    ),
    (256, 256): (  # 848, 799
        Tuned(_two_overlapped(block_kv=64, persistent=False)),
        Tuned(_two_overlapped(block_kv=64, persistent=False), term_spill_bytes=8),  # dropout
    ),
    (192, 192): (Tuned(_two_overlapped(q_stages=2, block_kv=64)),) * 2,  # 710 causal, T 4096
    # Not measured.
    (64, 128): (Tuned(_two_overlapped(q_stages=2)),) * 2,
    (64, 192): (Tuned(_two_overlapped(q_stages=2)),) * 2,
    (64, 256): (Tuned(_two_overlapped(q_stages=2, block_kv=64)),) * 2,
    (128, 64): (Tuned(_three_in_turn()),) * 2,
    (128, 192): (Tuned(_two_overlapped(q_stages=2, block_kv=64)),) * 2,
    (128, 256): (Tuned(_two_overlapped(q_stages=2, block_kv=64)),) * 2,
    (192, 64): (Tuned(_three_in_turn(q_stages=1)),) * 2,
    (192, 128): (Tuned(_two_overlapped(q_stages=2, block_kv=64)),) * 2,
    (192, 256): (Tuned(_two_overlapped(block_kv=64)),) * 2,
    (256, 64): (Tuned(_two_overlapped(q_stages=2, block_kv=64)),) * 2,
    (256, 128): (Tuned(_two_overlapped(block_kv=64)),) * 2,
    (256, 192): (Tuned(_two_overlapped(block_kv=64)),) * 2,
}

# With a bias, by the bytes of its entries: what leaves room for its tiles in shared memory.
_FORWARD_WITH_BIAS = {
    (64, 64, 2): Tuned(_two_overlapped()),
    (64, 64, 4): Tuned(_two_overlapped()),
    (128, 128, 2): Tuned(_two_overlapped(), term_spill_bytes=60),  # 568, T 4096, one for the batch
    (128, 128, 4): Tuned(_two_overlapped(block_kv=64)),
}

# Equal head dims between 64 and 128, where nothing but bounds hides and there is no further term.
# Causal, T 4096, 16 heads: 518 at 80, 582 at 96; two overlapped: 473, 577.
_FORWARD_NARROW = Tuned(_three_in_turn(output_through_q=True, rescale_threshold=8.0))

# Head dims of one of these rows that are not equal, where an output that cannot be staged in Q has
# no room: two consumers for three, or padded to equal ones.
_FORWARD_UNEQUAL = {
    (128, 128): Tuned(_two_overlapped(q_stages=2)),
    (192, 192): Tuned(_two_overlapped(q_stages=2, block_kv=64, head_tile=192)),
    (256, 256): Tuned(_two_overlapped(block_kv=64, persistent=False, head_tile=256)),
}

# Up to 512 queries and keys under a mask of bounds, with no further term: tiles of 192 queries are
# cut much by either. Causal, T 512: 0.123 ms, in turn 0.142; without a mask 0.178 against 0.156.
_FORWARD_SHORT = {(64, 64): Tuned(_two_overlapped(q_stages=2))}
MOST_SHORT = 512

HEAD_DIMS = tuple(sorted({head_dim for head_dim, _ in _FORWARD}))

_KEYS_64 = BackwardConfig(block_q=128, head_group=4)  # 32/8 heads causal: 522 -> 585, 2 gives 575
_KEYS_128 = BackwardConfig(block_q=64)  # 32/8 heads causal, head_group 1 -> 2: 613 -> 656
_ROLES = BackwardConfig(split="roles", block_kv=64)

_BACKWARD = {
    (64, 64): (  # 619 full, 582 causal
        Tuned(_KEYS_64, spill_bytes=8),
        # 28 causal, 20 with lengths. 40 with a soft cap, 52 with lengths where 4 heads share keys.
        # 120 with dropout: at 112 the backward kernel took 4.91 ms (32 heads, causal, B 2, T 8192).
        # 376 where the gradient of a bias is summed over a cluster: consumers have 232 registers
        # for it. With 240, in a launch that is no cluster, 264: full, B 1, T 4096 take 2.32 ms,
        # with 232 it was 3.69.
        Tuned(_KEYS_64, spill_bytes=32, term_spill_bytes=376),
    ),
    (128, 128): (  # 682 full, 648 causal
        Tuned(_KEYS_128),
        # 28 with lengths where 4 heads share keys and with a bias in a cluster, 12 with dropout; by
        # JAX 0.11 8 with a window
        Tuned(_KEYS_128, term_spill_bytes=28),
    ),
    (256, 256): (Tuned(_ROLES),) * 2,  # 495 full, 493 causal
    (192, 192): (Tuned(_ROLES),) * 2,  # 451 causal, T 4096
    # Not measured.
    (128, 64): (Tuned(_KEYS_128, spill_bytes=4),) * 2,
    (64, 128): (Tuned(_ROLES),) * 2,
    (64, 192): (Tuned(_ROLES),) * 2,
    (64, 256): (Tuned(_ROLES),) * 2,
    (128, 192): (Tuned(_ROLES),) * 2,
    (128, 256): (Tuned(_ROLES),) * 2,
    (192, 64): (Tuned(_ROLES),) * 2,
    (192, 128): (Tuned(_ROLES),) * 2,
    (192, 256): (Tuned(_ROLES),) * 2,
    (256, 64): (Tuned(_ROLES),) * 2,
    (256, 128): (Tuned(_ROLES),) * 2,
    (256, 192): (Tuned(_ROLES),) * 2,
}

# Where a head dim between 64 and 128 is not padded to 128 (the row above has split 'keys').
# TFLOP/s, T 4096, 16 heads, causal and full: 478, 556 at 80 and 517, 592 at 96; with num_stages=3
# 461, 550 and 506, 583.
_BACKWARD_NARROW = (
    Tuned(_KEYS_128),
    Tuned(_KEYS_128, term_spill_bytes=8),  # at 112 with a soft cap; none at 80 and 96
)

# dq of the deterministic backward, for every mask. TFLOP/s of its three products. Serialized by
# ptxas (C7512) at (128, 128): three consumers, and 128 keys a step.
_DQ = {
    (64, 64): Tuned(DqConfig(block_kv=128, k_stages=3, v_stages=3)),  # 617 full, 605 causal
    (64, 128): Tuned(DqConfig(k_stages=3, v_stages=3)),
    (128, 64): Tuned(DqConfig(k_stages=3, v_stages=3)),
    (128, 128): Tuned(DqConfig(k_stages=3, v_stages=3)),  # 756 causal
    (64, 192): Tuned(DqConfig()),
    (64, 256): Tuned(DqConfig()),
    (128, 192): Tuned(DqConfig()),
    (128, 256): Tuned(DqConfig()),
    (192, 64): Tuned(DqConfig()),
    (192, 128): Tuned(DqConfig()),
    (192, 192): Tuned(DqConfig()),
    (192, 256): Tuned(DqConfig()),
    (256, 64): Tuned(DqConfig()),
    (256, 128): Tuned(DqConfig()),
    (256, 192): Tuned(DqConfig()),
    (256, 256): Tuned(DqConfig(v_stages=1), spill_bytes=40),  # 629 full, 655 causal
}


def _row(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """The next of HEAD_DIMS each; StopIteration above the last."""
    first, second = (next(d for d in HEAD_DIMS if d >= n) for n in (head_dim, head_dim_v))
    return first, second


def tuned_forward(
    head_dim: int,
    head_dim_v: int,
    *,
    is_masked: bool,
    has_terms: bool = False,
    is_short: bool = False,
    bias_bytes: int | None = None,
) -> Tuned[ForwardConfig]:
    """The forward's row.

    Args:
      head_dim: of q and k, up to 256.
      head_dim_v: of v, likewise.
      is_masked: some pair may be hidden: causal, lengths, or keys that fill no whole tile.
      has_terms: there is more than bounds: a mask array, segments, a bias and the like.
      is_short: a mask hides pairs of at most `MOST_SHORT` queries and keys.
      bias_bytes: of an entry of the bias, where there is one.
    """
    row = _row(head_dim, head_dim_v)
    if bias_bytes is not None and (*row, bias_bytes) in _FORWARD_WITH_BIAS:
        return _FORWARD_WITH_BIAS[*row, bias_bytes]
    if 64 < head_dim == head_dim_v < 128 and not has_terms:
        return _FORWARD_NARROW
    if is_short and not has_terms and row in _FORWARD_SHORT:
        return _FORWARD_SHORT[row]
    usual = _FORWARD[row][is_masked]
    return usual if _has_room(usual.config, head_dim, head_dim_v) else _FORWARD_UNEQUAL[row]


def _has_room(config: ForwardConfig, head_dim: int, head_dim_v: int) -> bool:
    """What the forward holds fits a block."""
    fixed, stage = _forward_bytes(config, head_dim, head_dim_v)
    return fixed + config.num_stages * stage <= hardware.SM90.smem_bytes


def _forward_bytes(config: ForwardConfig, head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """Shared memory of Q, an output that is not staged there, lse and barriers; of K and V a stage.

    An upper bound; `tests/test_tuned.py` holds what it lets through to the scratch of the launch.
    """
    output = 0 if config.output_through_q and head_dim == head_dim_v else head_dim_v
    fixed = 2 * config.block_q * (config.q_stages * head_dim + output) + 2048
    return fixed, 2 * config.block_kv * (head_dim + head_dim_v)


def few_queries(
    head_dim: int, head_dim_v: int, *, is_masked: bool, has_soft_cap: bool
) -> ForwardConfig:
    """The forward of a few queries against many keys: rows that one consumer has room for.

    It waits for memory alone: as many keys under way as shared memory holds. Where 128 registers a
    thread are enough (by ptxas; 132 with a mask and 128 keys a step), two blocks share a
    multiprocessor: one loads while the other begins or ends. TB/s and of a copy's rate at head_dim
    64, 64 x 8192 keys, 8 kv heads: two consumers 3.49, 0.82; one 4.38, 1.02; a block of it beside
    another 4.46, 1.04, with 64 keys a step 4.41.

    Args:
      head_dim, head_dim_v: as of `tuned_forward`.
      is_masked: some pair may be hidden: by a mask, or keys that fill no whole tile.
      has_soft_cap: there is one.
    """
    if max(head_dim, head_dim_v) <= 64 and not has_soft_cap:
        config = _one_consumer(
            block_kv=64 if is_masked else 128, overlap=False, persistent=False, blocks_per_sm=2
        )
    else:  # overlapped, head dims above 128 spill with a mask and a soft cap
        block_kv = 128 if head_dim + head_dim_v <= 256 else 64
        config = _one_consumer(block_kv=block_kv, overlap=head_dim_v <= 128)
    fixed, stage = _forward_bytes(config, head_dim, head_dim_v)
    room = hardware.SM90.smem_share(config.blocks_per_sm) - fixed
    return dataclasses.replace(config, num_stages=room // stage)


def tuned_backward(head_dim: int, head_dim_v: int, *, is_masked: bool) -> Tuned[BackwardConfig]:
    """The fused backward's row; arguments as `tuned_forward`."""
    row = _BACKWARD[_row(head_dim, head_dim_v)][is_masked]
    wide = [row.config.padded(size) for size in (head_dim, head_dim_v)]
    return _BACKWARD_NARROW[is_masked] if any(size % 64 for size in wide) else row


def tuned_dq(head_dim: int, head_dim_v: int) -> Tuned[DqConfig]:
    """The row of the dq kernel; arguments as `tuned_forward`."""
    return _DQ[_row(head_dim, head_dim_v)]


def forward_of(problem: Problem) -> ForwardConfig:
    """The configuration that the forward of this problem is launched with."""
    return tuned_forward(
        *map(ForwardConfig().padded, (problem.head_dim, problem.head_dim_v)),
        is_masked=_is_masked(problem),
        has_terms=_has_terms(problem) or not problem.mask.is_bounds,
        is_short=bool(problem.mask.parts()) and max(problem.q_len, problem.kv_len) <= MOST_SHORT,
        bias_bytes=bias_bytes(problem),
    ).config


def backward_of(problem: Problem) -> BackwardConfig:
    """Of its fused backward."""
    return tuned_backward(
        problem.head_dim, problem.head_dim_v, is_masked=_is_masked(problem)
    ).config


def kv_parts(problem: Problem, cut: BackwardConfig) -> int:
    """Blocks for one tile of keys in its fused backward, which share the query heads that read it.

    The fewest that give each multiprocessor a block, or four where walks differ. Kernels in ms at
    1, 2, 4, 8 parts, T 8192, 32 / 1 heads of 128, B 2: causal 8.63, 4.85, 4.54, 4.10; full 8.92,
    8.46, 8.85. T 4096, 32 / 8 heads, B 1, causal: 0.759, 0.642.
    """
    blocks = problem.batch * problem.num_kv_heads * -(-problem.kv_len // cut.block_kv)
    parts = [p for p in range(1, problem.q_per_kv + 1) if problem.q_per_kv % p == 0]
    enough = hardware.SM90.num_sms * (4 if problem.mask.parts() else 1)
    return next((p for p in parts if p * blocks >= enough), parts[-1])


def dq_of(problem: Problem) -> DqConfig:
    """Of the dq kernel of its deterministic backward."""
    return tuned_dq(problem.head_dim, problem.head_dim_v).config


def bias_bytes(problem: Problem) -> int | None:
    """Of an entry of the bias as the kernels read it; None without one."""
    if problem.bias_dtype is None:
        return None
    return 2 if problem.bias_dtype in (dtype.name for dtype in LOW_PRECISION) else 4


def _has_terms(problem: Problem) -> bool:
    terms = (problem.bias_shape, problem.soft_cap, problem.alibi_shift)
    return any(x is not None for x in terms) or problem.has_sinks or problem.dropout_rate > 0


def _is_masked(problem: Problem) -> bool:
    # Ragged and short keys and further terms run best with the rows tuned for masks: the unmasked
    # ones spill there.
    is_ragged = problem.kv_len % 128 != 0 or problem.kv_len < 1024
    return bool(problem.mask.parts()) or is_ragged or _has_terms(problem)
