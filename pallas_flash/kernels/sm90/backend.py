"""Hopper: which problems the kernels take, and how their operands are laid out for them.

Nothing is padded in HBM beyond what a tiled copy needs: lengths to a multiple of 8, head dims to a
multiple of 64 (a call that needs neither is copied nowhere). A vmapped call is folded into the
batch axis, so it runs as one launch.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_flash import tuned
from pallas_flash.kernels.sm90 import backward as backward_kernel
from pallas_flash.kernels.sm90 import backward_dq as dq_kernel
from pallas_flash.kernels.sm90 import forward as forward_kernel
from pallas_flash.problem import LOW_PRECISION, Operands, Problem

FUSED_MASKS = frozenset({"Causal", "Lengths"})
MAX_HEAD_DIM = 256
ROW_TILE = 8  # a swizzled TMA copy moves 8 rows at a time
HEAD_TILE = 64  # 128 bytes, the widest swizzle


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
    refusals += [
        f"{what}: not fused"
        for what, present in (
            ("mask array", "Dense" in problem.mask_kinds),
            ("segment ids", "Segments" in problem.mask_kinds),
            ("local window", "Window" in problem.mask_kinds),
            ("bias", problem.bias_shape is not None),
            ("logits_soft_cap", problem.soft_cap is not None),
            ("sinks", problem.has_sinks),
            ("alibi_slopes", problem.alibi_shift is not None),
            ("dropout", problem.dropout_rate > 0),
        )
        if present
    ]
    if refusals:
        return False, "; ".join(refusals)
    return True, "fused on sm_90, forward and backward"


def notes(problem: Problem) -> tuple[str, ...]:
    """What the layout of this problem costs beyond its own work."""
    found = []
    for name, arrays in (("q_len", "query, out and their gradients"), ("kv_len", "key and value")):
        size = getattr(problem, name)
        if size % ROW_TILE:
            found.append(f"{name}={size} is no multiple of {ROW_TILE}: {arrays} are copied padded")
    for name in ("head_dim", "head_dim_v"):
        size = getattr(problem, name)
        if size % HEAD_TILE:
            padded = _round_up(size, HEAD_TILE)
            found.append(f"{name}={size} is padded to {padded}: copies, and the work of {padded}")
    return tuple(found)


@dataclasses.dataclass(frozen=True)
class _Arrays:
    """What the kernels read: batch first everywhere, so a vmapped axis folds into it."""

    q: Any
    k: Any
    v: Any
    scale: Any  # float32 (B,), positive
    query_lengths: Any = None
    kv_lengths: Any = None


jax.tree_util.register_dataclass(
    _Arrays, data_fields=[f.name for f in dataclasses.fields(_Arrays)], meta_fields=[]
)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _pad_axes(x, sizes: dict[int, int]):
    """x with axis `a` zero-padded to `sizes[a]`."""
    pads = [(0, sizes.get(axis, n) - n) for axis, n in enumerate(x.shape)]
    return jnp.pad(x, pads) if any(after for _, after in pads) else x


def _pad_tiles(x):
    """(B, T, heads, H) padded to what a tiled copy needs."""
    return _pad_axes(x, {1: _round_up(x.shape[1], ROW_TILE), 3: _round_up(x.shape[3], HEAD_TILE)})


def _is_plain(problem: Problem) -> bool:
    """The scale is a positive constant: the kernels take it as it is."""
    return problem.scale is not None and problem.scale > 0


def _sign_and_scale(problem: Problem, operands: Operands):
    """A factor +-1 or 0 for the queries (None for 1) and a positive scale (B,) for the kernels.

    The kernels' running maximum and initial accumulators want scale > 0. The sign goes into the
    queries, where it is exact; a scale of 0 makes them zero and any positive scale will do.
    """
    batch = (problem.batch,)
    scale = problem.scale if operands.scale is None else operands.scale
    scale = jnp.broadcast_to(jnp.asarray(scale, jnp.float32), batch)
    if _is_plain(problem):
        return None, scale
    return jnp.sign(scale), jnp.where(scale == 0, 1.0, jnp.abs(scale))


def _arrays(problem: Problem, operands: Operands) -> _Arrays:
    sign, scale = _sign_and_scale(problem, operands)
    query = operands.query
    if sign is not None:
        query = query * sign[:, None, None, None].astype(query.dtype)
    return _Arrays(
        q=_pad_tiles(query),
        k=_pad_tiles(operands.key),
        v=_pad_tiles(operands.value),
        scale=scale,
        query_lengths=operands.query_lengths,
        kv_lengths=operands.kv_lengths,
    )


def _foldable(run: Callable[..., Any]) -> Callable[..., Any]:
    """run(*args), all arrays batch first, such that vmap becomes a larger batch."""
    call = jax.custom_batching.custom_vmap(run)

    @call.def_vmap
    def rule(axis_size, in_batched, *args):
        def fold(x, batched):
            x = x if batched else jnp.broadcast_to(x, (axis_size, *x.shape))
            return x.reshape(axis_size * x.shape[1], *x.shape[2:])

        out = _foldable(run)(*jax.tree.map(fold, args, tuple(in_batched)))
        out = jax.tree.map(lambda x: x.reshape(axis_size, -1, *x.shape[1:]), out)
        return out, jax.tree.map(lambda _: True, out)

    return call


def _mask_arguments(problem: Problem, arrays: _Arrays) -> dict[str, Any]:
    return dict(
        mask=problem.mask,
        q_len=problem.q_len,
        kv_len=problem.kv_len,
        query_lengths=arrays.query_lengths,
        kv_lengths=arrays.kv_lengths,
        interpret=problem.interpret,
    )


def _tuning_key(problem: Problem, arrays: _Arrays) -> dict[str, Any]:
    # Ragged and short keys run best with the rows tuned for masks: the unmasked ones spill there.
    is_ragged = problem.kv_len % 128 != 0 or problem.kv_len < 1024
    return dict(
        head_dim=arrays.q.shape[-1],
        head_dim_v=arrays.v.shape[-1],
        is_masked=bool(problem.mask.parts()) or is_ragged,
    )


def forward(problem: Problem, operands: Operands):
    """out (B, T, N, Hv) and lse (B, N, T), float32, natural log."""
    arrays = _arrays(problem, operands)
    out, lse = _foldable(functools.partial(_run_forward, problem))(arrays)
    return out[:, : problem.q_len, :, : problem.head_dim_v], lse


def _run_forward(problem: Problem, arrays: _Arrays):
    config = tuned.tuned_forward(**_tuning_key(problem, arrays)).config
    out, lse = forward_kernel.flash_forward(
        arrays.q,
        arrays.k,
        arrays.v,
        arrays.scale,
        config=config,
        **_mask_arguments(problem, arrays),
    )
    return out, lse[:, :, : problem.q_len]


def backward(problem: Problem, operands: Operands, out, lse, dout, dlse) -> dict[str, Any]:
    """Gradients by operand name: query, key, value, and scale where it is an operand."""
    arrays = _arrays(problem, operands)
    scale = problem.scale if operands.scale is None else operands.scale
    scale = jnp.broadcast_to(jnp.asarray(scale, jnp.float32), (problem.batch,))
    query = None if operands.scale is None else operands.query
    products = out.astype(jnp.float32) * dout.astype(jnp.float32)
    delta = jnp.swapaxes(products.sum(-1), 1, 2) - dlse  # (B, N, T)
    run = _foldable(functools.partial(_run_backward, problem))
    dq, dk, dv, dscale = run(arrays, scale, query, _pad_tiles(dout), lse, delta)
    grads = dict(
        query=dq,
        key=dk[:, : problem.kv_len, :, : problem.head_dim],
        value=dv[:, : problem.kv_len, :, : problem.head_dim_v],
    )
    if operands.scale is not None:
        dscale = dscale if operands.scale.ndim else dscale.sum()
        grads["scale"] = dscale.astype(operands.scale.dtype)
    return grads


def _run_backward(problem: Problem, arrays: _Arrays, scale, query, dout, lse, delta):
    """dq, dk, dv and, where `query` is given, dscale (B,); `scale` is the user's, of any sign.

    The kernels' own dq is of the logits before any scale, float32.
    """
    config = tuned.tuned_backward(**_tuning_key(problem, arrays)).config
    inputs = (arrays.q, arrays.k, arrays.v, dout, lse, delta, arrays.scale)
    deterministic = problem.deterministic_backward
    dq, dk, dv = backward_kernel.flash_backward(
        *inputs,
        config=config,
        make_dq=not deterministic,
        **_mask_arguments(problem, arrays),
    )
    scaled = deterministic and _is_plain(problem)  # by the kernel itself
    if deterministic:
        dq = dq_kernel.flash_backward_dq(
            *inputs,
            config=tuned.tuned_dq(arrays.q.shape[-1], arrays.v.shape[-1]).config,
            out_float32=not scaled,
            **_mask_arguments(problem, arrays),
        )
    assert dq is not None
    dq = dq[:, : problem.q_len, :, : problem.head_dim]
    if scaled:
        return dq, dk, dv, None
    dscale = None
    if query is not None:  # a NaN behind a length meets a zero here, and must not win
        products = jnp.where(dq == 0, 0.0, query.astype(jnp.float32) * dq)
        dscale = products.sum((1, 2, 3))
    return (dq * scale[:, None, None, None]).astype(arrays.q.dtype), dk, dv, dscale
