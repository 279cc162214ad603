"""Attention over a sequence that is split over devices: each holds a part of the queries and keys.

    ring_attention         k and v travel round the ring, each device meets all of them in turn
    all_gather_attention   k and v are gathered on every device, queries stay split
    dot_product_attention  either of them over a mesh of batch x sequence x heads, in plain jit

The first two stand inside a `jax.shard_map`. The ring, of n devices:

    out, lse = 0, -inf
    for step in range(n):                          lax.scan
        start sending k, v to the next device      nothing below waits for it
        out_s, lse_s = attention(q, k, v)          the package's own forward; hidden parts skipped
        out, lse = merged by their lse
    backward: the same round, k and v with their gradients, each step from the lse of the whole row

Memory a device is that of its own part: a ring keeps q, k, v, out and lse, and while it runs one
more k and v (in the backward also their gradients, float32). Orders of the parts:

    "contiguous"   device i holds positions [i C, (i + 1) C). Under a causal mask the last device
                   has all the work of a step while the first has none.
    "zigzag"       2 n parts, device i holds the i-th from the front and the i-th from the back:
                   every device has the same causal work in every step. `to_zigzag` permutes a
                   sequence into it, `from_zigzag` back; permute tokens and positions, once.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from pallas_flash import autodiff, dispatch, masks, sharding
from pallas_flash.arguments import Arguments, check_lengths, normalize
from pallas_flash.dispatch import Implementation
from pallas_flash.kernels import xla
from pallas_flash.problem import Operands, Problem

Order = Literal["contiguous", "zigzag"]
AxisNames = str | tuple[str, ...] | None
_PARTS = {"contiguous": 1, "zigzag": 2}  # of the sequence, a device
_REFUSED = ("bias", "mask", "alibi_slopes")


# --- the order of a sequence ----------------------------------------------------------------------


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


# --- the calls ------------------------------------------------------------------------------------


def ring_attention(query: Any, key: Any, value: Any, *, axis_name: str, **options: Any) -> Any:
    """`pallas_flash.dot_product_attention` of a sequence split over the devices of `axis_name`.

    Stands inside `jax.shard_map`. Letters as there; T and S are of one device.

    Args:
      query: (B, T, N, H), this device's part of the sequence.
      key, value: (B, S, K, H) and (B, S, K, Hv), its part of theirs.
      axis_name: the mesh axis that splits the sequence.
      **options: of `pallas_flash.dot_product_attention`, but bias, mask and alibi_slopes; and
        order: "contiguous" or "zigzag", see the module.
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
    return _call(_ring_of, query, key, value, axis_name, options)


def all_gather_attention(
    query: Any, key: Any, value: Any, *, axis_name: str, **options: Any
) -> Any:
    """As `ring_attention`, but every device gathers all of key and value first.

    One collective instead of n: less to hide where the sequence is short, memory for all keys. It
    differentiates as `pallas_flash.dot_product_attention` does.
    """
    return _call(_gathered, query, key, value, axis_name, options)


@dataclasses.dataclass(frozen=True)
class _Split:
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
        return _PARTS[self.order]

    def starts(self, device: Any, length: int) -> list[Any]:
        """Global positions of the parts that a device holds, of a sequence of `length` a device."""
        if self.order == "contiguous":
            return [device * length]
        half = length // 2
        return [device * half, (2 * self.size - 1 - device) * half]


