"""From the arguments of a call to a Problem and its Operands: every check, before any tracing.

Shapes and dtypes are always checked, values where they are concrete. Each error gives the value,
the rule and the remedy, and names the argument. Knows no implementation.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_flash import masks
from pallas_flash.dropout import key_data
from pallas_flash.problem import DTYPES, Operands, Problem

AXES = "query (..., T, N, H), key (..., S, K, H), value (..., S, K, Hv)"


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The arguments of `dot_product_attention`, by its own names."""

    query: Any
    key: Any
    value: Any
    bias: Any = None
    mask: Any = None
    scale: Any = None
    is_causal: bool = False
    query_seq_lengths: Any = None
    key_value_seq_lengths: Any = None
    local_window_size: Any = None
    causal_alignment: str = "top_left"
    query_segment_ids: Any = None
    key_value_segment_ids: Any = None
    logits_soft_cap: Any = None
    sinks: Any = None
    alibi_slopes: Any = None
    dropout_rate: float = 0.0
    dropout_rng: Any = None
    broadcast_dropout: bool = False
    deterministic_backward: bool = False


def normalize(args: Arguments) -> tuple[Problem, Operands]:
    """Checks everything; returns the problem and the operands with one batch axis.

    Raises:
      ValueError: a shape, dtype or value breaks a rule; the message names the argument.
      TypeError: an argument is of a type that can not work.
    """
    query, key, value = _check_qkv(args.query, args.key, args.value)
    lead = query.shape[:-3]
    batch = math.prod(lead)
    q_len, num_q_heads, head_dim = query.shape[-3:]
    kv_len, num_kv_heads, head_dim_v = value.shape[-3:]
    logits_shape = (*lead, num_q_heads, q_len, kv_len)
    shift = _alignment_shift(args.causal_alignment, q_len, kv_len)

    mask = _check_mask(args.mask, logits_shape)
    bias = _check_bias(args.bias, logits_shape)
    q_lengths = check_lengths("query_seq_lengths", args.query_seq_lengths, lead, q_len)
    kv_lengths = check_lengths("key_value_seq_lengths", args.key_value_seq_lengths, lead, kv_len)
    window, has_left, has_right = _check_window(args.local_window_size)
    q_segments, kv_segments = _check_segments(args, lead, q_len, kv_len)
    static_scale, scale = _check_scale(args.scale, head_dim)
    static_cap, cap = _check_soft_cap(args.logits_soft_cap)
    sinks = _check_sinks(args.sinks, num_q_heads)
    slopes = _check_alibi_slopes(args.alibi_slopes, lead, num_q_heads, query.dtype)
    rate, dropout_key = _check_dropout(args.dropout_rate, args.dropout_rng)
    for name in ("is_causal", "broadcast_dropout", "deterministic_backward"):
        _check_flag(name, getattr(args, name))

    parts = []
    if args.is_causal:
        parts.append(masks.Causal(shift))
    if has_left or has_right:
        parts.append(masks.Window(has_left, has_right, shift))
    if q_lengths is not None or kv_lengths is not None:
        parts.append(masks.Lengths(q_lengths is not None, kv_lengths is not None))
    if q_segments is not None:
        parts.append(masks.Segments())
    if mask is not None:
        parts.append(masks.Dense())

    problem = Problem(
        batch=batch,
        q_len=q_len,
        kv_len=kv_len,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=query.dtype.name,
        mask=masks.And(tuple(parts)),
        scale=static_scale,
        soft_cap=static_cap,
        bias_shape=None if bias is None else bias.shape,
        bias_dtype=None if bias is None else bias.dtype.name,
        has_sinks=sinks is not None,
        alibi_shift=None if slopes is None else shift,
        dropout_rate=rate,
        broadcast_dropout=bool(args.broadcast_dropout),
        deterministic_backward=bool(args.deterministic_backward),
    )
    operands = Operands(
        query=query.reshape(batch, q_len, num_q_heads, head_dim),
        key=key.reshape(batch, kv_len, num_kv_heads, head_dim),
        value=value.reshape(batch, kv_len, num_kv_heads, head_dim_v),
        bias=bias,
        scale=scale,
        soft_cap=cap,
        sinks=sinks,
        alibi_slopes=slopes,
        mask=mask,
        query_lengths=q_lengths,
        kv_lengths=kv_lengths,
        window=window,
        query_segments=q_segments,
        kv_segments=kv_segments,
        dropout_key=dropout_key,
    )
    return problem, operands


