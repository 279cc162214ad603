"""The README is true: its Python runs, its commands name what exists, its file map is complete."""

import json
import math
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from pallas_flash import benchmark

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
COMMANDS = re.findall(r"^    (.*)$", README, re.MULTILINE)


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_snippet_runs(number):
    exec(compile(SNIPPETS[number], f"README.md, snippet {number}", "exec"), {})


def test_there_are_snippets_and_commands():
    assert SNIPPETS and COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_command_names_what_exists(command):
    words = shlex.split(command)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    named = [words[i + 1] for i, word in enumerate(words) if word == "--extra"]
    assert set(named) <= set(extras)
    modules = [words[i + 1] for i, word in enumerate(words) if word == "-m"]
    files = [word for word in words if word.endswith(".py")]
    files += [module.replace(".", "/") + ".py" for module in modules]
    for file in files:
        assert (ROOT / file).is_file(), f"{file} of `{command}` does not exist"


def test_file_map_is_complete():
    rows = " ".join(re.findall(r"^\| (`.*?) \|", README, re.MULTILINE))
    for path in [*(ROOT / "pallas_flash").glob("*.py"), *(ROOT / "examples").glob("*.py")]:
        assert path.name == "__init__.py" or path.name in README, f"{path.name} is in no file map"
    for name in re.findall(r"`(pallas_flash/[\w/.]+)`", rows):
        assert (ROOT / name).exists(), f"the file map names {name}, which does not exist"


FIGURES = (
    "",
    "_causal",
    "_short",
    "_more",
    "_variants",
    "_soft_cap",
    "_sustained",
    "_decode",
    "_deterministic",
)


def _told(name):
    return json.loads((ROOT / "benchmarks" / f"h200{name}.json").read_text())


@pytest.mark.parametrize("name", FIGURES)
def test_table_is_that_of_the_figures(name):
    assert benchmark.markdown_table(_told(name)) in README


def test_second_process_gave_the_same():
    for row, again in zip(_told("_short")["rows"], _told("_short_again")["rows"], strict=True):
        a, b = (r["results"]["pallas_flash"]["both_ms"] for r in (row, again))
        assert row["name"] == again["name"] and abs(a - b) < 0.01 * b


def test_ratios_of_short_calls_are_those_of_the_figures():
    rows = [row for name in ("_causal", "_short", "_short_again") for row in _told(name)["rows"]]
    rows += [row for name in ("", "_again") for row in _told(name)["rows"] if row["length"] == 512]
    short = [row for row in rows if row["length"] <= 512]
    ratio = lambda row, what: benchmark._best_peer(row, what) / row["results"]["pallas_flash"][what]
    kernels, wall = ([ratio(r, f"both{kind}_ms") for r in short] for kind in ("", "_wall"))
    readme = re.sub(r"\s+", " ", README)
    assert f"at least {math.floor(min(kernels) * 100) / 100:.2f} times as long" in readme
    assert f"it is {math.floor(min(wall) * 100) / 100:.2f} to {max(wall):.2f} times" in readme


@pytest.mark.parametrize("name", ["", "_again"])
def test_means_and_least_ratios_are_those_of_the_figures(name):
    """Of D 64, 128 and 256 at four lengths, full and causal."""
    told = _told(name)
    is_grid = re.compile(r"d\d+-t(512|2048|8192|16384)-(full|causal)").fullmatch
    told["rows"] = [row for row in told["rows"] if is_grid(row["name"])]
    means = benchmark.geometric_means(told)
    assert len(told["rows"]) == 24
    readme = re.sub(r"\s+", " ", README)
    assert f"{means['forward']:.2f} forward, {means['backward']:.2f} backward" in readme
    if name:
        ratios = [
            benchmark._best_peer(row, way) / row["results"]["pallas_flash"][way]
            for row in told["rows"]
            for way in ("forward_ms", "backward_ms")
        ]
        assert f"none a ratio below {math.floor(min(ratios) * 100) / 100:.2f}" in readme


def test_table_of_plain_attention_is_that_of_the_figures():
    assert benchmark.naive_table(_told("_naive")) in README
