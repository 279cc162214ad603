"""Named problems chosen for their edges. Every test that compares implementations runs all of them.

`Case.arguments(seed)` makes the arguments of `pallas_flash.dot_product_attention`; which of them
the kernels take is for `dispatch` to say, not for this file.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

NUMPY_DTYPES = {
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float32": np.float32,
    "float64": np.float64,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem: sizes, dtype, and what is given beyond query, key and value.

    Attributes:
      static: arguments passed as they are.
      arrays: argument name -> shape spec, made by `_make_array`.
    """

    name: str
    batch: int = 1
    q_len: int = 136
    kv_len: int = 136
    heads: tuple[int, int] = (2, 2)
    dims: tuple[int, int] = (64, 64)
    dtype: str = "bfloat16"
    static: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    arrays: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    def arguments(self, seed: int = 0) -> tuple[tuple[Any, Any, Any], dict[str, Any]]:
        """(query, key, value) and the keyword arguments, as jax arrays."""
        rng = np.random.default_rng(seed)
        dtype = NUMPY_DTYPES[self.dtype]
        (num_q, num_kv), (h, hv) = self.heads, self.dims
        shapes = (
            (self.batch, self.q_len, num_q, h),
            (self.batch, self.kv_len, num_kv, h),
            (self.batch, self.kv_len, num_kv, hv),
        )
        q, k, v = (jnp.asarray(rng.standard_normal(s).astype(dtype)) for s in shapes)
        made = {name: _make_array(spec, rng) for name, spec in self.arrays.items()}
        return (q, k, v), dict(self.static) | made

    def cotangent(self, seed: int = 1) -> jax.Array:
        """A random cotangent of the output."""
        rng = np.random.default_rng(seed)
        shape = (self.batch, self.q_len, self.heads[0], self.dims[1])
        return jnp.asarray(rng.standard_normal(shape).astype(NUMPY_DTYPES[self.dtype]))


