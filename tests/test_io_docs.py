"""docs/io.md is true: commands print what stands below them, its claims hold, its Python runs."""

import re
import shlex
from pathlib import Path

import pytest

from benchmarks import io_claims
from pallas_flash import io_report

ROOT = Path(__file__).parent.parent
DOCUMENT = (ROOT / "docs" / "io.md").read_text()
BLOCKS = [block.splitlines() for block in re.findall(r"```\n\$ (.*?)```", DOCUMENT, re.DOTALL)]
MODEL = "python -m pallas_flash.io_model "


def test_every_block_is_a_command_and_its_output():
    assert len(BLOCKS) == DOCUMENT.count("```") // 2
    assert all(len(block) > 1 for block in BLOCKS)


@pytest.mark.parametrize(
    "number", [i for i, block in enumerate(BLOCKS) if block[0].startswith(MODEL)]
)
def test_command_prints_what_stands_below_it(number, capsys):
    command, *shown = BLOCKS[number]
    io_report.main(shlex.split(command.removeprefix(MODEL)))
    printed = iter([line.rstrip() for line in capsys.readouterr().out.splitlines()])
    for line in shown:
        assert line in printed, f"`{command}` does not print, or not in this order: {line}"


def test_files_of_other_commands_exist():
    named = re.findall(r"python (\S+\.py)", DOCUMENT) + re.findall(r"\]\((\S+?)\)", DOCUMENT)
    assert len(named) >= 4
    for name in named:
        assert (ROOT / name).is_file() or (ROOT / "docs" / name).is_file(), name


def test_python_runs(capsys):
    code = "\n".join(
        line[4:]
        for line in DOCUMENT.split("## From Python")[1].splitlines()
        if line.startswith("    ") or not line
    )
    exec(compile(code, "docs/io.md", "exec"), {})
    assert capsys.readouterr().out.count("\n") == 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_in_another_order_differ_by_rounding(dtype):
    told = io_claims.order(dtype, length=256, block=32, orders=2)
    assert 0 < told.between_orders < 4 * told.plain and told.tiled < 2 * told.plain


def test_temporaries_are_fewer_with_tiles():
    told = io_claims.memory(2048)
    assert told.plain > 4 * told.tiled
