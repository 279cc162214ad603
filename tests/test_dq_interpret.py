"""The dq kernel of the deterministic backward in interpret mode, against float64 gradients."""

import dataclasses
import re

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_flash import masks
from pallas_flash.config import DqConfig
from pallas_flash.kernels.sm90 import backward_dq
from pallas_flash.kernels.sm90.call import Extras
from tests import test_backward_interpret as fused
from tests.interpreted import int32, interpreted
from tests.races import races_raise
from tests.spoiled import spoiled

TWO = DqConfig(compute_wgs=2, block_kv=64, k_stages=3, v_stages=2)
WIDE = DqConfig(compute_wgs=2, block_kv=128, k_stages=2, v_stages=2)
THREE = DqConfig(compute_wgs=3, block_kv=64, k_stages=3, v_stages=3)
LEAN = DqConfig(compute_wgs=2, block_kv=64, k_stages=2, v_stages=1)


def _case(config: DqConfig = TWO, **fields) -> fused.Case:
    return fused.Case(config=config, **fields)


CASES = {
    "full": _case(q_len=128, kv_len=192),
    "one-short-tile": _case(q_len=8, kv_len=16),
    "causal-ragged-three": _case(THREE, q_len=203, kv_len=203, causal_shift=0),
    "bottom-right-more-keys": _case(q_len=72, kv_len=200, causal_shift=128),
    "kv-lengths": _case(kv_len=200, kv_lengths=(0, 1, 128, 199)),
    "query-lengths": _case(q_len=200, query_lengths=(0, 1, 128, 199)),
    "lengths-causal-wide": _case(
        WIDE, q_len=200, kv_len=200, causal_shift=0, query_lengths=(128, 9), kv_lengths=(199, 64)
    ),
    "lengths-bottom-right": _case(
        kv_len=264, causal_shift=128, query_lengths=(136, 9), kv_lengths=(264, 100)
    ),
    "gqa2-lengths": _case(num_q_heads=4, num_kv_heads=2, query_lengths=(70,), kv_lengths=(130,)),
    "f16": _case(dtype="float16", causal_shift=0),
    "d128-64": _case(head_dim=128, head_dim_v=64, causal_shift=0),
    "d64-128": _case(head_dim=64, head_dim_v=128, kv_lengths=(130,)),
    "d80-96": _case(head_dim=80, head_dim_v=96, causal_shift=0, kv_lengths=(100,)),
    "d192-128-ragged": _case(q_len=139, head_dim=192, head_dim_v=128, causal_shift=0),
    "d256": _case(LEAN, head_dim=256, head_dim_v=256, causal_shift=0, kv_lengths=(100,)),
}


def _run(case: fused.Case, arrays: fused.Arrays, window=None, **options) -> np.ndarray:
    """dq as the kernel gives it, without padding; NaN and Inf behind every length."""
    f32 = lambda x: np.asarray(x, np.float32)

    run = interpreted(
        backward_dq.flash_backward_dq,
        q_len=case.q_len,
        kv_len=case.kv_len,
        config=case.config,
        **dict(mask=case.mask) | options,
    )

    with races_raise():
        dq = run(
            spoiled(arrays.q, case.query_lengths),
            spoiled(arrays.k, case.kv_lengths),
            spoiled(arrays.v, case.kv_lengths),
            spoiled(arrays.dout, case.query_lengths),
            f32(arrays.lse),
            _neg_delta(arrays),
            f32(arrays.scale),
            extras=Extras(
                query_lengths=int32(case.query_lengths),
                kv_lengths=int32(case.kv_lengths),
                window=window,
            ),
        )
        return np.asarray(dq)[:, : case.q_len]


def _neg_delta(arrays: fused.Arrays) -> np.ndarray:
    """What `backward_ends` makes: whole strips, 0 for rows that see no key."""
    neg_delta = np.where(arrays.lse > -np.inf, -arrays.delta, 0.0)
    strips = ((0, 0), (0, 0), (0, -neg_delta.shape[2] % 64))
    return np.pad(neg_delta, strips).astype(np.float32)


def _check(case: fused.Case, got: np.ndarray, want: np.ndarray) -> None:
    got = got.astype(np.float64)
    assert np.isfinite(got).all()
    bound = 4 * float(jnp.finfo(case.dtype).eps)
    assert np.abs(got - want).max() <= bound * max(1.0, np.abs(want).max())
    if case.query_lengths is not None:
        for row, length in zip(got, case.query_lengths, strict=True):
            assert not row[length:].any(), "dq behind its length"


def _scaled(arrays: fused.Arrays) -> np.ndarray:
    return arrays.grads[0] * arrays.scale[:, None, None, None]


@pytest.mark.parametrize("name", CASES)
def test_dq(name):
    case = CASES[name]
    arrays = fused._arrays(case)
    _check(case, _run(case, arrays), _scaled(arrays))


def test_dq_is_bit_equal_from_run_to_run():
    case = CASES["causal-ragged-three"]
    arrays = fused._arrays(case)
    first, second = _run(case, arrays), _run(case, arrays)
    assert first.tobytes() == second.tobytes()


def test_float32_is_before_the_scale():
    case = _case(q_len=139, causal_shift=0, query_lengths=(100,))
    arrays = fused._arrays(case)
    dq = _run(case, arrays, out_float32=True)
    assert dq.dtype == np.float32
    _check(case, dq, arrays.grads[0])


def test_rows_without_keys_have_no_gradient():
    """Behind the last key by more than the window: the walk has one step, all of it hidden."""
    case = _case(q_len=200, kv_len=72, kv_lengths=(70,), causal_shift=0)
    arrays = fused._arrays(case)
    lse = arrays.lse.copy()
    lse[..., 100:] = -np.inf
    arrays = dataclasses.replace(arrays, lse=lse)
    mask = case.mask & masks.Window(has_left=True, has_right=False)
    dq = _run(case, arrays, mask=mask, window=np.array([[30, 0]], np.int32))
    assert np.isfinite(dq.astype(np.float64)).all()
    assert not dq[:, 100:].any()


def test_too_many_stages_are_refused():
    case = _case(DqConfig(k_stages=8, v_stages=8), head_dim=256, head_dim_v=256)
    with pytest.raises(ValueError, match=re.escape("bytes of shared memory")):
        _run(case, fused._arrays(case))
