"""The named problems that are timed and tuned, and arrays for them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_flash import hardware, io_counts, io_model, masks
from pallas_flash.problem import Operands, Problem
from pallas_flash.tile_walks import NO_OPERANDS


@dataclasses.dataclass(frozen=True)
class Shape:
    """A named problem: B batch, T queries and keys, N and K heads, H head_dim.

    Attributes:
      head_dim_v: of the value, where it differs.
      lengths: true lengths, one a batch row.
      documents: tokens of each of the documents packed into a row.
      window: keys that a query sees before its own.
      bias: dtype of a bias (1, N, T, T), which has a gradient, too.
      soft_cap: of the logits.
      queries: of each sequence, where they are fewer than its keys: decoding, forward alone.
    """

    name: str
    batch: int
    length: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    causal: bool
    lengths: tuple[int, ...] | None = None
    head_dim_v: int | None = None
    documents: int | None = None
    window: int | None = None
    bias: str | None = None
    soft_cap: float | None = None
    queries: int | None = None

    @property
    def q_len(self) -> int:
        return self.queries or self.length

    def described(self, dtype: Any) -> tuple[Problem, Operands]:
        """For the IO model: the problem, and what its mask needs."""
        mask, operands = masks.And(), NO_OPERANDS
        if self.causal:
            mask &= masks.Causal()
        if self.window:
            mask &= masks.Window(True, True)
            operands = operands._replace(window=np.array((self.window, 0)))
        if self.lengths is not None:
            mask &= masks.Lengths(True, True)
            lengths = np.array(self.lengths)
            operands = operands._replace(query_lengths=lengths, kv_lengths=lengths)
        if self.documents:
            mask &= masks.Segments()
            ids = np.arange(self.length)[None] // self.documents
            operands = operands._replace(query_segments=ids, kv_segments=ids)
        problem = Problem(
            batch=self.batch,
            q_len=self.q_len,
            kv_len=self.length,
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            head_dim_v=self.head_dim_v or self.head_dim,
            dtype=jnp.dtype(dtype).name,
            mask=mask,
        )
        return problem, operands

    def flops(self, dtype: Any, *, backward: bool) -> int:
        """Of the products over the pairs that are visible: two forward, five backward."""
        return io_model.visible_flops(*self.described(dtype), backward=backward)

    def floor_ms(
        self, dtype: Any, *, backward: bool, speeds: hardware.GpuSpeeds = hardware.H200
    ) -> float:
        """The least time on a GPU of these speeds."""
        problem, operands = self.described(dtype)
        return 1e3 * io_model.problem_floor_s(problem, operands, backward=backward, speeds=speeds)

    def bytes(self, dtype: Any) -> int:
        """Of inputs and output, each once."""
        return io_counts.compulsory(self.described(dtype)[0], backward=False)


def _dense(head_dim: int, length: int, causal: bool, tokens: int = 16_384, width: int = 2048):
    heads = width // head_dim
    name = f"d{head_dim}-t{length}-{_kind(causal)}"
    return Shape(name, tokens // length, length, heads, heads, head_dim, causal)


def _kind(causal: bool) -> str:
    return "causal" if causal else "full"


GPU_SHAPES = (
    *(
        _dense(d, t, c)
        for t in (8192, 2048, 512, 16_384)
        for d in (64, 128, 256)
        for c in (False, True)
    ),
    *(Shape(f"gqa-32-8-d128-t8192-{_kind(c)}", 2, 8192, 32, 8, 128, c) for c in (False, True)),
    *(Shape(f"mha-32-d128-t8192-{_kind(c)}", 2, 8192, 32, 32, 128, c) for c in (False, True)),
    Shape("mqa-32-1-d128-t8192-causal", 2, 8192, 32, 1, 128, True),
    Shape("d128-t32768-causal", 1, 32_768, 16, 16, 128, True),
    Shape("ragged-d128-t8191-causal", 2, 8191, 16, 16, 128, True),
    *(Shape(f"d{d}-h16-t4096-causal", 4, 4096, 16, 16, d, True) for d in (80, 96, 192)),
    Shape("lengths-d128-causal", 4, 4096, 16, 16, 128, True, (4096, 3000, 1000, 100)),
    *(_dense(d, t, True) for d in (64, 128) for t in (128, 256)),
    _dense(128, 1024, True),
    Shape("packed-8x1024-d128-t8192-causal", 2, 8192, 16, 16, 128, True, documents=1024),
    Shape("window-1024-gqa-32-8-d128-t16384", 1, 16384, 32, 8, 128, True, window=1023),
    Shape("bias-d128-t4096-full", 4, 4096, 16, 16, 128, False, bias="bfloat16"),
    Shape("soft-cap-50-d128-t8192-causal", 2, 8192, 16, 16, 128, True, soft_cap=50.0),
    Shape("mla-192-128-t4096-causal", 4, 4096, 16, 16, 192, True, head_dim_v=128),
    Shape("decode-t1-s8192-b64-gqa-32-8-d128", 64, 8192, 32, 8, 128, False, queries=1),
    Shape("decode-t1-s8192-b64-gqa-32-8-d64", 64, 8192, 32, 8, 64, False, queries=1),
    Shape("decode-t8-s8192-b64-gqa-32-8-d128", 64, 8192, 32, 8, 128, False, queries=8),
    Shape("decode-t1-s131072-b1-gqa-32-8-d128", 1, 131_072, 32, 8, 128, False, queries=1),
)
QUICK_SHAPES = tuple(_dense(d, 8192, True) for d in (64, 128, 256))
CPU_SHAPES = tuple(
    Shape(f"d64-t{t}-{_kind(c)}", 1, t, 2, 2, 64, c) for t in (256, 1024) for c in (False, True)
)


def inputs(shape: Shape, dtype: Any):
    """q, k, v, dout; lengths or None; and the other arrays by argument name, a bias among them."""
    keys = jax.random.split(jax.random.key(0), 5)
    heads = (shape.num_q_heads, shape.num_kv_heads, shape.num_kv_heads, shape.num_q_heads)
    head_dim_v = shape.head_dim_v or shape.head_dim
    lengths_ = (shape.q_len, shape.length, shape.length, shape.q_len)
    dims = (shape.head_dim, shape.head_dim, head_dim_v, head_dim_v)
    q, k, v, dout = (
        jax.random.normal(key, (shape.batch, length, n, dim), dtype)
        for key, length, n, dim in zip(keys, lengths_, heads, dims, strict=False)
    )
    arrays, lengths = {}, None
    if shape.lengths is not None:  # implementations differ in rows past the length: ask nothing
        lengths = jnp.array(shape.lengths, jnp.int32)
        inside = jnp.arange(shape.length)[None] < lengths[:, None]
        dout = jnp.where(inside[:, :, None, None], dout, 0)
        arrays |= dict(query_seq_lengths=lengths, key_value_seq_lengths=lengths)
    if shape.documents:
        ids = jnp.arange(shape.length, dtype=jnp.int32) // shape.documents
        ids = jnp.broadcast_to(ids, (shape.batch, shape.length))
        arrays |= dict(query_segment_ids=ids, key_value_segment_ids=ids)
    if shape.bias:
        size = (1, shape.num_q_heads, shape.length, shape.length)
        arrays["bias"] = jax.random.normal(keys[4], size, shape.bias)
    return (q, k, v, dout), lengths, arrays
