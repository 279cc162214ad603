"""Thousands of random problems against attention in float32: values, lse, gradients, exact zeros.

    python tests/fuzz_gpu.py --parts 10 --part 3 --seed 0 --minutes 9 --state part3.json
    python tests/fuzz_gpu.py --seed 0 --only 17:4                     # one problem again
    JAX_PLATFORMS=cpu python tests/fuzz_gpu.py --implementation xla --max-len 40 --programs 4

A program is what is static about a call; it compiles once and runs with many draws of values. Ours
gets NaN and Inf behind the lengths and the largest floats in keys that nobody sees, the reference
does not. Every entry is held to the rule of `tests.tolerance`, and so is the root mean square of
the errors, with one rounding: that finds a gradient which is 2 % wrong everywhere.
"""

import argparse
import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several parts share the card
sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from pallas_flash import dot_product_attention, reference
from pallas_flash.arguments import Arguments, normalize
from tests import tolerance
from tests.cases import Case
from tests.random_problems import (
    LONGEST,
    Draw,
    arguments,
    dense_arguments,
    draw_case,
    draw_values,
    seen_keys,
)

WRT = ("query", "key", "value", "bias", "scale", "sinks", "alibi_slopes")
RMS_ROUNDINGS = 1.0
RMS_ENTRIES = 1024  # of fewer, the root mean square says little
LSE_FLOOR = 1.0  # log-sum-exp may be near 0 where the logits it sums are not
GPU_OPTIONS = {"xla_gpu_autotune_level": 0}  # the reference runs 20 times: compile time matters


def ours(case: Case, implementation: str):
    """Jitted: (arrays, dout, dlse) -> out, lse and the gradient of every float argument."""

    @jax.jit
    def run(arrays, dout, dlse):
        def call(wrt):
            return dot_product_attention(
                **arguments(case, arrays | wrt),
                return_residual=True,
                implementation=implementation,
            )

        (out, lse), vjp = jax.vjp(call, {n: arrays[n] for n in WRT if n in arrays})
        return {"out": out, "lse": lse} | {f"d{n}": g for n, g in vjp((dout, dlse))[0].items()}

    return run


def judge(problem, operands, dout, dlse, got):
    """Each result's true and plain counterparts, and the statistics that the rule needs.

    Returns:
      name -> (statistics, true, plain, floor).
    """
    dlse = jnp.swapaxes(dlse, 1, 2)
    with jax.default_matmul_precision("highest"):
        true = reference.plain_gradients(operands, problem, dout, dlse, jnp.float32)
        floors = magnitudes(problem, operands, dout, dlse, true)
    plain = reference.plain_gradients(operands, problem, dout, dlse)
    true, plain = (
        {"out": x[0], "lse": jnp.swapaxes(x[1], 1, 2)} | {f"d{n}": g for n, g in x[2].items()}
        for x in (true, plain)
    )
    judged = {}
    for name, x in got.items():
        t, p = (y[name].reshape(x.shape).astype(jnp.float32) for y in (true, plain))
        floor = floors.get(name, jnp.zeros(1))
        judged[name] = (statistics(x.astype(jnp.float32), t, p, floor), t, p, floor)
    return judged


def statistics(got, true, plain, floor) -> dict[str, jax.Array]:
    finite = jnp.isfinite(true)
    rms = lambda x: jnp.sqrt(jnp.mean(x**2))
    wrong, plain_wrong = (jnp.where(finite, x - true, 0.0) for x in (got, plain))
    size = jnp.where(finite, true, 0.0)
    return {
        "strange": jnp.sum(jnp.where(finite, ~jnp.isfinite(got), got != true)),
        "max": jnp.stack([jnp.abs(x).max() for x in (wrong, plain_wrong, size, floor)]),
        "rms": jnp.stack([rms(x) for x in (wrong, plain_wrong, size, floor)]),
    }


