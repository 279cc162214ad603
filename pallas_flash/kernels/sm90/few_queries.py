"""Few queries against many keys, as in decoding: the forward kernel, filled another way.

A consumer has room for 64 queries, a decoding step brings one a head. So the query heads that share
a kv head become rows of one tile, and a key is read once for all of them. Where that leaves
multiprocessors without work, the keys are cut into parts, each a batch row of its own (a reshape:
no key is copied), and the parts meet by their log-sum-exp (Dao et al., Flash-Decoding, 2023).

Which calls are run so is for `io_few_queries` to say, from the times of both ways.

A mask knows rows by position, and here `q_per_kv` rows have one. A single query's bounds are a
length of the keys; every other mask is written out, an array of these few rows.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_flash import masks
from pallas_flash.config import ForwardConfig
from pallas_flash.io_few_queries import cut, is_length
from pallas_flash.kernels.sm90.call import Extras
from pallas_flash.problem import Problem


class Rows(NamedTuple):
    """A call for the forward kernel, and what undoes the rearrangement.

    B batch, P parts, R = T * q_per_kv rows, K kv heads.

    Attributes:
      q: (B * P, R, K, H).
      k, v: (B * P, S / P, K, H) and (B * P, S / P, K, Hv).
      scale: float32 (1|B * P,).
      extras: what masks and terms read; sinks have no part in it.
      mask: of these rows.
      config: how the kernel is cut.
      parts: P.
      group: query heads that share a kv head.
    """

    q: Any
    k: Any
    v: Any
    scale: Any
    extras: Extras
    mask: masks.Mask
    config: ForwardConfig
    parts: int
    group: int


def rearranged(problem: Problem, q, k, v, scale, extras: Extras) -> Rows:
    """The call of `problem`, of one launch; q, k and v may be padded behind their lengths."""
    batch, kv_heads, group = q.shape[0], k.shape[2], q.shape[2] // k.shape[2]
    visible, lengths = _visible(problem, extras, batch)
    config, parts = cut(problem)
    in_parts = lambda x: x.reshape(batch * parts, x.shape[1] // parts, *x.shape[2:])
    of_parts = lambda x: x if x is None or x.shape[0] == 1 else jnp.repeat(x, parts, axis=0)
    rows = q[:, : problem.q_len].reshape(batch, problem.q_len, kv_heads, group, -1)
    rows = rows.swapaxes(2, 3).reshape(batch, problem.q_len * group, kv_heads, -1)
    if visible is not None:
        visible = _in_rows(visible, (batch, group, problem.q_len, problem.kv_len), parts)
    if lengths is not None:
        size = problem.kv_len // parts
        before = jnp.arange(parts, dtype=jnp.int32) * size
        lengths = jnp.clip(lengths[:, None] - before, 0, size).reshape(-1)
    mask = masks.And() if visible is None else masks.Dense()
    mask &= masks.And() if lengths is None else masks.Lengths(has_query=False, has_kv=True)
    return Rows(
        q=jnp.repeat(rows, parts, axis=0),
        k=in_parts(k),
        v=in_parts(v),
        scale=of_parts(scale),
        extras=Extras(kv_lengths=lengths, mask=visible, soft_cap=of_parts(extras.soft_cap)),
        mask=mask,
        config=config,
        parts=parts,
        group=group,
    )


def _visible(problem: Problem, extras: Extras, batch: int):
    """What hides keys: (bool that broadcasts to (B, N, T, S), int32 lengths (B,)), or None each.

    Lengths stay what they are: what lies behind them may be anything.
    """
    mask, values = problem.mask, _values(extras, batch)
    if not mask.parts():
        return None, None
    if is_length(problem):
        if jax.tree.leaves(values):
            return None, jax.vmap(lambda row: _visible_keys(problem, row))(values)
        end = _visible_keys(problem, values)
        return None, None if end == problem.kv_len else jnp.full((batch,), end, jnp.int32)
    q_pos = jnp.arange(problem.q_len, dtype=jnp.int32)[:, None]
    kv_pos = jnp.arange(problem.kv_len, dtype=jnp.int32)
    return mask.allowed(q_pos, kv_pos, values), extras.kv_lengths


def _visible_keys(problem: Problem, values: masks.MaskValues):
    """How many keys a single query sees, of one batch row; without a lower bound."""
    values = jax.tree.map(lambda x: x.reshape(()), values)
    return problem.mask.bounds(values).kv_any(0, 1, problem.kv_len)[1]


def _values(extras: Extras, batch: int) -> masks.MaskValues:
    """What the mask reads, (B, 1|N, 1|T, 1|S)."""

    def shaped(x, *axes: int):
        """x (1|B', ...), of whose further axes these are the places."""
        if x is None:
            return None
        x = jnp.repeat(x, batch // x.shape[0], axis=0)
        return jnp.expand_dims(x, [axis for axis in (1, 2, 3) if axis not in axes])

    window = extras.window
    return masks.MaskValues(
        query_length=shaped(extras.query_lengths),
        kv_length=shaped(extras.kv_lengths),
        window_left=None if window is None else shaped(window[:, 0]),
        window_right=None if window is None else shaped(window[:, 1]),
        query_segments=shaped(extras.query_segments, 2),
        kv_segments=shaped(extras.kv_segments, 3),
        dense=shaped(extras.mask, 1, 2, 3),
    )


def _in_rows(allowed, sizes: tuple[int, int, int, int], parts: int):
    """bool, broadcastable to (B, N, T, S) -> (B * P, 1|K, R, S / P). sizes: B, N / K, T, S."""
    batch, group, q_len, kv_len = sizes
    heads = allowed.shape[1] if allowed.ndim == 4 and allowed.shape[1] > 1 else group
    allowed = jnp.broadcast_to(allowed, (batch, heads, q_len, kv_len))
    allowed = allowed.reshape(batch, heads // group, group, q_len, parts, kv_len // parts)
    allowed = allowed.transpose(0, 4, 1, 3, 2, 5)  # B, P, K, T, group, S / P
    return allowed.reshape(batch * parts, heads // group, q_len * group, kv_len // parts)


def restored(problem: Problem, rows: Rows, out, lse, sinks):
    """out (B * P, R, K, Hv), lse (B * P, K, R) -> out (B, T, N, Hv), lse (B, N, T).

    Args:
      sinks: float32 (1|B', N), or None: one more logit a head, which takes part once.
    """
    group, q_len, dtype = rows.group, problem.q_len, out.dtype
    batch = out.shape[0] // rows.parts
    lse = lse.reshape(batch, rows.parts, -1, q_len, group)  # B, P, K, T, group
    lse = lse.transpose(0, 1, 3, 4, 2)[..., None]
    out = out[:, : q_len * group].reshape(batch, rows.parts, q_len, group, *out.shape[2:])
    if rows.parts == 1:
        lse, out = lse[:, 0], out[:, 0]  # B, T, group, K, 1|Hv
    else:
        pairs = jnp.broadcast_to(lse, out.shape), out.astype(jnp.float32)
        nothing = jnp.float32(-jnp.inf), jnp.float32(0.0)
        lse, out = jax.lax.reduce(pairs, nothing, _together, (1,))
    if sinks is not None:
        sinks = jnp.repeat(sinks, batch // sinks.shape[0], axis=0)
        sinks = sinks.reshape(batch, 1, -1, group, 1).swapaxes(2, 3)
        lse, out = _together((lse, out.astype(jnp.float32)), (sinks, jnp.float32(0.0)))
    out = out.astype(dtype).swapaxes(2, 3).reshape(batch, q_len, -1, out.shape[-1])
    return out, lse[..., 0].transpose(0, 3, 2, 1).reshape(batch, -1, q_len)


def _together(a, b):
    """(lse, out) of two sets of keys -> of both.

    As the one step of a reduction it takes XLA one kernel over the parts; with the maximum, the
    sum and the weighted sum each a reduction there are four.
    """
    lse = jnp.logaddexp(a[0], b[0])
    share = lambda part: jnp.where(part > -jnp.inf, jnp.exp(part - lse), 0.0)
    return lse, a[1] * share(a[0]) + b[1] * share(b[0])
