"""Problem: the static description of one attention call, and the arrays that go with it.

Every check of shape and dtype happens here, before anything is traced. Knows the masks, knows
nothing of implementations.
"""

import dataclasses
from typing import Any, NamedTuple, Self

import jax.numpy as jnp
import numpy as np

from pallas_flash import masks

Array = Any

LOW_PRECISION = (jnp.dtype(jnp.float16), jnp.dtype(jnp.bfloat16))
DTYPES = (*LOW_PRECISION, jnp.dtype(jnp.float32), jnp.dtype(jnp.float64))


class Operands(NamedTuple):
    """The arrays of one call by role, in one normal form; None where absent.

    B batch, T queries, S keys, N query heads, K kv heads, H head_dim, Hv head_dim_v.

    Attributes:
      query: (B, T, N, H).
      key: (B, S, K, H).
      value: (B, S, K, Hv).
      bias: (1|B, 1|N, 1|T, 1|S), float.
      scale: float32, () or (B,); None means the static `Problem.scale`.
      soft_cap: float32, (); None means the static `Problem.soft_cap`.
      sinks: float32, (N,), one logit a head.
      alibi_slopes: float32, (1|B, N), float64 for float64 inputs; `Problem.alibi_shift` goes with
        them.
      mask: bool, (1|B, 1|N, 1|T, 1|S).
      query_lengths: int32, (B,), already clamped to [0, T].
      kv_lengths: int32, (B,), already clamped to [0, S].
      window: int32, (2,): left, right.
      query_segments: int32, (B, T).
      kv_segments: int32, (B, S).
      dropout_key: uint32, (2,).
      dropout_origin: uint32, (4,): batch row, head, query and key at which the counters of the
        dropout pattern begin; None: at 0. A part of a larger call draws what that would draw.
    """

    query: Array
    key: Array
    value: Array
    bias: Array | None = None
    scale: Array | None = None
    soft_cap: Array | None = None
    sinks: Array | None = None
    alibi_slopes: Array | None = None
    mask: Array | None = None
    query_lengths: Array | None = None
    kv_lengths: Array | None = None
    window: Array | None = None
    query_segments: Array | None = None
    kv_segments: Array | None = None
    dropout_key: Array | None = None
    dropout_origin: Array | None = None


# What the axes of each operand are, in the words of sharding.py.
AXES = Operands(
    query="B . N .",
    key="B . K .",
    value="B . K .",
    bias="B N . .",
    scale="B",
    soft_cap="",
    sinks="N",
    alibi_slopes="B N",
    mask="B N . .",
    query_lengths="B",
    kv_lengths="B",
    window=".",
    query_segments="B .",
    kv_segments="B .",
    dropout_key=".",
    dropout_origin=".",
)

DIFFERENTIABLE = ("query", "key", "value", "bias", "scale", "soft_cap", "sinks", "alibi_slopes")


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is static about one call: hashable, the one non-differentiable argument.

    Attributes:
      batch, q_len, kv_len, num_q_heads, num_kv_heads, head_dim, head_dim_v: sizes.
      dtype: of query, key, value and the output, by name.
      mask: everything that hides a pair, bias of -inf apart.
      scale: of the logits; None when it is an operand.
      soft_cap: cap * tanh(x / cap) on the logits; None without, 'operand' when it is traced.
      bias_shape: shape of the bias, or None.
      bias_dtype: its dtype by name, or None.
      has_sinks: one more logit a head, with no value.
      alibi_shift: -slope * |kv_pos - q_pos - alibi_shift| on the logits, before the cap; None: no
        slopes.
      dropout_rate: probability of dropping an attention weight.
      broadcast_dropout: one dropout pattern for all batch rows and heads.
      deterministic_backward: gradients bit-equal from run to run.
      interpret: run the kernels in Pallas' interpret mode (tests on a CPU).
    """

    batch: int
    q_len: int
    kv_len: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: str
    mask: masks.Mask = masks.And()
    scale: float | None = 1.0
    soft_cap: float | str | None = None
    bias_shape: tuple[int, ...] | None = None
    bias_dtype: str | None = None
    has_sinks: bool = False
    alibi_shift: int | None = None
    dropout_rate: float = 0.0
    broadcast_dropout: bool = False
    deterministic_backward: bool = False
    interpret: bool = False

    @property
    def q_per_kv(self) -> int:
        """Query heads that share one kv head."""
        return self.num_q_heads // self.num_kv_heads if self.num_kv_heads else 1

    @property
    def is_empty(self) -> bool:
        """True when there is no logit at all."""
        return 0 in (self.batch, self.q_len, self.kv_len, self.num_q_heads, self.head_dim)

    def resized(self, operands: Operands) -> Self:
        """The same problem on a part of its batch, heads or sequences."""
        batch, q_len, num_q_heads, _ = operands.query.shape
        return dataclasses.replace(
            self,
            batch=batch,
            q_len=q_len,
            kv_len=operands.key.shape[1],
            num_q_heads=num_q_heads,
            num_kv_heads=operands.key.shape[2],
            bias_shape=None if operands.bias is None else operands.bias.shape,
        )

    @property
    def np_dtype(self) -> np.dtype:
        return jnp.dtype(self.dtype)
