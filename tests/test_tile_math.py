"""The arithmetic of a tile where it takes one of several ways."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_flash import tile_math

ALL = lambda tile, limit: jnp.abs(tile).max() <= limit


@pytest.mark.parametrize("factor", [1e-12, 1e-7, 1e-3, 1.0, 1e3, 1e7])
@pytest.mark.parametrize("largest", [0.01, 0.3, 0.34, 2.0, 50.0])
def test_squashed_is_tanh(largest, factor):
    x = np.linspace(-largest, largest, 1001).astype(np.float32)
    scores = jnp.asarray(x / np.float32(factor))
    wanted = np.tanh(np.asarray(scores, np.float64) * factor)
    for all_within in (ALL, None):
        squashed = functools.partial(tile_math.squashed, all_within=all_within)
        got = jax.jit(squashed)(scores, factor)
        np.testing.assert_allclose(got, wanted, atol=6e-7)


def test_squashed_of_infinity():
    """A tile with an infinite score is not small."""
    scores = jnp.array([-jnp.inf, 0.0, jnp.inf])
    np.testing.assert_array_equal(tile_math.squashed(scores, jnp.float32(0.01), ALL), [-1, 0, 1])


@pytest.mark.parametrize("values", [[0.5, -3.0], [-jnp.inf, 2.0], [float(jnp.finfo("f4").min), 1]])
def test_bias_in_scores(values):
    """Only -inf stays infinite, and a tile with anything of that size is not tame."""
    bias = jnp.array(values, jnp.float32)
    scores, is_tame = tile_math.bias_in_scores(bias, jnp.float32(11.0), ALL)
    np.testing.assert_array_equal(jnp.isinf(scores), jnp.isinf(bias))
    assert bool(is_tame) == (min(values) > -1e3)
    np.testing.assert_allclose(scores[1], 11.0 * bias[1])
