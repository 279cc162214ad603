"""Attention over a sequence that is split over devices: each holds a part of the queries and keys.

    ring_attention         k and v travel round the ring, each device meets all of them in turn
    all_gather_attention   k and v are gathered on every device, queries stay split
    dot_product_attention  either of them over a mesh of batch x sequence x heads, in plain jit

The first two stand inside a `jax.shard_map`; ring.py and all_gather.py say how they work and what
memory they take. `order` is that of the sequence's parts, "contiguous" or "zigzag": see
sequence_order.py, whose `to_zigzag` and `from_zigzag` are names of this module too.

Public calls alone: checks are in split_problem.py.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_flash import all_gather, ring, sharding
from pallas_flash.problem import Operands
from pallas_flash.sequence_order import from_zigzag, to_zigzag
from pallas_flash.split_problem import AxisNames, Split, normalize_split

__all__ = [
    "all_gather_attention",
    "dot_product_attention",
    "from_zigzag",
    "ring_attention",
    "to_zigzag",
]


def ring_attention(query: Any, key: Any, value: Any, *, axis_name: str, **options: Any) -> Any:
    """`pallas_flash.dot_product_attention` of a sequence split over the devices of `axis_name`.

    Stands inside `jax.shard_map`. Letters as there; T and S are of one device.

    Args:
      query: (B, T, N, H), this device's part of the sequence.
      key, value: (B, S, K, H) and (B, S, K, Hv), its part of theirs.
      axis_name: the mesh axis that splits the sequence.
      **options: of `pallas_flash.dot_product_attention`, but bias, mask and alibi_slopes; and
        order: "contiguous" or "zigzag", see sequence_order.py.
        batch_axis_name, head_axis_name: mesh axes that split batch and heads, if any. Dropout
          needs them to draw what one device would draw.
      Lengths count in the whole sequence; segment ids are of this device's part.

    Returns:
      out (B, T, N, Hv); with `return_residual` also lse (B, T, N).

    Raises:
      ValueError: as `pallas_flash.dot_product_attention`; an option that needs all of T x S.
      NotImplementedError: `implementation` cannot run this call on this device.

    Derivatives: reverse mode; with implementation="xla" any number of times.

    Source: Liu et al., Ring Attention (arXiv 2310.01889); the order of Zhu, zigzag ring attention.
    """
    return _call(ring.attention, query, key, value, axis_name, options)


def all_gather_attention(
    query: Any, key: Any, value: Any, *, axis_name: str, **options: Any
) -> Any:
    """As `ring_attention`, but every device gathers all of key and value first.

    One collective instead of n: less to hide where the sequence is short, memory for all keys. It
    differentiates as `pallas_flash.dot_product_attention` does.
    """
    return _call(all_gather.attention, query, key, value, axis_name, options)


def _call(
    run: Callable[[Split, Operands], tuple[Any, Any]],
    query: Any,
    key: Any,
    value: Any,
    axis_name: str,
    options: dict[str, Any],
) -> Any:
    options = dict(options)
    return_residual = options.pop("return_residual", False)
    split, operands = normalize_split(query, key, value, axis_name=axis_name, **options)
    out, lse = run(split, operands)

    lead = jnp.shape(query)[:-3]
    out = out.reshape(*lead, *out.shape[1:])
    lse = jnp.swapaxes(lse, 1, 2)
    return (out, lse.reshape(*lead, *lse.shape[1:])) if return_residual else out


# What the axes of each argument are, in the words of sharding.py.
_AXES = dict(
    query="B T N .",
    key="B S K .",
    value="B S K .",
    query_seq_lengths="B",
    key_value_seq_lengths="B",
    query_segment_ids="B T",
    key_value_segment_ids="B S",
    sinks="N",
)
_METHODS = {"ring": ring_attention, "all_gather": all_gather_attention}


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    mesh: Any = None,
    sequence_axis: str = "sequence",
    batch_axis: AxisNames = None,
    head_axis: AxisNames = None,
    method: Literal["ring", "all_gather"] = "ring",
    **options: Any,
) -> Any:
    """`pallas_flash.dot_product_attention` with the sequence split over a mesh axis.

    For plain jit, Auto and Explicit meshes alike; inside `jax.shard_map` use `ring_attention`.

    Args:
      query, key, value: (B, T, N, H), (B, S, K, H), (B, S, K, Hv): the whole arrays.
      mesh: a `jax.sharding.Mesh`; None: that of `jax.set_mesh`.
      sequence_axis: the mesh axis over which T and S are split.
      batch_axis, head_axis: mesh axes over which B and the heads are split, if any; None under
        Explicit axes: those of query's type. Where head_axis has more devices than key has heads,
        each device takes the kv heads that its queries read.
      method: "ring" or "all_gather".
      **options: of `ring_attention`, order among them.

    Returns:
      out (B, T, N, Hv), split as query; with `return_residual` also lse (B, T, N).

    Raises:
      ValueError: an axis that the mesh does not have or does not divide, another mesh than that of
        the arrays, and as `ring_attention`.
    """
    if method not in _METHODS:
        raise ValueError(f"method={method!r} must be 'ring' or 'all_gather'")
    mesh = sharding.given_mesh(mesh, (query, key, value))
    if sharding.explicit_axes(query):  # an axis not named is as the type of query says
        by_batch, _, by_heads, _ = sharding.spec_of(query)
        batch_axis, head_axis = batch_axis or by_batch or None, head_axis or by_heads or None
    axes = {"B": batch_axis, "T": sequence_axis, "S": sequence_axis, "N": head_axis}
    given = dict(query=query, key=key, value=value, **options)
    arrays = {n: x for n, x in given.items() if isinstance(x, jax.Array) or n in _AXES}
    arrays = {n: jnp.asarray(x) for n, x in arrays.items() if x is not None}
    static = {n: x for n, x in given.items() if n not in _AXES and n not in arrays}
    out = "B T N ."
    results = (out, "B T N") if static.get("return_residual") else out
    labels = {n: _AXES.get(n, " ".join(sharding.WHOLE * x.ndim)) for n, x in arrays.items()}

    def on_shards(arrays):
        qkv = [arrays.pop(n) for n in ("query", "key", "value")]
        names = dict(axis_name=sequence_axis, batch_axis_name=batch_axis, head_axis_name=head_axis)
        return _METHODS[method](*qkv, **names, **arrays, **static)

    run = lambda arrays: on_shards(dict(arrays))
    return sharding.over_named_axes(run, (arrays,), (labels,), results, axes, mesh)
