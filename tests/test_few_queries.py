"""Few queries against many keys: rearranged, cut into parts and merged, it is the same attention.

The kernel itself is stood in for by the XLA implementation: what is looked at is what goes into it
and what is made of its results. `cases.py` has calls that run this way on the kernel.
"""

import itertools
import re

import jax.numpy as jnp
import numpy as np
import pytest

import pallas_flash
from pallas_flash import dispatch, io_few_queries, masks, tuned
from pallas_flash.kernels import xla
from pallas_flash.kernels.sm90 import forward
from pallas_flash.problem import Operands, Problem

BOTTOM_RIGHT = dict(is_causal=True, causal_alignment="bottom_right")
RNG = np.random.default_rng(0)
LENGTHS = jnp.array([3000, 0])


def _dense(*shape):
    return jnp.asarray(RNG.random(shape) < 0.3)


# (queries, keys, query heads, kv heads), arguments
CALLS = {
    "plain": ((1, 2048, 8, 2), {}),
    "bottom-right": ((1, 2048, 8, 2), BOTTOM_RIGHT),
    "top-left": ((1, 2048, 8, 2), dict(is_causal=True)),
    "lengths": ((1, 4096, 4, 4), dict(key_value_seq_lengths=LENGTHS)),
    "sinks": ((1, 4096, 8, 2), dict(key_value_seq_lengths=LENGTHS, sinks=jnp.linspace(-1, 3, 8))),
    "query-lengths": (
        (4, 4096, 8, 2),
        BOTTOM_RIGHT
        | dict(key_value_seq_lengths=LENGTHS + 50, query_seq_lengths=jnp.array([4, 2])),
    ),
    "window": ((8, 2048, 4, 4), BOTTOM_RIGHT | dict(local_window_size=(500, 0))),
    "soft-cap": (
        (1, 2048, 4, 1),
        BOTTOM_RIGHT | dict(local_window_size=(500, 0), logits_soft_cap=5.0),
    ),
    "as-many-rows-as-fit": ((16, 2048, 8, 2), BOTTOM_RIGHT),
    "mask-per-head": ((3, 2048, 4, 2), dict(mask=_dense(2, 4, 3, 2048))),
    "mask-of-keys-ragged": ((3, 2000, 4, 2), dict(mask=_dense(1, 1, 1, 2000))),
    "segments": (
        (2, 2048, 4, 2),
        dict(
            query_segment_ids=jnp.array([[1, 2], [0, 2]]),
            key_value_segment_ids=jnp.arange(4096).reshape(2, 2048) % 2048 // 700,
        ),
    ),
}


@pytest.fixture
def launches(monkeypatch):
    """(batch, queries, heads, config) of each launch of what stands for the kernel."""
    seen = []

    def flash_forward(q, k, v, scale, *, mask, q_len, kv_len, extras, config, **how):
        del how
        seen.append((q.shape[0], q_len, q.shape[2], config))
        wide = lambda x, length: x[:, :length].astype(jnp.float32)
        operands = Operands(
            query=wide(q, q_len),
            key=wide(k, kv_len),
            value=wide(v, kv_len),
            scale=scale,
            kv_lengths=extras.kv_lengths,
            mask=extras.mask,
            soft_cap=None if extras.soft_cap is None else extras.soft_cap[0],
        )
        problem = Problem(
            batch=q.shape[0],
            q_len=q_len,
            kv_len=kv_len,
            num_q_heads=q.shape[2],
            num_kv_heads=k.shape[2],
            head_dim=q.shape[3],
            head_dim_v=v.shape[3],
            dtype="float32",
            mask=mask,
            scale=None,
            soft_cap=None if extras.soft_cap is None else "operand",
        )
        return xla.attention(problem, operands)

    monkeypatch.setattr(forward, "flash_forward", flash_forward)
    return seen


