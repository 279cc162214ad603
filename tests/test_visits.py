"""The tables of tiles to visit against the dense mask: nothing visible is left out, or untested."""

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_flash import masks
from pallas_flash.config import ForwardConfig
from pallas_flash.kernels.sm90 import visits
from pallas_flash.kernels.sm90.call import Call, Extras

Q_LEN, KV_LEN, BATCH = 300, 500, 2
CONFIG = ForwardConfig(block_kv=64)  # 128 queries a tile
Q_POS, KV_POS = np.arange(Q_LEN)[:, None], np.arange(KV_LEN)[None]


def _packed_ids(length, rng):
    return np.sort(rng.integers(0, 5, (BATCH, length)), axis=1).astype(np.int32)


def _mixed_ids(length, rng):
    return rng.integers(0, 3, (BATCH, length)).astype(np.int32)


def _block_mask(rng):
    blocks = rng.choice([0.0, 0.5, 1.0], (1, 3, -(-Q_LEN // 128), -(-KV_LEN // 64)))
    share = blocks.repeat(128, 2).repeat(64, 3)[:, :, :Q_LEN, :KV_LEN]
    return rng.random(share.shape) < share


def _extras(kind, rng):
    if kind == "packed":
        return dict(query_segments=_packed_ids(Q_LEN, rng), kv_segments=_packed_ids(KV_LEN, rng))
    if kind == "mixed":
        return dict(query_segments=_mixed_ids(Q_LEN, rng), kv_segments=_mixed_ids(KV_LEN, rng))
    if kind == "blocks":
        return dict(mask=_block_mask(rng))
    return dict(mask=rng.random((BATCH, 1, 1, KV_LEN)) < 0.02)


BANDS = {
    "alone": (masks.And(), {}),
    "causal": (masks.Causal(KV_LEN - Q_LEN), {}),
    "window-lengths": (
        masks.Window(True, True) & masks.Lengths(True, True),
        dict(
            window=np.array([[40, 90]], np.int32),
            query_lengths=np.array([300, 130], np.int32),
            kv_lengths=np.array([500, 129], np.int32),
        ),
    ),
}


def _dense(mask, extras, b, head):
    """The mask of one batch row and head, [Q_LEN, KV_LEN]."""

    def pick(name) -> Any:
        return None if name not in extras else extras[name][b % len(extras[name])]

    window, dense = pick("window"), pick("mask")
    values = masks.MaskValues(
        query_length=pick("query_lengths"),
        kv_length=pick("kv_lengths"),
        window_left=None if window is None else window[0],
        window_right=None if window is None else window[1],
        query_segments=None if "mask" in extras else pick("query_segments")[:, None],
        kv_segments=None if "mask" in extras else pick("kv_segments")[None],
        dense=None if dense is None else dense[head % len(dense)],
    )
    return np.broadcast_to(mask.allowed(Q_POS, KV_POS, values), (Q_LEN, KV_LEN))


@pytest.mark.parametrize("by_kv", [False, True], ids=["by-q", "by-kv"])
@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("kind", ["packed", "mixed", "blocks", "keys"])
def test_table_is_that_of_the_dense_mask(kind, band, by_kv):
    rng = np.random.default_rng(0)
    own, (mask, extras) = _extras(kind, rng), BANDS[band]
    extras = own | extras
    mask = mask & (masks.Dense() if "mask" in own else masks.Segments())
    call = Call(
        config=CONFIG,
        head_dim=64,
        head_dim_v=64,
        dtype="bfloat16",
        batch=BATCH,
        q_len=Q_LEN,
        kv_len=KV_LEN,
        num_q_heads=3,
        num_kv_heads=3,
        mask=mask,
    )
    arrays = Extras(**{name: jnp.asarray(x) for name, x in extras.items()})
    table = visits.make_visits(call, arrays, by_kv=by_kv, at_least_one=not by_kv)
    order, counts = np.asarray(table.order), np.asarray(table.counts)
    rows, columns = (call.num_kv_tiles, call.num_q_tiles)[:: 1 if by_kv else -1]
    assert order.shape[2:] == (rows, columns)
    for b, head, row in itertools.product(range(BATCH), range(3), range(rows)):
        entry = b % order.shape[0], head % order.shape[1], row
        (masked, visited), listed = counts[entry], order[entry]
        assert sorted(listed) == list(range(columns)), "no tile twice"
        dense = _dense(mask, extras, b, head)
        for place, column in enumerate(listed):
            qi, ki = (column, row) if by_kv else (row, column)
            tile = dense[qi * 128 : (qi + 1) * 128, ki * 64 : (ki + 1) * 64]
            if place >= visited:
                assert not tile.any(), "a visible tile is not visited"
            elif place >= masked:
                is_whole = tile.shape[1] == 64
                assert tile.all() and is_whole, "a tile that hides something runs without a test"
            elif kind != "mixed" and band == "alone" and visited > 1:
                # Of mixed ids only the range is looked at; two masks may only together hide a tile.
                assert tile.any(), "a hidden tile is visited"
        assert by_kv or visited >= 1


@pytest.mark.parametrize("axis", [2, 3])
def test_packed_bits(axis):
    mask = np.random.default_rng(0).random((1, 2, 70, 90)) < 0.5
    words = np.asarray(visits._packed(jnp.asarray(mask), axis)).view(np.uint32)
    for index in np.ndindex(mask.shape):
        at = tuple(i // 32 if a == axis else i for a, i in enumerate(index))
        assert (words[at] >> (index[axis] % 32)) & 1 == mask[index]
