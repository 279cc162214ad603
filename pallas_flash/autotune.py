"""Finds the fastest configuration of a kernel, and prints it as a row of tuned.py.

    python -m pallas_flash.autotune forward --head-dim 128 --causal
    python -m pallas_flash.autotune backward --head-dim 64 --state d64.json    goes on where it was

Every configuration is tried that fits: its own scratch in shared memory, and the compiler's verdict
(few spills, no serialized tensor-core work), which needs no GPU. What is left is timed where there
is one (CUPTI, the median of ten launches), and otherwise listed. `--state` keeps the results after
every step, so a search that was stopped goes on.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_flash import aot, benchmark, masks, tuned
from pallas_flash.benchmark_shapes import Shape
from pallas_flash.config import BackwardConfig, DqConfig, ForwardConfig
from pallas_flash.problem import Problem

Config = ForwardConfig | BackwardConfig | DqConfig
PASSES: dict[str, type[Config]] = dict(forward=ForwardConfig, backward=BackwardConfig, dq=DqConfig)
# What is varied; other fields keep their default.
VARIED: dict[str, dict[str, tuple[Any, ...]]] = dict(
    forward=dict(
        compute_wgs=(2, 3),
        block_kv=(64, 128, 192),
        num_stages=(2, 3),
        overlap=(True, False),
        rescale_threshold=(8.0,),
        q_stages=(1, 2),
        output_through_q=(True, False),
        persistent=(True, False),
    ),
    backward=dict(
        split=("keys", "roles"),
        block_q=(64, 128),
        block_kv=(64, 128),
        num_stages=(2, 3),
        head_group=(1, 2, 4),
    ),
    dq=dict(compute_wgs=(2, 3), block_kv=(64, 128), k_stages=(2, 3, 4), v_stages=(1, 2, 3)),
)
COMPILED_AT_ONCE = 8  # configurations a compiling process takes


@dataclasses.dataclass(frozen=True)
class Target:
    """What is tuned: one kernel on one problem, bfloat16.

    Attributes:
      kernel: 'forward', 'backward' or 'dq'.
      batch, seq_len, num_q_heads, num_kv_heads, head_dim, head_dim_v, causal: the problem.
    """

    kernel: str
    batch: int
    seq_len: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    causal: bool

    def configs(self) -> Iterator[Config]:
        """Every combination of `VARIED` that is a configuration."""
        varied = VARIED[self.kernel]
        for values in itertools.product(*varied.values()):
            try:
                yield PASSES[self.kernel](**dict(zip(varied, values, strict=True)))
            except ValueError:  # no such configuration
                continue

    def arguments(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes of what `launch` takes."""
        sizes = dict(b=self.batch, t=self.seq_len, n=self.num_q_heads, k=self.num_kv_heads)
        shape = lambda letters, width: (*(sizes[letter] for letter in letters), width)
        bf16 = lambda *s: jax.ShapeDtypeStruct(s, jnp.bfloat16)
        f32 = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
        q, out = shape("btn", self.head_dim), shape("btn", self.head_dim_v)
        k, v = shape("btk", self.head_dim), shape("btk", self.head_dim_v)
        given = [bf16(*q), bf16(*k), bf16(*v)]
        if self.kernel != "forward":
            rows = f32(self.batch, self.num_q_heads, self.seq_len)
            outs = [bf16(*out)] * (2 if self.kernel == "backward" else 1)  # dq needs dout only
            given += [*outs, rows, rows]
        return [*given, f32(self.batch)]

    def launch(self, config: Config):
        """A function of `arguments` that launches the kernel."""
        options: dict[str, Any] = dict(
            mask=self.problem.mask, q_len=self.seq_len, kv_len=self.seq_len, config=config
        )
        if isinstance(config, BackwardConfig):
            options["kv_parts"] = tuned.kv_parts(self.problem, config)
        return functools.partial(_kernel(self.kernel), **options)

    @property
    def problem(self) -> Problem:
        sizes = (self.batch, self.seq_len, self.seq_len, self.num_q_heads, self.num_kv_heads)
        mask = masks.Causal() if self.causal else masks.And()
        return Problem(*sizes, self.head_dim, self.head_dim_v, dtype="bfloat16", mask=mask)

    @property
    def flops(self) -> int:
        """Of the kernel's products over visible pairs: two in the forward, five, three for dq."""
        shape = Shape(
            "",
            self.batch,
            self.seq_len,
            self.num_q_heads,
            self.num_kv_heads,
            self.head_dim,
            self.causal,
            head_dim_v=self.head_dim_v,
        )
        h, hv = self.head_dim, self.head_dim_v
        pairs = shape.flops(jnp.bfloat16, backward=False) // (2 * (h + hv))
        widths = dict(forward=h + hv, backward=3 * h + 2 * hv, dq=2 * h + hv)
        return 2 * pairs * widths[self.kernel]