def magnitudes(problem, operands, dout, dlse, true) -> dict[str, jax.Array]:
    """What one rounding harms, where the result may be smaller than that by cancellation.

    A logit's gradient is P (dP - delta) with delta = dout . out: `out` rounded to 16 bits, of
    weights rounded to 16 bits, as flash attention has both, moves delta by half a rounding of
    `row`, whatever is left of the difference. Gradients that are sums of the logits' gradients have
    their size as well; sums over queries add errors as independent ones, sums over the keys of a
    query do not.
    """
    out, lse, grads = true
    k, v = (jnp.repeat(x, problem.q_per_kv, axis=2) for x in (operands.key, operands.value))
    q, k, v, dout = (x.astype(jnp.float32) for x in (operands.query, k, v, dout))
    shape = (problem.batch, problem.kv_len, problem.num_kv_heads, problem.kv_len)
    identity = jnp.broadcast_to(jnp.eye(problem.kv_len)[:, None, :], shape)
    undropped = dataclasses.replace(problem, dropout_rate=0.0)
    probs = reference.attention_reference(
        operands._replace(value=identity), undropped, jnp.float32
    )[0]
    probs = jnp.swapaxes(probs, 1, 2)  # (B, N, T, S)
    dprobs = jnp.einsum("btnh,bsnh->bnts", dout, v)
    row = jnp.einsum("btnh,btnh->bnt", dout**2, out**2) + jnp.sum((probs * dprobs) ** 2, -1)
    row = jnp.sqrt(row)
    delta = jnp.einsum("btnh,btnh->bnt", dout, out) - jnp.where(jnp.isfinite(lse), dlse, 0.0)
    slope = jnp.float32(1.0)
    if problem.soft_cap is not None:
        u = jnp.where(probs > 0, (jnp.log(probs) + lse[..., None]) / problem.soft_cap, 0.0)
        slope = jnp.clip(1 - u**2, 0.0, 1.0)
    tiny = float(jnp.finfo(problem.dtype).tiny)  # a probability or a gradient may underflow
    moved = slope * probs * row[..., None] / 2 + tiny
    terms = slope * jnp.abs(probs * (dprobs - delta[..., None])) + moved
    scale = jnp.abs(problem.scale if operands.scale is None else operands.scale)

    by_group = lambda x: x.reshape(*x.shape[:2], -1, problem.q_per_kv, x.shape[-1]).sum(3)
    by_row = lambda factor: jnp.sum(terms * jnp.abs(factor), axis=-1) ** 2
    found = {
        "lse": jnp.full(1, LSE_FLOOR),
        "dquery": scale * jnp.sqrt(jnp.einsum("bnts,bsnh->btnh", moved**2, k**2)),
        "dkey": scale * jnp.sqrt(by_group(jnp.einsum("bnts,btnh->bsnh", moved**2, q**2))),
    }
    if "bias" in grads:
        wide = grads["bias"].shape
        squares = by_row(1.0)[..., None] if wide[-1] == 1 else terms**2
        axes = tuple(a for a in range(3) if wide[a] == 1)
        found["dbias"] = jnp.sqrt(squares.sum(axes))
    if "scale" in grads:
        found["dscale"] = jnp.sqrt(by_row(jnp.einsum("btnh,bsnh->bnts", q, k)).sum())
    if "sinks" in grads:
        sink = jnp.exp(operands.sinks.astype(jnp.float32)[:, None] - lse)
        found["dsinks"] = jnp.sqrt(jnp.sum((sink * row) ** 2, axis=(0, 2)))
    if "alibi_slopes" in grads:
        far = jnp.arange(problem.kv_len) - jnp.arange(problem.q_len)[:, None]
        found["dalibi_slopes"] = jnp.sqrt(by_row(far - problem.alibi_shift).sum((0, 2)))
    return found


