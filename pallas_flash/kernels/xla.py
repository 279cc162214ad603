"""Attention in chunks, in plain JAX: for every device and dtype without a kernel of its own.

    for each block of queries:                     lax.map, checkpointed
        row_max, row_sum, acc = -inf, 0, 0
        for each block of keys:                    lax.scan, checkpointed
            scores  = soft_cap(scale * q @ k.T + bias + alibi), -inf where hidden
            new_max = max(row_max, scores)         no gradient flows through it
            p       = exp(scores - new_max)
            shrink  = exp(row_max - new_max)
            row_sum = row_sum * shrink + sum(p)
            acc     = acc * shrink + dropout(p) @ v
        out, lse = acc / row_sum, row_max + log(row_sum)

There is no derivative rule for attention: out and lse do not depend on the maximum that is
subtracted, so leaving it out of differentiation is exact to every order, and jvp, grad, hessian
and grad of grad are JAX's own, in O(T + S) memory. Blocks of keys that no query of a block may see
are not computed. A problem that fits one block is computed without any loop.

16-bit q, k and v go through the loops as float32, and only the products round their operands, by a
rule of their own: so gradients are summed over the blocks in float32 and rounded once, at the end.

Products of float32 inputs honour `jax.default_matmul_precision`; scores, softmax and sums are
float32 (float64 for float64). The softmax is in base e here: XLA gains nothing from base 2, and a
finite bias of finfo.min times log2(e) would overflow to -inf and hide its pair.

Layout inside: [batch, kv head, query head of its group, query, key or feature], so that k and v are
never repeated for the heads of a group; whatever an array lacks has size 1 and broadcasts.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_flash import dropout, masks, tile_math
from pallas_flash.problem import Operands, Problem

Array = Any

MAX_BLOCK = 512
MIN_BLOCK = 128
MAX_SCORES = 2**21  # scores alive at once, over batch and heads, while blocks can still shrink


def attention(
    problem: Problem,
    operands: Operands,
    *,
    block_q: int | None = None,
    block_kv: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention with O(T + S) memory in every derivative.

    Args:
      problem: what is static about the call.
      operands: its arrays.
      block_q: queries a block; None chooses.
      block_kv: keys a block; None chooses.

    Returns:
      out, (B, T, N, Hv), in the dtype of query, and the natural log-sum-exp, (B, N, T), float32
      (float64 for float64). A query without a key has out 0 and gradients 0, and, without sinks,
      log-sum-exp -inf.
    """
    chosen_q, chosen_kv = default_blocks(problem)
    return _attention(problem, block_q or chosen_q, block_kv or chosen_kv, operands)


