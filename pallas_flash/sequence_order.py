"""The order in which a sequence lies on devices: which positions each of them holds.

    "contiguous"   device i holds positions [i C, (i + 1) C). Under a causal mask the last device
                   has all the work of a step while the first has none.
    "zigzag"       2 n parts, device i holds the i-th from the front and the i-th from the back:
                   every device has the same causal work in every step. `to_zigzag` permutes a
                   sequence into it, `from_zigzag` back; permute tokens and positions, once.

Knows nothing of attention, and of devices only how many they are.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp

Order = Literal["contiguous", "zigzag"]
PARTS = {"contiguous": 1, "zigzag": 2}  # of the sequence, a device


def to_zigzag(x: Any, num_devices: int, axis: int = 1) -> jax.Array:
    """x with its sequence in zigzag order: cut along `axis`, each device gets two ends of it.

    Args:
      x: an array; tokens, positions, segment ids and labels all need it.
      num_devices: devices along the sequence; 2 * num_devices divides the length.
      axis: of the sequence.

    Raises:
      ValueError: the length is no multiple of 2 * num_devices.

    Example:
      >>> to_zigzag(jnp.arange(8), 2, axis=0)
      Array([0, 1, 6, 7, 2, 3, 4, 5], dtype=int32)
    """
    return _reordered(x, axis, _zigzag(num_devices))


def from_zigzag(x: Any, num_devices: int, axis: int = 1) -> jax.Array:
    """The inverse of `to_zigzag`."""
    order = _zigzag(num_devices)
    return _reordered(x, axis, [order.index(part) for part in range(len(order))])


def starts(order: Order, device: Any, num_devices: int, length: int) -> list[Any]:
    """Global positions of the parts that a device holds, of a sequence of `length` a device."""
    if order == "contiguous":
        return [device * length]
    half = length // 2
    return [device * half, (2 * num_devices - 1 - device) * half]


def _zigzag(num_devices: int) -> list[int]:
    last = 2 * num_devices - 1
    return [part for i in range(num_devices) for part in (i, last - i)]


def _reordered(x, axis, order):
    length = x.shape[axis]
    if length % len(order):
        raise ValueError(
            f"a sequence of {length} in zigzag order over {len(order) // 2} devices: it must be a "
            f"multiple of {len(order)}; pad it, or use order='contiguous'"
        )
    parts = jnp.split(jnp.asarray(x), len(order), axis)
    return jnp.concatenate([parts[i] for i in order], axis)