def _call(run: Callable[..., Any], query, key, value, axis_name: str, options: dict[str, Any]):
    options = dict(options)
    implementation = options.pop("implementation", None)
    return_residual = options.pop("return_residual", False)
    order = options.pop("order", "contiguous")
    axes = [options.pop(f"{kind}_axis_name", None) for kind in ("batch", "head")]
    lengths = {n: options.pop(n, None) for n in ("query_seq_lengths", "key_value_seq_lengths")}
    _check_options(options, order)

    problem, operands = normalize(Arguments(query, key, value, **options))
    size = _axis_size(axis_name)
    _check_lengths_divide(order, problem)
    operands = _with_lengths(operands, lengths, jnp.shape(query)[:-3], size)
    operands = operands._replace(dropout_origin=_origin(problem, axes))
    operands, problem, bounded = _as_window(problem, operands, size)
    chosen = dispatch.select(problem, dispatch.current_device(query), implementation)
    steps = _steps(problem, options, order, size)
    split = _Split(problem, chosen, axis_name, size, order, bounded[0], bounded[1], steps)
    out, lse = run(split, sharding.vary_alike((operands, lax.axis_index(axis_name)))[0])

    lead = jnp.shape(query)[:-3]
    out = out.reshape(*lead, *out.shape[1:])
    lse = jnp.swapaxes(lse, 1, 2)
    return (out, lse.reshape(*lead, *lse.shape[1:])) if return_residual else out


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
    if order not in _PARTS:
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
        if length % _PARTS[order]:
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


# --- a part of the queries against a part of the keys ---------------------------------------------


class _Place(NamedTuple):
    """Global positions of the first query and the first key of a pair of parts."""

    q: Any
    kv: Any


def _pair(split: _Split, operands: Operands, place: _Place) -> tuple[Problem, Operands]:
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


def _visible(split: _Split, problem: Problem, operands: Operands) -> Any:
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


def _unless_hidden(visible: Any, run: Callable[..., Any], state: Any, *args: Any) -> Any:
    if visible is None:
        return run(state, *args)
    return lax.cond(visible, run, lambda state, *_: state, state, *args)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _forward(implementation, problem, operands):
    if implementation == "xla":
        return xla.attention(problem, operands)
    return _by_kernels(autodiff.kernels().forward, problem, operands)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _backward(implementation, problem, operands, out, lse, dout, dlse):
    """What a pair adds to the gradients, from out and lse of whole rows."""
    if implementation == "xla":
        return _formula(problem, operands, out, lse, dout, dlse)
    run = functools.partial(autodiff.kernels().backward, wanted=_wanted(problem))
    return _by_kernels(run, problem, operands, out, lse, dout, dlse)


def _wanted(problem: Problem) -> frozenset[str]:
    return frozenset({"query", "key", "value"} | ({"scale"} if problem.scale is None else set()))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _by_kernels(run, problem, *args):
    return run(problem, *args)


@_by_kernels.defjvp
def _refuse_to_differentiate(run, problem, primals, tangents):
    raise TypeError(
        "ring_attention on the kernels is for reverse mode, once: for second derivatives use "
        "implementation='xla', or all_gather_attention"
    )


def _formula(problem, operands, out, lse, dout, dlse):
    """The same by JAX: a pair weighs w = exp(lse of the pair - lse of the row) in out and lse."""
    attend = lambda given: xla.attention(problem, operands._replace(**given))
    given = {n: getattr(operands, n) for n in _wanted(problem)}
    (out_pair, lse_pair), vjp = jax.vjp(attend, given)
    weight = jnp.where(lse_pair == -jnp.inf, 0.0, jnp.exp(lse_pair - lse))
    wide = lambda x: x.astype(lse.dtype)
    surplus = jnp.einsum("btnh,btnh->bnt", wide(dout), wide(out_pair) - wide(out))
    by_row = weight.swapaxes(1, 2)[..., None]
    return vjp(((wide(dout) * by_row).astype(dout.dtype), weight * (dlse + surplus)))[0]


# --- the ring -------------------------------------------------------------------------------------


class _Keys(NamedTuple):
    """What travels."""

    key: Any
    value: Any
    segments: Any


def _ring_of(split: _Split, operands: Operands):
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
    return _ring_forward(split, operands)


def _ring_fwd(split, operands):
    out, lse = _ring_forward(split, operands)
    out = checkpoint_name(out, autodiff.OUT_NAME)
    lse = checkpoint_name(lse, autodiff.LSE_NAME)
    return (out, lse), (operands, out, lse)


def _ring_bwd(split, residuals, cotangents):
    grads = _ring_backward(split, *residuals, *cotangents)
    operands = residuals[0]
    cast = lambda name, x: x.astype(getattr(operands, name).dtype)
    zeros = {"sinks": operands.sinks, "soft_cap": operands.soft_cap}  # not read by the ring
    given = {n: jnp.zeros_like(x) for n, x in zeros.items() if x is not None}
    given |= {name: cast(name, x) for name, x in grads.items()}
    return (Operands(**{n: given.get(n) for n in operands._fields}),)


