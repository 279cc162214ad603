"""The search for configurations: what it tries, what it keeps and what it prints."""

import json

import jax
import pytest

from pallas_flash import aot, autotune, benchmark
from pallas_flash.config import BackwardConfig, ForwardConfig

TARGET = autotune.Target("forward", 1, 1024, 2, 2, 128, 128, True)
FEW = dict(compute_wgs=(2, 3), block_kv=(64, 256), num_stages=(2,), overlap=(True,))


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setitem(autotune.VARIED, "forward", FEW)


def test_only_what_fits_is_tried(few):
    fitting = [c for c in TARGET.configs() if autotune.fits(TARGET, c)]
    assert len([*TARGET.configs()]) == 4
    assert {(c.compute_wgs, c.block_kv) for c in fitting} == {(2, 64), (3, 64)}


@pytest.mark.parametrize(
    "head_dim, config, does",
    [
        (128, BackwardConfig(block_q=64), True),
        (128, BackwardConfig(block_q=128), False),  # half of dq is no 64 x 64
        (128, BackwardConfig(block_q=64, num_stages=4), False),  # shared memory
        (96, BackwardConfig(block_q=64, num_stages=3), True),
        (96, BackwardConfig(block_q=128), False),
        (96, BackwardConfig(split="roles", block_kv=64), False),  # not padded
    ],
)
def test_a_backward_must_cut_the_problem(head_dim, config, does):
    target = autotune.Target("backward", 1, 1024, 2, 1, head_dim, head_dim, False)
    assert autotune.fits(target, config) == does


def test_a_row_reads_as_in_the_table():
    config = ForwardConfig(q_stages=2, rescale_threshold=8.0)
    line = autotune.row(TARGET, config, dict(spill_bytes=20, milliseconds=0.01))
    rate = 4 * 2 * (1024 * 1025 / 2) * 128 / 0.01e-3 / 1e12
    wanted = "Tuned(ForwardConfig(rescale_threshold=8.0, q_stages=2), spill_bytes=20)"
    assert line == f"(128, 128): {wanted},  # {rate:.0f} causal, T 1024"


def test_a_search_goes_on_where_it_was(few, monkeypatch, tmp_path, capsys):
    """Compiled and timed once; what serializes or spills too much is not timed."""
    compiled, timed = [], []

    def kernels_of(factory, cases, timeout_s):
        del factory, timeout_s
        compiled.extend(cases)
        bad = ("C7512",)
        return [
            [aot.Kernel("flash_forward_kernel", 168, 0, bad if c["compute_wgs"] == 3 else ())]
            for _, c in cases
        ]

    def kernel_times(function, *arrays):
        timed.append(function)
        return 1.0

    monkeypatch.setattr(aot, "kernels_of", kernels_of)
    monkeypatch.setattr(aot, "missing_wheels", lambda: "")
    monkeypatch.setattr(benchmark, "kernel_times", kernel_times)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    state = tmp_path / "state.json"
    arguments = "forward --head-dim 128 --seq-len 1024 --heads 2 --batch 1 --state".split()
    for _ in range(2):
        autotune.main([*arguments, str(state)])
    assert (len(compiled), len(timed)) == (2, 1)
    (results,) = json.loads(state.read_text()).values()
    assert sorted(len(r) for r in results.values()) == [2, 3]
    first, second = capsys.readouterr().out.splitlines()
    assert first == second and first.startswith("(128, 128): Tuned(ForwardConfig(block_kv=64)),")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("forward", "--head-dim"),
        ("sideways --head-dim 64", "sideways"),
        ("dq --head-dim 72", "--head-dim=72: this kernel takes [64, 80, 96, 112, 128, 192, 256]"),
        ("forward --head-dim 64 --heads 6 --kv-heads 4", "must be a multiple of --kv-heads=4"),
        ("forward --head-dim 64 --seq-len 1001", "--seq-len=1001: must be a multiple of 8"),
    ],
)
def test_wrong_arguments_are_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        autotune.main(arguments.split())
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
