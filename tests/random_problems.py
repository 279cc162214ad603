"""Random attention problems: what is static as a `Case`, then any number of values for it.

A `Case` here names in `arrays` the dtype and shape of every array beyond query, key and value;
window sides are the scalars "window_left" and "window_right". Which pairs are visible is said here
once more, in NumPy, without the package.
"""

import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_flash import dot_product_attention
from tests.cases import NUMPY_DTYPES, Case

EDGES = (1, 2, 7, 63, 64, 65, 127, 128, 129, 192, 256, 257, 500)
LONGEST = 700
HEAD_DIMS = (64, 128, 32, 72, 96, 192, 256)
HEAD_DIM_ODDS = (0.35, 0.3, 0.05, 0.07, 0.08, 0.06, 0.09)
HEADS = ((1, 1), (2, 2), (3, 3), (4, 4), (4, 2), (6, 3), (8, 2), (8, 1), (5, 1), (16, 2))
MOST_LOGITS = 3 << 20  # of one problem, so that the dense reference is quick
HAS_ALIBI = "alibi_slopes" in inspect.signature(dot_product_attention).parameters
HIDING_ENDS = ("_seq_lengths", "_segment_ids")
KINDS = ("normal", "large logits", "dominant key", "garbage")


class Draw(NamedTuple):
    """Values for one case.

    Attributes:
      kind: of the data, one of KINDS.
      arrays: argument name -> array, all finite (but for a bias of -inf).
      garbage: the same, with anything in what must not matter.
      dout, dlse: random cotangents, finite everywhere.
      visible: bool, (B, N, T, S).
    """

    kind: str
    arrays: dict[str, np.ndarray]
    garbage: dict[str, np.ndarray]
    dout: np.ndarray
    dlse: np.ndarray
    visible: np.ndarray


