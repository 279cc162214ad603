"""Times this package as it is in several checkouts, by turns, in one process.

    python benchmarks/compare.py --tree ../before --tree . --only d128-t8192-causal,soft-cap

Most changes to a kernel are worth less than what two cards, or two minutes of one, differ by. Here
each checkout has its turn in every round, forward and backward of the benchmark's shapes, and the
least time of each counts. What the first one computes the others are checked against. On a GPU
times are those of the kernels: the two that attend, and what runs before and after the backward's
(statistics, zeros, the cast of dq); elsewhere there is only the wall clock.
"""

import argparse
import contextlib
import importlib
import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
from tqdm import tqdm

from pallas_flash import benchmark
from pallas_flash.benchmark_shapes import CPU_SHAPES, GPU_SHAPES, Shape, inputs

ENDS = ("statistics", "zeros", "finish_dq")  # kernels around the backward's own


@contextlib.contextmanager
def package_of(tree: Path) -> Iterator[Any]:
    """`pallas_flash.peers` of this checkout; what is imported inside is of it, too."""
    mine = {name: m for name, m in sys.modules.items() if name.split(".")[0] == "pallas_flash"}
    for name in mine:
        del sys.modules[name]
    sys.path.insert(0, str(tree))
    importlib.invalidate_caches()
    try:
        peers = importlib.import_module("pallas_flash.peers")
        if not Path(peers.__file__ or "").resolve().is_relative_to(tree.resolve()):
            raise ValueError(f"tree={str(tree)!r} holds no package pallas_flash")
        yield peers
    finally:
        sys.path.remove(str(tree))
        for name in [n for n in sys.modules if n.split(".")[0] == "pallas_flash"]:
            del sys.modules[name]
        sys.modules.update(mine)


def lowered(tree: Path, shape: Shape, arguments: tuple) -> Any:
    """Forward and gradients of this checkout, before it is compiled."""
    with package_of(tree) as peers:
        _, both = benchmark.passes(peers.implementations(shape)["pallas_flash"])
        return both.lower(*arguments)


def part_times(function: Any, *arguments: Any) -> dict[str, float]:
    """Milliseconds of the forward kernel, of the backward's, of what is around it, and of all."""
    if jax.default_backend() != "gpu":
        return dict(all=benchmark.wall_times(function, *arguments))
    parts = dict(forward=0.0, backward=0.0, around=0.0)
    for name, milliseconds in benchmark.kernel_medians(function, *arguments).items():
        is_around = "forward" not in name and any(end in name for end in ENDS)
        part = "forward" if "forward" in name else "around" if is_around else "backward"
        parts[part] += milliseconds
    return parts | dict(all=sum(parts.values()))


def compare(trees: list[Path], shape: Shape, rounds: int) -> dict[str, dict[str, float]]:
    """Times by checkout; one that differs from the first has an 'error' instead."""
    dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
    (q, k, v, dout), _, arrays = inputs(shape, dtype)
    arguments = (q, k, v, dout, arrays)
    with ThreadPoolExecutor() as pool:  # tracing takes turns, compiling need not
        found = [pool.submit(lowered(tree, shape, arguments).compile) for tree in trees]
    programs = {str(tree): f.result() for tree, f in zip(trees, found, strict=True)}
    told: dict[str, dict[str, float]] = {name: {} for name in programs}
    wanted = jax.tree.leaves(programs[str(trees[0])](*arguments))
    for name, program in programs.items():
        got = jax.tree.leaves(program(*arguments))
        error = max(map(float, map(benchmark._relative_error, got, wanted)))
        if not error < benchmark.MAX_RELATIVE_ERROR:
            told[name]["error"] = error
    del wanted, got
    for turn in range(rounds):
        for name in list(programs)[:: 1 if turn % 2 == 0 else -1]:
            if "error" in told[name]:
                continue
            time.sleep(benchmark.PAUSE_S if jax.default_backend() == "gpu" else 0.0)
            for part, ms in part_times(programs[name], *arguments).items():
                told[name][part] = min(ms, told[name].get(part, ms))
    return told


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tree", type=Path, action="append", required=True, help="a checkout")
    parser.add_argument(
        "--only", default="", help="shapes, as in `python -m pallas_flash.benchmark`"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write all times here")
    options = parser.parse_args(argv)
    shapes = GPU_SHAPES if jax.default_backend() == "gpu" else CPU_SHAPES
    chosen = benchmark._chosen([shape.name for shape in shapes], options.only)
    told = {}
    for shape in tqdm([s for s in shapes if s.name in chosen and not s.queries], unit="shape"):
        told[shape.name] = compare(options.tree, shape, options.rounds)
        for tree, times in told[shape.name].items():
            cells = " ".join(f"{part} {ms:.4g}" for part, ms in times.items())
            tqdm.write(f"{shape.name:34s} {tree:24s} {cells}", file=sys.stdout)
        if options.json:
            options.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