_ring.defvjp(_ring_fwd, _ring_bwd)


def _ring_forward(split, operands):
    """out in the dtype of query and lse."""
    rows = _cut_rows(split, operands)
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


class _Pair(NamedTuple):
    problem: Problem
    operands: Operands
    visible: Any


def _cut_rows(split: _Split, operands: Operands) -> list[Operands]:
    """The operands of each part of this device's queries."""
    cut = lambda x: [None] * split.parts if x is None else jnp.split(x, split.parts, 1)
    parts = zip(cut(operands.query), cut(operands.query_segments), strict=True)
    return [operands._replace(query=q, query_segments=ids) for q, ids in parts]


def _pairs(split: _Split, rows: list[Operands], keys: _Keys, i: Any) -> list[list[_Pair]]:
    """At step i: for each part of this device's queries, the pairs with each part of the keys."""
    device = lax.axis_index(split.axis_name)
    q_starts = split.starts(device, split.problem.q_len)
    kv_starts = split.starts((device - i) % split.size, split.problem.kv_len)
    cut = lambda x: [None] * split.parts if x is None else jnp.split(x, split.parts, 1)
    parts = [_Keys(*part) for part in zip(*map(cut, keys), strict=True)]

    def pair(row, q_start, part, kv_start):
        operands = row._replace(key=part.key, value=part.value, kv_segments=part.segments)
        problem, operands = _pair(split, operands, _Place(q_start, kv_start))
        return _Pair(problem, operands, _visible(split, problem, operands))

    return [
        [pair(row, q0, part, kv0) for part, kv0 in zip(parts, kv_starts, strict=True)]
        for row, q0 in zip(rows, q_starts, strict=True)
    ]


def _merge(split: _Split, pair: _Pair):
    """Adds what the queries of a pair see in it to what they have seen."""

    def run(state):
        acc, lse = state
        out, lse_pair = _forward(split.implementation, pair.problem, pair.operands)
        total = jnp.logaddexp(lse, lse_pair)
        pivot = jnp.where(total == -jnp.inf, 0.0, total)
        by_row = lambda x: jnp.exp(x - pivot).swapaxes(1, 2)[..., None]
        return acc * by_row(lse) + out.astype(acc.dtype) * by_row(lse_pair), total

    return run


def _sent(split: _Split, arrays: Any, distance: int = 1) -> Any:
    """The arrays of the device `distance` places before this one."""
    to = [(i, (i + distance) % split.size) for i in range(split.size)]
    return jax.tree.map(lambda x: lax.ppermute(x, split.axis_name, to), arrays)


def _ring_backward(split, operands, out, lse, dout, dlse):
    """Gradients by name, float32: of query and scale here, of key and value sent home."""
    rows = _cut_rows(split, operands)
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


def _add_gradients(split: _Split, pair: _Pair):
    def run(state, out, lse, dout, dlse):
        mine, theirs = state
        grads = _backward(split.implementation, pair.problem, pair.operands, out, lse, dout, dlse)
        mine = {name: x + grads[name].astype(x.dtype) for name, x in mine.items()}
        found = (grads["key"], grads["value"])
        return mine, [x + g.astype(x.dtype) for x, g in zip(theirs, found, strict=True)]

    return run


# --- all keys on every device ---------------------------------------------------------------------


def _gathered(split: _Split, operands: Operands):
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
    for row, start in zip(_cut_rows(split, operands), starts, strict=True):
        problem, row = _pair(split, row, _Place(start, jnp.int32(0)))
        row = sharding.vary_alike(row._replace(sinks=operands.sinks))
        outs.append(autodiff.attention(split.implementation, problem, row))
    out, lse = zip(*outs, strict=True)
    return jnp.concatenate(out, 1), jnp.concatenate(lse, 2)


# --- over a mesh ----------------------------------------------------------------------------------

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