def _kernel(name: str):
    from pallas_flash.kernels.sm90 import backward, backward_dq, forward

    return dict(
        forward=forward.flash_forward,
        backward=backward.flash_backward,
        dq=backward_dq.flash_backward_dq,
    )[name]


def compiled_case(target: dict[str, Any], config: dict[str, Any]):
    """(function, arguments) of one configuration, for `aot.kernels_of`."""
    of = Target(**target)
    return of.launch(PASSES[of.kernel](**config)), of.arguments()


class State:
    """Results by configuration, on disk after every change."""

    def __init__(self, path: Path | None, target: Target):
        self.path, self.key = path, json.dumps(dataclasses.asdict(target))
        self.told: dict[str, dict[str, dict[str, Any]]] = {}
        if path is not None and path.exists():
            self.told = json.loads(path.read_text())
        self.results = self.told.setdefault(self.key, {})

    def of(self, config: Config) -> dict[str, Any]:
        return self.results.setdefault(json.dumps(dataclasses.asdict(config)), {})

    def save(self) -> None:
        if self.path is not None:
            self.path.write_text(json.dumps(self.told, indent=1) + "\n")


def fits(target: Target, config: Config) -> bool:
    """Whether the launch takes it: its tiles cut the problem and its scratch fits one block."""
    try:
        jax.eval_shape(target.launch(config), *target.arguments())
    except ValueError:
        return False
    return True


def compile_all(target: Target, configs: list[Config], state: State, progress: Any) -> None:
    """Records spill bytes and notes of every configuration that has none yet."""
    waiting = [config for config in configs if "spill_bytes" not in state.of(config)]
    for first in range(0, len(waiting), COMPILED_AT_ONCE):
        chunk = waiting[first : first + COMPILED_AT_ONCE]
        cases = [[dataclasses.asdict(target), dataclasses.asdict(config)] for config in chunk]
        found = aot.kernels_of("pallas_flash.autotune:compiled_case", cases, timeout_s=600)
        for config, kernels in zip(chunk, found, strict=True):
            main = [k for k in kernels if k.name.startswith(("flash_forward", "flash_backward"))]
            main = [k for k in main if not k.name.endswith(("statistics", "zeros", "finish_dq"))]
            state.of(config).update(
                spill_bytes=max((k.spill_bytes for k in main), default=0),
                serialized=any(k.notes for k in main),
            )
            progress.update()
        state.save()


def time_all(target: Target, configs: list[Config], state: State, progress: Any) -> None:
    """Records milliseconds of every configuration that has none yet."""
    keys = jax.random.split(jax.random.key(0), len(target.arguments()))
    arrays = [
        jax.random.normal(key, x.shape, x.dtype)
        for key, x in zip(keys, target.arguments(), strict=True)
    ]
    arrays[-1] = jnp.full(target.batch, 1 / math.sqrt(target.head_dim), jnp.float32)
    if target.kernel != "forward":
        arrays[4] = jnp.full_like(arrays[4], math.log(target.seq_len))
    for config in configs:
        result = state.of(config)
        if "milliseconds" not in result:
            result["milliseconds"] = benchmark.kernel_times(jax.jit(target.launch(config)), *arrays)
            state.save()
        progress.update()


