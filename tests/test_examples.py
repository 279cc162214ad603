"""The examples run, learn, and say what the README says they say. Small sizes."""

import dataclasses
import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

# An example imports its neighbours by their bare names, as a script of that folder can.
sys.path.append(str(Path(__file__).parent.parent / "examples"))

from examples import byte_lm, quickstart, train_lm, train_packed

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
    assert 0 < byte_lm.mean_difference(plain.losses, rounded.losses) < 0.1
    assert byte_lm.mean_difference(flash.losses, plain.losses) < 0.1

    assert plot.read_bytes().startswith(b"\x89PNG")
    saved = json.loads(record.read_text())
    assert saved["runs"][0]["losses"] == flash.losses
    printed = capsys.readouterr().out
    assert printed.count("mean |difference| of the last 50 losses") == 2


def test_train_lm_over_a_mesh_loses_what_one_device_loses(text, tmp_path):
    if len(jax.devices()) < 8:
        pytest.skip("needs eight devices")
    files = ["--text", str(text), "--plot", str(tmp_path / "loss.png")]
    few = [*SMALL, *files, "--steps", "3"]
    (one,) = train_lm.main([*few, "--sample", "0"])
    (split,) = train_lm.main([*few, "--mesh", "data=2,sequence=2,model=2"])
    np.testing.assert_allclose(split.losses, one.losses, rtol=1e-4)
    assert abs(split.held_out_loss - one.held_out_loss) < 1e-3


def test_a_step_over_a_mesh_returns_arrays_as_they_lay():
    """Else the second step is compiled again."""
    if len(jax.devices()) < 8:
        pytest.skip("needs eight devices")
    layout = train_lm.Layout(train_lm.parse_mesh("data=2,sequence=2,model=2"))
    sizes = byte_lm.Sizes(64, 2, 1, 32, 2, steps=1, lr=0.01, dtype="float32")
    program = train_lm.compiled_program(train_lm.ATTENTION["flash"], sizes, layout)
    params = program.init(jax.random.key(0))
    params = jax.device_put(params, layout.shardings(params))
    given = params, program.init_optimizer(params)
    lay = [(x.sharding, x.ndim) for x in jax.tree.leaves(given)]
    *returned, _ = program.step(*given, layout.rows(np.zeros((2, 65), np.int32)))
    returned = jax.tree.leaves(returned)
    assert all(x.sharding.is_equivalent_to(*was) for x, was in zip(returned, lay, strict=True))


@pytest.mark.parametrize("mesh", ["rows=2", "data", "data=0", "data=1000"])
def test_train_lm_refuses_a_mesh_that_it_cannot_make(mesh, capsys):
    with pytest.raises(SystemExit):
        train_lm.main(["--mesh", mesh])
    assert "argument --mesh" in capsys.readouterr().err


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
        for sizes in (byte_lm.default_sizes(on_gpu), train_packed.packed_sizes(on_gpu)):
            assert sizes.width % sizes.heads == 0


@pytest.fixture(scope="module")
def documents(tmp_path_factory) -> Path:
    """A file of 60 documents of 2 to 61 bytes: some are longer than a row of 48."""
    path = tmp_path_factory.mktemp("documents") / "documents.txt"
    line = b"the quick brown fox jumps over the lazy dog, and does it again"
    path.write_bytes(b"\n\n\n".join(line[:length] for length in range(2, 62)))
    return path


PACKED = "--seq 48 --batch 2 --layers 1 --width 32 --heads 2 --steps 8 --lr 0.02 --window 9".split()


@pytest.fixture(scope="module")
def packed_and_padded(documents) -> tuple[list[train_packed.Run], Path]:
    """Both runs, and the folder of plot.png and runs.json."""
    folder = documents.parent
    files = ["--plot", str(folder / "plot.png"), "--json", str(folder / "runs.json")]
    return train_packed.main([*PACKED, "--text", str(documents), *files]), folder


def test_train_packed_learns_the_same_packed_and_padded(packed_and_padded):
    (packed, padded), folder = packed_and_padded
    assert [packed.name, padded.name] == ["packed", "padded"]
    np.testing.assert_allclose(packed.losses, padded.losses, atol=1e-4)
    assert packed.losses[-1] < packed.losses[0] - 0.5
    assert packed.real_tokens == padded.real_tokens
    assert packed.all_tokens == [2 * 48] * 8
    assert packed.passes == [1] * 8 and sum(padded.passes) > 8
    assert packed.padding < padded.padding < 1
    assert "real tokens/s, packed / padded:" in train_packed.summary([packed, padded])

    assert (folder / "plot.png").read_bytes().startswith(b"\x89PNG")
    saved = json.loads((folder / "runs.json").read_text())
    assert saved["runs"][1]["losses"] == padded.losses
    assert saved["runs"][0]["tokens_per_s"] == packed.tokens_per_s


def test_train_packed_learns_the_same_with_a_mask(packed_and_padded, documents, tmp_path):
    options = "--mode packed --attention jax".split()
    files = ["--text", str(documents), "--plot", str(tmp_path / "plot.png")]
    (plain,) = train_packed.main([*PACKED, *options, *files])
    np.testing.assert_allclose(plain.losses, packed_and_padded[0][0].losses, atol=1e-4)


def test_train_packed_stops_where_documents_see_each_other(documents, tmp_path, monkeypatch):
    place = train_packed.place

    def without_segments(rows, seq):
        batch = place(rows, seq)
        assert batch.segments is not None
        return batch._replace(segments=np.zeros_like(batch.segments))

    monkeypatch.setattr(train_packed, "place", without_segments)
    with pytest.raises(SystemExit, match="see each other"):
        train_packed.main([*PACKED, "--text", str(documents), "--plot", str(tmp_path / "p.png")])


def test_train_packed_refuses_too_few_documents(tmp_path):
    path = tmp_path / "one.txt"
    path.write_text("one document")
    with pytest.raises(SystemExit, match="too few"):
        train_packed.main(["--text", str(path), "--plot", str(tmp_path / "plot.png")])


def test_documents_fill_rows_and_each_is_placed_once(documents):
    found = train_packed.read_documents([str(documents)], seq=48)
    assert [len(document) for document in found] == [min(length, 48) for length in range(2, 62)]

    sizes = dataclasses.replace(train_packed.packed_sizes(on_gpu=False), seq=48, batch=2)
    steps = list(train_packed.first_fit(found, sizes))
    placed = [document for rows in steps for documents in rows for document in documents]
    assert sorted(map(id, placed)) == sorted(map(id, found))
    assert all(sum(map(len, documents)) <= 48 for rows in steps for documents in rows)

    batch = train_packed.place([[found[0], found[2]]], seq=8)
    assert batch.tokens.tolist() == [[*b"th", *b"the ", 0, 0]]
    assert batch.positions.tolist() == [[0, 1, 0, 1, 2, 3, 0, 0]]
    assert batch.segments is not None
    assert batch.segments.tolist() == [[0, 0, 1, 1, 1, 1, 2, 2]]


def test_quickstart_prints_its_table(monkeypatch, capsys):
    monkeypatch.setattr(quickstart, "SHAPE", (1, 256, 2, 64))
    quickstart.main()
    rows = capsys.readouterr().out.splitlines()
    ours = next(row for row in rows if row.startswith("pallas_flash"))
    errors = [float(word) for word in ours.split()[1:3]]
    assert all(0 < error < 2e-2 for error in errors)
