"""The IO model's predictions: published figures, growth, floors, regimes, rings, command line."""

import dataclasses
import itertools
import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import pallas_flash
from pallas_flash import (
    arguments,
    benchmark_shapes,
    dispatch,
    hardware,
    io_counts,
    io_kernels,
    io_model,
    io_report,
    io_sweep,
    link_model,
    masks,
)
from pallas_flash.kernels.sm90 import cost
from pallas_flash.problem import Problem
from pallas_flash.tile_walks import NO_OPERANDS, visible_pairs

ROOT = Path(__file__).parent.parent


def _problem(seq_len=4096, heads=16, head_dim=128, batch=1, kv_heads=None, **changes) -> Problem:
    sizes = (batch, seq_len, seq_len, heads, kv_heads or heads, head_dim, head_dim)
    return dataclasses.replace(Problem(*sizes, dtype="bfloat16"), **changes)


def _both(naive_or_paper: str, problem: Problem, **options) -> list[io_counts.Counts]:
    return [
        getattr(io_counts, f"{naive_or_paper}_{direction}")(problem, **options)
        for direction in ("forward", "backward")
    ]


# --- the paper's figure 2, left: GPT-2 medium, forward + backward, A100 --------------------------

GPT2 = _problem(1024, 16, 64, batch=64, dtype="float16", mask=masks.Causal(), dropout_rate=0.1)
PUBLISHED_GB = dict(standard=40.3, flash=4.4)
PUBLISHED_GFLOP = dict(standard=66.6, flash=75.2)
A100_SRAM_BYTES = 192 * 2**10


def test_published_bytes_of_standard_attention():
    """PyTorch as in the paper's code, in float16: mask, softmax and dropout are passes."""
    counts = _both("naive", GPT2, fused_softmax=False)
    matrix = GPT2.batch * GPT2.num_q_heads * 1024 * 1024 * 2
    passes = sum(c.moved for c in counts) / matrix
    assert 18 < passes < 19  # 18 matrices, and 12 arrays of T x d
    assert abs(sum(c.moved for c in counts) / 1e9 / PUBLISHED_GB["standard"] - 1) < 2e-3


def test_published_bytes_of_flash_attention():
    """By the letter 6 % above the published figure; without what a kernel need not do, below it."""
    plain = dataclasses.replace(GPT2, mask=masks.And(), dropout_rate=0.0)
    forward, backward = _both("paper", plain, sram_bytes=A100_SRAM_BYTES)
    moved = (forward.moved + backward.moved) / 1e9
    assert 1 < moved / PUBLISHED_GB["flash"] < 1.06
    # O, l, m and dQ are set to 0 and then read at the first visit; dK and dV are set to 0 and then
    # written whole. A kernel starts from registers instead.
    written = {a.tensor: a.moved for c in (forward, backward) for a in c.passes[0].writes}
    needless = 2 * sum(written[n] for n in ("out", "l", "m", "dq")) + written["dk"] + written["dv"]
    assert moved - needless / 1e9 < PUBLISHED_GB["flash"] < moved


def test_published_flops():
    """One product more: the backward computes S again. The rest of both figures is common."""
    plain = dataclasses.replace(GPT2, mask=masks.And(), dropout_rate=0.0)
    naive, paper = (
        sum(c.flops for c in _both(name, plain, **options))
        for name, options in (("naive", {}), ("paper", dict(sram_bytes=A100_SRAM_BYTES)))
    )
    product = 2 * 1024 * 1024 * 64  # of one head of one batch row
    assert naive == 6 * product * 64 * 16 and paper == 7 * product * 64 * 16
    # Published are 1.13 and not 7 / 6, being 64 products (of 64 heads in all, not of 64 x 16) and
    # a part that both have: their difference is one product of 64 heads.
    extra = PUBLISHED_GFLOP["flash"] - PUBLISHED_GFLOP["standard"]
    assert abs(extra - 64 * product / 1e9) < 0.1  # published to 0.1
    common = PUBLISHED_GFLOP["standard"] - 6 * 64 * product / 1e9
    ratio = (7 * 64 * product / 1e9 + common) / (6 * 64 * product / 1e9 + common)
    assert abs(ratio - 1.13) < 5e-3


# --- bounds and growth ---------------------------------------------------------------------------


