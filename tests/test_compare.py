"""Several checkouts in one process: each runs its own package, and this one's stays as it was."""

import shutil
import sys
from pathlib import Path

import pytest

import pallas_flash
from benchmarks import compare
from pallas_flash.benchmark_shapes import Shape

ROOT = Path(__file__).parents[1]
SMALL = Shape("small-causal", 1, 64, 2, 1, 16, True)


@pytest.fixture
def other(tmp_path):
    """A checkout whose output is twice what it should be."""
    shutil.copytree(ROOT / "pallas_flash", tmp_path / "pallas_flash")
    peers = tmp_path / "pallas_flash" / "peers.py"
    text = peers.read_text()
    call = "return pallas_flash.dot_product_attention("
    assert text.count(call) == 1
    peers.write_text(text.replace(call, "return 2 * pallas_flash.dot_product_attention("))
    return tmp_path


def test_a_checkout_that_differs_is_told(other):
    told = compare.compare([ROOT, other], SMALL, rounds=1)
    assert told[str(ROOT)]["all"] > 0 and told[str(other)]["error"] > 0.1
    assert "all" not in told[str(other)]
    assert sys.modules["pallas_flash"] is pallas_flash


def test_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(compare, "CPU_SHAPES", (SMALL,))
    copy = tmp_path / "copy"
    shutil.copytree(ROOT / "pallas_flash", copy / "pallas_flash")
    file = tmp_path / "told.json"
    compare.main(["--tree", str(ROOT), "--tree", str(copy), "--rounds", "2", "--json", str(file)])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("small")]
    assert len(lines) == 2 and str(copy) in lines[1] and " all " in lines[1]
    assert str(copy) in file.read_text()


def test_a_folder_without_the_package_is_an_error(tmp_path):
    with pytest.raises((ValueError, ModuleNotFoundError), match="pallas_flash"):
        compare.compare([tmp_path], SMALL, rounds=1)
    assert sys.modules["pallas_flash"] is pallas_flash
