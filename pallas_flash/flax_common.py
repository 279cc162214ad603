"""What the linen and nnx halves share: Flax's keywords on our function, and decode with a cache.

Letters: T queries, S keys (the length of a cache while decoding), N heads, K kv heads, H head_dim.
Knows nothing of modules, parameters or how either library keeps its state.
"""

import contextlib
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import core, lax

from pallas_flash import tile_math
from pallas_flash.api import dot_product_attention


@dataclasses.dataclass(frozen=True)
class FlaxKeywords:
    """The keywords of Flax's own `dot_product_attention` that both libraries pass, by its names."""

    bias: Any = None
    mask: Any = None
    broadcast_dropout: bool = True
    dropout_rng: Any = None
    dropout_rate: float = 0.0
    deterministic: bool = False
    precision: Any = None
    module: Any = None


def attend(query: Any, key: Any, value: Any, flax: FlaxKeywords, options: dict[str, Any]) -> Any:
    """`dot_product_attention` under Flax's conventions; `options` are keywords of our own."""
    if flax.module is not None:
        raise ValueError(
            "module (sow_weights=True) asks for the attention weights, which flash attention never "
            "has in memory; leave sow_weights out, or use Flax's own dot_product_attention there"
        )
    mask = None if flax.mask is None else jnp.asarray(flax.mask) != 0
    if mask is not None and query.shape[-3] == 1 < key.shape[-3]:
        options = _of_a_single_query(options)
    if not flax.deterministic:  # not passed on otherwise: what is unused would compile anew
        options = options | {
            "dropout_rate": flax.dropout_rate,
            "dropout_rng": flax.dropout_rng,
            "broadcast_dropout": flax.broadcast_dropout and flax.dropout_rate > 0,
        }
    with _matmul_precision(flax.precision):
        return dot_product_attention(query, key, value, flax.bias, mask, **options)


def _of_a_single_query(options: dict[str, Any]) -> dict[str, Any]:
    """Options for one query against many keys under a mask: a decode step of Flax's modules.

    Its position is not among the arguments, and the mask says which keys there are so far. A
    causal rule that counts the query as position 0 would leave key 0 only.
    """
    for name in ("local_window_size", "alibi_slopes"):
        if options.get(name) is not None:
            raise ValueError(
                f"{name} with one query, several keys and a mask (a decode step of Flax's own "
                "module): attention_fn is not told the query's position; use the attention module "
                "of pallas_flash with decode=True"
            )
    return {**options, "is_causal": False}


def _matmul_precision(precision: Any) -> contextlib.AbstractContextManager:
    """The context in which float32 products have Flax's `precision`."""
    if isinstance(precision, (tuple, list)):
        if len(set(precision)) != 1:
            raise ValueError(
                f"precision={precision!r} differs between the operands of one product: attention "
                "has a single precision; pass one value"
            )
        precision = precision[0]
    if precision is None:
        return contextlib.nullcontext()
    name = getattr(precision, "name", precision)  # enums by name: lax.Precision.HIGH, ...
    return jax.default_matmul_precision(
        name.lower() if isinstance(precision, lax.Precision) else name
    )


def without_defaults(**options: Any) -> dict[str, Any]:
    """Options somebody set, so that an `attention_fn` with its own (a partial) keeps the others."""
    unset = lambda x: x is None or x is False or (isinstance(x, str) and x == "top_left")
    return {name: x for name, x in options.items() if not unset(x)}


def module_options(module: Any, /, **of_the_call: Any) -> dict[str, Any]:
    """The options that an attention module keeps as attributes, and those of one call of it.

    Each stands under the name it has in `dot_product_attention`. The call's own win: None (of
    `is_causal`, say) leaves the module's.
    """
    of_the_module = without_defaults(
        is_causal=module.is_causal,
        local_window_size=module.local_window_size,
        causal_alignment=module.causal_alignment,
        logits_soft_cap=module.logits_soft_cap,
        alibi_slopes=module.alibi_slopes,
        scale=module.scale,
        implementation=module.implementation,
        deterministic_backward=module.deterministic_backward,
    )
    return of_the_module | {name: x for name, x in of_the_call.items() if x is not None}


def check_decode_options(attention_fn: Any, options: dict[str, Any]) -> None:
    """Raises ValueError where a partial binds what `view_cache` has to know."""
    bound = getattr(attention_fn, "keywords", {})
    for name in ("local_window_size", "alibi_slopes", "rope"):
        if bound.get(name) is not None:
            raise ValueError(
                f"{name} is bound to attention_fn, which is not told the position in the cache; "
                f"while decoding give {name} to the module"
            )
    for name in ("logits_soft_cap", "sinks"):
        if bound.get(name) is not None and "alibi_slopes" in options:
            raise ValueError(
                f"{name} is bound to attention_fn, and the module has alibi_slopes: while decoding "
                f"the bias that they become depends on {name}; give {name} to the module"
            )


def check_heads(num_heads: int, num_kv_heads: int, qkv_features: int) -> None:
    """Raises ValueError unless the heads of an attention module fit each other."""
    if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads={num_heads} must be a multiple of num_kv_heads={num_kv_heads}: each kv "
            "head serves as many query heads; change one of them"
        )
    if qkv_features % num_heads:
        raise ValueError(
            f"qkv_features={qkv_features} must be a multiple of num_heads={num_heads}: each head "
            "gets an equal part; change one of them (qkv_features defaults to the input's features)"
        )


