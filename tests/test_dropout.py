"""The dropout pattern: its statistics, and that nothing but key and counters decides it."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_flash import dropout

SIZES = dict(batch=4, num_heads=6, q_len=128, kv_len=160)


draw = jax.jit(
    dropout.dropout_keep_mask,
    static_argnames=("rate", "batch", "num_heads", "q_len", "kv_len", "broadcast"),
)


@functools.cache
def pattern(seed=0, rate=0.3, **changes):
    return np.asarray(draw(jax.random.key(seed), rate=rate, **(SIZES | changes)))


def test_an_origin_cuts_a_part_out_of_the_whole_pattern():
    part = dict(batch=2, num_heads=3, q_len=50, kv_len=70)
    got = pattern(**part, origin=(1, 2, 30, 40))
    np.testing.assert_array_equal(got, pattern()[1:3, 2:5, 30:80, 40:110])


def pattern_of(key):
    return np.asarray(draw(key, rate=0.3, **SIZES))


def z_of_agreement(a, b, keep):
    """How many standard deviations the agreement of two patterns is from independence."""
    expected = keep**2 + (1 - keep) ** 2
    deviation = np.sqrt(expected * (1 - expected) / a.size)
    return abs((a == b).mean() - expected) / deviation


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_mean_is_the_keep_probability(rate):
    kept = pattern(rate=rate)
    assert abs(kept.mean() - (1 - rate)) < 4.5 * np.sqrt(rate * (1 - rate) / kept.size)


@pytest.mark.parametrize("axis", range(4))
def test_neighbours_are_independent_along_every_axis(axis):
    kept = pattern()
    for step in (1, 2, 3):
        left = np.delete(kept, range(step), axis)
        right = np.delete(kept, range(kept.shape[axis] - step, kept.shape[axis]), axis)
        assert z_of_agreement(left, right, 0.7) < 4.5


@pytest.mark.parametrize("axes", list(itertools.combinations(range(4), 2)))
def test_counters_are_not_interchangeable(axes):
    kept = np.moveaxis(pattern(batch=24, num_heads=24, q_len=24, kv_len=24), axes, (0, 1))
    i, j = np.triu_indices(24, k=1)
    assert z_of_agreement(kept[i, j], kept[j, i], 0.7) < 4.5


@pytest.mark.parametrize("axis", range(4))
def test_sums_scatter_as_binomials_do(axis):
    counts = pattern(rate=0.5).sum(axis=axis)
    n = list(SIZES.values())[axis]
    spread = 4.5 * np.sqrt(2 / counts.size)
    assert abs(counts.var() / (n * 0.25) - 1) < spread + 0.01


def test_keys_differ():
    first = pattern()
    for seed in (1, 2, 2**31 - 1):
        assert z_of_agreement(first, pattern(seed), 0.7) < 4.5
    for words in ([1, 0], [0, 1], [2**32 - 1, 0], [0, 2**31]):
        raw = jnp.array(words, jnp.uint32)
        assert z_of_agreement(first, pattern_of(raw), 0.7) < 4.5
    assert (first == pattern_of(jax.random.key(0))).all()


def test_pairs_of_bits_are_uniform_over_many_keys():
    q_pos, kv_pos = jnp.arange(4)[:, None], jnp.arange(4)
    draw_tile = jax.jit(jax.vmap(lambda key: dropout.keep(key, 0, 0, q_pos, kv_pos, 0.5)))
    keys = jax.random.key_data(jax.random.split(jax.random.key(3), 4000))
    bits = np.asarray(draw_tile(keys)).reshape(4000, 16) * 2.0 - 1
    correlations = bits.T @ bits / np.sqrt(4000)
    assert abs(correlations[~np.eye(16, dtype=bool)]).max() < 5
    assert abs(bits.sum(axis=0)).max() / np.sqrt(4000) < 4.5


def test_a_cut_of_the_counters_is_a_cut_of_the_pattern():
    kept = pattern()
    q_pos, kv_pos = jnp.arange(40, 60)[:, None], jnp.arange(100, 117)[None, :]
    cut = dropout.keep(dropout.key_data(jax.random.key(0)), 3, 5, q_pos, kv_pos, 0.3)
    np.testing.assert_array_equal(cut, kept[3, 5, 40:60, 100:117])
    rows = dropout.row_keys(dropout.key_data(jax.random.key(0)), 3, 5, q_pos)
    np.testing.assert_array_equal(dropout.keep_in_row(rows, kv_pos, 0.3), cut)


def test_broadcast_is_the_pattern_of_the_first_row_and_head():
    kept = pattern(broadcast=True)
    np.testing.assert_array_equal(kept, np.broadcast_to(pattern()[:1, :1], kept.shape))


def test_rates_zero_and_one():
    assert pattern(rate=0.0).all()
    assert pattern(rate=1.0).mean() < 1e-4 and dropout.keep_scale(1.0) == 0.0
    assert dropout.keep_scale(0.75) == 4.0


def test_typed_and_raw_keys_are_one():
    np.testing.assert_array_equal(pattern(), pattern_of(jax.random.PRNGKey(0)))
    assert dropout.key_data(jax.random.key(1)).shape == (2,)


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_longer_keys_fold_and_still_differ(impl):
    words = [dropout.key_data(jax.random.key(seed, impl=impl)) for seed in range(3)]
    assert all(w.shape == (2,) and w.dtype == jnp.uint32 for w in words)
    assert len({tuple(np.asarray(w).tolist()) for w in words}) == 3


@pytest.mark.parametrize(
    "key", [0, np.zeros(2, np.int32), np.zeros((3, 2), np.uint32), np.zeros(0, np.uint32)]
)
def test_what_is_no_key_raises(key):
    with pytest.raises(TypeError, match="dropout key"):
        dropout.key_data(key)


def test_the_same_under_x64_and_with_32_bits_only():
    kept = pattern()
    with jax.enable_x64(True):
        np.testing.assert_array_equal(pattern_of(jax.random.key(0)), kept)
        q_pos, kv_pos = jnp.arange(4, dtype=jnp.int32)[:, None], jnp.arange(4, dtype=jnp.int32)
        tile = lambda key: dropout.keep(key, 0, 0, q_pos, kv_pos, 0.3)
        text = str(jax.make_jaxpr(tile)(jnp.zeros(2, jnp.uint32)))
    assert "u64" not in text and "f64" not in text