def _make_array(spec: Any, rng: np.random.Generator) -> jax.Array:
    """A list of numbers as it is; ('bool' | 'ids' | 'float32' | ..., shape) at random."""
    if isinstance(spec, (list, float)):
        return jnp.asarray(np.asarray(spec, np.float32 if isinstance(spec, float) else np.int32))
    kind, shape = spec
    if kind == "bool":
        return jnp.asarray(rng.random(shape) < 0.6)
    if kind == "ids":
        return jnp.asarray(np.sort(rng.integers(0, 4, shape), axis=-1).astype(np.int32))
    if kind == "mixed ids":
        return jnp.asarray(rng.integers(0, 4, shape).astype(np.int32))
    if kind == "blocks":  # whole tiles of 128 keys hidden, visible, and mixed
        blocks = np.resize([0.0, 1.0, 0.5], -(-shape[-1] // 128)).repeat(128)[: shape[-1]]
        return jnp.asarray(rng.random(shape) < blocks)
    if kind == "slopes":
        return jnp.asarray(rng.uniform(0.0, 0.5, shape).astype(np.float32))
    if kind == "key":
        return jax.random.key_data(jax.random.key(7))
    return jnp.asarray(rng.standard_normal(shape).astype(NUMPY_DTYPES[kind]))


CAUSAL = {"is_causal": True}
BOTTOM_RIGHT = {"is_causal": True, "causal_alignment": "bottom_right"}

EVERYTHING = {
    "local_window_size": (150, 20),
    "logits_soft_cap": 6.0,
    "dropout_rate": 0.2,
    "broadcast_dropout": True,
}


def _every_array(batch, q_len, kv_len, heads):
    return {
        "query_segment_ids": ("ids", (batch, q_len)),
        "key_value_segment_ids": ("ids", (batch, kv_len)),
        "query_seq_lengths": [q_len - 60] * batch,
        "key_value_seq_lengths": [kv_len - 9] * batch,
        "mask": ("bool", (batch, 1, 1, kv_len)),
        "bias": ("float32", (batch, heads, q_len, kv_len)),
        "alibi_slopes": ("slopes", (heads,)),
        "sinks": ("float32", (heads,)),
        "dropout_rng": ("key", None),
        "scale": 0.2,
    }


FUSED = (
    Case("full-bf16"),
    Case("full-f16", dtype="float16"),
    Case("causal-bf16", static=CAUSAL),
    Case("causal-f16-d128", dims=(128, 128), dtype="float16", static=CAUSAL),
    Case("one-tile-of-keys", batch=2, q_len=256, kv_len=77),
    Case("one-tile-of-keys-causal", q_len=128, kv_len=128, heads=(4, 2), static=CAUSAL),
    Case("one-tile-of-keys-scale", q_len=128, kv_len=64, arrays={"scale": -0.3}),
    Case("one-query-one-key", q_len=1, kv_len=1),
    Case("one-query", q_len=1, kv_len=300),
    Case("one-key", q_len=300, kv_len=1),
    Case(
        "decode-gqa4-lengths-sinks",
        batch=2,
        q_len=1,
        kv_len=512,
        heads=(4, 1),
        static=BOTTOM_RIGHT,
        arrays={"key_value_seq_lengths": [500, 3], "sinks": ("float32", (4,))},
    ),
    Case(
        "decode-3-queries-window-soft-cap",
        q_len=3,
        kv_len=512,
        heads=(4, 2),
        static=BOTTOM_RIGHT | {"local_window_size": (300, 0), "logits_soft_cap": 5.0},
        arrays={"key_value_seq_lengths": [400], "query_seq_lengths": [2]},
    ),
    Case("decode-16-queries-gqa4", q_len=16, kv_len=512, heads=(8, 2), static=BOTTOM_RIGHT),
    Case("decode-gqa8-in-parts", batch=2, q_len=1, kv_len=1024, heads=(8, 1)),
    Case(
        "decode-4-queries-d256-soft-cap",
        q_len=4,
        kv_len=520,
        heads=(4, 2),
        dims=(256, 256),
        static=BOTTOM_RIGHT | {"logits_soft_cap": 5.0},
        arrays={"key_value_seq_lengths": [400]},
    ),
    Case(
        "decode-more-tiles-than-blocks-d128-f16",
        batch=20,
        q_len=1,
        kv_len=264,
        heads=(16, 8),
        dims=(128, 128),
        dtype="float16",
    ),
    Case("ragged-7", q_len=7, kv_len=7, static=CAUSAL),
    Case("ragged-63-65", q_len=63, kv_len=65),
    Case("tile-edge-129-causal", q_len=129, kv_len=129, static=CAUSAL),
    Case("tile-exact-192-causal", q_len=192, kv_len=192, static=CAUSAL),
    Case("long-kv-d128", q_len=100, kv_len=400, dims=(128, 128)),
    Case("long-q-causal", q_len=400, kv_len=100, static=CAUSAL),
    Case("bottom-right-long-kv", q_len=100, kv_len=301, heads=(1, 1), static=BOTTOM_RIGHT),
    Case("bottom-right-empty-rows", q_len=301, kv_len=100, static=BOTTOM_RIGHT),
    Case("gqa4-causal-ragged", q_len=203, kv_len=203, heads=(8, 2), static=CAUSAL),
    Case("mqa-d128", heads=(5, 1), dims=(128, 128), q_len=65, kv_len=130),
    Case("gqa-d256-causal", heads=(4, 2), dims=(256, 256), static=CAUSAL),
    Case("full-d256", dims=(256, 256), q_len=200, kv_len=264),
    Case("odd-head-dim-80", dims=(80, 80), static=CAUSAL),
    Case(
        "narrow-head-dims-112-90-gqa",
        batch=2,
        dims=(112, 90),
        heads=(4, 2),
        arrays={"query_seq_lengths": [100, 136], "key_value_seq_lengths": [136, 70]},
    ),
    Case("head-dim-1", dims=(1, 3), q_len=70, kv_len=70),
    Case("mla-192-128-causal", dims=(192, 128), static=CAUSAL),
    Case("unequal-224-256-causal", dims=(224, 256), q_len=70, static=CAUSAL),
    Case("unequal-192-170", dims=(192, 170), q_len=70, kv_len=70),
    Case("unequal-96-128-long", dims=(96, 128), q_len=64, kv_len=1024, heads=(1, 1)),
    Case("wide-value-64-200", dims=(64, 200)),
    Case(
        "kv-lengths-with-zero",
        batch=4,
        arrays={"key_value_seq_lengths": [17, 0, 136, 128]},
    ),
    Case(
        "both-lengths-causal-gqa",
        batch=4,
        heads=(2, 1),
        q_len=200,
        kv_len=264,
        static=CAUSAL,
        arrays={
            "query_seq_lengths": [200, 1, 64, 65],
            "key_value_seq_lengths": [127, 129, 0, 264],
        },
    ),
    Case("query-lengths-d128", batch=3, dims=(128, 128), arrays={"query_seq_lengths": [0, 5, 129]}),
    Case(
        "lengths-d256-causal",
        batch=2,
        dims=(256, 256),
        static=CAUSAL,
        arrays={"query_seq_lengths": [130, 70], "key_value_seq_lengths": [65, 136]},
    ),
    Case("scale-traced", arrays={"scale": 0.3}),
    Case("scale-negative", static={"scale": -0.2, "is_causal": True}),
    Case("scale-zero-traced", arrays={"scale": 0.0}, q_len=72, heads=(4, 2)),
    Case("window-both", static={"local_window_size": (7, 3)}, q_len=130, kv_len=130),
    Case("window-left-causal", static={"local_window_size": (16, None), "is_causal": True}),
    Case("window-bottom-right", q_len=60, static=BOTTOM_RIGHT | {"local_window_size": 20}),
    Case(
        "segments-causal",
        batch=2,
        static=CAUSAL,
        arrays={"query_segment_ids": ("ids", (2, 136)), "key_value_segment_ids": ("ids", (2, 136))},
    ),
    Case("mask-per-batch", batch=2, arrays={"mask": ("bool", (2, 1, 1, 136))}),
    Case(
        "mask-f16-causal", dtype="float16", static=CAUSAL, arrays={"mask": ("bool", (1, 1, 1, 136))}
    ),
    Case(
        "bias-f32-broadcast", batch=2, heads=(4, 2), arrays={"bias": ("float32", (1, 4, 136, 136))}
    ),
    # Blocks of a cluster sum its gradient; a block of its own stores it.
    *(
        Case(
            f"bias-shared-by-{batch}-d{head_dim}{'-causal' * causal}",
            batch=batch,
            q_len=256,
            kv_len=384,
            heads=(4, 2),
            dims=(head_dim, head_dim),
            static=CAUSAL if causal else {},
            arrays={"bias": ("bfloat16", (1, 4, 256, 384))},
        )
        for batch, head_dim, causal in (
            (2, 96, False),  # added up: dS has narrow lines
            (2, 128, True),
            (4, 128, False),
            (4, 64, True),
            (8, 64, False),
        )
    ),
    Case(
        "bias-shared-by-8-f16-window-dropout",
        batch=8,
        q_len=384,
        kv_len=384,
        dims=(128, 128),
        dtype="float16",
        static={"local_window_size": (130, 20), "dropout_rate": 0.2},
        arrays={"bias": ("float16", (1, 2, 384, 384)), "dropout_rng": ("key", ())},
    ),
    Case(
        "bias-own-lengths",
        batch=2,
        q_len=256,
        kv_len=256,
        arrays={
            "bias": ("bfloat16", (2, 2, 256, 256)),
            "query_seq_lengths": [130, 256],
            "key_value_seq_lengths": [256, 65],
        },
    ),
    Case("bias-bf16-row", arrays={"bias": ("bfloat16", (1, 2, 1, 136))}, static=CAUSAL),
    Case("soft-cap", static={"logits_soft_cap": 5.0}),
    # The largest cap with which no row keeps its maximum; many logits are near it, up or down.
    Case(
        "soft-cap-saturated", heads=(1, 1), static=CAUSAL | {"logits_soft_cap": 55.0, "scale": 5.0}
    ),
    # Its weights are made in parts: whatever else a tile has is cut as they are.
    *(
        Case(
            f"soft-cap-with-{name}-d{head_dim}",
            batch=2,
            q_len=200,
            kv_len=264,
            heads=(4, 2),
            dims=(head_dim, head_dim),
            static={"logits_soft_cap": 5.0} | static,
            arrays=arrays,
        )
        for head_dim in (128, 256)
        for name, static, arrays in (
            ("mask", {}, {"mask": ("bool", (2, 1, 200, 264))}),
            ("mask-of-keys", CAUSAL, {"mask": ("bool", (1, 4, 1, 264))}),
            ("dropout", CAUSAL | {"dropout_rate": 0.3}, {"dropout_rng": ("key", ())}),
            ("window", {"local_window_size": (70, 9)}, {}),
            (
                "segments-alibi",
                {},
                {
                    "query_segment_ids": ("ids", (2, 200)),
                    "key_value_segment_ids": ("ids", (2, 264)),
                    "alibi_slopes": ("slopes", (4,)),
                },
            ),
            (
                "lengths-sinks",
                CAUSAL,
                {
                    "query_seq_lengths": [200, 77],
                    "key_value_seq_lengths": [130, 264],
                    "sinks": ("float32", (4,)),
                },
            ),
        )
    ),
    Case("soft-cap-traced", arrays={"logits_soft_cap": 4.0}, static=CAUSAL),
    Case("sinks-causal", static=CAUSAL, arrays={"sinks": ("float32", (2,))}),
    Case(
        "alibi-causal-gqa", heads=(4, 2), static=CAUSAL, arrays={"alibi_slopes": ("slopes", (4,))}
    ),
    Case(
        "alibi-per-batch-long-kv",
        batch=2,
        q_len=100,
        kv_len=264,
        arrays={"alibi_slopes": ("slopes", (2, 2))},
    ),
    Case(
        "alibi-soft-cap-bottom-right-f16",
        q_len=100,
        dtype="float16",
        static=BOTTOM_RIGHT | {"logits_soft_cap": 5.0},
        arrays={"alibi_slopes": ("slopes", (2,))},
    ),
    Case(
        "dropout",
        batch=2,
        static={"dropout_rate": 0.25},
        arrays={"dropout_rng": ("key", None)},
    ),
    Case(
        "window-gqa-d128-causal",
        q_len=300,
        kv_len=300,
        heads=(4, 2),
        dims=(128, 128),
        static=CAUSAL | {"local_window_size": (70, 0)},
    ),
    Case("window-d256", q_len=200, dims=(256, 256), static={"local_window_size": (0, 20)}),
    Case(
        "segments-packed-d128-causal",
        q_len=400,
        kv_len=400,
        heads=(2, 1),
        dims=(128, 128),
        static=CAUSAL,
        arrays={"query_segment_ids": ("ids", (1, 400)), "key_value_segment_ids": ("ids", (1, 400))},
    ),
    Case(
        "segments-any-order-d256",
        batch=2,
        q_len=200,
        dims=(256, 256),
        arrays={
            "query_segment_ids": ("mixed ids", (2, 200)),
            "key_value_segment_ids": ("mixed ids", (2, 136)),
        },
    ),
    Case("mask-blocks", heads=(4, 2), kv_len=400, arrays={"mask": ("blocks", (1, 4, 136, 400))}),
    Case(
        "bias-bf16-d128-gqa",
        batch=2,
        q_len=200,
        kv_len=256,
        heads=(2, 1),
        dims=(128, 128),
        arrays={"bias": ("bfloat16", (1, 2, 200, 256))},
    ),
    Case("bias-f32-whole-lines", kv_len=160, arrays={"bias": ("float32", (1, 2, 136, 160))}),
    Case("bias-full-d256", dims=(256, 256), arrays={"bias": ("float16", (1, 2, 136, 136))}),
    Case(
        "bias-full-deterministic",
        static={"deterministic_backward": True, "logits_soft_cap": 9.0},
        arrays={"bias": ("float32", (1, 2, 136, 136))},
    ),
    Case(
        "dropout-d256-soft-cap-causal",
        dims=(256, 256),
        static=CAUSAL | {"dropout_rate": 0.4, "logits_soft_cap": 5.0},
        arrays={"dropout_rng": ("key", None)},
    ),
    Case(
        "everything-gqa-d128",
        batch=2,
        q_len=206,
        kv_len=236,
        heads=(2, 1),
        dims=(128, 128),
        static=BOTTOM_RIGHT | EVERYTHING,
        arrays=_every_array(2, 206, 236, 2),
    ),
    Case(
        "everything-deterministic",
        batch=1,
        q_len=270,
        kv_len=300,
        heads=(1, 1),
        static=BOTTOM_RIGHT | EVERYTHING | {"deterministic_backward": True},
        arrays=_every_array(1, 270, 300, 1),
    ),
)

UNFUSED = (
    Case("f32-causal", dtype="float32", static=CAUSAL),
    Case("mask-per-head", arrays={"mask": ("bool", (1, 2, 136, 136))}, dtype="float32"),
    Case(
        "shared-bias-deterministic",
        batch=2,
        static={"deterministic_backward": True},
        arrays={"bias": ("float32", (1, 2, 136, 136))},
    ),
)

CASES = FUSED + UNFUSED
