"""What compares the IO model to a GPU's counters: with counters that say what the model says."""

import copy
import json

import pytest

from benchmarks import io_counters
from pallas_flash import io_counts, io_model


def _counters(kernel, counts, reads):
    """One kernel that moves just what the model says."""
    return {
        "kernel": kernel,
        "dram__bytes_read.sum": reads,
        "dram__bytes_write.sum": io_counters._written(counts)[1],
        io_counters.TO_SM: counts.reads,
        io_counters.FROM_SM: counts.writes,
    }


@pytest.fixture(scope="module")
def as_told():
    shapes = {}
    for shape in (*io_counters.SHAPES, io_counters.STREAMING):
        problem, operands = shape.described(io_counters.DTYPE)
        shapes[shape.name] = [
            _counters(name, told.counts, told.memory.reads)
            for name, backward in ((io_counters.FORWARD, False), ("flash_backward", True))
            for told in [io_model.estimates(problem, operands, backward=backward)[-1]]
        ]
    for shape in io_counters.NAIVE:
        counts = io_counts.naive_forward(shape.described(io_counters.DTYPE)[0], score_bytes=4)
        shapes[shape.name] = [_counters("gemm", counts, counts.reads)]
    return {"shapes": shapes}


def test_counters_that_agree_deviate_by_nothing(as_told):
    rows = io_counters.compared(as_told)
    assert {row.shape for row in rows} == as_told["shapes"].keys()
    assert all(row.deviation == 0 for row in rows)
    assert len(rows) == 7 * 2 * 4 + 2 * 2


def test_counters_that_differ_deviate(as_told):
    name = io_counters.SHAPES[0].name
    told = copy.deepcopy(as_told)
    told["shapes"][name][0][io_counters.TO_SM] *= 1.2
    told["shapes"][name][1]["dram__bytes_read.sum"] *= 0.5
    off = {row[1:3]: row.deviation for row in io_counters.compared(told) if row.deviation}
    assert off == {
        ("forward", "L2 to SM"): pytest.approx(0.2),
        ("backward", "device memory read"): pytest.approx(0.5),
    }


def test_kernels_are_told_apart_by_markers():
    names = [s.name for s in (*io_counters.SHAPES, io_counters.STREAMING, *io_counters.NAIVE)]
    rows = [{"Kernel Name": "before", "m": "1"}]
    for number, _ in enumerate(names):
        rows += [{"Kernel Name": f"{io_counters.MARKER}_kernel", "m": "0"}]
        rows += [{"Kernel Name": "k", "m": f"{number},000"}, {"Kernel Name": "l", "m": ""}]
    groups = io_counters._by_shape(rows, ["m"])
    assert list(groups) == names
    assert groups[names[3]] == [{"kernel": "k", "m": 3000.0}, {"kernel": "l"}]


def test_without_ncu_it_is_one_line_and_status_two(monkeypatch, capsys):
    monkeypatch.setattr(io_counters, "_find_ncu", lambda: None)
    with pytest.raises(SystemExit) as stopped:
        io_counters.main([])
    told = capsys.readouterr()
    assert stopped.value.code == 2 and told.err.count("\n") == 1 and "no `ncu` here" in told.err


def test_regimes_of_the_shapes():
    """Six in which the model says one number, and one in which it gives bounds."""
    for shape in (*io_counters.SHAPES, io_counters.STREAMING):
        problem, operands = shape.described(io_counters.DTYPE)
        regimes = {
            io_model.estimates(problem, operands, backward=backward)[-1].residency.regime
            for backward in (False, True)
        }
        assert (regimes == {io_model.RESIDENT}) is (shape != io_counters.STREAMING)


MEASURED = json.loads(io_counters.FILE.read_text())
ROWS = io_counters.compared(MEASURED)
CHECKED = ("device memory read", "device memory written", "L2 to SM")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.shape}-{row.direction}-{row.what}")
def test_model_is_what_an_h200_counts(row):
    """Within 5 % for our kernels, within 10 % for XLA's naive attention."""
    if row.what in CHECKED:
        naive = {shape.name for shape in io_counters.NAIVE}
        assert row.deviation < (0.10 if row.shape in naive else 0.05), row


def test_everything_was_counted():
    assert io_counters.TO_SM in MEASURED["metrics"]
    for shape in io_counters.SHAPES:
        for direction in ("forward", "backward"):
            found = {r.what for r in ROWS if (r.shape, r.direction) == (shape.name, direction)}
            assert found >= set(CHECKED)