def _as_array(name: str, x: Any) -> jax.Array:
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be an array, got {type(x).__name__}: {x!r}") from error


def _check_qkv(query: Any, key: Any, value: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    query, key, value = (
        _as_array(n, x) for n, x in (("query", query), ("key", key), ("value", value))
    )
    shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim < 3:
            raise ValueError(f"{name} has {x.ndim} axes: {name} must have at least 3, as {AXES}")
    if not query.ndim == key.ndim == value.ndim:
        raise ValueError(
            f"query, key and value must have as many axes as each other, got {shapes}; as {AXES}"
        )
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(
            f"query is {query.dtype}, key is {key.dtype}, value is {value.dtype}: they must have "
            "one dtype; cast them to it"
        )
    if query.dtype not in DTYPES:
        raise ValueError(
            f"query, key and value are {query.dtype}; they must be float16, bfloat16, float32 or "
            "float64; cast them"
        )
    if not query.shape[:-3] == key.shape[:-3] == value.shape[:-3]:
        raise ValueError(f"query, key and value differ in batch axes: {shapes}; as {AXES}")
    if key.shape[-3:-1] != value.shape[-3:-1]:
        raise ValueError(
            f"key {key.shape} and value {value.shape} must agree in length S and heads K; as {AXES}"
        )
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"query has head_dim={query.shape[-1]}, key has {key.shape[-1]}: they must be equal; "
            f"as {AXES}"
        )
    num_q_heads, num_kv_heads = query.shape[-2], key.shape[-2]
    if num_q_heads and not num_kv_heads:
        raise ValueError(f"key has no heads but query has {num_q_heads}; as {AXES}")
    if num_kv_heads and num_q_heads % num_kv_heads:
        raise ValueError(
            f"num_q_heads={num_q_heads} must be a multiple of num_kv_heads={num_kv_heads}; repeat "
            f"key and value or change the heads. Expected axis order: {AXES} (length before heads)"
        )
    return query, key, value


def _alignment_shift(alignment: str, q_len: int, kv_len: int) -> int:
    if alignment not in ("top_left", "bottom_right"):
        raise ValueError(
            f"causal_alignment={alignment!r} must be 'top_left' (query i sees keys up to i) or "
            "'bottom_right' (the last query sees the last key)"
        )
    return kv_len - q_len if alignment == "bottom_right" else 0


def _broadcastable(name: str, x: jax.Array, logits_shape: tuple[int, ...]) -> jax.Array:
    """x with one batch axis: (1|B, 1|N, 1|T, 1|S)."""
    rank = len(logits_shape)
    wanted = f"({', '.join(map(str, logits_shape))}) = (..., N, T, S)"
    if x.ndim > max(rank, 4) or any(
        size not in (1, full)
        for size, full in zip(x.shape[::-1], (*logits_shape[::-1], 1), strict=False)
    ):
        raise ValueError(
            f"{name} of shape {x.shape} must broadcast to {wanted}; each axis is 1 or that size"
        )
    x = x.reshape((1,) * (rank - x.ndim) + x.shape) if x.ndim < rank else x
    lead, full_lead = x.shape[:-3], logits_shape[:-3]
    if all(size == 1 for size in lead):
        return x.reshape(1, *x.shape[-3:])
    if lead != full_lead and len(full_lead) > 1:  # some batch axes broadcast, some do not
        x = jnp.broadcast_to(x, (*full_lead, *x.shape[-3:]))
    return x.reshape(math.prod(full_lead), *x.shape[-3:])


def _check_mask(mask: Any, logits_shape: tuple[int, ...]) -> jax.Array | None:
    if mask is None:
        return None
    mask = _as_array("mask", mask)
    if mask.dtype != jnp.bool_:
        raise ValueError(
            f"mask is {mask.dtype}; it must be bool, True where a pair is visible; pass "
            "mask.astype(bool), or bias=mask for an additive one"
        )
    return _broadcastable("mask", mask, logits_shape)


