"""Flax linen: `attention_fn`, which swaps one argument of a model, and an attention module.

    nn.MultiHeadDotProductAttention(
        num_heads=8,
        attention_fn=functools.partial(pallas_flash.linen.attention_fn, is_causal=True),
    )

called with mask=None: a mask array would be read from memory, T * S entries of it.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype

from pallas_flash import flax_common
from pallas_flash.flax_common import FlaxKeywords


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
    module: nn.Module | None = None,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Any = None,
    qk_attn_weights_einsum: Any = None,
    attn_weights_value_einsum: Any = None,
    **options: Any,
) -> jax.Array:
    """`flax.linen.dot_product_attention` by `pallas_flash.dot_product_attention`.

    linen passes only keywords it finds in this signature, so every one it knows is listed.

    Args:
      query: (batch..., T, N, H).
      key, value: (batch..., S, K, H), N a multiple of K.
      bias: float, broadcasts to (batch..., N, T, S).
      mask: bool, or float as `nn.make_causal_mask` makes it: hidden where 0. Broadcasts likewise.
      broadcast_dropout: one dropout pattern for all batch entries and heads.
      dropout_rng, dropout_rate: as linen's, though the pattern drawn from a key is another.
      deterministic: no dropout.
      dtype: query, key and value are cast to it; None promotes them to one dtype.
      precision: of float32 and float64 products. 16-bit inputs are multiplied exactly and summed
        in float32 whatever it says.
      module: asks for attention weights: refused.
      force_fp32_for_softmax: the softmax is in float32 either way.
      einsum_dot_general, qk_attn_weights_einsum, attn_weights_value_einsum: refused.
      **options: keywords of `pallas_flash.dot_product_attention`: is_causal, local_window_size,
        key_value_seq_lengths, query_segment_ids, implementation, ... Bind them with
        `functools.partial`.

    Returns:
      (batch..., T, N, H). A query that sees no key gives 0 (linen's own: the mean of value).

    Raises:
      ValueError: as `pallas_flash.dot_product_attention`; or a keyword that is refused.

    One query against several keys under a mask is a decode step of linen's own module: the mask
    says which keys there are, and is_causal adds nothing.
    """
    del force_fp32_for_softmax
    for name, given in (
        ("einsum_dot_general", einsum_dot_general),
        ("qk_attn_weights_einsum", qk_attn_weights_einsum),
        ("attn_weights_value_einsum", attn_weights_value_einsum),
    ):
        if given is not None:
            raise ValueError(
                f"{name} replaces a product inside attention, which a fused kernel has no place "
                "for; leave it out, or use flax.linen.dot_product_attention there"
            )
    query, key, value = promote_dtype(query, key, value, dtype=dtype)
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
    return flax_common.attend(query, key, value, keywords, options)


class MultiHeadDotProductAttention(nn.MultiHeadDotProductAttention):
    """`flax.linen.MultiHeadDotProductAttention` on flash attention, with what it lacks.

    Every field of linen's is kept, and the parameters have its names and shapes: a checkpoint of
    linen's module loads unchanged and gives the same output. `qk_attn_weights_einsum_cls` and
    `attn_weights_value_einsum_cls` are refused.

    With decode=True the cache has linen's layout. A call may bring any number of tokens (a prompt,
    then single ones), and attention is causal whatever `is_causal` says; causal_alignment and a
    window's right side mean nothing there. Single tokens run on the kernels; a chunk of several
    runs on the XLA implementation, since its causal bound is known at run time only.

    Attributes:
      num_kv_heads: heads of key and value, num_heads a multiple of it; None: num_heads.
      is_causal: position i sees positions up to i.
      local_window_size: int or (left, right), inclusive; None as a side leaves it open.
      logits_soft_cap: cap * tanh(logits / cap).
      alibi_slopes: floats (num_heads,), a tuple keeps the module hashable: a logit loses slope *
        distance. While decoding they are a bias.
      use_sinks: one learned logit a head, parameter "sinks" (num_heads,).
      sinks_init: its initializer.
      scale: of the logits; None: 1 / sqrt(head_dim).
      causal_alignment: "top_left" or "bottom_right" (the last query sees the last key).
      implementation: None, "mosaic_gpu" or "xla".
      deterministic_backward: gradients bit-equal from run to run.
      attention_fn: takes the keywords of this module's `attention_fn` that are in use.

    Example:
      >>> import jax, jax.numpy as jnp, pallas_flash.linen
      >>> layer = pallas_flash.linen.MultiHeadDotProductAttention(
      ...     num_heads=8, num_kv_heads=2, is_causal=True, dtype=jnp.bfloat16
      ... )
      >>> x = jnp.ones((2, 128, 512))
      >>> layer.apply(layer.init(jax.random.key(0), x), x).shape
      (2, 128, 512)
    """

    attention_fn: Callable[..., jax.Array] = attention_fn
    num_kv_heads: int | None = None
    is_causal: bool = False
    local_window_size: Any = None
    logits_soft_cap: float | None = None
    alibi_slopes: Any = None
    use_sinks: bool = False
    sinks_init: Callable[..., jax.Array] = nn.initializers.zeros_init()
    scale: float | None = None
    causal_alignment: str = "top_left"
    implementation: str | None = None
    deterministic_backward: bool = False

    @nn.compact
    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        inputs_q: Any,
        inputs_k: Any = None,
        inputs_v: Any = None,
        *,
        inputs_kv: Any = None,
        mask: Any = None,
        bias: Any = None,
        deterministic: bool | None = None,
        dropout_rng: Any = None,
        sow_weights: bool = False,
        query_seq_lengths: Any = None,
        key_value_seq_lengths: Any = None,
        query_segment_ids: Any = None,
        key_value_segment_ids: Any = None,
    ) -> jax.Array:
        """Attention of inputs_q to inputs_k and inputs_v.

        Args:
          inputs_q: (batch..., T, features).
          inputs_k: (batch..., S, features); None: inputs_q.
          inputs_v: (batch..., S, features); None: inputs_k.
          inputs_kv: linen's older spelling of inputs_k.
          mask: bool, or float 0 and 1; broadcasts to (batch..., N, T, S).
          bias: float, added to the logits; broadcasts likewise.
          deterministic: no dropout; needed here or as a field where dropout_rate > 0.
          dropout_rng: a key; None: `make_rng("dropout")`.
          sow_weights: refused, there are no attention weights.
          query_seq_lengths, key_value_seq_lengths: int, (batch...).
          query_segment_ids, key_value_segment_ids: int, (batch..., T) and (batch..., S).

        While decoding S is the length of the cache.

        Returns:
          (batch..., T, out_features).

        Raises:
          ValueError: heads, shapes or values that do not fit; the message says which.
        """
        if inputs_kv is not None:
            if inputs_k is not None or inputs_v is not None:
                raise ValueError("inputs_kv is given beside inputs_k or inputs_v: leave it out")
            inputs_k = inputs_kv
        inputs_k, inputs_v = flax_common.choose_inputs(inputs_q, inputs_k, inputs_v)
        query, key, value = self._project(inputs_q, inputs_k, inputs_v)
        options = flax_common.module_options(
            self,
            mask=mask,
            bias=bias,
            query_seq_lengths=query_seq_lengths,
            key_value_seq_lengths=key_value_seq_lengths,
            query_segment_ids=query_segment_ids,
            key_value_segment_ids=key_value_segment_ids,
            qk_attn_weights_einsum=self.qk_attn_weights_einsum_cls,
            attn_weights_value_einsum=self.attn_weights_value_einsum_cls,
            sinks=self._sinks(),
            module=self if sow_weights else None,
        )
        if self.decode:
            key, value, options = self._decode(key, value, options)
        out = self.attention_fn(
            query,
            key,
            value,
            broadcast_dropout=self.broadcast_dropout,
            dtype=self.dtype,
            precision=self.precision,
            **self._dropout(deterministic, dropout_rng),
            **options,
        )
        return nn.DenseGeneral(
            features=self.out_features or inputs_q.shape[-1],
            axis=(-2, -1),
            kernel_init=self.out_kernel_init or self.kernel_init,
            bias_init=self.out_bias_init or self.bias_init,
            use_bias=self.use_bias,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            precision=self.precision,
            dot_general=self.out_dot_general,
            dot_general_cls=self.out_dot_general_cls,
            name="out",
        )(out)

    def _sinks(self):
        if not self.use_sinks:
            return None
        return self.param("sinks", self.sinks_init, (self.num_heads,), self.param_dtype)

    def _project(self, inputs_q, inputs_k, inputs_v):
        """query (batch..., T, N, H), key and value (batch..., S, K, H)."""
        qkv_features = self.qkv_features or inputs_q.shape[-1]
        num_kv_heads = self.num_heads if self.num_kv_heads is None else self.num_kv_heads
        flax_common.check_heads(self.num_heads, num_kv_heads, qkv_features)
        head_dim = qkv_features // self.num_heads
        dense = functools.partial(
            nn.DenseGeneral,
            axis=-1,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            kernel_init=self.kernel_init,
            bias_init=self.bias_init,
            use_bias=self.use_bias,
            precision=self.precision,
            dot_general=self.qkv_dot_general,
            dot_general_cls=self.qkv_dot_general_cls,
        )
        query = dense(features=(self.num_heads, head_dim), name="query")(inputs_q)
        key = dense(features=(num_kv_heads, head_dim), name="key")(inputs_k)
        value = dense(features=(num_kv_heads, head_dim), name="value")(inputs_v)
        if self.normalize_qk:
            norm = functools.partial(
                nn.LayerNorm, use_bias=False, dtype=self.dtype, param_dtype=self.param_dtype
            )
            query, key = norm(name="query_ln")(query), norm(name="key_ln")(key)
        return query, key, value

    def _decode(self, key, value, options):
        """Key, value and options of the call against the cache, which gets the new tokens."""
        if not self.is_mutable_collection("cache"):
            raise ValueError(
                "decode=True writes to a cache: pass `apply` the 'cache' collection that `init` "
                "made with inputs of the cache's length, and mutable=['cache']"
            )
        flax_common.check_decode_options(self.attention_fn, options)
        is_initialized = self.has_variable("cache", "cached_key")
        cached_key = self.variable("cache", "cached_key", jnp.zeros, key.shape, key.dtype)
        cached_value = self.variable("cache", "cached_value", jnp.zeros, value.shape, value.dtype)
        cache_index = self.variable("cache", "cache_index", lambda: jnp.array(0, dtype=jnp.int32))
        if not is_initialized:  # inputs have the length of the cache, as in linen
            return key, value, options
        index, q_len = cache_index.value, key.shape[-3]
        cached_key.value, cached_value.value = flax_common.extend_cache(
            cached_key.value, cached_value.value, index, key, value
        )
        cache_index.value = index + q_len
        view = flax_common.view_cache(cached_key.value, cached_value.value, index, q_len, options)
        return view.key, view.value, view.options

    def _dropout(self, deterministic, dropout_rng):
        if self.dropout_rate == 0.0:
            return {"deterministic": True}
        deterministic = nn.merge_param("deterministic", self.deterministic, deterministic)
        if not deterministic and dropout_rng is None:
            dropout_rng = self.make_rng("dropout")
        return {
            "deterministic": deterministic,
            "dropout_rate": self.dropout_rate,
            "dropout_rng": dropout_rng,
        }


class MultiHeadAttention(MultiHeadDotProductAttention):
    """`MultiHeadDotProductAttention` under linen's other name, which it gives to parameters."""
