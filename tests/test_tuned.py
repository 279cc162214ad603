"""Whatever the head dims, dtype and terms, each pass has a configuration that fits the GPU."""

import itertools

import pytest

from pallas_flash import masks, tuned
from pallas_flash.hardware import SM90
from pallas_flash.kernels.sm90 import backward, backward_dq, backward_launch, forward
from pallas_flash.kernels.sm90.smem import smem_bytes
from pallas_flash.problem import Problem

# What pads to each multiple of 16 up to 256, and most of those themselves.
SIZES = range(1, 257, 15)
MASKS = {"full": masks.And(), "causal": masks.Causal()}
LENGTHS = 96, 512, 4096  # short, at the edge of short, long


def _problem(head_dim, head_dim_v, mask, length, dtype, **terms):
    return Problem(
        batch=2,
        q_len=length,
        kv_len=length,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=dtype,
        mask=mask,
        **terms,
    )


def _launch(problem, config):
    return backward_launch.Launch(
        batch=problem.batch,
        q_len=problem.q_len,
        kv_len=problem.kv_len,
        num_q_heads=problem.num_q_heads,
        num_kv_heads=problem.num_kv_heads,
        head_dim=config.padded(problem.head_dim),
        head_dim_v=config.padded(problem.head_dim_v),
        dtype=problem.dtype,
        mask=problem.mask,
        terms=frozenset({"soft_cap"} if problem.soft_cap else ()),
        dropout_rate=problem.dropout_rate,
        config=config,
    )


def test_sizes_are_all_that_kernels_see():
    assert {-(-size // 16) for size in SIZES} == {*range(1, 17)} and 256 in SIZES


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("terms", [{}, dict(soft_cap=30.0, dropout_rate=0.1)], ids=["", "terms"])
def test_every_pass_fits(dtype, name, terms):
    for *dims, length in itertools.product(SIZES, SIZES, LENGTHS):
        problem = _problem(*dims, MASKS[name], length, dtype, **terms)
        config = tuned.forward_of(problem)
        padded = [config.padded(size) for size in dims]
        assert forward.forward_smem_bytes(config, *padded, dtype) <= SM90.smem_bytes, problem
        if length == max(LENGTHS):  # nothing here depends on it
            cut = tuned.backward_of(problem)
            launch = _launch(problem, cut)
            backward._check_padded(launch)
            backward._SPLITS[cut.split].check(launch)
            assert smem_bytes(backward._gpu_scratch(launch)) <= SM90.smem_bytes, problem
            wide, cut = [cut.padded(size) for size in dims], tuned.dq_of(problem)
            assert backward_dq.dq_smem_bytes(cut, *wide, dtype) <= SM90.smem_bytes, problem
