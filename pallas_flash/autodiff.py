"""Derivatives of the fused path: the only custom_vjp, and the two custom_jvp inside it.

    attend          custom_vjp; its rules call
      _forward      custom_jvp: the kernel's value, derivatives of the XLA formula
      _backward     custom_jvp: the kernel's value, derivatives of the XLA formula's gradient

Reverse mode therefore runs two kernels. Anything that differentiates further (grad of grad,
hessian, jacrev of a gradient) keeps the kernels' values and takes derivatives of exact formulas. A
bare jvp, linearize or jacfwd of `attend` raises JAX's own TypeError for custom_vjp: use
implementation="xla" there.

Residuals: the operands, out and lse, the last two under the checkpoint names below, so that a
`jax.checkpoint` policy can save them and run the forward kernel once.
"""

import functools
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from pallas_flash import dispatch
from pallas_flash.kernels import xla
from pallas_flash.problem import DIFFERENTIABLE, Operands, Problem

OUT_NAME = "pallas_flash_out"
LSE_NAME = "pallas_flash_lse"


def attention(implementation: str, problem: Problem, operands: Operands) -> tuple[Any, Any]:
    """out (B, T, N, Hv) and lse (B, N, T), differentiable, by the implementation named."""
    if implementation == "xla":
        return xla.attention(problem, operands)
    return attend(problem, operands)


def _kernels():
    family = dispatch.gpu_family(dispatch.Device("gpu", (9, 0)))
    assert family is not None
    return family


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(problem: Problem, operands: Operands) -> tuple[Any, Any]:
    """The fused path: out (B, T, N, Hv) and lse (B, N, T)."""
    return _forward(problem, operands)


def _attend_fwd(problem, operands):
    out, lse = _forward(problem, operands)
    out, lse = checkpoint_name(out, OUT_NAME), checkpoint_name(lse, LSE_NAME)
    return (out, lse), (operands, out, lse)


def _attend_bwd(problem, residuals, cotangents):
    operands, out, lse = residuals
    grads = _backward(problem, operands, out, lse, *cotangents)
    return (Operands(**grads, **_no_gradient(operands)),)


attend.defvjp(_attend_fwd, _attend_bwd)


def _no_gradient(operands: Operands) -> dict[str, None]:
    return {name: None for name in operands._fields if name not in DIFFERENTIABLE}


def _split(operands: Operands) -> tuple[dict[str, Any], dict[str, Any]]:
    """Operands that have a gradient, and the rest, both without absent ones."""
    present = {n: x for n, x in operands._asdict().items() if x is not None}
    inexact = {n: x for n, x in present.items() if n in DIFFERENTIABLE}
    return inexact, {n: x for n, x in present.items() if n not in DIFFERENTIABLE}


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _forward(problem, operands):
    return _kernels().forward(problem, operands)


@_forward.defjvp
def _forward_jvp(problem, primals, tangents):
    value = _forward(problem, *primals)
    _, tangent = jax.jvp(functools.partial(xla.attention, problem), primals, tangents)
    return value, tangent


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _backward(problem, operands, out, lse, dout, dlse):
    """Gradients by name of every differentiable operand that is present."""
    return _kernels().backward(problem, operands, out, lse, dout, dlse)


@_backward.defjvp
def _backward_jvp(problem, primals, tangents):
    value = _backward(problem, *primals)

    # out and lse are functions of the operands: the formula computes them from there, so their
    # own tangents carry nothing new.
    def formula(operands, dout, dlse):
        inexact, rest = _split(operands)
        _, vjp = jax.vjp(lambda x: xla.attention(problem, Operands(**x, **rest)), inexact)
        return vjp((dout, dlse))[0]

    pick = lambda seq: (seq[0], seq[3], seq[4])
    _, tangent = jax.jvp(formula, pick(primals), pick(tangents))
    return value, tangent