def complaints(case: Case, draw: Draw, got, judged) -> list[str]:
    """What is wrong with the results of one problem, a line each."""
    found = []
    for name, (stats, *arrays) in judged.items():
        stats = jax.tree.map(np.asarray, stats)
        dtype = "float32" if name == "lse" and "logits_soft_cap" not in case.static else case.dtype
        by_max = _allowed(stats["max"], tolerance.ROUNDINGS[dtype], dtype)
        if stats["strange"] or not stats["max"][0] <= by_max:
            found.append(_in_words(name, got[name], *arrays, dtype))
        by_rms = _allowed(stats["rms"], RMS_ROUNDINGS, dtype)
        if name != "lse" and got[name].size >= RMS_ENTRIES and stats["rms"][0] > by_rms:
            found.append(f"{name}: rms error {stats['rms'][0]:.3g}, allowed {by_rms:.3g}")
    rows = np.swapaxes(draw.visible.any(axis=-1), 1, 2)  # (B, T, N)
    keys = seen_keys(case, draw.visible)  # (B, S, K)
    zeros = {"out": rows, "dquery": rows, "dkey": keys, "dvalue": keys}
    for name, seen in zeros.items():
        hidden = np.asarray(got[name])[~seen] if not seen.all() else np.zeros(0)
        if not (hidden == 0).all():
            found.append(f"{name}: {(hidden != 0).sum()} entries not 0 where nothing is visible")
    if "sinks" not in case.arrays and (np.asarray(got["lse"])[~rows] != -np.inf).any():
        found.append("lse: not -inf where nothing is visible")
    return found


def _allowed(stats, roundings: float, dtype) -> float:
    _, plain, size, floor = map(float, stats)
    eps = float(jnp.finfo(dtype).eps)
    return tolerance.PLAIN_FACTOR * plain + roundings * eps * max(
        size, floor, float(jnp.finfo(dtype).tiny)
    )


def _in_words(name, got, true, plain, floor, dtype) -> str:
    try:
        floor = float(jnp.max(floor))
        got, true, plain = (np.asarray(x, np.float32) for x in (got, true, plain))
        tolerance.assert_close(got, true, plain, dtype, name, floor=floor)
    except AssertionError as error:
        return str(error)
    return f"{name}: just beyond the tolerance"


class Program:
    """One compiled case, and what became of its problems."""

    def __init__(self, options, index: int, judge):
        self.options, self.index, self.judge = options, index, judge
        self.case = draw_case(options.seed, index, options.max_len)
        self.refused = ""
        self.run = ours(self.case, options.implementation)

    def check(self, number: int) -> str | None:
        """What is wrong with one draw, in a line."""
        draw = draw_values(self.case, self.options.seed, number)
        problem, operands = normalize(Arguments(**dense_arguments(self.case, draw)))
        cotangents = jnp.asarray(draw.dout), jnp.asarray(draw.dlse)
        try:
            got = self.run(draw.garbage, *cotangents)
        except NotImplementedError as error:
            if "cannot run this call" not in str(error) or self.refused:
                raise
            self.refused = str(error).partition("mosaic_gpu: ")[2].partition("; xla:")[0]
            self.run = ours(self.case, "xla")
            got = self.run(draw.garbage, *cotangents)
        if self.options.plant:
            got["dkey"] = (got["dkey"] * 1.02).astype(got["dkey"].dtype)
        judged = self.judge(problem, operands, *cotangents, got)
        found = complaints(self.case, draw, got, judged)
        return f"{'; '.join(found)} | {self._told(number, draw)}" if found else None

    def _told(self, number: int, draw: Draw) -> str:
        small = {
            n: x.tolist() for n, x in draw.arrays.items() if x.size <= 16 and n in self.case.arrays
        }
        options = self.options
        again = f"--seed {options.seed} --max-len {options.max_len} --only {self.index}:{number}"
        return f"{again} | {draw.kind}, {small} | {self.case!r}"


class State:
    """What is finished, in a file if one is named: program -> problems, failures, refusal."""

    def __init__(self, path: Path | None, run: dict[str, Any]):
        self.path, self.run = path, run
        self.done: dict[str, dict[str, Any]] = {}
        if path and path.exists():
            saved = json.loads(path.read_text())
            if saved["run"] != run:
                sys.exit(f"{path} is of another run: {saved['run']}, not {run}; name another file")
            self.done = saved["done"]
            if saved["running"] is not None:
                failure = f"program {saved['running']}: ended the process (hang, crash or kill)"
                print(f"FAILED {failure}")
                record = {"problems": 0, "failures": [failure], "refused": ""}
                self.done[str(saved["running"])] = record
                self.save(running=None)

    def save(self, running: int | None) -> None:
        if self.path:
            text = json.dumps({"run": self.run, "running": running, "done": self.done}, indent=1)
            self.path.with_suffix(".tmp").write_text(text)
            self.path.with_suffix(".tmp").replace(self.path)


