"""The public call: `dot_product_attention`, and `explain`, which says what a call would run."""

import dataclasses
import functools
import inspect
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_flash import autodiff, dispatch
from pallas_flash.arguments import Arguments, normalize
from pallas_flash.dispatch import Implementation
from pallas_flash.kernels.interpret import interpret_requested
from pallas_flash.problem import Operands, Problem

Alignment = Literal["top_left", "bottom_right"]


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: Any = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: Any = None,
    implementation: Implementation | None = None,
    return_residual: bool = False,
    causal_alignment: Alignment = "top_left",
    query_segment_ids: Any = None,
    key_value_segment_ids: Any = None,
    logits_soft_cap: Any = None,
    sinks: Any = None,
    alibi_slopes: Any = None,
    dropout_rate: float = 0.0,
    dropout_rng: Any = None,
    broadcast_dropout: bool = False,
    deterministic_backward: bool = False,
) -> Any:
    r"""Exact scaled dot-product attention whose memory grows with T, not with T * S.

    A drop-in for `jax.nn.dot_product_attention`: the same arguments, and more behind them. The
    scores are made tile by tile and discarded; nothing is approximated.

        logits = scale * query . key + bias - slope * distance
        logits = soft_cap * tanh(logits / soft_cap)          (where a cap is given)
        out    = softmax(logits where visible) . value       (softmax in float32)

    Letters: B batch axes (none, one or more), T queries, S keys, N query heads, K kv heads (N is a
    multiple of K; query head n reads kv head n // (N / K)), H head_dim, Hv head_dim_v.

    A pair is visible when everything given allows it: causal, window, lengths, segments, mask, and
    a bias other than -inf. **A query that sees no key gets out 0, gradients 0 and lse -inf**, on
    every implementation (jax.nn's XLA gives the mean of value instead: the one deliberate
    difference). Finite values in hidden keys change nothing; behind a length, NaN and Inf do not
    either.

    Args:
      query: (B, T, N, H), float16, bfloat16, float32 or float64.
      key: (B, S, K, H), same dtype.
      value: (B, S, K, Hv), same dtype; Hv may differ from H.
      bias: added to the logits; float, broadcasts to (B, N, T, S). Its gradient has its own shape.
      mask: bool, True where visible; broadcasts to (B, N, T, S).
      scale: of the logits, a number or a float scalar array (traced too: it then has a gradient).
        Default 1 / sqrt(H).
      is_causal: query i sees keys up to i (see `causal_alignment`).
      query_seq_lengths: int, (B,): queries from there on see nothing.
      key_value_seq_lengths: int, (B,): keys from there on are hidden. Traced lengths are clamped
        to [0, T] and [0, S].
      local_window_size: int or (left, right), inclusive: query i sees keys i - left .. i + right.
        None as a side leaves it open. With (3, 2), token c of [0, 1, 2, 3, 4, 5, c, 7, 8, 9] sees
        [3, 4, 5, c, 7, 8]. Sides may be integer scalar arrays.
      implementation: None chooses before tracing, see `explain`; "mosaic_gpu" are the fused
        kernels, "xla" the chunked XLA implementation, which runs everywhere.
      return_residual: also return the log-sum-exp of the visible logits.
      causal_alignment: "top_left" as jax.nn, or "bottom_right": the last query sees the last key,
        causal, window and ALiBi are all shifted by S - T (FlashAttention 2's rule).
      query_segment_ids, key_value_segment_ids: int, (B, T) and (B, S): a query sees the keys of
        its own id. Any order; any id (give padding an id of its own).
      logits_soft_cap: cap > 0, number or float scalar array.
      sinks: float, (N,): one more logit a query head, with no value, in softmax and lse.
      alibi_slopes: float, (N,) or (B, N): the logit of query i and key j loses slope * |j - i|
        (|j - i - (S - T)| with "bottom_right"). ALiBi's own slopes, for N a power of 2, are
        2 ** (-8 * (n + 1) / N) for head n.
      dropout_rate: probability of dropping an attention weight, a Python number.
      dropout_rng: the key it draws from, typed or raw. The pattern depends on the key and on
        (batch, head, query, key) alone, not on the implementation.
      broadcast_dropout: one pattern for all batch entries and heads.
      deterministic_backward: gradients bit-equal from run to run. By default the kernels add dq in
        float32 in no fixed order; out, lse, dk and dv are bit-equal either way.

    Returns:
      out (B, T, N, Hv) in the dtype of query; with `return_residual` also lse (B, T, N), float32
      (float64 for float64 inputs), natural logarithm, differentiable, -inf for a query that sees
      no key.

    Raises:
      ValueError: shapes, dtypes or values that break a rule above; the message names the argument.
      TypeError: an argument of a type that can not work.
      NotImplementedError: `implementation` cannot run this call on this device; the message has
        every verdict.

    Derivatives: reverse mode any number of times (grad, jacrev, hessian, grad of grad) on every
    implementation. On the fused kernels a bare jvp, linearize or jacfwd raises JAX's TypeError for
    custom_vjp; implementation="xla" supports them. Under `jax.checkpoint` the residuals are named
    "pallas_flash_out" and "pallas_flash_lse".

    float32 products follow `jax.default_matmul_precision`.

    Source: Dao et al., FlashAttention (arXiv 2205.14135), algorithms 1 and 4; Dao, FlashAttention-2
    (arXiv 2307.08691), sections 3.1 and 3.2; Press et al., ALiBi (arXiv 2108.12409).

    Example:
      >>> import jax, jax.numpy as jnp, pallas_flash
      >>> q = k = v = jnp.ones((2, 128, 4, 64), jnp.bfloat16)
      >>> pallas_flash.dot_product_attention(q, k, v, is_causal=True).shape
      (2, 128, 4, 64)
    """
    arguments = Arguments(
        query,
        key,
        value,
        bias,
        mask,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        causal_alignment=causal_alignment,
        query_segment_ids=query_segment_ids,
        key_value_segment_ids=key_value_segment_ids,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        dropout_rate=dropout_rate,
        dropout_rng=dropout_rng,
        broadcast_dropout=broadcast_dropout,
        deterministic_backward=deterministic_backward,
    )
    problem, operands = normalize(arguments)
    chosen = dispatch.select(problem, dispatch.current_device(query), implementation)
    if chosen != "xla" and interpret_requested():
        problem = dataclasses.replace(problem, interpret=True)
    out, lse = _attention(chosen, problem, operands)
    lead = jnp.shape(query)[:-3]
    out = out.reshape(*lead, *out.shape[1:])
    if not return_residual:
        return out
    lse = jnp.swapaxes(lse, 1, 2)
    return out, lse.reshape(*lead, *lse.shape[1:])