def choose_inputs(inputs_q: Any, inputs_k: Any, inputs_v: Any) -> tuple[Any, Any]:
    """inputs_k and inputs_v by Flax's defaults: k falls back to q, v to k."""
    if inputs_k is None and inputs_v is not None:
        raise ValueError(
            "inputs_v is given without inputs_k: pass inputs_k (inputs_v falls back to it)"
        )
    inputs_k = inputs_q if inputs_k is None else inputs_k
    return inputs_k, inputs_k if inputs_v is None else inputs_v


def extend_cache(
    cached_key: jax.Array, cached_value: jax.Array, index: jax.Array, key: Any, value: Any
) -> tuple[jax.Array, jax.Array]:
    """Both caches with the new keys and values from position `index` on, in the cache's dtype.

    A traced index cannot be checked: past the end it overwrites the last entries, as Flax does.

    Args:
      cached_key, cached_value: (..., S, K, H).
      index: int32 scalar, the tokens the cache holds already.
      key, value: (..., T, K, H).

    Raises:
      ValueError: shapes differ, or the tokens do not fit (where that is known).
    """
    *lead, cache_len, num_kv_heads, head_dim = cached_key.shape
    q_len = key.shape[-3]
    expected = (*lead, q_len, num_kv_heads, head_dim)
    if key.shape != expected:
        raise ValueError(
            f"decode got keys of shape {key.shape} for a cache of shape {cached_key.shape}: they "
            f"must be {expected}, (batch..., new tokens, num_kv_heads, head_dim); make the cache "
            "with the batch of the calls"
        )
    known = 0 if isinstance(index, core.Tracer) else int(index)
    if known + q_len > cache_len:
        raise ValueError(
            f"cache overflow: cache_index={known} and {q_len} new tokens exceed the cache's length "
            f"{cache_len}; make a longer cache"
        )
    write = lambda cache, x: lax.dynamic_update_slice_in_dim(
        cache, x.astype(cache.dtype), index, axis=-3
    )
    return write(cached_key, key), write(cached_value, value)


@dataclasses.dataclass(frozen=True)
class CacheView:
    """The part of a cache that one call attends to, and the options under which it does."""

    key: jax.Array
    value: jax.Array
    options: dict[str, Any]


def view_cache(
    key: jax.Array, value: jax.Array, index: jax.Array, q_len: int, options: dict[str, Any]
) -> CacheView:
    """Causal attention of T new tokens, the first at position `index`, against the cache.

    Query t sees the keys at positions up to index + t, and no further back than the window's left
    side. One token needs a kv length for that; several need a window whose right side is `index`.
    With a left side only the last T + left entries are read: their number is static, so a step
    costs O(window), and every bound stays non-negative. ALiBi becomes a bias: its shift is known
    at run time only.

    Args:
      key, value: the cache with the new tokens in it, (..., S, K, H).
      index: int32 scalar, the position of the first new token.
      q_len: T.
      options: of the call; arrays with an axis S (bias, mask, key_value_segment_ids) span the
        whole cache. Causality, its alignment and the window's right side are what decoding is.
    """
    options = options | {"is_causal": False, "causal_alignment": "top_left"}
    left = _left_side(options.pop("local_window_size", None))
    lead, cache_len = key.shape[:-3], key.shape[-3]
    start, kept = 0, cache_len
    if left is not None and q_len + left < cache_len:
        kept = q_len + left
        start = jnp.clip(index - left, 0, cache_len - kept)
        cut = lambda x, axis: lax.dynamic_slice_in_dim(x, start, kept, axis=axis)
        key, value = cut(key, -3), cut(value, -3)
        for name in ("bias", "mask", "key_value_segment_ids"):
            if name in options and options[name].shape[-1] == cache_len:
                options[name] = cut(options[name], -1)
    first = index - start  # the first query's position among the kept keys
    kv_lengths = options.get("key_value_seq_lengths")
    if kv_lengths is not None:
        kv_lengths = jnp.asarray(kv_lengths) - start
    if q_len == 1:
        # No window: the kept keys begin at or after index - left.
        so_far = jnp.broadcast_to(first + 1, lead)
        kv_lengths = so_far if kv_lengths is None else jnp.minimum(so_far, kv_lengths)
    else:
        options["local_window_size"] = (None if left is None else left - first, first)
    if "alibi_slopes" in options:
        options["bias"] = _alibi_bias(options, first, q_len, kept)
        del options["alibi_slopes"]
    return CacheView(key, value, {**options, **without_defaults(key_value_seq_lengths=kv_lengths)})


def _alibi_bias(options: dict[str, Any], first: Any, q_len: int, kv_len: int) -> Any:
    """ALiBi of T queries, the first at `first` among S keys, added to the bias there may be.

    A query sees no key ahead of it, so all of its distances may be too large by the same amount:
    softmax does not notice. As measured from the last query they make (N, 1, S) numbers. A soft
    cap and sinks would notice: with them, every query has its own row.
    """
    one_row = q_len == 1 or not {"logits_soft_cap", "sinks"} & options.keys()
    q_pos = first + (q_len - 1 if one_row else jnp.arange(q_len, dtype=jnp.int32)[:, None])
    kv_pos = jnp.arange(kv_len, dtype=jnp.int32)
    slopes = jnp.asarray(options["alibi_slopes"])[..., None, None]
    alibi = tile_math.alibi(slopes.astype(jnp.float32), q_pos, kv_pos, 0)
    return options["bias"] + alibi if "bias" in options else alibi


def _left_side(window: Any) -> int | None:
    left = window[0] if isinstance(window, (tuple, list)) else window
    if left is None:
        return None
    if isinstance(left, bool) or not isinstance(left, int):
        raise TypeError(
            f"local_window_size={window!r} must hold Python ints while decoding: the left side "
            "decides how much of the cache is read"
        )
    return left
