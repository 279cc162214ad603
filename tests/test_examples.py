"""The examples run, learn, and say what the README says they say. Small sizes."""

import json
from pathlib import Path

import numpy as np
import pytest

from examples import quickstart, train_lm

SMALL = "--seq 64 --batch 2 --layers 1 --width 32 --heads 2 --steps 12 --lr 0.01 --sample 8".split()


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    return path


def test_train_lm_learns_and_compares(text, tmp_path, capsys):
    plot, record = tmp_path / "loss.png", tmp_path / "runs.json"
    files = ["--text", str(text), "--plot", str(plot), "--json", str(record)]
    runs = train_lm.main([*SMALL, *files, "--dtype", "bfloat16", "--compare", "--perturb"])

    flash, plain, rounded = runs
    assert [run.name for run in runs] == ["flash", "jax", "jax-perturbed"]
    for run in runs:
        assert len(run.losses) == len(run.step_times_s) == 12
        assert np.isfinite(run.losses).all() and np.isfinite(run.held_out_loss)
        assert run.losses[-1] < run.losses[0] - 0.5
        assert len(run.sample) >= 8
    # The batches are the same, so the curves differ by rounding: about as much as rounding once.
    assert 0 < train_lm.mean_difference(plain, rounded) < 0.1
    assert train_lm.mean_difference(flash, plain) < 0.1

    assert plot.read_bytes().startswith(b"\x89PNG")
    saved = json.loads(record.read_text())
    assert saved["runs"][0]["losses"] == flash.losses
    printed = capsys.readouterr().out
    assert printed.count("mean |difference| of the last 50 losses") == 2


def test_train_lm_refuses_too_little_text(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("short")
    with pytest.raises(SystemExit, match="too few"):
        train_lm.main([*SMALL, "--text", str(path), "--plot", str(tmp_path / "loss.png")])


def test_read_text_takes_text_files_in_order(tmp_path):
    (tmp_path / "b.txt").write_bytes(b"second")
    (tmp_path / "a.py").write_bytes(b"first")
    (tmp_path / "c.so").write_bytes(b"\x00")
    assert train_lm.read_text([str(tmp_path)]).tobytes() == b"first\nsecond"


def test_default_sizes_make_whole_heads():
    for on_gpu in (False, True):
        sizes = train_lm.default_sizes(on_gpu)
        assert sizes.width % sizes.heads == 0


def test_quickstart_prints_its_table(monkeypatch, capsys):
    monkeypatch.setattr(quickstart, "SHAPE", (1, 256, 2, 64))
    quickstart.main()
    rows = capsys.readouterr().out.splitlines()
    ours = next(row for row in rows if row.startswith("pallas_flash"))
    errors = [float(word) for word in ours.split()[1:3]]
    assert all(0 < error < 2e-2 for error in errors)
