"""What one step of the ring computes of a pair of parts, forward and backward.

A step's forward is the package's own. Its backward starts from out and lse of whole rows, of which
the pair has seen only a part: the kernels work from lse anyhow; for the XLA implementation JAX
differentiates a pair's own out and lse, weighed by their share of the row.

Must not know where the pair stands, nor what other steps found but out and lse of the whole rows.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_flash import autodiff
from pallas_flash.kernels import xla
from pallas_flash.problem import Problem


@functools.partial(jax.jit, static_argnums=(0, 1))
def forward(implementation, problem, operands):
    """out (B, T, N, Hv) and lse (B, N, T) of the queries of a pair over its keys alone."""
    if implementation == "xla":
        return xla.attention(problem, operands)
    return _by_kernels(autodiff.kernels().forward, problem, operands)


@functools.partial(jax.jit, static_argnums=(0, 1))
def backward(implementation, problem, operands, out, lse, dout, dlse):
    """What a pair adds to the gradients, by name, from out and lse of whole rows."""
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