def test_flops_are_equal_forward_and_one_product_more_backward():
    problem = _problem(128 * 3 * 8)  # whole tiles of every algorithm
    naive, _, paper, kernels = io_model.estimates(problem)
    assert naive.counts.flops == paper.counts.flops == kernels.counts.flops
    assert naive.counts.flops == io_model.visible_flops(problem)
    naive, _, paper, kernels = io_model.estimates(problem, backward=True)
    assert kernels.counts.flops == paper.counts.flops == naive.counts.flops // 4 * 5
    assert kernels.counts.flops == io_model.visible_flops(problem, backward=True)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_traffic_stays_quadratic_and_falls_with_sram(backward):
    """Theorem 2: Theta(T^2 d^2 / M) against Theta(T d + T^2)."""
    bytes_of = lambda seq_len, sram: [
        e.counts.moved
        for e in io_model.estimates(_problem(seq_len), sram_bytes=sram, backward=backward)
    ]
    longest, double = bytes_of(2**16, 2**18), bytes_of(2**17, 2**18)
    exponents = np.log2(np.array(double) / np.array(longest))
    assert (exponents > 1.95).all() and (exponents < 2.05).all()
    naive, _, paper, _ = bytes_of(2**16, 2**18)
    naive_more, _, paper_more, _ = bytes_of(2**16, 2**19)
    assert naive == naive_more and 1.9 < paper / paper_more < 2.1
    closed = io_model.estimates(_problem(2**16), sram_bytes=2**18, backward=backward)
    for estimate in closed[:3]:  # a constant: how often the algorithm moves what the bound counts
        twice = [
            e for e in io_model.estimates(_problem(2**17), sram_bytes=2**18, backward=backward)
        ]
        other = next(e for e in twice if e.algorithm == estimate.algorithm)
        ratios = [e.counts.moved / e.closed_form for e in (estimate, other)]
        assert abs(ratios[0] / ratios[1] - 1) < 0.02


MASKED = {
    "full": (masks.And(), NO_OPERANDS),
    "causal": (masks.Causal(), NO_OPERANDS),
    "window": (masks.Window(True, True), NO_OPERANDS._replace(window=np.array([511, 0]))),
}


@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_estimates_are_in_order(name, backward):
    mask, operands = MASKED[name]
    for kv_heads, seq_len in itertools.product((16, 2), (256, 2048, 65536)):
        problem = _problem(seq_len, kv_heads=kv_heads, mask=mask)
        least = io_counts.compulsory(problem, backward=backward)
        floor = io_model.problem_floor_s(problem, operands, backward=backward)
        for e in io_model.estimates(problem, operands, backward=backward):
            assert least <= e.memory.total <= e.memory.most
            assert e.memory.least <= e.memory.total
            if not (backward and e.algorithm.startswith("naive")):  # a stored P spares a product
                assert e.floor_s() >= floor * 0.999
        flops = io_model.visible_flops(problem, operands)
        assert flops == 4 * 128 * visible_pairs(problem, operands)


def test_regime_follows_what_the_running_blocks_share():
    full = [io_model.forward_residency(_problem(t)).regime for t in (4096, 32768, 2**18)]
    assert full == ["resident", "resident", "streaming"]
    causal = _problem(16384, mask=masks.Causal())  # eight heads of K and V, interleaved
    assert io_model.forward_residency(causal).regime == "streaming"
    grouped = _problem(16384, kv_heads=2, mask=masks.Causal())  # of which one is K and V
    assert io_model.forward_residency(grouped).regime == "resident"
    windowed = _problem(16384, 32, kv_heads=8, mask=masks.Window(True, True))
    operands = NO_OPERANDS._replace(window=np.array([1023, 0]))
    for residency in (io_model.forward_residency, io_model.backward_residency):
        assert residency(windowed, operands).regime != "streaming"


def test_streaming_is_between_least_and_most():
    problem = _problem(2**18, mask=masks.Causal())
    for backward in (False, True):
        kernels = io_model.estimates(problem, backward=backward)[-1]
        assert kernels.residency.regime == "streaming"
        assert kernels.memory.least < kernels.memory.total < kernels.memory.most


def test_memory_of_the_kernels_is_linear_and_of_naive_attention_is_not():
    extra = lambda t: [e.counts.extra_bytes for e in io_model.estimates(_problem(t), backward=True)]
    growth = np.array(extra(8192)) / np.array(extra(4096))
    np.testing.assert_allclose(growth, [4, 4, 2, 2])


def test_what_no_kernel_takes_is_left_out_with_the_reason():
    for problem, why in (
        (_problem(dtype="float32"), "float32"),
        (_problem(head_dim=320), "above 256"),
        (_problem(q_len=8, kv_len=4096), "few_queries.py"),
    ):
        assert why in io_model.refusal(problem)
        assert [e.algorithm for e in io_model.estimates(problem)][-1] == "paper"
    assert not io_model.refusal(_problem(8))  # few keys, too