def _check_bias(bias: Any, logits_shape: tuple[int, ...]) -> jax.Array | None:
    if bias is None:
        return None
    bias = _as_array("bias", bias)
    if bias.dtype not in DTYPES:
        raise ValueError(
            f"bias is {bias.dtype}; it must be floating point (it is added to the logits); pass a "
            "boolean one as mask="
        )
    return _broadcastable("bias", bias, logits_shape)


def _concrete(x: Any) -> np.ndarray | None:
    """The value of x where it is known before tracing, else None; never waits for a device."""
    return x if isinstance(x, np.ndarray) else None


def check_lengths(name: str, lengths: Any, lead: tuple[int, ...], full: int) -> jax.Array | None:
    if lengths is None:
        return None
    known = _concrete(np.asarray(lengths)) if isinstance(lengths, (int, list, tuple)) else None
    known = _concrete(lengths) if known is None else known
    lengths = _as_array(name, lengths)
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(f"{name} is {lengths.dtype}; it must be integer; cast it to int32")
    if lengths.shape != lead and not (lead == () and lengths.shape == (1,)):
        raise ValueError(
            f"{name} of shape {lengths.shape} must have the batch shape {lead}: one length a "
            "sequence"
        )
    if known is not None and known.size and not (0 <= known.min() and known.max() <= full):
        raise ValueError(
            f"{name} holds {known.min()}..{known.max()}; a length must be between 0 and {full}; "
            "clip it"
        )
    return jnp.clip(lengths, 0, full).astype(jnp.int32).reshape(math.prod(lead))


def _check_window(window: Any) -> tuple[jax.Array | None, bool, bool]:
    """(left, right) as int32 (2,), and which side is present."""
    if window is None:
        return None, False, False
    if isinstance(window, (tuple, list)):
        if len(window) != 2:
            raise ValueError(
                f"local_window_size={window!r} must be an int or (left, right); None is open"
            )
        sides = tuple(window)
    else:
        sides = (window, window)
    for side in sides:
        if side is None:
            continue
        if isinstance(side, bool) or not (
            isinstance(side, (int, np.integer))
            or (getattr(side, "shape", None) == () and jnp.issubdtype(side.dtype, jnp.integer))
        ):
            raise TypeError(
                f"local_window_size={window!r} must hold integers (or integer scalars, or None for "
                "an open side)"
            )
        if isinstance(side, (int, np.integer)) and side < 0:
            raise ValueError(
                f"local_window_size={window!r} has a negative side; a side counts the keys it "
                "shows beyond the query's own, so 0 or more; None leaves it open"
            )
    has_left, has_right = (side is not None for side in sides)
    if not (has_left or has_right):
        return None, False, False
    limit = np.iinfo(np.int32).max // 4  # far beyond any length, and sums stay in int32
    values = [0 if side is None else jnp.clip(side, 0, limit).astype(jnp.int32) for side in sides]
    return jnp.stack([jnp.asarray(v, jnp.int32) for v in values]), has_left, has_right


def _check_segments(args: Arguments, lead: tuple[int, ...], q_len: int, kv_len: int):
    query, kv = args.query_segment_ids, args.key_value_segment_ids
    if query is None and kv is None:
        return None, None
    if query is None or kv is None:
        missing = "query_segment_ids" if query is None else "key_value_segment_ids"
        raise ValueError(
            f"{missing} is missing: query_segment_ids and key_value_segment_ids go together; pass "
            "both (the same array in self-attention)"
        )
    out = []
    for name, ids, length in (
        ("query_segment_ids", query, q_len),
        ("key_value_segment_ids", kv, kv_len),
    ):
        ids = _as_array(name, ids)
        if not jnp.issubdtype(ids.dtype, jnp.integer):
            raise ValueError(f"{name} is {ids.dtype}; it must be integer; cast it to int32")
        if ids.shape != (*lead, length):
            raise ValueError(
                f"{name} of shape {ids.shape} must be {(*lead, length)}: one id a position"
            )
        out.append(ids.astype(jnp.int32).reshape(math.prod(lead), length))
    return tuple(out)


