"""The tuned numbers, and nothing else: which configuration a problem runs with.

Beside each row stand the chip, the date and the figure that chose it; a row without a figure was
chosen because it compiles clean and fits, by analogy with its neighbours, and is to be measured.
"""

import dataclasses

import jax.numpy as jnp

from pallas_flash.config import BackwardConfig, DqConfig, ForwardConfig

# --- forward -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class TunedForward:
    """A row of the forward table.

    Attributes:
      config: how the kernel is cut.
      spill_bytes: most bytes a thread spills (stores), over both dtypes and all masks, by ptxas
        13.0. The ahead-of-time test fails above it.
    """

    config: ForwardConfig
    spill_bytes: int = 0


def _three_in_turn(**changes) -> ForwardConfig:
    base = ForwardConfig(compute_wgs=3, overlap=False, q_stages=2, output_through_q=False)
    return dataclasses.replace(base, **changes)


def _two_overlapped(**changes) -> ForwardConfig:
    return dataclasses.replace(ForwardConfig(rescale_threshold=8.0), **changes)


# By (head_dim, head_dim_v): without a mask, and with one. TFLOP/s on an H200, 2026-11-29, bfloat16,
# 16,384 tokens, model width 2048, T 8192, JAX 0.11.2, CUPTI median of a short burst.
_FORWARD = {
    (64, 64): (  # 575 full, 549 causal
        TunedForward(_three_in_turn()),
        TunedForward(_three_in_turn()),
    ),
    (128, 128): (  # 717 full, 708 causal
        # Clean where tiles divide kv_len; ragged or within one tile it spills.
        TunedForward(_three_in_turn(output_through_q=True, rescale_threshold=8.0), spill_bytes=76),
        TunedForward(_two_overlapped(q_stages=2)),
    ),
    (256, 256): (  # 829 full, 797 causal
        TunedForward(_two_overlapped(block_kv=64, persistent=False)),
        TunedForward(_two_overlapped(block_kv=64, persistent=False)),
    ),
    # Not measured.
    (64, 128): (TunedForward(_two_overlapped(q_stages=2)),) * 2,
    (64, 192): (TunedForward(_two_overlapped(q_stages=2)),) * 2,
    (64, 256): (TunedForward(_two_overlapped(q_stages=2, block_kv=64)),) * 2,
    (128, 64): (TunedForward(_three_in_turn()),) * 2,
    (128, 192): (TunedForward(_two_overlapped(q_stages=2, block_kv=64)),) * 2,
    (128, 256): (TunedForward(_two_overlapped(q_stages=2, block_kv=64)),) * 2,
    (192, 64): (TunedForward(_three_in_turn(q_stages=1)),) * 2,
    (192, 128): (TunedForward(_two_overlapped(q_stages=2, block_kv=64)),) * 2,
    (192, 192): (TunedForward(_two_overlapped(q_stages=2, block_kv=64)),) * 2,
    (192, 256): (TunedForward(_two_overlapped(block_kv=64)),) * 2,
    (256, 64): (TunedForward(_two_overlapped(q_stages=2, block_kv=64)),) * 2,
    (256, 128): (TunedForward(_two_overlapped(block_kv=64)),) * 2,
    (256, 192): (TunedForward(_two_overlapped(block_kv=64)),) * 2,
}

HEAD_DIMS = tuple(sorted({head_dim for head_dim, _ in _FORWARD}))


def tuned_forward(head_dim: int, head_dim_v: int, *, is_masked: bool, dtype) -> TunedForward:
    """The row for these padded head dims.

    Args:
      head_dim: of q and k, one of HEAD_DIMS.
      head_dim_v: of v, one of HEAD_DIMS.
      is_masked: some pair may be hidden (causal, window, lengths).
      dtype: bfloat16 or float16; both run with the same row.

    Raises:
      KeyError: for other head dims.
    """
    assert jnp.dtype(dtype).itemsize == 2, f"dtype={dtype} must be bfloat16 or float16"
    return _FORWARD[head_dim, head_dim_v][is_masked]


def forward_config(head_dim: int, head_dim_v: int, *, is_masked: bool, dtype) -> ForwardConfig:
    """The configuration of `tuned_forward`'s row."""
    return tuned_forward(head_dim, head_dim_v, is_masked=is_masked, dtype=dtype).config


# --- dq of the deterministic backward ------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class TunedDq:
    """A row of the dq table, for every mask.

    Attributes:
      config: how the kernel is cut.
      spill_bytes: most bytes a thread spills (stores), over both dtypes and all masks, by ptxas
        13.0. The ahead-of-time test fails above it.
    """

    config: DqConfig
    spill_bytes: int = 0