def row(target: Target, config: Config, result: dict[str, Any]) -> str:
    """The line for tuned.py."""
    default = PASSES[target.kernel]()
    changed = ", ".join(
        f"{field.name}={getattr(config, field.name)!r}"
        for field in dataclasses.fields(config)
        if getattr(config, field.name) != getattr(default, field.name)
    )
    spills = result.get("spill_bytes")
    spilled = f", spill_bytes={spills}" if spills else ""
    line = f"({target.head_dim}, {target.head_dim_v}): "
    line += f"Tuned({type(config).__name__}({changed}){spilled}),"
    if "milliseconds" in result:
        rate = target.flops / result["milliseconds"] / 1e9
        kind = "causal" if target.causal else "full"
        line += f"  # {rate:.0f} {kind}, T {target.seq_len}"
    return line


def search(target: Target, state: State, most_spills: int) -> list[Config]:
    """The configurations that are worth timing, or were timed, best first."""
    from tqdm import tqdm

    configs = [c for c in tqdm([*target.configs()], "fits", leave=False) if fits(target, c)]
    missing = aot.missing_wheels()
    if missing:
        print(f"spills are not looked at: {missing}", file=sys.stderr)
    else:
        known = sum("spill_bytes" in state.of(config) for config in configs)
        with tqdm(total=len(configs), desc="compiles", initial=known) as progress:
            compile_all(target, configs, state, progress)
        is_clean = lambda r: not r["serialized"] and r["spill_bytes"] <= most_spills
        configs = [config for config in configs if is_clean(state.of(config))]
    if jax.default_backend() == "gpu":
        with tqdm(total=len(configs), desc="times") as progress:
            time_all(target, configs, state, progress)
    rank = lambda c: (state.of(c).get("milliseconds", math.inf), state.of(c).get("spill_bytes", 0))
    return sorted(configs, key=rank)


def _parsed(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kernel", choices=PASSES)
    parser.add_argument("--head-dim", type=int, required=True)
    parser.add_argument("--head-dim-v", type=int, help="of the value; default: --head-dim")
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--heads", type=int, help="query heads; default: 2048 / --head-dim")
    parser.add_argument("--kv-heads", type=int, help="default: --heads")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--most-spills", type=int, default=64, help="bytes a thread may spill")
    parser.add_argument("--state", type=Path, help="results are kept here and taken from here")
    parser.add_argument("--show", type=int, default=5, help="how many rows to print")
    options = parser.parse_args(argv)
    sizes = {name: getattr(options, name) for name in ("head_dim", "seq_len", "batch")}
    for name, size in sizes.items():
        if size < 1:
            parser.error(f"--{name.replace('_', '-')}={size}: must be at least 1")
    for name in ("head_dim", "head_dim_v"):
        size = getattr(options, name) or 64
        tiles = range(16, 257, 16)
        if options.kernel != "forward":
            tiles = sorted({*range(64, 129, 16), *tuned.HEAD_DIMS})
        if size not in tiles:
            parser.error(f"--{name.replace('_', '-')}={size}: this kernel takes {[*tiles]}")
    heads = options.heads or max(1, 2048 // options.head_dim)
    if heads % (options.kv_heads or heads):
        parser.error(f"--heads={heads} must be a multiple of --kv-heads={options.kv_heads}")
    if options.seq_len % 8:
        parser.error(f"--seq-len={options.seq_len}: must be a multiple of 8")
    return options


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    options = _parsed(argv)
    heads = options.heads or max(1, 2048 // options.head_dim)
    target = Target(
        kernel=options.kernel,
        batch=options.batch,
        seq_len=options.seq_len,
        num_q_heads=heads,
        num_kv_heads=options.kv_heads or heads,
        head_dim=options.head_dim,
        head_dim_v=options.head_dim_v or options.head_dim,
        causal=options.causal,
    )
    state = State(options.state, target)
    best = search(target, state, options.most_spills)
    if not best:
        sys.exit("no configuration fits")
    for config in best[: options.show]:
        print(row(target, config, state.of(config)))
    if jax.default_backend() != "gpu":
        print(f"{len(best)} configurations fit; no GPU here, so none was timed", file=sys.stderr)


if __name__ == "__main__":
    main()