def arguments(case: Case, arrays: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of `dot_product_attention`."""
    given = dict(case.static) | arrays
    window = tuple(given.pop(f"window_{side}", None) for side in ("left", "right"))
    return given if window == (None, None) else given | {"local_window_size": window}


def dense_arguments(case: Case, draw: Draw) -> dict[str, Any]:
    """The same problem for a reference: all that hides is one dense mask."""
    hiding = ("is_causal", "local_window_size", "mask")
    given = arguments(case, jax.tree.map(jnp.asarray, draw.arrays))
    given = {n: x for n, x in given.items() if n not in hiding and not n.endswith(HIDING_ENDS)}
    return given | {"mask": jnp.asarray(draw.visible)}


def draw_case(seed: int, index: int, longest: int = LONGEST) -> Case:
    """Everything static, at random; the same for the same seed and index."""
    rng = np.random.default_rng([seed, index])
    batch, (n, k) = int(rng.integers(1, 4)), HEADS[rng.integers(len(HEADS))]
    t = s = _length(rng, longest)
    if rng.random() < 0.5:
        s = _length(rng, longest)
    batch = max(1, min(batch, MOST_LOGITS // (n * t * s)))
    while n * t * s > MOST_LOGITS:
        n, k = 4, 2
        t, s = (max(1, x * 3 // 4) for x in (t, s)) if 4 * t * s > MOST_LOGITS else (t, s)
    h = int(rng.choice(HEAD_DIMS, p=HEAD_DIM_ODDS))
    h_v = h if rng.random() < 0.7 else int(rng.choice(HEAD_DIMS, p=HEAD_DIM_ODDS))
    dtype = str(rng.choice(["bfloat16", "float16"]))
    arrays = _draw_specs(rng, batch, t, s, n, dtype)
    static = _draw_static(rng, arrays, h)
    return Case(str(index), batch, t, s, (n, k), (h, h_v), dtype, static, arrays)


def _length(rng, longest: int) -> int:
    edges = [x for x in EDGES if x <= longest]
    return int(rng.choice(edges) if rng.random() < 0.5 else rng.integers(1, longest + 1))


def _draw_specs(rng, batch, t, s, n, dtype) -> dict[str, Any]:
    """Argument name -> (dtype, shape) of the arrays beyond query, key and value."""
    given = lambda odds: rng.random() < odds
    specs: dict[str, Any] = {}
    if given(0.35):
        sides = (("window_left",), ("window_right",), ("window_left", "window_right"))
        specs |= {name: ("int32", ()) for name in sides[rng.integers(3)]}
    if given(0.3):
        specs["key_value_seq_lengths"] = ("int32", (batch,))
    if given(0.2):
        specs["query_seq_lengths"] = ("int32", (batch,))
    if given(0.25):
        specs["query_segment_ids"] = ("int32", (batch, t))
        specs["key_value_segment_ids"] = ("int32", (batch, s))
    if given(0.25):
        specs["mask"] = ("bool", _broadcast_shape(rng, (batch, n, t, s)))
    if given(0.3):
        dtype_of_bias = "float32" if given(0.5) else dtype
        specs["bias"] = (dtype_of_bias, _broadcast_shape(rng, (batch, n, t, s)))
    if given(0.2):
        specs["sinks"] = ("float32" if given(0.7) else dtype, (n,))
    if given(0.3):
        specs["scale"] = ("float32", ())
    if HAS_ALIBI and given(0.2):
        specs["alibi_slopes"] = ("float32", (n,))
    if given(0.2):
        specs["dropout_rng"] = ("uint32", (2,))
    return specs


def _draw_static(rng, specs, head_dim: int) -> dict[str, Any]:
    """Arguments passed as they are."""
    static: dict[str, Any] = {"is_causal": bool(rng.random() < 0.45)}
    static["deterministic_backward"] = bool(rng.random() < 0.3)
    if rng.random() < 0.4:
        static["causal_alignment"] = "bottom_right"
    if rng.random() < 0.2:
        static["logits_soft_cap"] = float(rng.choice([2.0, 5.0, 30.0]))
    if "dropout_rng" in specs:
        static["dropout_rate"] = float(rng.choice([0.05, 0.1, 0.3, 0.5]))
        static["broadcast_dropout"] = bool(rng.random() < 0.2)
    if "scale" not in specs and rng.random() < 0.3:
        static["scale"] = float(rng.choice([0.5, 2.0, -1.0]) / np.sqrt(head_dim))
    return static


def _broadcast_shape(rng, full) -> tuple[int, ...]:
    """Any shape that broadcasts to `full`, at times of fewer axes."""
    shape = tuple(int(size) if rng.random() < 0.6 else 1 for size in full)
    while len(shape) > 1 and shape[0] == 1 and rng.random() < 0.3:
        shape = shape[1:]
    return shape


def draw_values(case: Case, seed: int, draw: int) -> Draw:
    """Every array at random; the same for the same case, seed and draw."""
    rng = np.random.default_rng([seed, draw, *map(ord, case.name)])
    kind = KINDS[draw % len(KINDS)]
    (n, k), (h, h_v), b = case.heads, case.dims, case.batch
    normal = lambda *shape: rng.standard_normal(shape, np.float32)
    arrays = {
        "query": normal(b, case.q_len, n, h),
        "key": normal(b, case.kv_len, k, h),
        "value": normal(b, case.kv_len, k, h_v),
    }
    if kind == "large logits":
        arrays["query"] *= rng.choice([4.0, 12.0])
    if kind == "dominant key":
        arrays["key"][:, rng.integers(case.kv_len)] *= 20.0
    arrays = {name: x.astype(NUMPY_DTYPES[case.dtype]) for name, x in arrays.items()}
    packed = _draw_segments(rng, case)  # drawn even where absent: values do not shift
    for name, (dtype, shape) in case.arrays.items():
        x = packed[name] if name in packed else _draw_array(rng, name, shape, case)
        arrays[name] = np.asarray(x).astype(NUMPY_DTYPES.get(dtype, dtype))
    dout = normal(b, case.q_len, n, h_v).astype(NUMPY_DTYPES[case.dtype])
    dlse = normal(b, case.q_len, n)
    if rng.random() < 0.3:
        dlse *= 0.0
    seen = visible(case, arrays)
    garbage = _with_garbage(rng, case, arrays, seen) if kind == "garbage" else arrays
    return Draw(kind, arrays, garbage, dout, dlse, seen)


def _draw_array(rng, name: str, shape, case: Case):
    if name.startswith("window"):
        return rng.choice([0, 1, 5, 63, 64, 100, 300, 10**6, rng.integers(0, 128)])
    if name.endswith("seq_lengths"):
        full = case.q_len if name.startswith("query") else case.kv_len
        edges = [x for x in (0, 1, 64, 65, full - 1, full, full) if x <= full]
        anywhere = rng.integers(0, full + 1, shape)
        return np.where(rng.random(shape) < 0.5, rng.choice(edges, shape), anywhere)
    if name == "mask":
        return _draw_mask(rng, shape)
    if name == "bias":
        return _draw_bias(rng, shape)
    if name == "scale":
        return rng.choice([1.0, 0.3, -1.0, 0.0]) / np.sqrt(case.dims[0])
    if name == "alibi_slopes":
        slopes = 2.0 ** (-8.0 * np.arange(1, shape[-1] + 1) / shape[-1])
        return slopes if rng.random() < 0.6 else rng.standard_normal(shape) * 0.1
    if name == "dropout_rng":
        return rng.integers(0, 2**32, shape, np.uint32)
    return rng.standard_normal(shape) * rng.choice([1.0, 4.0])  # sinks


def _draw_segments(rng, case: Case) -> dict[str, np.ndarray]:
    """Packed, in random order, or packed with padding (of one id, or of two that differ)."""
    names = {"query_segment_ids": case.q_len, "key_value_segment_ids": case.kv_len}
    kind, most = rng.choice(["packed", "random", "padded"]), int(rng.choice([1, 3, 8]))
    ids = {n: rng.integers(0, most, (case.batch, size)) for n, size in names.items()}
    if kind != "random":
        ids = {n: np.sort(x, axis=-1) for n, x in ids.items()}
    if case.q_len == case.kv_len and rng.random() < 0.5:
        ids["key_value_segment_ids"] = ids["query_segment_ids"].copy()
    if kind == "padded":
        padding = (-1, int(rng.choice([-1, -2])))
        for (name, size), value in zip(names.items(), padding, strict=True):
            ids[name][np.arange(size) >= rng.integers(0, size + 1, (case.batch, 1))] = value
    return ids


def _draw_mask(rng, shape) -> np.ndarray:
    t, s = (1, 1, *shape)[-2:]
    kind = rng.choice(
        ["dense", "blocks", "band", "rows", "sparse", "none"], p=[0.2] * 4 + [0.15, 0.05]
    )
    if kind == "blocks":
        size = int(rng.choice([16, 64, 128]))
        coarse = rng.random((*shape[:-2], -(-t // size), -(-s // size))) < 0.5
        return coarse.repeat(size, -2)[..., :t, :].repeat(size, -1)[..., :s].reshape(shape)
    if kind == "band":
        ahead = np.arange(s) - np.arange(t)[:, None] * (s / t)
        band = (ahead >= -rng.integers(0, s + 1)) & (ahead <= rng.integers(0, s + 1))
        return np.broadcast_to(band[(0,) * (len(shape) < 2)], shape)
    odds = {"dense": 0.6, "rows": 0.8, "sparse": 0.03, "none": 0.0}[kind]
    mask = rng.random(shape) < odds
    if kind == "rows":  # some of them see no key
        mask &= rng.random((*shape[:-1], 1)) < 0.7
    return mask


def _draw_bias(rng, shape) -> np.ndarray:
    bias = rng.standard_normal(shape, np.float32) * rng.choice([1.0, 4.0])
    kind = rng.choice(["finite", "holes", "rows"], p=[0.6, 0.25, 0.15])
    if kind == "holes":
        bias[rng.random(shape) < 0.2] = -np.inf
    if kind == "rows":
        bias[np.broadcast_to(rng.random((*shape[:-1], 1)) < 0.2, shape)] = -np.inf
    return bias


def visible(case: Case, arrays: dict[str, np.ndarray]) -> np.ndarray:
    """Bool, (B, N, T, S): the definition, pair by pair."""
    i, j = np.arange(case.q_len)[:, None], np.arange(case.kv_len)[None, :]
    bottom_right = case.static.get("causal_alignment") == "bottom_right"
    ahead = j - i - (case.kv_len - case.q_len if bottom_right else 0)
    seen = np.ones((1, 1, case.q_len, case.kv_len), bool)
    if case.static.get("is_causal"):
        seen &= ahead <= 0
    if "window_left" in arrays:
        seen &= ahead >= -int(arrays["window_left"])
    if "window_right" in arrays:
        seen &= ahead <= int(arrays["window_right"])
    per_row = lambda name: arrays[name][:, None, None, None]
    if "query_seq_lengths" in arrays:
        seen = seen & (i < per_row("query_seq_lengths"))
    if "key_value_seq_lengths" in arrays:
        seen = seen & (j < per_row("key_value_seq_lengths"))
    if "query_segment_ids" in arrays:
        ids = arrays["query_segment_ids"], arrays["key_value_segment_ids"]
        seen = seen & (ids[0][:, None, :, None] == ids[1][:, None, None, :])
    if "mask" in arrays:
        seen = seen & arrays["mask"]
    if "bias" in arrays:
        seen = seen & (arrays["bias"] != -np.inf)
    return np.broadcast_to(seen, (case.batch, case.heads[0], case.q_len, case.kv_len))


def seen_keys(case: Case, seen: np.ndarray) -> np.ndarray:
    """Bool, (B, S, K): does any query of any head of the group see the key?"""
    shape = (case.batch, case.heads[1], -1, case.kv_len)
    return np.swapaxes(seen.reshape(shape).any(axis=2), 1, 2)


def _with_garbage(rng, case: Case, arrays, seen) -> dict[str, np.ndarray]:
    """NaN and Inf behind the lengths, the largest floats in keys that nobody sees."""
    out = {name: arrays[name].copy() for name in ("query", "key", "value")}
    largest = float(np.finfo(np.float16).max) if case.dtype == "float16" else 3e38
    for name in ("key", "value"):
        hidden = ~seen_keys(case, seen)
        signs = rng.choice([-1.0, 1.0], out[name][hidden].shape)
        out[name][hidden] = (signs * largest).astype(out[name].dtype)
    not_numbers = np.array([np.nan, np.inf, -np.inf])
    for name in out:
        lengths = arrays.get(("query" if name == "query" else "key_value") + "_seq_lengths")
        if lengths is not None:
            behind = np.arange(out[name].shape[1]) >= lengths[:, None]
            out[name][behind] = rng.choice(not_numbers, out[name][behind].shape)
    return arrays | out
