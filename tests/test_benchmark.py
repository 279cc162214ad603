"""The benchmark: what it measures, and what it makes of the figures."""

import json
import math
import types

import pytest

from pallas_flash import benchmark
from pallas_flash.benchmark_shapes import GPU_SHAPES, Shape

SMALL = Shape("small-causal", 1, 64, 2, 1, 16, True)
DECODE = Shape("small-decode", 2, 128, 4, 2, 16, False, queries=2)


@pytest.mark.parametrize("shape", [SMALL, DECODE], ids=str)
def test_a_shape_is_checked_and_timed(shape):
    row = benchmark.run_shape(shape, "float32")
    ours, peer = (row["results"][name] for name in ("pallas_flash", "jax.nn xla"))
    assert max(ours["relative_errors"]) < 1e-5
    assert ours["forward_ms"] > 0 and peer["forward_wall_ms"] > 0
    assert ("backward_ms" in ours) == (shape.queries is None)


@pytest.mark.parametrize("call_s, calls", [(2**-2, 10), (2**-10, 52), (2**-20, 300)])
def test_short_calls_are_timed_for_50_ms(call_s, calls, monkeypatch):
    ends = [0.0]
    clock = types.SimpleNamespace(perf_counter=lambda: ends[-1])
    monkeypatch.setattr(benchmark, "time", clock)
    first = 3  # warm-ups, which take longer and do not count
    takes = lambda: call_s if len(ends) > first else 1.0
    told = benchmark.wall_times(lambda: ends.append(ends[-1] + takes()))
    assert told == call_s * 1e3 and len(ends) - 1 - first == calls


def test_a_wrong_result_is_not_timed(monkeypatch):
    found = benchmark.implementations(SMALL)
    found["pallas_flash"] = lambda q, k, v, arrays: q * 0.9
    monkeypatch.setattr(benchmark, "implementations", lambda _: found)
    ours = benchmark.run_shape(SMALL, "float32")["results"]["pallas_flash"]
    assert ours["failed"].startswith("relative errors") and "forward_ms" not in ours


def test_a_refusal_is_a_row(monkeypatch):
    def refuses(q, k, v, arrays):
        raise NotImplementedError("no")

    found = dict(refuses=refuses) | benchmark.implementations(SMALL)
    monkeypatch.setattr(benchmark, "implementations", lambda _: found)
    row = benchmark.run_shape(SMALL, "float32")
    assert row["results"]["refuses"]["failed"] == "NotImplementedError: no"


def _row(name, ours, peers, **more):
    times = lambda ms: dict(forward_ms=ms, both_ms=4 * ms, backward_ms=3 * ms)
    results = dict(pallas_flash=times(ours)) | {f"peer{i}": times(x) for i, x in enumerate(peers)}
    shape = dict(batch=1, length=1024, num_q_heads=2, num_kv_heads=2, head_dim=64, causal=False)
    return dict(name=name, results=results) | shape | more


TOLD = dict(
    device="a GPU",
    jax="1",
    dtype="bfloat16",
    speeds=dict(hbm_copy_bytes_s=4e12),
    rows=[_row("two", 1.0, [2.0, 3.0]), _row("none", 1.0, []), _row("half", 1.0, [0.5])],
)


def test_the_best_peer_counts():
    lines = benchmark.markdown_table(TOLD).splitlines()
    flops = 4 * 2 * 1024**2 * 64
    assert f"| two | {flops / 1e9:.0f} | {flops / 2e9:.0f} | 2.00 |" in lines[2]
    assert "refused" in lines[3] and "| 0.50 |" in lines[4]
    means = benchmark.geometric_means(TOLD)
    assert means["forward"] == pytest.approx(1.0) and means["backward"] == pytest.approx(1.0)


def test_decoding_is_told_by_its_bytes():
    row = _row("decode", 1.0, [0.9], queries=1)
    row["results"] = {n: dict(forward_ms=r["forward_ms"]) for n, r in row["results"].items()}
    line = benchmark.markdown_table(TOLD | dict(rows=[row])).splitlines()[-1]
    size = 2 * 2 * 64 * (2 * 1024 + 2) / 1e9
    assert line.startswith(f"| decode | {size:.2f} |") and line.endswith(f"{size / 4:.2f} |")


def test_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(benchmark, "CPU_SHAPES", (SMALL, DECODE))
    file, picture = tmp_path / "told.json", tmp_path / "ratios.png"
    benchmark.main(["--only", "small-causal", "--json", str(file), "--plot", str(picture)])
    out = capsys.readouterr().out
    assert "small-causal" in out and "small-decode" not in out and "geometric mean" in out
    assert [row["name"] for row in json.loads(file.read_text())["rows"]] == ["small-causal"]
    assert picture.stat().st_size > 1000
    benchmark.main(["--show", str(file)])
    assert capsys.readouterr().out.startswith("| shape |")


@pytest.mark.parametrize(
    ("only", "wanted"), [("", "ab abc c"), ("ab", "ab"), ("b", "ab abc"), ("ab,c", "ab c")]
)
def test_only_takes_names_and_parts_of_them(only, wanted):
    assert benchmark._chosen(["ab", "abc", "c"], only) == {*wanted.split()}


def test_names_are_unique_and_floors_known():
    assert len({shape.name for shape in GPU_SHAPES}) == len(GPU_SHAPES)
    assert all(shape.floor_ms("bfloat16", backward=False) > 0 for shape in GPU_SHAPES)
    assert not math.isnan(sum(shape.bytes("bfloat16") for shape in GPU_SHAPES))
