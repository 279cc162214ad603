"""How the tests call a kernel in interpret mode."""

import functools

import jax
import numpy as np


def interpreted(kernel, **static):
    """The kernel with what is static about it, as a function of arrays.

    One program: what runs around the kernel is not compiled operation by operation.
    """
    return jax.jit(functools.partial(kernel, interpret=True, **static))


def int32(values) -> np.ndarray | None:
    """An optional array of the kernel, from what a case has."""
    return None if values is None else np.asarray(values, np.int32)
