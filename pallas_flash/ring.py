"""The ring: k and v travel from device to device, and each device meets all of them in turn.

    out, lse = 0, -inf
    for step in range(n):                          lax.scan
        start sending k, v to the next device      nothing below waits for it
        out_s, lse_s = attention(q, k, v)          ring_step.py; hidden parts skipped
        out, lse = merged by their lse
    backward: the same round, k and v with their gradients, each step from the lse of the whole row

From forward to backward q, k, v, out and lse are kept; a round holds one more k and v (backward:
also their gradients, float32). Memory a device is that of its own part.

Must not know what runs a step, nor how masks and dropout of a pair are counted.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from pallas_flash import autodiff, ring_step, sharding, split_pair
from pallas_flash.problem import Operands, Problem
from pallas_flash.split_problem import Split


def attention(split: Split, operands: Operands) -> tuple[Any, Any]:
    """out (B, T, N, Hv) and lse (B, N, T) of this device's queries, over the keys of all."""
    out, lse = _ring(split, operands)
    if operands.sinks is None:
        return out, lse
    sinks = operands.sinks.astype(lse.dtype)[None, :, None]
    # A row without a key has out 0, whatever its share.
    share = jax.nn.sigmoid(jnp.where(lse == -jnp.inf, 0.0, lse) - sinks)
    out = (out * share.swapaxes(1, 2)[..., None]).astype(out.dtype)
    return out, jnp.logaddexp(lse, sinks)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(split, operands):
    return _forward(split, operands)


def _ring_fwd(split, operands):
    out, lse = _forward(split, operands)
    out = checkpoint_name(out, autodiff.OUT_NAME)
    lse = checkpoint_name(lse, autodiff.LSE_NAME)
    return (out, lse), (operands, out, lse)


def _ring_bwd(split, residuals, cotangents):
    grads = _backward(split, *residuals, *cotangents)
    operands = residuals[0]
    cast = lambda name, x: x.astype(getattr(operands, name).dtype)
    zeros = {"sinks": operands.sinks, "soft_cap": operands.soft_cap}  # not read by the ring
    given = {n: jnp.zeros_like(x) for n, x in zeros.items() if x is not None}
    given |= {name: cast(name, x) for name, x in grads.items()}
    return (Operands(**{n: given.get(n) for n in operands._fields}),)


_ring.defvjp(_ring_fwd, _ring_bwd)


class _Keys(NamedTuple):
    """What travels."""

    key: Any
    value: Any
    segments: Any


class _Pair(NamedTuple):
    """The call of a part of the queries over a part of the keys; visible: see split_pair."""

    problem: Problem
    operands: Operands
    visible: Any


def _forward(split, operands):
    """out in the dtype of query and lse."""
    rows = split_pair.cut_rows(split, operands)
    state = _vary_like(operands, [_nothing_seen(split.problem, r.query) for r in rows])

    def step(i, keys, state):
        return [
            functools.reduce(
                lambda state, pair: _unless_hidden(pair.visible, _merge(split, pair), state),
                pairs,
                row_state,
            )
            for row_state, pairs in zip(state, _pairs(split, rows, keys, i), strict=True)
        ]

    keys = _Keys(operands.key, operands.value, operands.kv_segments)

    def body(carry, i):
        keys, state = carry
        arriving = _sent(split, keys)  # first: it travels while the step computes
        return (arriving, step(i, keys, state)), None

    (keys, state), _ = lax.scan(body, (keys, state), jnp.arange(split.steps - 1))
    state = step(split.steps - 1, keys, state)
    outs, lses = zip(*state, strict=True)
    return jnp.concatenate(outs, 1).astype(split.problem.dtype), jnp.concatenate(lses, 2)


def _nothing_seen(problem: Problem, query):
    batch, length, heads, _ = query.shape
    wide = jnp.promote_types(problem.np_dtype, jnp.float32)
    out = jnp.zeros((batch, length, heads, problem.head_dim_v), wide)
    return out, jnp.full((batch, heads, length), -jnp.inf, wide)


def _vary_like(operands: Operands, state: Any) -> Any:
    return sharding.vary_alike((operands, state))[1]