# By (head_dim, head_dim_v). Not measured: chosen because they compile clean and fit. Also clean at
# (64, 64): DqConfig(3, 64, 4, 4). Serialized by ptxas (C7512) at (128, 128): 3 x 64, 2 x 128.
_DQ = {
    (64, 64): TunedDq(DqConfig(block_kv=128, k_stages=3, v_stages=3)),
    (64, 128): TunedDq(DqConfig(k_stages=3, v_stages=3)),
    (128, 64): TunedDq(DqConfig(k_stages=3, v_stages=3)),
    (128, 128): TunedDq(DqConfig(k_stages=3, v_stages=3)),
    (64, 192): TunedDq(DqConfig()),
    (64, 256): TunedDq(DqConfig()),
    (128, 192): TunedDq(DqConfig()),
    (128, 256): TunedDq(DqConfig()),
    (192, 64): TunedDq(DqConfig()),
    (192, 128): TunedDq(DqConfig()),
    (192, 192): TunedDq(DqConfig()),
    (192, 256): TunedDq(DqConfig()),
    (256, 64): TunedDq(DqConfig()),
    (256, 128): TunedDq(DqConfig()),
    (256, 192): TunedDq(DqConfig()),
    (256, 256): TunedDq(DqConfig(v_stages=1), spill_bytes=32),  # lengths and causal
}


def tuned_dq(head_dim: int, head_dim_v: int) -> TunedDq:
    """The row for these padded head dims, each one of HEAD_DIMS; KeyError for others."""
    return _DQ[head_dim, head_dim_v]


def dq_config(head_dim: int, head_dim_v: int) -> DqConfig:
    """The configuration of `tuned_dq`'s row."""
    return tuned_dq(head_dim, head_dim_v).config


# --- backward ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class TunedBackward:
    """A row of the backward table.

    Attributes:
      config: how the kernel is cut.
      spill_bytes: most bytes a thread spills (stores), over both dtypes and all masks, by ptxas
        13.0. The ahead-of-time test fails above it.
    """

    config: BackwardConfig
    spill_bytes: int = 0


_KEYS_64 = BackwardConfig(block_q=128)
_KEYS_128 = BackwardConfig(block_q=64)
_ROLES = BackwardConfig(split="roles", block_kv=64)

# By (head_dim, head_dim_v): without a mask, and with one. TFLOP/s on an H200, 2026-11-29, bfloat16,
# 16,384 tokens, model width 2048, T 8192, JAX 0.11.2, CUPTI median, of kernels of this structure.
_BACKWARD = {
    (64, 64): (  # 607 full, 571 causal
        TunedBackward(_KEYS_64, spill_bytes=48),  # 40 where heads share keys, 12 else
        TunedBackward(_KEYS_64, spill_bytes=64),  # 60 with lengths, 12 causal
    ),
    (128, 128): (  # 683 full, 625 causal
        TunedBackward(_KEYS_128),
        TunedBackward(_KEYS_128, spill_bytes=32),  # 24 with lengths, 0 else
    ),
    (256, 256): (TunedBackward(_ROLES),) * 2,  # 515 full, 463 causal (that with dq last)
    # Not measured.
    (128, 64): (TunedBackward(_KEYS_128),) * 2,
    (64, 128): (TunedBackward(_ROLES),) * 2,
    (64, 192): (TunedBackward(_ROLES),) * 2,
    (64, 256): (TunedBackward(_ROLES),) * 2,
    (128, 192): (TunedBackward(_ROLES),) * 2,
    (128, 256): (TunedBackward(_ROLES),) * 2,
    (192, 64): (TunedBackward(_ROLES),) * 2,
    (192, 128): (TunedBackward(_ROLES),) * 2,
    (192, 192): (TunedBackward(_ROLES),) * 2,
    (192, 256): (TunedBackward(_ROLES),) * 2,
    (256, 64): (TunedBackward(_ROLES),) * 2,
    (256, 128): (TunedBackward(_ROLES),) * 2,
    (256, 192): (TunedBackward(_ROLES),) * 2,
}


def tuned_backward(head_dim: int, head_dim_v: int, *, is_masked: bool, dtype) -> TunedBackward:
    """The row for these padded head dims.

    Args:
      head_dim: of q and k, one of HEAD_DIMS.
      head_dim_v: of v, one of HEAD_DIMS.
      is_masked: some pair may be hidden (causal, window, lengths).
      dtype: bfloat16 or float16; both run with the same row.

    Raises:
      KeyError: for other head dims.
    """
    assert jnp.dtype(dtype).itemsize == 2, f"dtype={dtype} must be bfloat16 or float16"
    return _BACKWARD[head_dim, head_dim_v][is_masked]


def backward_config(head_dim: int, head_dim_v: int, *, is_masked: bool, dtype) -> BackwardConfig:
    """The configuration of `tuned_backward`'s row."""
    return tuned_backward(head_dim, head_dim_v, is_masked=is_masked, dtype=dtype).config