@pytest.mark.parametrize("name", CALLS)
def test_is_the_same_attention(name, launches):
    (q_len, kv_len, num_q_heads, num_kv_heads), options = CALLS[name]
    sizes = (q_len, num_q_heads), (kv_len, num_kv_heads), (kv_len, num_kv_heads)
    q, k, v = (jnp.asarray(RNG.standard_normal((2, *s, 64)), jnp.bfloat16) for s in sizes)
    attend = lambda implementation: pallas_flash.dot_product_attention(
        q, k, v, implementation=implementation, return_residual=True, **options
    )
    with dispatch.assume_device("gpu", (9, 0)):
        out, lse = attend("mosaic_gpu")
    wanted_out, wanted_lse = attend("xla")
    batch, rows, heads, config = launches[0]
    assert (rows, heads) == (q_len * num_q_heads // num_kv_heads, num_kv_heads)
    assert batch > 2, "in parts"
    assert rows <= config.block_q == 64, "a second consumer would have no rows and be waited for"
    np.testing.assert_allclose(out.astype("f4"), wanted_out.astype("f4"), atol=8e-3)
    np.testing.assert_allclose(lse, wanted_lse, atol=1e-5)


def _problem(q_len, kv_len, heads, batch=1, **changes) -> Problem:
    sizes = (batch, q_len, kv_len, *heads)
    usual = dict(head_dim=128, head_dim_v=128, dtype="bfloat16", mask=masks.Causal(kv_len - q_len))
    return Problem(*sizes, **usual | changes)


@pytest.mark.parametrize("batch", [1, 8, 64])
@pytest.mark.parametrize("kv_len", [4096, 131_072])
@pytest.mark.parametrize("heads", [(32, 8), (32, 32), (8, 1)], ids=str)
def test_decoding_is_run_as_rows(heads, kv_len, batch):
    for q_len, lengths in itertools.product((1, 2, 8), (masks.And(), masks.Lengths(False, True))):
        mask = masks.Causal(kv_len - q_len) & lengths
        assert io_few_queries.applies(_problem(q_len, kv_len, heads, batch, mask=mask))
        assert io_few_queries.applies(_problem(q_len, kv_len, heads, batch, mask=masks.And()))


def test_as_many_queries_as_pay_are_run_as_rows():
    applies = lambda *sizes, **changes: io_few_queries.applies(_problem(*sizes, **changes))
    # A tile for each of four heads is bound by products, one for all by bytes: up to a tile's rows.
    assert applies(16, 8192, (32, 8), batch=32) and not applies(17, 8192, (32, 8), batch=32)
    assert applies(64, 8192, (4, 4)) and not applies(65, 8192, (4, 4))  # few blocks: keys in parts
    # Enough blocks, one head each: queries are copied for nothing once they are many for the keys.
    assert applies(8, 1024, (32, 32), batch=8) and not applies(64, 1024, (32, 32), batch=8)
    # A mask would be written out of many keys that no query sees.
    assert not applies(8, 131_072, (32, 8), mask=masks.Causal())
    assert not applies(1, 255, (32, 8))
    for term in (
        dict(bias_shape=(1, 32, 1, 8192), bias_dtype="float32"),
        dict(alibi_shift=0),
        dict(dropout_rate=0.1),
    ):
        assert not applies(1, 8192, (32, 8), **term)


def test_explain_tells_that_queries_are_rows_and_why():
    shape = lambda t, n: jnp.zeros((1, t, n, 128), jnp.bfloat16)
    with dispatch.assume_device("gpu", (9, 0)):
        told, whole = (
            str(pallas_flash.explain(shape(t, 32), shape(4096, 8), shape(4096, 8)))
            for t in (2, 100)
        )
    [note] = [line for line in told.splitlines() if "few queries" in line]
    assert "4 heads in one tile of 8 rows, keys in 16 parts: forward about" in note
    this, other = [float(x) for x in re.findall(r"([\d.]+) us", note)]
    assert this < other
    assert "few queries" not in whole


def test_parts_fill_the_chip():
    num_parts = io_few_queries.num_parts
    assert num_parts(64 * 8, 8192, 1) == num_parts(64 * 8, 8192, 2) == 1
    assert num_parts(8, 131_072, 1) == 16  # 128 blocks, and there is room for 132
    assert num_parts(8, 131_072, 2) == 32  # for 264
    assert num_parts(8, 100_000, 1) == 125  # of no whole tiles
    assert num_parts(136, 8192, 1) == 8  # 4 of them would be alone at the end
    assert num_parts(136, 8192, 2) == 1  # all run at a time
    assert num_parts(1, 512, 2) == 2  # as many as there can be
    assert num_parts(1, 1000, 2) == 1  # nothing divides it


@pytest.mark.parametrize("dims", [*itertools.product((16, *tuned.HEAD_DIMS), repeat=2)])
def test_config_fits(dims):
    for is_masked, has_soft_cap in itertools.product((False, True), repeat=2):
        config = tuned.few_queries(*dims, is_masked=is_masked, has_soft_cap=has_soft_cap)
        room = 233_472 // config.blocks_per_sm - 1024  # a block's, and what the system takes of it
        assert forward.forward_smem_bytes(config, *dims, "bfloat16") <= room
        assert config.blocks_per_sm == (2 if max(dims) <= 64 and not has_soft_cap else 1)


def test_steps_are_long_where_no_key_is_hidden():
    cut = lambda kv_len, mask: io_few_queries.cut(
        _problem(1, kv_len, (32, 8), batch=64, head_dim=64, head_dim_v=64, mask=mask)
    )
    assert cut(8192, masks.And())[0].block_kv == 128
    assert cut(8200, masks.And())[0].block_kv == 64
    assert cut(8192, masks.Lengths(False, True))[0].block_kv == 64
