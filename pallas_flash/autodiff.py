"""Derivatives of the fused path: its custom_vjp, and the two custom_jvp inside it.

    attend          custom_vjp; its rules call
      _forward      custom_jvp: the kernel's value, derivatives of the XLA formula
      _backward     custom_jvp: the kernel's value, derivatives of the XLA formula's gradient

Reverse mode therefore runs two kernels. Anything that differentiates further (grad of grad,
hessian, jacrev of a gradient) keeps the kernels' values and takes derivatives of exact formulas. A
bare jvp, linearize or jacfwd of `attend` raises JAX's own TypeError for custom_vjp: use
implementation="xla" there.

Residuals: the operands, out and lse, the last two under the checkpoint names below, so that a
`jax.checkpoint` policy can save them and run the forward kernel once.

Only gradients that someone asks for are made: that of a bias costs a buffer of its size. What no
kernel makes (the gradients of soft cap and ALiBi slopes) comes from the formula, when asked for.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from pallas_flash import dispatch, sharding
from pallas_flash.kernels import xla
from pallas_flash.problem import AXES, DIFFERENTIABLE, Operands, Problem

OUT_NAME = "pallas_flash_out"
LSE_NAME = "pallas_flash_lse"


def attention(implementation: str, problem: Problem, operands: Operands) -> tuple[Any, Any]:
    """out (B, T, N, Hv) and lse (B, N, T), differentiable, by the implementation named."""
    if implementation == "xla":
        return _plain(problem, operands)
    return attend(problem, sharding.vary_alike(operands))


def _plain(problem, operands):
    """The XLA implementation. The compiler cuts it over a mesh by itself, but under Explicit axes
    JAX would have to be told the sharding of each of its steps: there each device runs its own.
    """
    if not sharding.explicit_axes(operands):
        return xla.attention(problem, operands)
    rows, heads = (jnp.arange(n, dtype=jnp.uint32) for n in (problem.batch, problem.num_q_heads))

    def run(operands, rows, heads):
        if problem.dropout_rate:
            zero = jnp.zeros_like(rows[0])
            operands = operands._replace(dropout_origin=jnp.stack([rows[0], heads[0], zero, zero]))
        return xla.attention(problem.resized(operands), operands)

    words = {n: None if x is None else getattr(AXES, n) for n, x in operands._asdict().items()}
    labels = (sharding.labelled(Operands(**words), operands), "B", "N")
    args = (operands, rows, heads)
    return sharding.over_explicit_shards(run, args, labels, (AXES.query, "B N ."))


def kernels():
    family = dispatch.gpu_family(dispatch.Device("gpu", (9, 0)))
    assert family is not None
    return family


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(problem: Problem, operands: Operands) -> tuple[Any, Any]:
    """The fused path: out (B, T, N, Hv) and lse (B, N, T)."""
    return _forward(problem, operands)


def _attend_fwd(problem, operands):
    operands, wanted = _values_and_wanted(operands)
    out, lse = _forward(problem, operands)
    out, lse = checkpoint_name(out, OUT_NAME), checkpoint_name(lse, LSE_NAME)
    return (out, lse), (operands, out, lse, wanted)


def _values_and_wanted(operands):
    """The operands, and by name (present or None: static) those that someone differentiates by."""
    is_leaf = lambda x: isinstance(x, CustomVJPPrimal)
    given = {n: getattr(operands, n) for n in DIFFERENTIABLE}
    wanted = {n: () for n, x in given.items() if x is not None and x.perturbed}
    return jax.tree.map(lambda x: x.value, operands, is_leaf=is_leaf), wanted


def _attend_bwd(problem, residuals, cotangents):
    operands, out, lse, wanted = residuals
    dout, dlse = cotangents
    dout, dlse = _dense(dout), None if isinstance(dlse, SymbolicZero) else dlse
    present = frozenset(n for n in wanted) | {"query", "key", "value"}
    grads = _backward(problem, present, operands, out, lse, dout, dlse)
    return (Operands(**{n: grads.get(n) for n in operands._fields}),)


attend.defvjp(_attend_fwd, _attend_bwd, symbolic_zeros=True)


def _dense(cotangent: Any) -> Any:
    if isinstance(cotangent, SymbolicZero):
        aval: Any = cotangent
        return jnp.zeros(aval.shape, aval.dtype)
    return cotangent


def _split(operands: Operands, names: frozenset[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Operands to differentiate by, and the rest, both without absent ones."""
    present = {n: x for n, x in operands._asdict().items() if x is not None}
    inexact = {n: x for n, x in present.items() if n in names}
    return inexact, {n: x for n, x in present.items() if n not in names}


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _forward(problem, operands):
    return kernels().forward(problem, operands)


@_forward.defjvp
def _forward_jvp(problem, primals, tangents):
    value = _forward(problem, *primals)
    _, tangent = jax.jvp(functools.partial(xla.attention, problem), primals, tangents)
    return value, tangent


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _backward(problem, wanted, operands, out, lse, dout, dlse):
    """Gradients by name of the operands in `wanted`; what no kernel makes, by the formula.

    dlse: None where nobody differentiates by lse.
    """
    family = kernels()
    by_kernels = wanted & family.MADE_BY_KERNELS
    grads = family.backward(problem, operands, out, lse, dout, dlse, by_kernels)
    others = wanted - by_kernels
    return grads | (_formula(problem, others, operands, dout, dlse) if others else {})


def _formula(problem, wanted, operands, dout, dlse):
    """Gradients by name, from the XLA formula."""
    inexact, rest = _split(operands, wanted)
    (_, lse), vjp = jax.vjp(lambda x: xla.attention(problem, Operands(**x, **rest)), inexact)
    return vjp((dout, jnp.zeros_like(lse) if dlse is None else dlse))[0]


@_backward.defjvp
def _backward_jvp(problem, wanted, primals, tangents):
    value = _backward(problem, wanted, *primals)

    # out and lse are functions of the operands: the formula computes them from there, so their
    # own tangents carry nothing new.
    pick = lambda seq: (seq[0], seq[3], seq[4])
    formula = functools.partial(_formula, problem, wanted)
    _, tangent = jax.jvp(formula, pick(primals), pick(tangents))
    return value, tangent