@functools.partial(jax.jit, static_argnums=(0, 1))
def _attention(implementation: Implementation, problem: Problem, operands: Operands):
    # One jit for the whole call: -inf and the like stay inside, so debug_infs sees finite results.
    return autodiff.attention(implementation, problem, operands)


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What a call would run, and every backend's verdict. `print` it.

    Attributes:
      implementation: the one that would run, None when none can.
      device: what it would run on.
      verdicts: every backend's answer, in order of preference.
      notes: what the chosen implementation does beyond the call's own work (copies, padding), and
        the device memory traffic that the IO model predicts.
    """

    implementation: str | None
    device: str
    verdicts: tuple[dispatch.Verdict, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        head = f"runs: {self.implementation} on {self.device}"
        lines = [f"  {v.implementation}: {'yes' if v.ok else 'no'}, {v.why}" for v in self.verdicts]
        return "\n".join([head, *lines, *(f"  note: {n}" for n in self.notes)])


def explain(*args: Any, **kwargs: Any) -> Explanation:
    """What `dot_product_attention` would run for these arguments, and why.

    Args:
      *args, **kwargs: as for `dot_product_attention`; arrays may be `jax.ShapeDtypeStruct`s.

    Returns:
      An `Explanation`; print it to read it.

    Raises:
      ValueError, TypeError: as the call itself would.
    """
    bound = inspect.signature(dot_product_attention).bind(*args, **kwargs).arguments
    implementation = bound.pop("implementation", None)
    bound.pop("return_residual", None)
    arrays = {n: x for n, x in bound.items() if isinstance(x, (jax.Array, jax.ShapeDtypeStruct))}
    static = {n: x for n, x in bound.items() if n not in arrays}
    found: list[Problem] = []

    def trace(arrays):
        found.append(normalize(Arguments(**arrays, **static))[0])
        return 0

    jax.eval_shape(trace, arrays)
    [problem] = found
    device = dispatch.current_device(bound["query"])
    try:
        chosen = dispatch.select(problem, device, implementation)
    except NotImplementedError:
        chosen = None
    family = dispatch.gpu_family(device) if chosen == "mosaic_gpu" else None
    notes = family.notes(problem) if family else ()
    return Explanation(chosen, str(device), dispatch.verdicts(problem, device), notes)