# --- rings ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("kv_heads", [32, 8])
def test_ring_is_hidden_from_the_length_it_says(kv_heads, is_causal, backward):
    options = dict(is_causal=is_causal, backward=backward)
    at = lambda t: link_model.ring_step(
        _problem(t, 32, kv_heads=kv_heads), 8, hardware.H200.nvlink_bytes_s, **options
    )
    first = at(8192).hidden_from
    assert first % 8 == 0 and at(first).is_hidden and not at(first - 8).is_hidden


def test_ring_bytes_and_flops():
    step = link_model.ring_step(_problem(8192, 32, kv_heads=8, batch=3), 4, 50e9)
    assert step.link_bytes == 3 * 8 * 2048 * 256 * 2
    assert step.flops == 3 * 32 * 2048 * 2048 * 512
    assert step.link_s == step.link_bytes / 50e9
    causal = link_model.ring_step(_problem(8192, 32, kv_heads=8, batch=3), 4, 50e9, is_causal=True)
    assert causal.flops == step.flops // 2 and causal.link_bytes == step.link_bytes


@pytest.mark.parametrize(
    ("devices", "bandwidth", "match"),
    [(1, 1e9, "at least 2"), (3, 1e9, "multiple of devices=3"), (2, 0, "must be positive")],
)
def test_ring_refuses(devices, bandwidth, match):
    with pytest.raises(ValueError, match=match):
        link_model.ring_step(_problem(), devices, bandwidth)


# --- the command line ----------------------------------------------------------------------------

SHAPE = "--seq-len 2048 --head-dim 64 --heads 4"


def test_table_and_plot(tmp_path, capsys):
    picture = tmp_path / "io.png"
    options = f"{SHAPE} --kv-heads 2 --window 255,0 --backward --passes --devices 4"
    io_report.main([*options.split(), "--plot", str(picture)])
    out = capsys.readouterr().out
    for told in (
        "window 255,0",
        "kernels: statistics, dq sum = 0",
        "T^1.",
        "hidden from T",
        "recomputed",
    ):
        assert told in out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_json_is_the_model(capsys):
    options = f"{SHAPE} --causal --backward --sram 100KB --devices 2 --link-bandwidth 50GB/s --json"
    io_report.main(options.split())
    told = json.loads(capsys.readouterr().out)
    problem = _problem(2048, 4, 64, mask=masks.Causal())
    for backward, direction in ((False, "forward"), (True, "backward")):
        found = io_model.estimates(problem, sram_bytes=100_000, backward=backward)
        algorithms = told[direction]["algorithms"]
        assert list(algorithms) == [e.algorithm for e in found]
        for e in found:
            assert algorithms[e.algorithm]["moved_bytes"] == e.counts.moved
            assert algorithms[e.algorithm]["floor_s"] == e.floor_s()
        assert told[direction]["sweep"][-1]["seq_len"] == 2048
        ring = link_model.ring_step(problem, 2, 50e9, is_causal=True, backward=backward)
        assert told["ring"]["link"][direction] == ring._asdict()
    assert told["visible_pairs"] == visible_pairs(problem)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ("--head-dim 64 --heads 4", "--seq-len"),
        (f"{SHAPE} --seq-len 0", "'0' is no positive whole number"),
        (f"{SHAPE} --heads 1.5", "'1.5' is no positive whole number"),
        (f"{SHAPE} --kv-heads 3", "heads=4 must be a multiple of kv_heads=3"),
        (f"{SHAPE} --sram 12bananas", "'12bananas' is no size like 227KiB"),
        (f"{SHAPE} --sram 1..5KB", "'1..5KB' is no size"),
        (f"{SHAPE} --sram 100", "four rows of head_dim 64 need 256"),
        (f"{SHAPE} --window 5", "'5' is no pair of sides"),
        (f"{SHAPE} --dropout 1", "dropout=1.0 must be at least 0 and below 1"),
        (f"{SHAPE} --dtype int8", "invalid choice: 'int8'"),
        (f"{SHAPE} --devices 3", "must be a multiple of devices=3"),
        (f"{SHAPE} --link-bandwidth 1GB/s", "needs --devices"),
        (f"{SHAPE} --plot /nowhere/io.png", "/nowhere/io.png"),
        (f"{SHAPE} --plot io.fish", "'fish' is not supported"),
    ],
)
def test_wrong_values_are_one_line_and_status_two(arguments, match, capsys):
    with pytest.raises(SystemExit) as stopped:
        io_report.main(arguments.split())
    told = capsys.readouterr()
    assert stopped.value.code == 2 and not told.out
    assert told.err.count("\n") == 1 and match in told.err


