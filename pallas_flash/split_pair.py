"""A part of the queries against a part of the keys: their call, and whether they meet at all.

The parts of a sequence that is split over devices stand anywhere in it. The call of a pair of them
is a call of this package as any other, once its masks, lengths and dropout are counted from where
the two parts stand, which only the device knows.

Must not know how the parts came to one device, nor what runs the call.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_flash.problem import Operands, Problem
from pallas_flash.split_problem import Split


def cut_rows(split: Split, operands: Operands) -> list[Operands]:
    """The operands of each part of this device's queries."""
    cut = lambda x: [None] * split.parts if x is None else jnp.split(x, split.parts, 1)
    parts = zip(cut(operands.query), cut(operands.query_segments), strict=True)
    return [operands._replace(query=q, query_segments=ids) for q, ids in parts]


class Place(NamedTuple):
    """Global positions of the first query and the first key of a pair of parts."""

    q: Any
    kv: Any


def placed(split: Split, operands: Operands, place: Place) -> tuple[Problem, Operands]:
    """The call of one pair: its masks and dropout counted from where the parts stand."""
    problem = split.problem.resized(operands)
    ahead = lax.convert_element_type(place.kv - place.q, jnp.int32)
    clipped = lambda x, first, size: None if x is None else jnp.clip(x - first, 0, size)
    window, origin = operands.window, operands.dropout_origin
    if window is not None:
        window = jnp.stack([window[0] + ahead, window[1] - ahead])
    if origin is not None:
        positions = (lax.convert_element_type(x, jnp.uint32) for x in place)
        origin = origin + jnp.stack([jnp.zeros_like(origin[0])] * 2 + list(positions))
    return problem, operands._replace(
        sinks=None,
        window=window,
        dropout_origin=origin,
        query_lengths=clipped(operands.query_lengths, place.q, problem.q_len),
        kv_lengths=clipped(operands.kv_lengths, place.kv, problem.kv_len),
    )


def visible(split: Split, problem: Problem, operands: Operands) -> Any:
    """Whether any query of the pair may see any key of it; None: always."""
    tests = []
    window: Any = operands.window
    if split.has_left:
        tests.append(window[0] > -problem.kv_len)
    if split.has_right:
        tests.append(window[1] > -problem.q_len)
    tests += [(x > 0).any() for x in (operands.query_lengths, operands.kv_lengths) if x is not None]
    q_ids: Any = operands.query_segments
    kv_ids: Any = operands.kv_segments
    if q_ids is not None:
        meet = (q_ids.min(1) <= kv_ids.max(1)) & (kv_ids.min(1) <= q_ids.max(1))
        tests.append(meet.any())
    return functools.reduce(jnp.logical_and, tests) if tests else None
