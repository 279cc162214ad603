"""The command line of the IO model: a table, a sweep over lengths, a plot.

    python -m pallas_flash.io_model --seq-len 8192 --head-dim 128 --heads 16 --causal --backward

Nothing is computed here but ratios and exponents.
"""

import argparse
import dataclasses
import itertools
import json
import math
import re
from pathlib import Path
from typing import Any, NoReturn

import jax.numpy as jnp
import numpy as np

from pallas_flash import hardware, io_counts, io_model, link_model, masks
from pallas_flash.io_model import Estimate
from pallas_flash.io_sweep import LONGEST, SPEEDS, Study, crossovers, sweep
from pallas_flash.problem import DTYPES, Operands, Problem
from pallas_flash.tile_walks import NO_OPERANDS, visible_pairs

LIMITS = hardware.SM90
FIRST_PLOTTED = 128
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, and exit status 2."""
        self.exit(2, f"{self.prog}: {message}\n")


def _size(text: str) -> int:
    """'227KiB', '450GB/s' or a number, in bytes (a second)."""
    found = re.fullmatch(r"([\d.]+) ?([KMGT]i?|)B?(?:/s)?", text)
    try:
        value = float(found[1]) * _UNITS[found[2]] if found else math.nan
    except (ValueError, KeyError):
        value = math.nan
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size like 227KiB, 48KB or 450GB/s")
    return int(value)


def _count(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive whole number")
    return int(text)


def _sides(text: str) -> tuple[int, int]:
    parts = text.split(",")
    if len(parts) != 2 or not all(part.isdigit() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no pair of sides like 1023,0")
    return int(parts[0]), int(parts[1])


def _parser() -> _Parser:
    parser = _Parser(
        prog="io_model",
        description=io_model.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--seq-len", type=_count, required=True, help="queries, T")
    add("--head-dim", type=_count, required=True, help="of query and key")
    add("--heads", type=_count, required=True, help="of the query")
    add("--kv-heads", type=_count, help="of key and value; default: as many")
    add("--kv-len", type=_count, help="keys, S; default: T")
    add("--head-dim-v", type=_count, help="of the value; default: as the key's")
    add("--batch", type=_count, default=1)
    add("--dtype", default="bfloat16", choices=[dtype.name for dtype in DTYPES])
    add("--sram", type=_size, default=LIMITS.smem_bytes, help="M of the paper, such as 227KiB")
    add("--causal", action="store_true", help="aligned top-left")
    add("--window", type=_sides, metavar="L,R", help="keys visible before and after a query's own")
    add("--dropout", type=float, default=0.0, metavar="RATE")
    add("--backward", action="store_true", help="the backward, too")
    add("--passes", action="store_true", help="every pass by tensor")
    add("--devices", type=_count, help="in a ring over the sequence")
    add(
        "--link-bandwidth",
        type=_size,
        help="one way, such as 450GB/s; default: NVLink and the network",
    )
    add("--json", action="store_true", help="all of it, for a program")
    add("--plot", type=Path, metavar="FILE", help="bytes and time floors over T")
    return parser


def _problem(options: argparse.Namespace) -> tuple[Problem, Operands]:
    kv_heads = options.kv_heads or options.heads
    if options.heads % kv_heads:
        raise ValueError(
            f"heads={options.heads} must be a multiple of kv_heads={kv_heads}: change one"
        )
    if not 0 <= options.dropout < 1:
        raise ValueError(f"dropout={options.dropout} must be at least 0 and below 1")
    mask, operands = masks.And(), NO_OPERANDS
    if options.causal:
        mask &= masks.Causal()
    if options.window is not None:
        mask &= masks.Window(True, True)
        operands = operands._replace(window=np.array(options.window))
    problem = Problem(
        batch=options.batch,
        q_len=options.seq_len,
        kv_len=options.kv_len or options.seq_len,
        num_q_heads=options.heads,
        num_kv_heads=kv_heads,
        head_dim=options.head_dim,
        head_dim_v=options.head_dim_v or options.head_dim,
        dtype=jnp.dtype(options.dtype).name,
        mask=mask,
        dropout_rate=options.dropout,
    )
    return problem, operands


def _swept(study: Study) -> list[int]:
    """Lengths up to T for which the same algorithms are counted."""
    q_len = study.problem.q_len
    shorter = {q_len // part for part in (16, 8, 4, 2)} - {0}
    is_counted = lambda n: not io_model.refusal(study.at(n).problem)
    return sorted({q_len} | {n for n in shorter if is_counted(n) == is_counted(q_len)})


# --- as text -------------------------------------------------------------------------------------


def readable(size: float, unit: str = "B") -> str:
    """Three digits and a decimal prefix."""
    for prefix in ("", "k", "M", "G", "T"):
        if size < 999.5 or prefix == "T":
            break
        size /= 1000
    digits = 0 if prefix == "" or size >= 99.95 else 1 if size >= 9.995 else 2
    return f"{size:.{digits}f} {prefix}{unit}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms"


def _columns(title: str, rows: dict[str, list[str]], heads: list[str]) -> list[str]:
    width = max(map(len, [title, *rows])) + 2
    widths = [
        max(len(cell) for cell in column) + 3 for column in zip(heads, *rows.values(), strict=True)
    ]
    line = lambda name, cells: (
        name.ljust(width) + "".join(cell.rjust(w) for cell, w in zip(cells, widths, strict=True))
    )
    return [line(title, heads), *(line(name, cells) for name, cells in rows.items())]


def _ratio(e: Estimate) -> str:
    return f"{e.counts.moved / e.closed_form:.3g}" if e.closed_form else "-"


def table(study: Study, backward: bool) -> list[str]:
    """The figures of one direction, a column an algorithm."""
    found = study.estimates(backward)
    of = lambda cell: [cell(e) for e in found]
    rows = {
        "read": of(lambda e: readable(e.counts.reads)),
        "written": of(lambda e: readable(e.counts.writes)),
        "moved (the paper's HBM count)": of(lambda e: readable(e.counts.moved)),
        "  closed form": of(lambda e: readable(e.closed_form) if e.closed_form else "-"),
        "  moved / closed form": of(_ratio),
        "device memory, predicted": of(lambda e: readable(e.memory.total)),
        "  at least / at most": of(
            lambda e: f"{readable(e.memory.least)} / {readable(e.memory.most)}"
        ),
        "  what is shared in L2": of(
            lambda e: f"{readable(e.residency.active_bytes)} {e.residency.regime}"
        ),
        "matrix products": of(lambda e: readable(e.counts.flops, "FLOP")),
        "  of these, recomputed": of(lambda e: readable(_recomputed(e), "FLOP")),
        "extra memory at the peak": of(lambda e: readable(e.counts.extra_bytes)),
        "flops a byte of device memory": of(lambda e: f"{e.intensity:.1f}"),
        "time floor, products": of(lambda e: _ms(e.counts.flops / SPEEDS.matmul_flops_s)),
        "time floor, bytes": of(lambda e: _ms(e.memory.total / SPEEDS.hbm_bytes_s)),
        "  at the rate of a copy": of(lambda e: _ms(e.memory.total / SPEEDS.hbm_copy_bytes_s)),
        "time floor": of(lambda e: _ms(e.floor_s(SPEEDS))),
    }
    title = "backward" if backward else "forward"
    return _columns(title, rows, [e.algorithm for e in found])


def _recomputed(e: Estimate) -> int:
    return sum(
        product.flops
        for one in e.counts.passes
        for product in one.products
        if product.name.endswith("again")
    )


def by_pass(estimate: Estimate) -> list[str]:
    """A line for each pass and each way: tensors and their bytes."""
    lines = []
    for one in estimate.counts.passes:
        lines.append(f"  {estimate.algorithm}: {one.name}  ({one.source})")
        for way, accesses in (("reads", one.reads), ("writes", one.writes)):
            told = ", ".join(f"{a.tensor} {readable(a.moved)}" for a in accesses if a.moved)
            if told:
                lines.append(f"    {way:6s} {told}")
        told = ", ".join(f"{p.name} {readable(p.flops, 'FLOP')}" for p in one.products)
        if told:
            lines.append(f"    does   {told}")
    return lines


def _heading(study: Study) -> list[str]:
    p, sides = study.problem, study.operands.window
    told = [f"{p.dtype}, batch {p.batch}, heads {p.num_q_heads} on {p.num_kv_heads} kv heads"]
    told += [f"T {p.q_len}, S {p.kv_len}", f"head_dim {p.head_dim}, of value {p.head_dim_v}"]
    told += ["causal"] * (masks.Causal() in p.mask.parts())
    told += [] if sides is None else [f"window {sides[0]},{sides[1]}"]
    told += [f"dropout {p.dropout_rate}"] if p.dropout_rate else []
    pairs, seen = p.batch * p.num_q_heads * p.q_len * p.kv_len, visible_pairs(p, study.operands)
    floors = [
        f"{'backward' if backward else 'forward'} "
        + _ms(io_model.problem_floor_s(p, study.operands, backward=backward, speeds=SPEEDS))
        for backward in study.directions
    ]
    blocks = io_counts.paper_blocks(p, study.sram_bytes)
    lines = [
        ", ".join(told),
        f"{SPEEDS.name}; M = {study.sram_bytes} bytes: blocks of {blocks[0]} queries, "
        f"{blocks[1]} keys in the paper's algorithm",
        f"pairs: {seen} of {pairs} visible; least time of the problem: {', '.join(floors)}",
    ]
    refusal = io_model.refusal(p)
    return [*lines, f"kernels: not counted, {refusal}"] if refusal else lines


def _sweep_lines(study: Study, backward: bool) -> list[str]:
    rows = sweep(study, _swept(study), backward)
    names = list(rows[0]["bytes"])
    cells = {}
    for row in rows:
        exponents = row.get("exponent")
        power = lambda name, e=exponents: f" T^{e[name]:.2f}" if e else " " * 7
        cells[f"T {row['seq_len']}"] = [readable(row["bytes"][n]) + power(n) for n in names]
    title = f"moved, {'backward' if backward else 'forward'}"
    return _columns(title, cells, names)


def _crossover_lines(found: dict[str, int | None]) -> list[str]:
    told = {
        "each byte once, forward: bound by the matrix products": "compute_bound_from",
        "naive, forward: scores too large to stay in L2": "scores_leave_l2_from",
        "tiled: least time below that of naive, fused softmax": "tiled_floor_below_naive_from",
    }
    at = lambda length: f"at no T up to {LONGEST}" if length is None else f"from T {length} on"
    return [f"{what} {at(found[name])}" for what, name in told.items()]


def _links(options: argparse.Namespace) -> dict[str, int]:
    """Bytes a second to a neighbour, by the name of the link."""
    if options.link_bandwidth:
        return {"link": options.link_bandwidth}
    return {"NVLink": SPEEDS.nvlink_bytes_s, "network": SPEEDS.network_bytes_s}


def _ring(study: Study, devices: int, bandwidth: int, backward: bool) -> link_model.RingStep:
    return link_model.ring_step(
        study.problem,
        devices,
        bandwidth,
        is_causal=masks.Causal() in study.problem.mask.parts(),
        backward=backward,
        speeds=SPEEDS,
    )


def _ring_lines(study: Study, devices: int, name: str, bandwidth: int) -> list[str]:
    lines = [f"ring of {devices} devices, {name} of {readable(bandwidth, 'B/s')}, each step"]
    for backward in study.directions:
        step = _ring(study, devices, bandwidth, backward)
        lines.append(
            f"  {'backward' if backward else 'forward '}  sends {readable(step.link_bytes)} in "
            f"{_ms(step.link_s)}, computes {readable(step.flops, 'FLOP')} in "
            f"{_ms(step.compute_s)}: {'hidden' if step.is_hidden else 'not hidden'}; "
            f"hidden from T {step.hidden_from} on"
        )
    return lines


def _text(study: Study, options: argparse.Namespace, at: dict[str, int | None]) -> str:
    lines = _heading(study)
    for backward in study.directions:
        lines += ["", *table(study, backward)]
        if options.passes:
            lines += ["", *itertools.chain(*map(by_pass, study.estimates(backward)))]
        lines += ["", *_sweep_lines(study, backward)]
    lines += ["", *_crossover_lines(at)]
    if options.devices:
        for name, bandwidth in _links(options).items():
            lines += ["", *_ring_lines(study, options.devices, name, bandwidth)]
    return "\n".join(lines)


# --- for a program -------------------------------------------------------------------------------


def _as_json(
    study: Study, options: argparse.Namespace, at: dict[str, int | None]
) -> dict[str, Any]:
    told: dict[str, Any] = {
        "problem": {
            f.name: value
            for f in dataclasses.fields(Problem)
            if isinstance(value := getattr(study.problem, f.name), (int, float, str))
        },
        "causal": options.causal,
        "window": options.window,
        "sram_bytes": study.sram_bytes,
        "speeds": dataclasses.asdict(SPEEDS),
        "visible_pairs": visible_pairs(study.problem, study.operands),
        "crossovers": at,
    }
    for backward in study.directions:
        told["backward" if backward else "forward"] = {
            "floor_s": io_model.problem_floor_s(
                study.problem, study.operands, backward=backward, speeds=SPEEDS
            ),
            "algorithms": {e.algorithm: _estimate(e) for e in study.estimates(backward)},
            "sweep": sweep(study, _swept(study), backward),
        }
    if options.devices:
        told["ring"] = {
            name: {
                "backward" if backward else "forward": _ring(
                    study, options.devices, bandwidth, backward
                )._asdict()
                for backward in study.directions
            }
            for name, bandwidth in _links(options).items()
        }
    return told


def _estimate(e: Estimate) -> dict[str, Any]:
    return {
        "read_bytes": e.counts.reads,
        "written_bytes": e.counts.writes,
        "moved_bytes": e.counts.moved,
        "closed_form_bytes": e.closed_form or None,
        "flops": e.counts.flops,
        "recomputed_flops": _recomputed(e),
        "extra_bytes": dict(e.counts.extra),
        "dram": e.memory._asdict(),
        "residency": e.residency._asdict(),
        "flops_a_byte": e.intensity,
        "floor_s": e.floor_s(SPEEDS),
        "passes": [
            {
                "name": one.name,
                "source": one.source,
                "reads": {a.tensor: a.moved for a in one.reads},
                "writes": {a.tensor: a.moved for a in one.writes},
                "flops": {p.name: p.flops for p in one.products},
            }
            for one in e.counts.passes
        ],
    }


# --- as a picture --------------------------------------------------------------------------------


def plot(study: Study, path: Path, at: dict[str, int | None]) -> None:
    """Bytes, and the least time, over T; `at` from `crossovers`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    longest = max(study.problem.q_len, 2 * FIRST_PLOTTED)
    steps = math.floor(math.log2(longest / FIRST_PLOTTED))
    lengths = sorted({*(FIRST_PLOTTED * 2**i for i in range(steps + 1)), longest})
    found = [[study.at(n).estimates(b) for n in lengths] for b in study.directions]
    summed = lambda pick, i: [sum(pick(d[n][i]) for d in found) for n in range(len(lengths))]
    figure, (bytes_axes, time_axes) = pyplot.subplots(1, 2, figsize=(11, 4.5))
    for i, e in enumerate(found[0][0]):
        moved = summed(lambda e: e.counts.moved, i)
        bytes_axes.plot(lengths, moved, f"C{i}", label=f"{e.algorithm}, moved")
        if e.algorithm == "kernels":
            label, reached = "kernels, device memory", summed(lambda e: e.memory.total, i)
            bytes_axes.plot(lengths, reached, f"C{i}", linestyle="--", label=label)
        floors = summed(lambda e: 1e3 * e.floor_s(SPEEDS), i)
        time_axes.plot(lengths, floors, f"C{i}", label=e.algorithm)
    marks = (
        ("bound by products", ":", at["compute_bound_from"]),
        ("naive: scores leave L2", "-.", at["scores_leave_l2_from"]),
        ("tiled below naive", "--", at["tiled_floor_below_naive_from"]),
    )
    for label, style, length in marks:
        if length is not None and lengths[0] <= length <= lengths[-1]:
            for axes in (bytes_axes, time_axes):
                axes.axvline(length, color="gray", linestyle=style, label=f"{label} (T {length})")
    passes = "forward + backward" if study.backward else "forward"
    for axes, title in ((bytes_axes, "bytes"), (time_axes, "least time, ms")):
        axes.set(xscale="log", yscale="log", xlabel="T", title=f"{title}, {passes}")
        axes.set_xticks(lengths, [str(n) for n in lengths], rotation=45)
        axes.minorticks_off()
        axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.link_bandwidth and not options.devices:
        parser.error("--link-bandwidth needs --devices")
    try:
        study = Study(*_problem(options), options.sram, options.backward)
        at = crossovers(study)
        if options.json:
            told = json.dumps(_as_json(study, options, at), indent=1)
        else:
            told = _text(study, options, at)
        if options.plot:
            plot(study, options.plot, at)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(told)
