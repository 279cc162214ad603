"""All keys on every device: k and v are gathered once and take memory whole, queries stay split.

What follows is one call of the package for each part of this device's queries, against keys in the
order of their positions. Derivatives are those of the call; that of the gather is JAX's.

Must not know what runs the call, nor how masks and dropout of a pair are counted.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_flash import autodiff, sharding, split_pair
from pallas_flash.problem import Operands
from pallas_flash.sequence_order import from_zigzag
from pallas_flash.split_problem import Split


def attention(split: Split, operands: Operands) -> tuple[Any, Any]:
    """out (B, T, N, Hv) and lse (B, N, T) of this device's queries, over the keys of all."""

    def everywhere(x):
        if x is None:
            return None
        x = lax.all_gather(x, split.axis_name, axis=1, tiled=True)
        return from_zigzag(x, split.size) if split.order == "zigzag" else x

    operands = operands._replace(
        key=everywhere(operands.key),
        value=everywhere(operands.value),
        kv_segments=everywhere(operands.kv_segments),
    )
    starts = split.starts(lax.axis_index(split.axis_name), split.problem.q_len)
    outs = []
    for row, start in zip(split_pair.cut_rows(split, operands), starts, strict=True):
        problem, row = split_pair.placed(split, row, split_pair.Place(start, jnp.int32(0)))
        row = sharding.vary_alike(row._replace(sinks=operands.sinks))
        outs.append(autodiff.attention(split.implementation, problem, row))
    out, lse = zip(*outs, strict=True)
    return jnp.concatenate(out, 1), jnp.concatenate(lse, 2)
