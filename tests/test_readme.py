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


FIGURES = ["", "_more", "_variants", "_sustained", "_decode", "_deterministic"]


@pytest.mark.parametrize("name", FIGURES)
def test_table_is_that_of_the_figures(name):
    told = json.loads((ROOT / "benchmarks" / f"h200{name}.json").read_text())
    assert benchmark.markdown_table(told) in README


@pytest.mark.parametrize("name", ["", "_again"])
def test_means_and_least_ratios_are_those_of_the_figures(name):
    """Of D 64, 128 and 256 at four lengths, full and causal."""
    told = json.loads((ROOT / "benchmarks" / f"h200{name}.json").read_text())
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
    told = json.loads((ROOT / "benchmarks" / "h200_naive.json").read_text())
    assert benchmark.naive_table(told) in README
