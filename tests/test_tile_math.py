"""The arithmetic of a tile where it takes one of several ways."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_flash import tile_math

ALL = lambda tile, limit: jnp.abs(tile).max() <= limit
squashed = functools.partial(tile_math.squashed, reciprocal=lambda x: 1.0 / x)


@pytest.mark.parametrize("factor", [1e-12, 1e-7, 1e-3, 1.0, 1e3, 1e7])
@pytest.mark.parametrize("largest", [0.01, 0.3, 0.34, 2.0, 50.0])
def test_squashed_is_tanh(largest, factor):
    x = np.linspace(-largest, largest, 1001).astype(np.float32)
    scores = jnp.asarray(x / np.float32(factor))
    wanted = np.tanh(np.asarray(scores, np.float64) * factor)
    top = 72.0
    ways = [dict(all_within=ALL), dict(all_within=None), dict(reciprocal=None)]
    for way in ways:
        got = jax.jit(functools.partial(squashed, **way))(scores, factor, top)
        np.testing.assert_allclose(got / top, wanted, atol=6e-7)


def test_squashed_of_infinity():
    """A tile with an infinite score is not small."""
    scores = jnp.array([-jnp.inf, 0.0, jnp.inf])
    got = squashed(scores, jnp.float32(0.01), 3.0, all_within=ALL)
    np.testing.assert_array_equal(got, [-3, 0, 3])


def test_needs_pivot():
    """Only bfloat16, whose exponent is as wide as that of the sums, and only logits of a bound."""
    assert not tile_math.needs_pivot(50.0, jnp.bfloat16)
    assert tile_math.needs_pivot(50.0, jnp.float16)
    assert tile_math.needs_pivot(60.0, jnp.bfloat16)
    assert tile_math.needs_pivot(None, jnp.bfloat16)


@pytest.mark.parametrize("values", [[0.5, -3.0], [-jnp.inf, 2.0], [float(jnp.finfo("f4").min), 1]])
def test_bias_in_scores(values):
    """Only -inf stays infinite, and a tile with anything of that size is not tame."""
    bias = jnp.array(values, jnp.float32)
    scores, is_tame = tile_math.bias_in_scores(bias, jnp.float32(11.0), ALL)
    np.testing.assert_array_equal(jnp.isinf(scores), jnp.isinf(bias))
    assert bool(is_tame) == (min(values) > -1e3)
    np.testing.assert_allclose(scores[1], 11.0 * bias[1])
