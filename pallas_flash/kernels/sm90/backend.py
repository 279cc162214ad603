"""Hopper: which problems the kernels take, and how their operands are laid out for them.

Nothing is padded in HBM beyond what a tiled copy needs: lengths to a multiple of 8, head dims to a
multiple of 16 or, in some backward passes, of 64 (`config.padded`; a call that needs neither is
copied nowhere). A vmapped call is folded into the batch axis, so it runs as one launch; over a mesh
each device launches its own shards.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_flash import dropout, io_few_queries, io_kernels, io_model, sharding, tuned
from pallas_flash.config import ROW_TILE, BackwardConfig, ForwardConfig
from pallas_flash.kernels.sm90 import backward as backward_kernel
from pallas_flash.kernels.sm90 import backward_dq as dq_kernel
from pallas_flash.kernels.sm90 import few_queries
from pallas_flash.kernels.sm90 import forward as forward_kernel
from pallas_flash.kernels.sm90.call import Extras
from pallas_flash.problem import LOW_PRECISION, Operands, Problem

# Gradients that the kernels give; others come from the formula.
MADE_BY_KERNELS = frozenset({"query", "key", "value", "scale", "bias", "sinks"})
MAX_HEAD_DIM = 256


def supports(problem: Problem) -> tuple[bool, str]:
    """Can these kernels run the problem, forward and backward, and why (not)."""
    refusals = []
    if problem.np_dtype not in LOW_PRECISION:
        refusals.append(f"dtype {problem.dtype}: the tensor cores take float16 and bfloat16")
    for name in ("head_dim", "head_dim_v"):
        size = getattr(problem, name)
        if size > MAX_HEAD_DIM:
            refusals.append(f"{name}={size}: at most {MAX_HEAD_DIM}")
        elif size == 0:
            refusals.append(f"{name}=0: nothing to compute")
    if problem.is_empty:
        refusals.append("an axis of size 0: nothing to launch")
    if problem.deterministic_backward and _is_shared_bias(problem):
        refusals.append(
            f"deterministic_backward with a bias of shape {problem.bias_shape}: the gradient of "
            "what several logits share is added up in no fixed order: not fused"
        )
    if refusals:
        return False, "; ".join(refusals)
    return True, "fused on sm_90, forward and backward"


def _is_shared_bias(problem: Problem) -> bool:
    """Several logits have one entry of the bias in common."""
    logits = (problem.batch, problem.num_q_heads, problem.q_len, problem.kv_len)
    return problem.bias_shape not in (None, logits)


def notes(problem: Problem) -> tuple[str, ...]:
    """What its layout costs beyond its own work, and its memory traffic, or what runs instead."""
    found = []
    for name, arrays in (("q_len", "query, out and their gradients"), ("kv_len", "key and value")):
        size = getattr(problem, name)
        if size % ROW_TILE:
            found.append(f"{name}={size} is no multiple of {ROW_TILE}: {arrays} are copied padded")
    cuts = dict(forward=tuned.forward_of(problem), backward=tuned.backward_of(problem))
    for name in ("head_dim", "head_dim_v"):
        size = getattr(problem, name)
        for way, cut in cuts.items():
            padded = cut.padded(size)
            if size != padded:
                found.append(f"{name}={size} is padded to {padded} in the {way}: copies, and work")
    rows = io_few_queries.told(problem)
    return (*found, rows or _traffic(problem))


def _traffic(problem: Problem) -> str:
    """Device memory by the IO model, lengths and windows and such hiding nothing."""
    known = io_kernels.known_ahead(problem)
    found = [io_model.estimates(known, backward=backward) for backward in (False, True)]
    ours, naive = (" and ".join(f"{e[i].memory.total / 1e6:.0f}" for e in found) for i in (-1, 1))
    return f"device memory, forward and backward: {ours} MB; with scores stored {naive} MB"


class _Arrays(NamedTuple):
    """What the kernels read: batch first everywhere, so a vmapped axis folds into it."""

    q: Any
    k: Any
    v: Any
    scale: Any  # float32 (1|B,), positive
    extras: Extras


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _pad_axes(x, sizes: dict[int, int]):
    """x with axis `a` zero-padded to `sizes[a]`."""
    pads = [(0, sizes.get(axis, n) - n) for axis, n in enumerate(x.shape)]
    return jnp.pad(x, pads) if any(after for _, after in pads) else x


def _pad_tiles(x, cut: ForwardConfig | BackwardConfig):
    """(B, T, heads, H) padded to what a tiled copy needs."""
    return _pad_axes(x, {1: _round_up(x.shape[1], ROW_TILE), 3: cut.padded(x.shape[3])})


def _is_plain(problem: Problem) -> bool:
    """The scale is a positive constant: the kernels take it as it is."""
    return problem.scale is not None and problem.scale > 0


def _sign_and_scale(problem: Problem, operands: Operands):
    """Factors +-1 or 0 for the queries (None for 1) and positive scales for the kernels, (1|B,).

    The kernels' running maximum and initial accumulators want scale > 0. The sign goes into the
    queries, where it is exact; a scale of 0 makes them zero and any positive scale will do.
    """
    scale = _own_scale(problem, operands)
    scale = _constant_scale(problem) if scale is None else scale
    if _is_plain(problem):
        return None, scale
    return jnp.sign(scale), jnp.where(scale == 0, 1.0, jnp.abs(scale))


def _own_scale(problem: Problem, operands: Operands):
    """The scale that is an array of the call, of any sign: float32 (B,), or None."""
    if operands.scale is None:
        return None
    return jnp.broadcast_to(operands.scale.astype(jnp.float32), (problem.batch,))


def _constant_scale(problem: Problem):
    """The scale that is known ahead, float32 (1,): B equal ones XLA would write at every call."""
    scale: Any = problem.scale
    return jnp.full((1,), scale, jnp.float32)


def _arrays(problem: Problem, operands: Operands, cut: ForwardConfig | BackwardConfig) -> _Arrays:
    sign, scale = _sign_and_scale(problem, operands)
    query = operands.query
    if sign is not None:
        query = query * sign[:, None, None, None].astype(query.dtype)
    return _Arrays(
        q=_pad_tiles(query, cut),
        k=_pad_tiles(operands.key, cut),
        v=_pad_tiles(operands.value, cut),
        scale=scale,
        extras=_extras(problem, operands),
    )


def _extras(problem: Problem, operands: Operands) -> Extras:
    one_row = lambda x: None if x is None else x[None]
    f32 = lambda x: None if x is None else x.astype(jnp.float32)
    soft_cap = None
    if problem.soft_cap is not None:
        static = operands.soft_cap is None
        soft_cap = jnp.float32(problem.soft_cap) if static else f32(operands.soft_cap)
    bias = operands.bias
    if bias is not None and bias.dtype not in (*LOW_PRECISION, jnp.float32):
        bias = bias.astype(jnp.float32)
    return Extras(
        query_lengths=operands.query_lengths,
        kv_lengths=operands.kv_lengths,
        window=one_row(operands.window),
        query_segments=operands.query_segments,
        kv_segments=operands.kv_segments,
        mask=operands.mask,
        bias=bias,
        alibi_slopes=operands.alibi_slopes,
        soft_cap=one_row(soft_cap),
        sinks=one_row(f32(operands.sinks)),
        dropout_rows=_dropout_rows(problem, operands) if problem.dropout_rate else None,
    )


def _dropout_rows(problem: Problem, operands: Operands):
    """uint32 (1|B, 1|N, 2, T): what the pattern needs to know of each query."""
    sizes = (problem.batch, problem.num_q_heads, problem.q_len)
    origin = operands.dropout_origin
    batch, head, q_pos = dropout.counters(sizes, origin, problem.broadcast_dropout)
    first_kv = 0 if origin is None else origin[3]
    return jnp.stack(dropout.row_keys(operands.dropout_key, batch, head, q_pos, first_kv), axis=2)


# What the axes of each array are, in the words of sharding.py.
_Q, _KV, _ROWS = "B . N .", "B . K .", "B N ."
_EXTRAS = Extras(
    query_lengths="B",
    kv_lengths="B",
    window="B .",
    query_segments="B .",
    kv_segments="B .",
    mask="B N . .",
    bias="B N . .",
    alibi_slopes="B N",
    soft_cap="B",
    sinks="B N",
    dropout_rows="B N . .",
)


def _labels(arrays: _Arrays) -> _Arrays:
    words = {name: getattr(_EXTRAS, name) for name in arrays.extras.present()}
    words = _Arrays(q=_Q, k=_KV, v=_KV, scale="B", extras=Extras(**words))
    return sharding.labelled(words, arrays)


def _foldable(
    run: Callable[..., Any], labels: Any, results: Any, *, share: bool = True, mapped: int = 0
) -> Callable[..., Any]:
    """run(*args), all arrays batch first, cut over a mesh, such that vmap becomes a larger batch.

    Args:
      run: a function of arrays.
      labels, results: what the axes of its arguments and results are.
      share: an extra of one row that is not mapped stays one row, and serves all (lengths do not:
        every row has its own). Not where run returns its gradient, of which every example has its
        own. A scale of one row does always.
      mapped: how many axes of vmap the arguments have.
    """
    call = jax.custom_batching.custom_vmap(
        lambda *args: sharding.over_shards(run, args, labels, results)
    )

    @call.def_vmap
    def rule(axis_size, in_batched, *args):
        del axis_size
        letter = f"v{mapped}"
        more = lambda word, batched=True: f"{letter} {word}" if batched else word
        mapped_labels = jax.tree.map(more, labels, tuple(in_batched))
        mapped_results = jax.tree.map(more, results)
        # Folded inside the shards: there the batch is whole, whichever of the two axes is cut.
        folded = functools.partial(_run_folded, run, in_batched, share)
        out = _foldable(folded, mapped_labels, mapped_results, share=share, mapped=mapped + 1)(
            *args
        )
        return out, jax.tree.map(lambda _: True, out)

    return call


def _run_folded(run: Callable[..., Any], in_batched, share: bool, *args):
    """run of arguments with an axis in front where `in_batched` says so, folded into the batch."""
    examples = jax.tree.map(
        lambda x, batched: x.shape[0] if batched else 0, args, tuple(in_batched)
    )
    size = max(jax.tree.leaves(examples))

    def fold(path, x, batched):
        names = {getattr(key, "name", None) for key in path}
        of_rows = names & {"query_lengths", "kv_lengths"}
        shareable = "scale" in names or (share and "extras" in names and not of_rows)
        if shareable and not batched and x.shape[0] == 1:
            return x
        x = x if batched else jnp.broadcast_to(x, (size, *x.shape))
        return x.reshape(size * x.shape[1], *x.shape[2:])

    out = run(*jax.tree_util.tree_map_with_path(fold, args, tuple(in_batched)))
    return jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), out)


def _launch_arguments(problem: Problem, arrays: _Arrays) -> dict[str, Any]:
    return dict(
        mask=problem.mask,
        q_len=problem.q_len,
        kv_len=problem.kv_len,
        extras=arrays.extras,
        alibi_shift=problem.alibi_shift or 0,
        dropout_rate=problem.dropout_rate,
        interpret=problem.interpret,
    )


def forward(problem: Problem, operands: Operands):
    """out (B, T, N, Hv) and lse (B, N, T), float32, natural log."""
    arrays = _arrays(problem, operands, tuned.forward_of(problem))
    run = functools.partial(_run_forward, problem)
    out, lse = _foldable(run, (_labels(arrays),), (_Q, _ROWS))(arrays)
    return out[:, : problem.q_len, :, : problem.head_dim_v], lse


def _run_forward(problem: Problem, arrays: _Arrays):
    launched = _launched(problem, arrays)
    if io_few_queries.applies(launched):
        return _run_few_queries(launched, arrays)
    out, lse = forward_kernel.flash_forward(
        arrays.q,
        arrays.k,
        arrays.v,
        arrays.scale,
        logit_bound=_logit_bound(problem),
        config=tuned.forward_of(problem),
        **_launch_arguments(problem, arrays),
    )
    return out, lse[:, :, : problem.q_len]


def _logit_bound(problem: Problem) -> float | None:
    """No logit is larger, where that is known before the call runs."""
    return problem.soft_cap if isinstance(problem.soft_cap, float) else None


def _run_few_queries(problem: Problem, arrays: _Arrays):
    rows = few_queries.rearranged(problem, *arrays)
    q_len = rows.q.shape[1]
    out, lse = forward_kernel.flash_forward(
        _pad_tiles(rows.q, rows.config),
        rows.k,
        rows.v,
        rows.scale,
        mask=rows.mask,
        q_len=q_len,
        kv_len=problem.kv_len // rows.parts,
        extras=rows.extras,
        logit_bound=_logit_bound(problem),
        config=rows.config,
        interpret=problem.interpret,
    )
    return few_queries.restored(problem, rows, out, lse[:, :, :q_len], arrays.extras.sinks)


def backward(
    problem: Problem,
    operands: Operands,
    out,
    lse,
    dout,
    dlse,
    wanted: frozenset[str] = frozenset(),
) -> dict[str, Any]:
    """Gradients by operand name: query, key, value and `wanted`, out of MADE_BY_KERNELS."""
    cut = tuned.backward_of(problem)
    arrays = _arrays(problem, operands, cut)
    scale = _own_scale(problem, operands)
    query = operands.query if "scale" in wanted else None
    out, dout = (_pad_tiles(x, cut) for x in (out, dout))
    args = (arrays, scale, query, out, dout, lse, dlse)
    labels = _labels(arrays)
    words = (labels, "B", _Q, _Q, _Q, _ROWS, _ROWS)
    words = tuple(None if x is None else word for x, word in zip(args, words, strict=True))
    made = dict(query=_Q, key=_KV, value=_KV, scale="B", sinks="B N", bias=labels.extras.bias)
    made = {name: made[name] for name in wanted | {"query", "key", "value"}}
    for name in wanted & {"bias", "sinks"}:
        made[name] = sharding.whole_where(made[name], getattr(operands, name))
    run = functools.partial(_run_backward, problem, wanted)
    grads = _foldable(run, words, made, share="bias" not in wanted)(*args)
    grads["key"] = grads["key"][:, : problem.kv_len, :, : problem.head_dim]
    grads["value"] = grads["value"][:, : problem.kv_len, :, : problem.head_dim_v]
    if "scale" in wanted and operands.scale is not None and not operands.scale.ndim:
        grads["scale"] = grads["scale"].sum()
    if "sinks" in wanted:
        grads["sinks"] = grads["sinks"].sum(0)
    for name in wanted - {"query", "key", "value"}:
        grads[name] = grads[name].astype(getattr(operands, name).dtype)
    return {name: sharding.like(x, getattr(operands, name)) for name, x in grads.items()}


def _run_backward(problem: Problem, wanted, arrays: _Arrays, scale, query, out, dout, lse, dlse):
    """Gradients by name; `scale` is the user's, of any sign, None where it is known ahead.

    Those of scale and sinks have a batch axis in front.
    """
    extras = arrays.extras
    scale = _constant_scale(problem) if scale is None else scale
    deterministic = problem.deterministic_backward
    config = tuned.backward_of(problem)
    dq, dk, dv, dbias, statistics = backward_kernel.flash_backward(
        arrays.q,
        arrays.k,
        arrays.v,
        out,
        dout,
        lse,
        dlse,
        arrays.scale,
        config=config,
        kv_parts=tuned.kv_parts(_launched(problem, arrays), config),
        make_dq=not deterministic,
        make_dbias="bias" in wanted,
        dq_factor=None if "scale" in wanted else scale,
        **_launch_arguments(problem, arrays),
    )
    grads = dict(key=_sum_of_parts(dk, arrays.k), value=_sum_of_parts(dv, arrays.v))
    if dbias is not None:
        grads["bias"] = dbias
    if "sinks" in wanted:
        neg_delta = statistics.total_neg_delta()
        grads["sinks"] = _dsinks(extras, lse, _delta(problem, extras, neg_delta, dlse))
    scaled = _is_plain(problem) if deterministic else "scale" not in wanted  # by the kernel itself
    if deterministic:
        dq = dq_kernel.flash_backward_dq(
            arrays.q,
            arrays.k,
            arrays.v,
            dout,
            lse,
            statistics.total_neg_delta(),
            arrays.scale,
            config=tuned.dq_of(problem),
            out_float32=not scaled,
            **_launch_arguments(problem, arrays),
        )
    assert dq is not None
    dq = dq[:, : problem.q_len, :, : problem.head_dim]
    if scaled:
        return grads | dict(query=dq)
    if "scale" in wanted:  # a NaN behind a length meets a zero here, and must not win
        products = jnp.where(dq == 0, 0.0, query.astype(jnp.float32) * dq)
        grads["scale"] = products.sum((1, 2, 3))
    return grads | dict(query=(dq * scale[:, None, None, None]).astype(arrays.q.dtype))


def _launched(problem: Problem, arrays: _Arrays) -> Problem:
    """The problem of one launch: the batch rows and heads of a shard, with what vmap folds in."""
    batch, _, num_q_heads, _ = arrays.q.shape
    return dataclasses.replace(
        problem, batch=batch, num_q_heads=num_q_heads, num_kv_heads=arrays.k.shape[2]
    )


def _sum_of_parts(grad, like):
    """(B, S, K * parts, H) -> (B, S, K, H) like `like`, added up in float32."""
    if grad.shape == like.shape:
        return grad
    parts = grad.reshape(*like.shape[:3], -1, like.shape[3])
    return parts.sum(3, dtype=jnp.float32).astype(like.dtype)


def _delta(problem: Problem, extras: Extras, neg_delta, dlse):
    """rowsum(out * dout) - dlse (B, N, T), from what the kernels add."""
    delta = -neg_delta[..., : problem.q_len] * dropout.keep_scale(problem.dropout_rate)
    if extras.query_lengths is None or dlse is None:
        return delta
    row = jax.lax.broadcasted_iota(jnp.int32, delta.shape, 2)
    return jnp.where(row < extras.query_lengths[:, None, None], delta, -dlse)  # kernels add 0


def _dsinks(extras: Extras, lse, delta):
    """(B, N): a sink takes part in the log-sum-exp and in no value."""
    batch = lse.shape[0]
    sinks = jnp.repeat(extras.sinks, batch // extras.sinks.shape[0], axis=0)[:, :, None]
    return -jnp.where(sinks > -jnp.inf, jnp.exp(sinks - lse) * delta, 0.0).sum(-1)