def _pairs(split: Split, rows: list[Operands], keys: _Keys, i: Any) -> list[list[_Pair]]:
    """At step i: for each part of this device's queries, the pairs with each part of the keys."""
    device = lax.axis_index(split.axis_name)
    q_starts = split.starts(device, split.problem.q_len)
    kv_starts = split.starts((device - i) % split.size, split.problem.kv_len)
    cut = lambda x: [None] * split.parts if x is None else jnp.split(x, split.parts, 1)
    parts = [_Keys(*part) for part in zip(*map(cut, keys), strict=True)]

    def pair(row, q_start, part, kv_start):
        operands = row._replace(key=part.key, value=part.value, kv_segments=part.segments)
        problem, operands = split_pair.placed(split, operands, split_pair.Place(q_start, kv_start))
        return _Pair(problem, operands, split_pair.visible(split, problem, operands))

    return [
        [pair(row, q0, part, kv0) for part, kv0 in zip(parts, kv_starts, strict=True)]
        for row, q0 in zip(rows, q_starts, strict=True)
    ]


def _unless_hidden(visible: Any, run: Callable[..., Any], state: Any, *args: Any) -> Any:
    """run(state, *args), or state where the pair is hidden."""
    if visible is None:
        return run(state, *args)
    return lax.cond(visible, run, lambda state, *_: state, state, *args)


def _merge(split: Split, pair: _Pair):
    """Adds what the queries of a pair see in it to what they have seen."""

    def run(state):
        acc, lse = state
        out, lse_pair = ring_step.forward(split.implementation, pair.problem, pair.operands)
        total = jnp.logaddexp(lse, lse_pair)
        pivot = jnp.where(total == -jnp.inf, 0.0, total)
        by_row = lambda x: jnp.exp(x - pivot).swapaxes(1, 2)[..., None]
        return acc * by_row(lse) + out.astype(acc.dtype) * by_row(lse_pair), total

    return run


def _sent(split: Split, arrays: Any, distance: int = 1) -> Any:
    """The arrays of the device `distance` places before this one."""
    to = [(i, (i + distance) % split.size) for i in range(split.size)]
    return jax.tree.map(lambda x: lax.ppermute(x, split.axis_name, to), arrays)


def _backward(split, operands, out, lse, dout, dlse):
    """Gradients by name, float32: of query and scale here, of key and value sent home."""
    rows = split_pair.cut_rows(split, operands)
    cut = lambda x, axis: jnp.split(x, split.parts, axis)
    wholes = list(zip(cut(out, 1), cut(lse, 2), cut(dout, 1), cut(dlse, 2), strict=True))
    zeros = lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32))
    mine = [{n: zeros(getattr(r, n)) for n in _of_rows(split.problem)} for r in rows]
    theirs = [zeros(operands.key), zeros(operands.value)]
    mine, theirs = _vary_like(operands, (mine, theirs))

    def step(i, keys, mine):
        of_keys = [[jnp.split(x, split.parts, 1)[b] for x in nothing] for b in range(split.parts)]
        mine = list(mine)
        for a, pairs in enumerate(_pairs(split, rows, keys, i)):
            for b, pair in enumerate(pairs):
                add = _add_gradients(split, pair)
                state = (mine[a], of_keys[b])
                mine[a], of_keys[b] = _unless_hidden(pair.visible, add, state, *wholes[a])
        return mine, [jnp.concatenate(x, 1) for x in zip(*of_keys, strict=True)]

    nothing = theirs
    keys = _Keys(operands.key, operands.value, operands.kv_segments)

    def body(carry, i):
        keys, mine, theirs = carry
        arriving = _sent(split, keys)
        mine, found = step(i, keys, mine)
        return (arriving, mine, _sent(split, jax.tree.map(jnp.add, theirs, found))), None

    carry = (keys, mine, theirs)
    (keys, mine, theirs), _ = lax.scan(body, carry, jnp.arange(split.steps - 1))
    mine, found = step(split.steps - 1, keys, mine)
    theirs = _sent(split, jax.tree.map(jnp.add, theirs, found), 1 - split.steps)
    grads: dict[str, Any] = dict(zip(("key", "value"), theirs, strict=True))
    grads["query"] = jnp.concatenate([x["query"] for x in mine], 1)
    if "scale" in mine[0]:
        grads["scale"] = functools.reduce(jnp.add, [x["scale"] for x in mine])
    return grads


def _of_rows(problem: Problem) -> tuple[str, ...]:
    return ("query",) if problem.scale is not None else ("query", "scale")


def _add_gradients(split: Split, pair: _Pair):
    """Adds what a pair gives to the gradients of its queries and of its keys."""

    def run(state, out, lse, dout, dlse):
        mine, theirs = state
        grads = ring_step.backward(
            split.implementation, pair.problem, pair.operands, out, lse, dout, dlse
        )
        mine = {name: x + grads[name].astype(x.dtype) for name, x in mine.items()}
        found = (grads["key"], grads["value"])
        return mine, [x + g.astype(x.dtype) for x, g in zip(theirs, found, strict=True)]

    return run
