"""The mask algebra: intervals against the dense mask, and each mask against its definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_flash import masks
from pallas_flash.masks import And, Bounds, Causal, Dense, Lengths, MaskValues, Segments, Window

Q_LEN, KV_LEN = 19, 23
Q_POS, KV_POS = np.arange(Q_LEN)[:, None], np.arange(KV_LEN)[None, :]

offset = st.none() | st.integers(-30, 30)
all_bounds = st.builds(
    Bounds,
    lower=offset,
    upper=offset,
    q_end=st.none() | st.integers(0, Q_LEN),
    kv_end=st.none() | st.integers(0, KV_LEN),
)


def dense(bounds: Bounds) -> np.ndarray:
    """The definition."""
    ahead, out = KV_POS - Q_POS, np.ones((Q_LEN, KV_LEN), bool)
    out &= bounds.lower is None or ahead >= bounds.lower
    out &= bounds.upper is None or ahead <= bounds.upper
    out &= bounds.q_end is None or Q_POS < bounds.q_end
    out &= bounds.kv_end is None or KV_POS < bounds.kv_end
    return out


def interval_of(seen: np.ndarray) -> tuple[int, int]:
    """Hull of the True entries, (0, 0) without any."""
    at = np.flatnonzero(seen)
    return (int(at[0]), int(at[-1]) + 1) if at.size else (0, 0)


def normal(interval) -> tuple[int, int]:
    lo, hi = map(int, interval)
    return (lo, hi) if hi > lo else (0, 0)


def assert_hull(bounds: Bounds, interval, seen: np.ndarray) -> None:
    """Nothing is seen outside; the interval is the smallest such unless the band is empty."""
    lo, hi = normal(interval)
    assert not seen[:lo].any() and not seen[hi:].any()
    if bounds.lower is None or bounds.upper is None or bounds.lower <= bounds.upper:
        assert (lo, hi) == interval_of(seen)


def tiles(length: int):
    pair = st.tuples(st.integers(0, length - 1), st.integers(1, length))
    return pair.map(lambda p: (p[0], min(p[0] + p[1], length)))


@settings(max_examples=250, deadline=None)
@given(all_bounds, tiles(Q_LEN))
def test_key_intervals_say_what_the_dense_mask_says(bounds, tile):
    rows = dense(bounds)[slice(*tile)]
    assert_hull(bounds, bounds.kv_any(*tile, KV_LEN), rows.any(axis=0))
    assert normal(bounds.kv_all(*tile, KV_LEN)) == interval_of(rows.all(axis=0))


@settings(max_examples=250, deadline=None)
@given(all_bounds, tiles(KV_LEN))
def test_query_intervals_say_what_the_dense_mask_says(bounds, tile):
    columns = dense(bounds)[:, slice(*tile)]
    assert_hull(bounds, bounds.q_any(*tile, Q_LEN), columns.any(axis=1))
    assert normal(bounds.q_all(*tile, Q_LEN)) == interval_of(columns.all(axis=1))


@settings(max_examples=60, deadline=None)
@given(all_bounds, all_bounds)
def test_intersection_is_and(a, b):
    np.testing.assert_array_equal(dense(a & b), dense(a) & dense(b))


@settings(max_examples=60, deadline=None)
@given(all_bounds)
def test_allowed_is_the_definition(bounds):
    allowed = bounds.allowed(Q_POS, KV_POS)
    allowed = True if allowed is None else allowed
    np.testing.assert_array_equal(np.broadcast_to(allowed, (Q_LEN, KV_LEN)), dense(bounds))


@jax.jit
def _traced_intervals(numbers, q_tile, kv_tile):
    bounds = Bounds(*numbers)
    return (
        bounds.kv_any(*q_tile, KV_LEN),
        bounds.kv_all(*q_tile, KV_LEN),
        bounds.q_any(*kv_tile, Q_LEN),
        bounds.q_all(*kv_tile, Q_LEN),
    )


whole = st.integers(-30, 30)


@settings(max_examples=60, deadline=None)
@given(
    st.tuples(whole, whole, st.integers(0, Q_LEN), st.integers(0, KV_LEN)),
    tiles(Q_LEN),
    tiles(KV_LEN),
)
def test_traced_bounds_equal_static_ones(numbers, q_tile, kv_tile):
    static = _traced_intervals.__wrapped__(numbers, q_tile, kv_tile)
    int32s = jax.tree.map(np.int32, (numbers, q_tile, kv_tile))
    assert list(map(normal, _traced_intervals(*int32s))) == list(map(normal, static))


def test_a_tile_may_reach_beyond_the_last_query():
    bounds = Bounds(upper=0, q_end=Q_LEN)
    assert bounds.kv_any(16, 32, KV_LEN) == (0, Q_LEN)
    assert normal(bounds.kv_all(16, 32, KV_LEN)) == (0, 0)  # rows past the end see nothing


VALUES = MaskValues(
    query_length=np.int32(11),
    kv_length=np.int32(14),
    window_left=np.int32(3),
    window_right=np.int32(2),
    query_segments=(Q_POS // 5).astype(np.int32),
    kv_segments=(KV_POS // 7).astype(np.int32),
    dense=(Q_POS * KV_POS) % 3 != 1,
)
AHEAD = KV_POS - Q_POS
DEFINITIONS = {
    "causal": (Causal(), AHEAD <= 0),
    "causal-bottom-right": (Causal(KV_LEN - Q_LEN), AHEAD <= KV_LEN - Q_LEN),
    "window": (Window(True, True), (AHEAD >= -3) & (AHEAD <= 2)),
    "window-left": (Window(True, False), AHEAD >= -3),
    "window-right-shifted": (Window(False, True, shift=4), AHEAD <= 6),
    "lengths": (Lengths(True, True), (Q_POS < 11) & (KV_POS < 14)),
    "query-length": (Lengths(True, False), (Q_POS < 11) & (KV_POS >= 0)),
    "segments": (Segments(), Q_POS // 5 == KV_POS // 7),
    "dense": (Dense(), VALUES.dense),
}


@pytest.mark.parametrize("name", DEFINITIONS)
def test_mask_is_its_definition(name):
    mask, want = DEFINITIONS[name]
    allowed = np.asarray(mask.allowed(Q_POS, KV_POS, VALUES))
    np.testing.assert_array_equal(np.broadcast_to(allowed, want.shape), want)
    np.testing.assert_array_equal(  # the transposed tile of a backward kernel
        np.broadcast_to(mask.allowed(Q_POS, KV_POS, VALUES), want.shape).T, want.T
    )


def test_every_pair_of_masks_intersects():
    for left, want_left in DEFINITIONS.values():
        for right, want_right in DEFINITIONS.values():
            allowed = (left & right).allowed(Q_POS, KV_POS, VALUES)
            want = want_left & want_right
            np.testing.assert_array_equal(np.broadcast_to(allowed, want.shape), want)


def test_nothing_hidden_is_none_and_a_neutral_element():
    assert And().allowed(Q_POS, KV_POS, VALUES) is None
    assert (And() & Causal()).parts() == (Causal(),)
    assert hash(Causal() & Dense()) == hash(Causal() & Dense())


def test_only_masks_that_are_all_bounds_say_so():
    assert And().is_bounds and (Causal() & Lengths(True, True) & Window(True, True)).is_bounds
    assert not Segments().is_bounds and not (Causal() & Dense()).is_bounds


@pytest.mark.parametrize(("left", "right"), [(-4, 9), (9, -4)])
def test_a_negative_window_side_is_a_window_beside_the_diagonal(left, right):
    values = VALUES._replace(window_left=np.int32(left), window_right=np.int32(right))
    allowed = Window(True, True).allowed(Q_POS, KV_POS, values)
    np.testing.assert_array_equal(np.asarray(allowed), (AHEAD >= -left) & (AHEAD <= right))


@pytest.mark.parametrize("combine", [lambda a, b: a and b, lambda a, b: a or b, lambda a, b: not a])
def test_the_words_and_or_not_raise(combine):
    with pytest.raises(TypeError, match="combined with `&`"):
        combine(Causal(), Dense())


def test_bounds_stay_int32_under_x64():
    with jax.enable_x64(True):
        bounds = (Causal() & Window(True, True) & Lengths(True, True)).bounds(
            jax.tree.map(jnp.asarray, VALUES)
        )
        for interval in (bounds.kv_any(0, 8, KV_LEN), bounds.q_any(0, 8, Q_LEN)):
            assert {x.dtype for x in interval} == {jnp.dtype(jnp.int32)}


def test_hide_puts_minus_infinity():
    scores = jnp.ones((1, 2))
    np.testing.assert_array_equal(masks.hide(scores, np.array([[True, False]])), [[1, -np.inf]])
    assert masks.hide(scores, None) is scores