def test_module_is_a_program():
    command = [sys.executable, "-m", "pallas_flash.io_model", *SHAPE.split()]
    out = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert out.startswith("bfloat16, batch 1, heads 4 on 4 kv heads, T 2048")


def test_crossover_is_where_floors_meet():
    options = io_report._parser().parse_args(SHAPE.split())
    problem, operands = io_report._problem(options)
    at = io_sweep.crossovers(io_sweep.Study(problem, operands, 2**18, False))
    length = at["compute_bound_from"]
    assert length is not None
    speeds = hardware.H200
    for t, is_bound in ((length, True), (length - 64, False)):
        there = _problem(t, 4, 64)
        products_s = io_model.visible_flops(there) / speeds.matmul_flops_s
        bytes_s = io_counts.compulsory(there) / speeds.hbm_bytes_s
        assert (products_s >= bytes_s) is is_bound


def test_sizes_are_readable():
    told = [io_report.readable(x) for x in (0, 7, 999, 1500, 33.6e6, 2.15e12, 4e15)]
    assert told == ["0 B", "7 B", "999 B", "1.50 kB", "33.6 MB", "2.15 TB", "4000 TB"]


# --- who else uses it ----------------------------------------------------------------------------


def _cost_estimates(function, *shapes) -> list:
    """Of every kernel that is traced, in order."""
    found = []

    def look(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.params.get("cost_estimate") is not None:
                found.append(eqn.params["cost_estimate"])
                continue
            for value in eqn.params.values():
                for inner in value if isinstance(value, (tuple, list)) else [value]:
                    inner = getattr(inner, "jaxpr", inner)
                    if hasattr(inner, "eqns"):
                        look(inner)

    with dispatch.assume_device("gpu", (9, 0)):
        look(jax.make_jaxpr(function)(*shapes).jaxpr)
    return found


@pytest.mark.skipif(not cost.IS_TAKEN, reason="this JAX takes no cost estimates")
@pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])
def test_cost_estimates_of_the_kernels_are_the_counts(deterministic):
    shape = lambda heads: jax.ShapeDtypeStruct((2, 1000, heads, 96), "bfloat16")

    def loss(q, k, v):
        out = pallas_flash.dot_product_attention(
            q, k, v, is_causal=True, deterministic_backward=deterministic
        )
        return out.astype("float32").sum()

    estimates = _cost_estimates(jax.grad(loss, (0, 1, 2)), shape(4), shape(2), shape(2))
    problem = Problem(2, 1000, 1000, 4, 2, 96, 96, "bfloat16", masks.Causal())
    counted = [
        io_kernels.forward_kernel(problem),
        io_kernels.backward_kernel(problem, make_dq=not deterministic),
    ]
    counted += [io_kernels.dq_kernel(problem)] if deterministic else []
    assert len(estimates) == len(counted)
    for estimate, one in zip(estimates, counted, strict=True):
        assert estimate.flops == sum(product.flops for product in one.products)
        assert estimate.bytes_accessed == sum(a.distinct for a in (*one.reads, *one.writes))
        assert estimate.transcendentals * 2 * 96 == one.products[0].flops


def test_explain_tells_the_traffic():
    q = jax.ShapeDtypeStruct((1, 4096, 16, 128), "bfloat16")
    with dispatch.assume_device("gpu", (9, 0)):
        notes = pallas_flash.explain(q, q, q).notes
    naive, _, _, kernels = io_model.estimates(_problem())
    told = f"device memory, forward and backward: {kernels.memory.total / 1e6:.0f} and "
    assert notes[-1].startswith(told) and f"stored {naive.memory.total / 1e6:.0f} and" in notes[-1]


@pytest.mark.parametrize("name", ["window", "lengths", "documents"])
def test_benchmark_describes_what_it_runs(name):
    changes = dict(
        window=dict(window=20), lengths=dict(lengths=(96, 50)), documents=dict(documents=24)
    )
    shape = benchmark_shapes.Shape("small", 2, 96, 4, 2, 64, True, **changes[name])
    (q, k, v, _), _, arrays = benchmark_shapes.inputs(shape, "float32")
    window = (shape.window, 0) if shape.window else None
    given = arguments.Arguments(q, k, v, is_causal=True, local_window_size=window, **arrays)
    problem, operands = arguments.normalize(given)
    described, described_operands = shape.described("float32")
    assert described.mask == problem.mask
    pairs = visible_pairs(problem, operands)
    assert visible_pairs(described, described_operands) == pairs
    assert shape.flops("float32", backward=True) == 10 * 64 * pairs
    assert shape.floor_ms("float32", backward=False) > 0