def run_program(program: Program, draws, bar, out_of_time) -> dict[str, Any] | None:
    """Its record; None when time was up first."""
    failures, problems = [], 0
    bar.set_description(f"program {program.index}")
    for number in draws:
        if out_of_time():
            return None
        problems += 1
        bar.update()
        try:
            found, broken = program.check(number), False
        except Exception as error:  # a fault of one program is a result, not the end
            line, broken = " ".join(str(error).split())[:500], True
            found = f"{type(error).__name__}: {line} | program {program.index}: {program.case!r}"
        if found:
            failures.append(found)
            bar.write(f"FAILED {found}", file=sys.stdout)
        if broken:
            break
    if program.refused:
        bar.write(f"not fused: program {program.index}: {program.refused}", file=sys.stdout)
    return {"problems": problems, "failures": failures, "refused": program.refused}


def device_answers() -> bool:
    try:
        return bool(jnp.arange(4).sum() == 6)
    except Exception:  # whatever a lost device raises
        return False


def main(options) -> int:
    start = time.perf_counter()
    out_of_time = lambda: time.perf_counter() - start > 60 * options.minutes
    on_gpu = jax.default_backend() == "gpu"
    judge_jit = jax.jit(judge, static_argnums=0, compiler_options=GPU_OPTIONS if on_gpu else {})
    indices = range(options.part, options.programs, options.parts)
    draws = range(options.draws)
    if options.only:
        index, _, number = options.only.partition(":")
        indices, draws = [int(index)], [int(number)] if number else draws
    run = {n: getattr(options, n) for n in ("seed", "draws", "max_len", "implementation", "plant")}
    state = State(None if options.only else options.state, run)
    todo = [i for i in indices if str(i) not in state.done]
    with tqdm(total=len(todo) * len(draws), unit=" problems", mininterval=1.0) as bar:
        for index in todo:
            if out_of_time():
                break
            state.save(running=index)
            record = run_program(Program(options, index, judge_jit), draws, bar, out_of_time)
            if record:
                state.done[str(index)] = record
            state.save(running=None)
            if record and record["failures"] and not device_answers():
                bar.write("the device is lost: continue in a new process", file=sys.stdout)
                break
    return summary(state, indices, time.perf_counter() - start)


def summary(state: State, indices, seconds: float) -> int:
    records = [state.done[str(i)] for i in indices if str(i) in state.done]
    failures = sum(len(r["failures"]) for r in records)
    problems = sum(r["problems"] for r in records)
    refused = sum(bool(r["refused"]) for r in records)
    print(
        f"{problems} problems, {len(records)} of {len(indices)} programs ({refused} not fused), "
        f"{failures} failures, {seconds:.0f} s"
    )
    return 1 if failures else 0


def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--programs", type=int, default=120, help="in all parts together")
    parser.add_argument("--draws", type=int, default=20, help="of values for each program")
    parser.add_argument("--parts", type=int, default=1)
    parser.add_argument("--part", type=int, default=0, help="runs programs PART, PART + PARTS, ...")
    parser.add_argument("--minutes", type=float, default=9.0, help="starts nothing after that")
    parser.add_argument("--state", type=Path, help="remembers finished programs, and skips them")
    parser.add_argument("--only", metavar="PROGRAM[:DRAW]", help="one program, or one problem")
    parser.add_argument("--implementation", default="mosaic_gpu", choices=("mosaic_gpu", "xla"))
    parser.add_argument("--max-len", type=int, default=LONGEST, help="of queries and keys")
    parser.add_argument("--plant", action="store_true", help="dkey 2 %% too large: must be found")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(parse()))
