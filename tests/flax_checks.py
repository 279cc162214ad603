"""What tests of the linen and nnx halves compare with, and a jit for programs that run once."""

import jax
import numpy as np


def fast_jit(fn):
    """jit, compiled in a hurry."""
    return jax.jit(fn, compiler_options={"xla_backend_optimization_level": 0})


def assert_near(a, b, tolerance=3e-6):
    """The same tree of arrays, but for rounding in float32."""
    close = lambda x, y: np.testing.assert_allclose(x, y, atol=tolerance, rtol=tolerance)
    jax.tree.map(close, a, b)


def assert_differ(a, b):
    """Two arrays of the same shape that rounding can not explain."""
    assert np.max(np.abs(np.asarray(a) - np.asarray(b))) > 1e-3
