"""A call on one device's part of the sequence: checked, and told in the words of problem.py.

The public calls' options become a `Split`, what is static about the call, and the operands of this
device. Masks that count from the start of the sequence (causal, window) turn into one window whose
sides count from the diagonal, so that they hold between any two parts: see split_pair.py.

Stands inside a `jax.shard_map`. Must not know what is computed of the parts, nor by what.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_flash import dispatch, masks, sequence_order, sharding
from pallas_flash.arguments import Arguments, check_lengths, normalize
from pallas_flash.dispatch import Implementation
from pallas_flash.problem import Operands, Problem
from pallas_flash.sequence_order import Order

AxisNames = str | tuple[str, ...] | None
_REFUSED = ("bias", "mask", "alibi_slopes")


@dataclasses.dataclass(frozen=True)
class Split:
    """What is static about a split call.

    Attributes:
      problem: one device's part of the call, without causal and window masks.
      implementation: what runs each step.
      axis_name, size: of the mesh axis along the sequence.
      order: of the sequence's parts.
      has_left, has_right: whether key - query positions are bounded.
      steps: of the ring; fewer than `size` where a window hides the rest from every device.
    """

    problem: Problem
    implementation: Implementation
    axis_name: str
    size: int
    order: Order
    has_left: bool
    has_right: bool
    steps: int

    @property
    def parts(self) -> int:
        return sequence_order.PARTS[self.order]

    def starts(self, device: Any, length: int) -> list[Any]:
        """Global positions of the parts that a device holds, of a sequence of `length` a device."""
        return sequence_order.starts(self.order, device, self.size, length)


def normalize_split(
    query: Any,
    key: Any,
    value: Any,
    *,
    axis_name: str,
    implementation: Implementation | None = None,
    order: Order = "contiguous",
    batch_axis_name: AxisNames = None,
    head_axis_name: AxisNames = None,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    **options: Any,
) -> tuple[Split, Operands]:
    """The static part of a split call and its operands, from the arguments of `ring_attention`.

    Raises:
      ValueError: an option that needs all of T x S, an order that does not exist or does not
        divide, no such mesh axis, and as `arguments.normalize`.
      NotImplementedError: `implementation` cannot run this call on this device.
    """
    _check_options(options, order)
    problem, operands = normalize(Arguments(query, key, value, **options))
    size = _axis_size(axis_name)
    _check_lengths_divide(order, problem)
    lengths = {
        "query_seq_lengths": query_seq_lengths,
        "key_value_seq_lengths": key_value_seq_lengths,
    }
    operands = _with_lengths(operands, lengths, jnp.shape(query)[:-3], size)
    origin = _origin(problem, [batch_axis_name, head_axis_name])
    operands = operands._replace(dropout_origin=origin)
    operands, problem, bounded = _as_window(problem, operands, size)
    chosen = dispatch.select(problem, dispatch.current_device(query), implementation)
    steps = _steps(problem, options, order, size)
    split = Split(problem, chosen, axis_name, size, order, bounded[0], bounded[1], steps)
    return split, sharding.vary_alike((operands, lax.axis_index(axis_name)))[0]


def _check_options(options: dict[str, Any], order: str) -> None:
    for name in _REFUSED:
        if options.get(name) is not None:
            raise ValueError(
                f"{name} with a split sequence: it has an entry for every pair of positions, or "
                "counts their distance, and no device has all of them; use is_causal, "
                "local_window_size, lengths or segment ids, or leave the sequence whole"
            )
    if isinstance(options.get("logits_soft_cap"), jax.Array):
        raise ValueError(
            "logits_soft_cap as an array with a split sequence: it would need a gradient; pass a "
            "Python number"
        )
    if order not in sequence_order.PARTS:
        raise ValueError(f"order={order!r} must be 'contiguous' or 'zigzag'")


def _axis_size(axis_name: str) -> int:
    try:
        return lax.axis_size(axis_name)
    except NameError as error:
        raise ValueError(
            f"axis_name={axis_name!r} is no mesh axis here: call this inside jax.shard_map over "
            "that axis, or use pallas_flash.parallel.dot_product_attention outside of it"
        ) from error


def _check_lengths_divide(order: str, problem: Problem) -> None:
    for name, length in (("query", problem.q_len), ("key", problem.kv_len)):
        if length % sequence_order.PARTS[order]:
            raise ValueError(
                f"{name} has {length} positions a device: zigzag order cuts them in two equal "
                "parts; pad the sequence, or use order='contiguous'"
            )


def _with_lengths(operands: Operands, lengths, lead, size: int) -> Operands:
    q_lengths, kv_lengths = (
        check_lengths(name, lengths[name], lead, size * x.shape[1])
        for name, x in (
            ("query_seq_lengths", operands.query),
            ("key_value_seq_lengths", operands.key),
        )
    )
    return operands._replace(query_lengths=q_lengths, kv_lengths=kv_lengths)


def _origin(problem: Problem, axes: list[AxisNames]) -> Any:
    """Counters of dropout at this device's first batch row and head; positions come later."""
    if not problem.dropout_rate:
        return None
    sizes = (problem.batch, problem.num_q_heads)
    first = [0 if a is None else lax.axis_index(a) * n for a, n in zip(axes, sizes, strict=True)]
    return jnp.stack([jnp.asarray(x, jnp.uint32) for x in (*first, 0, 0)])


def _as_window(problem: Problem, operands: Operands, size: int):
    """Causal and window masks as one window, its sides counted from the diagonal.

    Between two parts of a sequence the diagonal is at a distance that only the device knows, and
    of all masks a window has run-time numbers.
    """
    left = right = None
    rest: list[masks.Mask] = [
        masks.Lengths(operands.query_lengths is not None, operands.kv_lengths is not None)
    ]
    for mask in problem.mask.parts():
        if isinstance(mask, masks.Causal):
            right = masks.smaller(right, size * mask.shift)
        elif isinstance(mask, masks.Window):
            values = operands.window
            assert values is not None
            left = values[0] - size * mask.shift if mask.has_left else None
            side = values[1] + size * mask.shift if mask.has_right else None
            right = masks.smaller(right, side)
        else:
            rest.append(mask)
    bounded = (left is not None, right is not None)
    if any(bounded):
        rest.append(masks.Window(*bounded))
        sides = [jnp.asarray(0 if x is None else x, jnp.int32) for x in (left, right)]
        operands = operands._replace(window=jnp.stack(sides))
    kept = tuple(m for m in rest if m != masks.Lengths(False, False))
    problem = dataclasses.replace(problem, mask=masks.And(kept))
    return operands, problem, bounded


def _steps(problem: Problem, options: dict[str, Any], order: str, size: int) -> int:
    """How far keys travel: a window of static width ends the round early."""
    window = options.get("local_window_size")
    left = window[0] if isinstance(window, (tuple, list)) else window
    length = problem.q_len
    is_short = order == "contiguous" and options.get("is_causal") and length == problem.kv_len
    if not (is_short and isinstance(left, int)):
        return size
    return min(size, -(-left // length) + 1)