def default_blocks(problem: Problem) -> tuple[int, int]:
    """(block_q, block_kv): the whole problem where it is small, else at most 512 by 512."""
    block_q, block_kv = _even(problem.q_len, MAX_BLOCK), _even(problem.kv_len, MAX_BLOCK)
    heads = problem.batch * problem.num_q_heads
    while heads * block_q * block_kv > MAX_SCORES and max(block_q, block_kv) > MIN_BLOCK:
        if block_q >= block_kv:
            block_q = _even(problem.q_len, max(block_q // 2, MIN_BLOCK))
        else:
            block_kv = _even(problem.kv_len, max(block_kv // 2, MIN_BLOCK))
    return block_q, block_kv


def _even(length: int, limit: int) -> int:
    """The block of at most `limit` that cuts `length` into equal parts with little padding."""
    if length <= limit:
        return max(length, 1)
    num_blocks = -(-length // limit)
    return min(limit, -(-length // (8 * num_blocks)) * 8)


# One jit: intermediate -inf stays inside it, where jax.debug_infs does not look. Checkpointed as a
# whole: what is kept for the backward pass is the operands as they are, not their chunks.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _attention(problem, block_q, block_kv, operands):
    if 0 in (problem.batch, problem.q_len, problem.kv_len, problem.num_q_heads):
        return _no_keys(problem, operands)
    chunked = functools.partial(_chunked, problem, block_q, block_kv)
    # A single block may as well be shared by the two passes where XLA sees both: it is small.
    is_small = block_q >= problem.q_len and block_kv >= problem.kv_len
    return jax.checkpoint(chunked, prevent_cse=not is_small)(operands)


def _no_keys(problem, operands):
    rows = problem.batch, problem.num_q_heads, problem.q_len
    out = jnp.zeros((problem.batch, problem.q_len, problem.num_q_heads, problem.head_dim_v))
    lse = jnp.full(rows, -jnp.inf, _wide(problem))
    if operands.sinks is not None:
        lse = jnp.broadcast_to(operands.sinks.astype(lse.dtype)[:, None], rows)
    return out.astype(problem.dtype), lse


class _Pairs(NamedTuple):
    """What has a query and a key axis: [1|B, 1|K, 1|G, 1|queries, 1|keys]."""

    bias: Array | None
    mask: Array | None


class _Rows(NamedTuple):
    """The query side of a block."""

    pos: Array | None  # int32, [block_q, 1]; not before the cut
    q: Array  # [B, K, G, block_q, H], float32 or wider, as are k and v
    segments: Array | None  # [B, 1, 1, block_q, 1]


class _Keys(NamedTuple):
    """The key side of a block."""

    pos: Array | None  # int32, [1, block_kv]; not before the cut
    k: Array  # [B, K, block_kv, H]
    v: Array  # [B, K, block_kv, Hv]
    segments: Array | None  # [B, 1, 1, 1, block_kv]


class _Shared(NamedTuple):
    """What belongs to no block: per batch row, per head, or one for all."""

    scale: Array | float  # () or [B, 1, 1, 1, 1]
    soft_cap: Array | float | None
    sinks: Array | None  # [1, K, G, 1]
    alibi_slopes: Array | None  # [1|B, K, G, 1, 1]
    query_lengths: Array | None  # int32, [B, 1, 1, 1, 1]
    kv_lengths: Array | None
    window: Array | None  # int32, (2,)
    dropout_key: Array | None
    dropout_origin: Array | None  # uint32, (4,)


class _Carry(NamedTuple):
    """The online softmax so far."""

    row_max: Array  # [B, K, G, block_q], natural log
    row_sum: Array  # [B, K, G, block_q]
    acc: Array  # [B, K, G, block_q, Hv]


def _chunked(problem, block_q, block_kv, operands):
    rows, keys, pairs, shared = _by_role(problem, operands)
    num_q, num_kv = -(-problem.q_len // block_q), -(-problem.kv_len // block_kv)
    rows = _stack_all(rows, _Rows(pos=None, q=3, segments=3), block_q)
    keys = _stack_all(keys, _Keys(pos=None, k=2, v=2, segments=4), block_kv)
    # Positions run on through the padding: that is how the padding is known.
    rows = rows._replace(pos=_positions(num_q, block_q)[:, :, None])
    keys = keys._replace(pos=_positions(num_kv, block_kv)[:, None, :])
    q_pairs, every_pairs = _stack_pairs(pairs, 3, block_q)

    def q_block(chunk):
        rows, pairs = chunk
        pairs = _one_of(pairs, every_pairs)
        return _q_block(problem, shared, rows, keys, pairs, num_kv)

    out, lse = _each(q_block, (rows, q_pairs), num_q)
    return _joined(problem, out, lse)


def _by_role(problem, operands):
    """The operands in the layout of this file."""
    b, t, s = problem.batch, problem.q_len, problem.kv_len
    groups = (problem.num_kv_heads, problem.q_per_kv)
    query, key, value = (x.astype(_wide(problem)) for x in operands[:3])
    q = _zero_behind(query, operands.query_lengths).reshape(b, t, *groups, -1)
    k = _zero_behind(key, operands.kv_lengths)
    v = _zero_behind(value, operands.kv_lengths)
    shaped = lambda x, *shape: None if x is None else x.reshape(shape)

    def grouped(x):  # [1|B, 1|N, 1|T, 1|S] -> [1|B, 1|K, 1|G, 1|T, 1|S]
        if x is None:
            return None
        return x.reshape(x.shape[0], *(groups if x.shape[1] > 1 else (1, 1)), *x.shape[2:])

    rows = _Rows(
        pos=None,
        q=q.transpose(0, 2, 3, 1, 4),
        segments=shaped(operands.query_segments, b, 1, 1, t, 1),
    )
    keys = _Keys(
        pos=None,
        k=k.swapaxes(1, 2),
        v=v.swapaxes(1, 2),
        segments=shaped(operands.kv_segments, b, 1, 1, 1, s),
    )
    scale = problem.scale if operands.scale is None else operands.scale.astype(_wide(problem))
    cap = problem.soft_cap if operands.soft_cap is None else operands.soft_cap
    shared = _Shared(
        scale=scale if jnp.ndim(scale) == 0 else scale.reshape(-1, 1, 1, 1, 1),
        soft_cap=cap if operands.soft_cap is None else cap.astype(_wide(problem)),
        sinks=shaped(operands.sinks, 1, *groups, 1),
        alibi_slopes=shaped(operands.alibi_slopes, -1, *groups, 1, 1),
        query_lengths=shaped(operands.query_lengths, b, 1, 1, 1, 1),
        kv_lengths=shaped(operands.kv_lengths, b, 1, 1, 1, 1),
        window=operands.window,
        dropout_key=operands.dropout_key,
        dropout_origin=operands.dropout_origin,
    )
    return rows, keys, _Pairs(grouped(operands.bias), grouped(operands.mask)), shared


def _zero_behind(x, lengths):
    """x (B, T, heads, features) with zeros behind the lengths: NaN may be stored there."""
    if lengths is None:
        return x
    pos = lax.broadcasted_iota(jnp.int32, (1, x.shape[1], 1, 1), 1)
    return jnp.where(pos < lengths.reshape(-1, 1, 1, 1), x, jnp.zeros((), x.dtype))


def _positions(num, block):
    return jnp.arange(num * block, dtype=jnp.int32).reshape(num, block)


def _stack(block, x, axis):
    """`axis` cut into blocks, padded with zeros, the blocks stacked along a new first axis."""
    num = -(-x.shape[axis] // block)
    if num == 1 and x.shape[axis] == block:
        return x[None]
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, num * block - x.shape[axis])
    padded = jnp.pad(x, pad) if pad[axis][1] else x
    cut = padded.reshape(*x.shape[:axis], num, block, *x.shape[axis + 1 :])
    return jnp.moveaxis(cut, axis, 0)


def _stack_all(arrays, axes, block):
    cut = [None if x is None else _stack(block, x, a) for x, a in zip(arrays, axes, strict=True)]
    return type(arrays)(*cut)


def _stack_pairs(pairs, axis, block):
    """(stacked, whole): each array in one of the two; one of size 1 along `axis` stays whole.

    A gradient of a stacked array is written block by block, of a whole one summed over blocks.
    """
    is_cut = lambda x: x is not None and x.shape[axis] > 1
    return (
        _Pairs(*[_stack(block, x, axis) if is_cut(x) else None for x in pairs]),
        _Pairs(*[None if is_cut(x) else x for x in pairs]),
    )


def _one_of(pairs, others):
    return _Pairs(*[b if a is None else a for a, b in zip(pairs, others, strict=True)])


def _each(f, chunks, num):
    """f of every chunk, stacked; no loop around a single one."""
    if num == 1:
        return jax.tree.map(lambda x: x[None], f(jax.tree.map(lambda x: x[0], chunks)))
    return lax.map(jax.checkpoint(f, prevent_cse=False), chunks)


def _q_block(problem, shared, rows, keys, pairs, num_kv):
    """out and lse of one block of queries over all keys."""
    block_kv = keys.pos.shape[-1]
    kv_pairs, every_pairs = _stack_pairs(pairs, 4, block_kv)

    def step(carry, chunk):
        keys, pairs = chunk
        return _step(problem, shared, rows, keys, _one_of(pairs, every_pairs), carry)

    carry, chunks = _start(problem, shared, rows, keys.v[0]), (keys, kv_pairs)
    if num_kv == 1:
        return _finish(problem, step(carry, jax.tree.map(lambda x: x[0], chunks)))
    step = _unless_hidden(problem, shared, rows, step)
    step = jax.checkpoint(step, prevent_cse=False)
    carry, _ = lax.scan(lambda carry, chunk: (step(carry, chunk), None), carry, chunks)
    return _finish(problem, carry)


def _unless_hidden(problem, shared, rows, step):
    """`step` that does nothing where no query of the block sees a key of the chunk."""
    longest = lambda lengths: None if lengths is None else lengths.max()
    values = _mask_values(shared)._replace(
        query_length=longest(shared.query_lengths), kv_length=longest(shared.kv_lengths)
    )
    bounds = problem.mask.bounds(values)
    if bounds == masks.Bounds():
        return step
    q_lo = rows.pos[0, 0]
    lo, hi = bounds.kv_any(q_lo, q_lo + rows.pos.shape[0], problem.kv_len)

    def guarded(carry, chunk):
        kv_lo = chunk[0].pos[0, 0]
        visible = jnp.maximum(kv_lo, lo) < jnp.minimum(kv_lo + chunk[0].pos.shape[1], hi)
        return lax.cond(visible, step, lambda carry, _: carry, carry, chunk)

    return guarded


def _start(problem, shared, rows, value):
    """Before any key: the sinks, where there are any.

    The zeros are a product of zeros like q and v, so that a mesh shards them as it does `acc`.
    """
    wide = _wide(problem)
    acc = _dot(jnp.zeros_like(rows.q[..., :1]), jnp.zeros_like(value[:, :, :1]), contract_v=2)
    zeros = acc.sum(axis=-1)
    if shared.sinks is None:
        return _Carry(zeros - jnp.inf, zeros, acc)
    sink = zeros + shared.sinks.astype(wide)
    row_max = lax.stop_gradient(sink)
    return _Carry(row_max, jnp.exp(sink - tile_math.finite_pivot(row_max)), acc)


def _step(problem, shared, rows, keys, pairs, carry):
    """One block of keys: the algorithm of the module docstring."""
    scores = _scores(problem, shared, rows, keys, pairs)
    new_max = jnp.maximum(carry.row_max, lax.stop_gradient(scores).max(axis=-1))
    pivot = tile_math.finite_pivot(new_max)
    weights = jnp.exp(scores - pivot[..., None])
    shrink = jnp.exp(carry.row_max - pivot)
    row_sum = carry.row_sum * shrink + weights.sum(axis=-1)
    if problem.dropout_rate:
        weights = jnp.where(_kept(problem, shared, rows, keys), weights, 0.0)
    update = _product(problem, weights, keys.v, contract_v=2)
    return _Carry(new_max, row_sum, carry.acc * shrink[..., None] + update)


def _scores(problem, shared, rows, keys, pairs):
    """Finished logits [B, K, G, block_q, block_kv], -inf where hidden."""
    scores = _product(problem, rows.q, keys.k, contract_v=3)
    visible = _visible(problem, shared, rows, keys, pairs)
    # Hidden keys may hold anything finite: no overflow of theirs may meet a derivative below.
    scores = _zero_hidden(scores, visible) * shared.scale
    if pairs.bias is not None:
        scores = scores + _zero_hidden(pairs.bias.astype(scores.dtype), visible)
    if problem.alibi_shift is not None:
        scores += tile_math.alibi(shared.alibi_slopes, rows.pos, keys.pos, problem.alibi_shift)
    if shared.soft_cap is not None:
        scores = tile_math.soft_capped(scores, shared.soft_cap)
    return masks.hide(scores, visible)


def _zero_hidden(x, visible):
    return x if visible is None else jnp.where(visible, x, 0.0)


def _visible(problem, shared, rows, keys, pairs):
    """Everything that hides a pair, the padding of the last block included; None: nothing."""
    values = _mask_values(shared)._replace(
        query_segments=rows.segments, kv_segments=keys.segments, dense=pairs.mask
    )
    tests = [problem.mask.allowed(rows.pos, keys.pos, values)]
    if problem.kv_len % keys.pos.shape[1]:
        tests.append(keys.pos < problem.kv_len)
    if pairs.bias is not None:
        tests.append(pairs.bias != -jnp.inf)
    tests = [test for test in tests if test is not None]
    return functools.reduce(jnp.logical_and, tests) if tests else None


def _mask_values(shared):
    left, right = (None, None) if shared.window is None else shared.window
    return masks.MaskValues(
        query_length=shared.query_lengths,
        kv_length=shared.kv_lengths,
        window_left=left,
        window_right=right,
    )


def _kept(problem, shared, rows, keys):
    groups = (1, 1) if problem.broadcast_dropout else (problem.num_kv_heads, problem.q_per_kv)
    origin = shared.dropout_origin
    sizes = (problem.batch, problem.num_q_heads)
    batch, head = dropout.counters(sizes, origin, problem.broadcast_dropout)
    batch, head = batch.reshape(-1, 1, 1, 1, 1), head.reshape(*groups, 1, 1)
    q_pos, kv_pos = rows.pos, keys.pos
    if origin is not None:
        q_pos, kv_pos = q_pos.astype(jnp.uint32) + origin[2], kv_pos.astype(jnp.uint32) + origin[3]
    return dropout.keep(shared.dropout_key, batch, head, q_pos, kv_pos, problem.dropout_rate)


def _product(problem, x, y, contract_v):
    """`_dot` of x and y in the dtype of the problem; differentiated as if it did not round."""
    if x.dtype == problem.np_dtype:
        return _dot(x, y, contract_v)
    return _rounding_dot(problem.dtype, contract_v, x, y)


# Through astype the cotangents of x and y would be rounded too, once a block.
@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _rounding_dot(dtype, contract_v, x, y):
    return _dot(x.astype(dtype), y.astype(dtype), contract_v)


@_rounding_dot.defjvp
def _rounding_dot_jvp(dtype, contract_v, primals, tangents):
    (x, y), (dx, dy) = primals, tangents
    out = _rounding_dot(dtype, contract_v, x, y)
    return out, _dot(dx, y, contract_v) + _dot(x, dy, contract_v)


def _dot(x, y, contract_v):
    """[B, K, G, q, c] with [B, K, ...]: contracts c with axis `contract_v` of y."""
    numbers = (((4,), (contract_v,)), ((0, 1), (0, 1)))
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return lax.dot_general(x, y, numbers, preferred_element_type=wide)


def _finish(problem, carry):
    # A where before the division: 1 / 0 would make a NaN of the zero cotangent of an empty row.
    total = jnp.where(carry.row_sum > 0, carry.row_sum, 1.0)
    out = carry.acc * (dropout.keep_scale(problem.dropout_rate) / total)[..., None]
    return out.astype(problem.dtype), carry.row_max + jnp.log(total)


def _joined(problem, out, lse):
    """Blocks of out [n, B, K, G, block_q, Hv] and lse [n, B, K, G, block_q] back as one."""
    b, n, t = problem.batch, problem.num_q_heads, problem.q_len
    out = jnp.moveaxis(out, 0, 3)
    out = out.reshape(*out.shape[:3], -1, out.shape[-1])[:, :, :, :t]  # [B, K, G, T, Hv]
    lse = jnp.moveaxis(lse, 0, 3)
    lse = lse.reshape(*lse.shape[:3], -1)[..., :t]
    return out.transpose(0, 3, 1, 2, 4).reshape(b, t, n, -1), lse.reshape(b, n, t)


def _wide(problem):
    return jnp.promote_types(problem.np_dtype, jnp.float32)
