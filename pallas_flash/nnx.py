"""Flax nnx: `attention_fn`, which swaps one argument of a model, and an attention module.

    layer = nnx.MultiHeadAttention(
        8, 512, attention_fn=pallas_flash.nnx.attention_fn, decode=False, rngs=rngs
    )
    layer(x, is_causal=True)

nnx's module passes is_causal on every call, so is_causal bound with `functools.partial` would be
overridden with its False: say it in the call. Every other option may be bound.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes

from pallas_flash import flax_common
from pallas_flash.flax_common import FlaxKeywords

ZEROS = nnx.initializers.zeros_init()


def attention_fn(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    broadcast_dropout: bool = True,
    dropout_rng: Any = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: nnx.Module | None = None,
    promote_dtype: Callable[..., Any] = dtypes.promote_dtype,
    is_causal: bool = False,
    *,
    input_positions: Any = None,
    rope: Callable[..., Any] | None = None,
    **options: Any,
) -> jax.Array:
    """`flax.nnx.dot_product_attention` by `pallas_flash.dot_product_attention`.

    Args:
      query: (batch..., T, N, H).
      key, value: (batch..., S, K, H), N a multiple of K.
      bias: float, broadcasts to (batch..., N, T, S).
      mask: bool, or float as `nnx.make_causal_mask` makes it: hidden where 0. Broadcasts likewise.
      broadcast_dropout: one dropout pattern for all batch entries and heads.
      dropout_rng, dropout_rate: as nnx's, though the pattern drawn from a key is another.
      deterministic: no dropout.
      dtype: query, key and value are cast to it; None promotes them to one dtype.
      precision: of float32 and float64 products. 16-bit inputs are multiplied exactly and summed
        in float32 whatever it says.
      module: asks for attention weights: refused.
      promote_dtype: nnx's hook, called with (query, key, value) and dtype.
      is_causal: position i sees positions up to i.
      input_positions: int, (T,) or (batch..., T): positions for `rope`, refused without it. With
        S = T they are those of the keys, too; else key j is at position j (a cache).
      rope: an `nnx.RoPE`: rotates query and key (and keeps their dtype), as
        `nnx.dot_product_attention_with_rope` does.
      **options: further keywords of `pallas_flash.dot_product_attention`: local_window_size,
        key_value_seq_lengths, query_segment_ids, implementation, ... Bind them with
        `functools.partial`.

    Returns:
      (batch..., T, N, H). A query that sees no key gives 0 (nnx's own: the mean of value).

    Raises:
      ValueError: as `pallas_flash.dot_product_attention`; or a keyword that is refused.

    One query against several keys under a mask is a decode step of nnx's own module: the mask says
    which keys there are, and is_causal adds nothing.
    """
    query, key = _rotate_both(query, key, rope, input_positions)
    query, key, value = promote_dtype((query, key, value), dtype=dtype)
    keywords = FlaxKeywords(
        bias=bias,
        mask=mask,
        broadcast_dropout=broadcast_dropout,
        dropout_rng=dropout_rng,
        dropout_rate=dropout_rate,
        deterministic=deterministic,
        precision=precision,
        module=module,
    )
    return flax_common.attend(query, key, value, keywords, {"is_causal": is_causal, **options})


def _rotate_both(query: Any, key: Any, rope: Any, positions: Any) -> tuple[Any, Any]:
    if rope is None:
        if positions is not None:
            raise ValueError("input_positions are for rope, and there is none: pass rope= as well")
        return query, key
    same_length = query.shape[-3] == key.shape[-3]
    if positions is None and not same_length:
        raise ValueError(
            f"rope with {query.shape[-3]} queries and {key.shape[-3]} keys (a cache) needs "
            "input_positions, the positions of the queries; key j is at position j"
        )
    return _rotate(query, rope, positions), _rotate(key, rope, positions if same_length else None)


def _rotate(x: jax.Array, rope: Any, positions: Any) -> jax.Array:
    """rope on x (batch..., T, N, H) at positions (T,) or (batch..., T); None counts from 0."""
    heads_first = jnp.swapaxes(x, -3, -2)  # [batch..., N, T, H]
    if positions is None:
        out = rope(heads_first)
    else:
        positions = jnp.asarray(positions)
        rotate = lambda x, positions: rope(x, positions)
        for _ in positions.shape[:-1]:  # nnx.RoPE takes one row of positions
            rotate = jax.vmap(rotate)
        out = rotate(heads_first, positions)
    return jnp.swapaxes(out, -3, -2).astype(x.dtype)


class MultiHeadAttention(nnx.MultiHeadAttention):
    """`flax.nnx.MultiHeadAttention` on flash attention, with what it lacks.

    Every argument of nnx's is kept, and the parameters have its names and shapes: a state of nnx's
    module loads unchanged and gives the same output. `decode` is False unless given.

    Decoding needs `init_cache` first, as in nnx, and the cache has its layout. A call may bring
    any number of tokens (a prompt, then single ones), and attention is causal whatever is_causal
    says; causal_alignment and a window's right side mean nothing there. Single tokens run on the
    kernels; a chunk of several runs on the XLA implementation, since its causal bound is known at
    run time only.

    Args:
      num_heads: N.
      in_features: of inputs_q.
      qkv_features: of query, key and value over all query heads; None: in_features.
      out_features: None: in_features.
      num_kv_heads: K, heads of key and value, N a multiple of it; None: N.
      in_kv_features: of inputs_k and inputs_v; None: in_features.
      is_causal: position i sees positions up to i; the call may override it.
      local_window_size: int or (left, right), inclusive; None as a side leaves it open.
      logits_soft_cap: cap * tanh(logits / cap).
      alibi_slopes: a tuple of num_heads floats (an array would be state): a logit loses slope *
        distance. While decoding they are a bias.
      use_sinks: one learned logit a head, parameter "sinks" (num_heads,).
      sinks_init: its initializer.
      scale: of the logits; None: 1 / sqrt(head_dim).
      causal_alignment: "top_left" or "bottom_right" (the last query sees the last key).
      implementation: None, "mosaic_gpu" or "xla".
      deterministic_backward: gradients bit-equal from run to run.
      rope: an `nnx.RoPE`: rotates query and key, keys before they enter the cache.
      attention_fn: takes the keywords of this module's `attention_fn` that are in use.
      decode: use the cache; the call may override it.
      rngs: for the parameters and dropout.
      **nnx_options: every other argument of `flax.nnx.MultiHeadAttention`.

    Raises:
      ValueError: num_heads is no multiple of num_kv_heads, or qkv_features none of num_heads.

    Example:
      >>> import jax.numpy as jnp, pallas_flash.nnx
      >>> from flax import nnx
      >>> layer = pallas_flash.nnx.MultiHeadAttention(
      ...     8, 512, num_kv_heads=2, is_causal=True, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)
      ... )
      >>> layer(jnp.ones((2, 128, 512))).shape
      (2, 128, 512)
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None = None,
        out_features: int | None = None,
        num_kv_heads: int | None = None,
        in_kv_features: int | None = None,
        *,
        is_causal: bool = False,
        local_window_size: Any = None,
        logits_soft_cap: float | None = None,
        alibi_slopes: Any = None,
        use_sinks: bool = False,
        sinks_init: Callable[..., jax.Array] = ZEROS,
        scale: float | None = None,
        causal_alignment: str = "top_left",
        implementation: str | None = None,
        deterministic_backward: bool = False,
        rope: Callable[..., Any] | None = None,
        attention_fn: Callable[..., jax.Array] = attention_fn,
        decode: bool | None = False,
        rngs: nnx.Rngs,
        **nnx_options: Any,
    ):
        flax_common.check_heads(
            num_heads,
            num_heads if num_kv_heads is None else num_kv_heads,
            in_features if qkv_features is None else qkv_features,
        )
        super().__init__(
            num_heads,
            in_features,
            qkv_features,
            out_features,
            num_kv_heads,
            in_kv_features,
            attention_fn=attention_fn,
            decode=decode,
            rngs=rngs,
            **nnx_options,
        )
        self.is_causal = is_causal
        self.local_window_size = local_window_size
        self.logits_soft_cap = logits_soft_cap
        self.alibi_slopes = alibi_slopes
        self.scale = scale
        self.causal_alignment = causal_alignment
        self.implementation = implementation
        self.deterministic_backward = deterministic_backward
        self.rope = rope
        self.sinks: nnx.Param | None = nnx.data(None)
        if use_sinks:
            self.sinks = nnx.Param(sinks_init(rngs.params(), (num_heads,), self.param_dtype))

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        inputs_q: Any,
        inputs_k: Any = None,
        inputs_v: Any = None,
        *,
        mask: Any = None,
        bias: Any = None,
        deterministic: bool | None = None,
        rngs: Any = None,
        sow_weights: bool = False,
        decode: bool | None = None,
        is_causal: bool | None = None,
        out_sharding: Any = None,
        qkv_sharding: Any = None,
        input_positions: Any = None,
        query_seq_lengths: Any = None,
        key_value_seq_lengths: Any = None,
        query_segment_ids: Any = None,
        key_value_segment_ids: Any = None,
    ) -> jax.Array:
        """Attention of inputs_q to inputs_k and inputs_v.

        Args:
          inputs_q: (batch..., T, in_features).
          inputs_k: (batch..., S, in_kv_features); None: inputs_q.
          inputs_v: (batch..., S, in_kv_features); None: inputs_k.
          mask: bool, or float 0 and 1; broadcasts to (batch..., N, T, S).
          bias: float, added to the logits; broadcasts likewise.
          deterministic: no dropout; needed here or in the module where dropout_rate > 0.
          rngs: for dropout; None: the module's own.
          sow_weights: refused, there are no attention weights.
          decode, is_causal: None: the module's own.
          out_sharding, qkv_sharding: of the projections, as in nnx.
          input_positions: int, (T,) or (batch..., T): for rope; None counts on from the cache.
          query_seq_lengths, key_value_seq_lengths: int, (batch...).
          query_segment_ids, key_value_segment_ids: int, (batch..., T) and (batch..., S).

        While decoding S is the length of the cache.

        Returns:
          (batch..., T, out_features).

        Raises:
          ValueError: shapes or values that do not fit, or no cache; the message says which.
        """
        inputs_k, inputs_v = flax_common.choose_inputs(inputs_q, inputs_k, inputs_v)
        decode = self.decode if decode is None else decode
        if decode and self.cache_index is None:
            raise ValueError("decode=True without a cache: call init_cache first")
        query = self.query(inputs_q, out_sharding=qkv_sharding)
        key = self.key(inputs_k, out_sharding=qkv_sharding)
        value = self.value(inputs_v, out_sharding=qkv_sharding)
        if self.normalize_qk:
            assert self.query_ln is not None and self.key_ln is not None
            query, key = self.query_ln(query), self.key_ln(key)
        if decode and self.rope is not None and input_positions is None:
            assert self.cache_index is not None
            input_positions = self.cache_index[...] + jnp.arange(query.shape[-3])
        query, key = _rotate_both(query, key, self.rope, input_positions)
        options = flax_common.module_options(
            self,
            mask=mask,
            bias=bias,
            query_seq_lengths=query_seq_lengths,
            key_value_seq_lengths=key_value_seq_lengths,
            query_segment_ids=query_segment_ids,
            key_value_segment_ids=key_value_segment_ids,
            is_causal=is_causal,
            sinks=None if self.sinks is None else self.sinks[...],
            module=self if sow_weights else None,
        )
        if decode:
            key, value, options = self._decode(key, value, options)
        out = self.attention_fn(
            query,
            key,
            value,
            broadcast_dropout=self.broadcast_dropout,
            dtype=self.dtype,
            precision=self.precision,
            **self._dropout(deterministic, rngs),
            **options,
        )
        return self.out(out, out_sharding=out_sharding)

    def _decode(self, key, value, options):
        """Key, value and options of the call against the cache, which gets the new tokens."""
        assert self.cached_key is not None and self.cached_value is not None
        assert self.cache_index is not None
        flax_common.check_decode_options(self.attention_fn, options)
        index, q_len = self.cache_index[...], key.shape[-3]
        self.cached_key[...], self.cached_value[...] = flax_common.extend_cache(
            self.cached_key[...], self.cached_value[...], index, key, value
        )
        self.cache_index[...] = index + q_len
        view = flax_common.view_cache(
            self.cached_key[...], self.cached_value[...], index, q_len, options
        )
        return view.key, view.value, view.options

    def _dropout(self, deterministic, rngs):
        if self.dropout_rate == 0.0:
            return {"deterministic": True}
        deterministic = self.deterministic if deterministic is None else deterministic
        if deterministic is None:
            raise ValueError(
                f"dropout_rate={self.dropout_rate} needs to be told whether to drop: pass "
                "deterministic=True or False to the module or to the call"
            )
        if deterministic:
            return {"deterministic": True}
        rngs = self.rngs if rngs is None else rngs
        if rngs is None:
            raise ValueError(
                f"dropout_rate={self.dropout_rate} needs rngs: pass rngs=nnx.Rngs(...) to the "
                "call, or leave keep_rngs=True in the module"
            )
        rng = rngs.dropout() if isinstance(rngs, nnx.Rngs) else rngs()
        return {
            "deterministic": False,
            "dropout_rate": self.dropout_rate,
            "dropout_rng": rng,
        }