def _static_number(x: Any) -> float | None:
    """x as a float when it is a Python or NumPy number, None when it is a JAX array."""
    if isinstance(x, (bool, np.bool_, str, bytes)) or x is None:
        raise TypeError(f"{x!r} is not a number")
    if isinstance(x, (int, float, np.number)):
        return float(x)
    if isinstance(x, np.ndarray) and x.shape == () and np.issubdtype(x.dtype, np.number):
        return float(x)
    if isinstance(x, jax.Array) and x.shape == () and jnp.issubdtype(x.dtype, jnp.floating):
        return None
    raise TypeError(f"{type(x).__name__} of shape {getattr(x, 'shape', None)}")


def _check_scale(scale: Any, head_dim: int) -> tuple[float | None, jax.Array | None]:
    if scale is None:
        return 1.0 / math.sqrt(head_dim) if head_dim else 1.0, None
    try:
        static = _static_number(scale)
    except TypeError as error:
        raise TypeError(f"scale must be a real number or a float scalar array: {error}") from error
    if static is None:
        return None, scale.astype(jnp.promote_types(scale.dtype, jnp.float32))
    if not math.isfinite(static):
        raise ValueError(f"scale={static} must be finite; leave it out for 1 / sqrt(head_dim)")
    return static, None


def _check_soft_cap(cap: Any) -> tuple[float | str | None, jax.Array | None]:
    if cap is None:
        return None, None
    try:
        static = _static_number(cap)
    except TypeError as error:
        raise TypeError(
            f"logits_soft_cap must be a real number or a float scalar array: {error}"
        ) from error
    if static is None:
        return "operand", cap.astype(jnp.promote_types(cap.dtype, jnp.float32))
    if not (math.isfinite(static) and static > 0):
        raise ValueError(f"logits_soft_cap={static} must be positive and finite; None is no cap")
    return static, None


def _check_sinks(sinks: Any, num_q_heads: int) -> jax.Array | None:
    if sinks is None:
        return None
    sinks = _as_array("sinks", sinks)
    if not jnp.issubdtype(sinks.dtype, jnp.floating):
        raise ValueError(f"sinks is {sinks.dtype}; it must be floating point; cast it to float32")
    if sinks.shape != (num_q_heads,):
        raise ValueError(
            f"sinks of shape {sinks.shape} must be ({num_q_heads},): one logit a query head"
        )
    return sinks


def _check_alibi_slopes(
    slopes: Any, lead: tuple[int, ...], num_q_heads: int, dtype: Any
) -> jax.Array | None:
    """(1|B, N), as wide as the logits."""
    if slopes is None:
        return None
    known = _concrete(slopes)
    slopes = _as_array("alibi_slopes", slopes)
    if not jnp.issubdtype(slopes.dtype, jnp.floating):
        raise ValueError(
            f"alibi_slopes is {slopes.dtype}; it must be floating point; cast it to float32"
        )
    if slopes.shape not in ((num_q_heads,), (*lead, num_q_heads)):
        batched = f" or {(*lead, num_q_heads)}" if lead else ""
        raise ValueError(
            f"alibi_slopes of shape {slopes.shape} must be ({num_q_heads},){batched}: one slope a "
            "query head"
        )
    if known is not None and not np.isfinite(known).all():
        raise ValueError(
            f"alibi_slopes holds {known[~np.isfinite(known)][0]}; each slope must be finite; hide "
            "keys with mask="
        )
    return slopes.astype(jnp.promote_types(dtype, jnp.float32)).reshape(
        math.prod(slopes.shape[:-1]), num_q_heads
    )


def _check_dropout(rate: Any, rng: Any) -> tuple[float, jax.Array | None]:
    if isinstance(rate, bool) or not isinstance(rate, (int, float, np.number)):
        raise TypeError(
            f"dropout_rate={rate!r} must be a Python number: it is static; close over it in jit"
        )
    rate = float(rate)
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"dropout_rate={rate} must be at least 0 and less than 1")
    if rate == 0.0:
        return 0.0, None
    if rng is None:
        raise ValueError(
            f"dropout_rate={rate} needs a key: pass dropout_rng=jax.random.key(...), or rate 0"
        )
    return rate, key_data(rng)


def _check_flag(name: str, value: Any) -> None:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}={value!r} must be a Python bool: it is static; close over it")
