"""Times attention against the other implementations installed here, in one process.

    python -m pallas_flash.benchmark                 the named shapes, ours and every peer
    python -m pallas_flash.benchmark --quick         a few of them
    python -m pallas_flash.benchmark --only d128     those whose name contains it, or is it
    python -m pallas_flash.benchmark --sustained     two seconds each, not ten launches
    python -m pallas_flash.benchmark --show FILE     the table of figures written by --json
    python -m pallas_flash.benchmark --show FILE --plot PICTURE     the same as a picture

Every result is checked before it is timed, against a peer or, where none takes the shape, against
our XLA implementation or our other backward (`--deterministic`). On a GPU a time is that of the
kernels (CUPTI: three warm-ups, then the median of ten launches) and `wall` that of the whole call
(the median of ten, or of the more that make 50 ms); elsewhere both are wall time. `forward` is the
call alone, `backward` is forward+backward minus forward, so it includes everything a gradient
needs; decoding has the forward alone. TFLOP/s are of the products over visible pairs; floor/time is
the least time that these and the bytes of inputs and results can take (`io_model`), by the matrix
product and the copy timed in the same process. Ten launches after a pause are a burst, not what a
power-limited card holds for seconds: read the ratios.
"""

import argparse
import dataclasses
import json
import math
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_flash import hardware
from pallas_flash.benchmark_shapes import (
    CPU_SHAPES,
    GPU_SHAPES,
    QUICK_SHAPES,
    Shape,
    inputs,
)
from pallas_flash.peers import Attention, implementations

WARM_UPS = 3
LAUNCHES = 10
# The median of ten calls of 0.5 ms by the wall clock is off by up to 20 %.
WALL_MS = 50.0
MOST_CALLS = 300
SUSTAINED_S = 2.0
PAUSE_S = 0.25  # before each burst: the card is power-limited, and the next would find it warm
# All have their turn in each, and the least time counts: the clock falls while a card is busy. That
# moved a ratio by 5 %, where a forward takes 6 ms (T 32768).
ROUNDS = 2
MAX_RELATIVE_ERROR = 1e-2  # between two bfloat16 implementations; rounding alone is 2e-3..4e-3
REFERENCE = "chunked xla"  # checked against, not timed
NO_PEERS = ("pallas_flash", "deterministic", REFERENCE, "naive")


def kernel_times(function: Callable[..., Any], *args: Any) -> float:
    """Milliseconds of GPU kernels in one call: the sum over kernels of each one's median."""
    return sum(kernel_medians(function, *args).values())


def kernel_medians(function: Callable[..., Any], *args: Any) -> dict[str, float]:
    """Milliseconds of each GPU kernel in one call, by name."""
    from jax.experimental.mosaic.gpu import profiler

    for _ in range(WARM_UPS):
        jax.block_until_ready(function(*args))
    measured = profiler.measure(function, iterations=LAUNCHES, aggregate=False)
    runs: Any = measured(*args)[1]
    by_name: dict[str, list[float]] = {}
    for run in runs:
        for name, milliseconds in run:
            by_name.setdefault(name, []).append(milliseconds)
    return {name: statistics.median(t) * len(t) / LAUNCHES for name, t in by_name.items()}


def wall_times(function: Callable[..., Any], *args: Any) -> float:
    """Milliseconds of one call by the wall clock, the median.

    Of ten calls; where these take less than 50 ms, of as many as do, 300 at the most.
    """
    for _ in range(WARM_UPS):
        jax.block_until_ready(function(*args))
    times: list[float] = []
    while len(times) < LAUNCHES or (sum(times) < WALL_MS and len(times) < MOST_CALLS):
        start = time.perf_counter()
        jax.block_until_ready(function(*args))
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def sustained_times(function: Callable[..., Any], *args: Any) -> float:
    """Milliseconds of one call out of two seconds of them, one after the other."""
    calls = max(1, math.ceil(SUSTAINED_S * 1e3 / wall_times(function, *args)))
    start = time.perf_counter()
    for _ in range(calls):
        out = function(*args)
    jax.block_until_ready(out)
    return (time.perf_counter() - start) * 1e3 / calls


def measured_speeds() -> hardware.GpuSpeeds:
    """This GPU's matrix products and copies, timed; the rest is an H200's."""
    a = jax.random.normal(jax.random.key(0), (8192, 8192), jnp.bfloat16)
    product_ms = kernel_times(jax.jit(jnp.matmul), a, a)
    big = jnp.zeros(2**29, jnp.float32)
    copy_ms = kernel_times(jax.jit(jnp.negative), big)
    return dataclasses.replace(
        hardware.H200,
        name=jax.devices()[0].device_kind,
        matmul_flops_s=round(2 * 8192**3 / product_ms * 1e3),
        hbm_copy_bytes_s=round(2 * big.nbytes / copy_ms * 1e3),
    )


def passes(attention: Attention) -> tuple[Any, Any]:
    """Jitted forward(q, k, v, arrays) and both(q, k, v, dout, arrays) -> out and gradients."""
    forward = jax.jit(attention)

    @jax.jit
    def both(q, k, v, dout, arrays):
        inexact = {name: x for name, x in arrays.items() if name == "bias"}
        call = lambda q, k, v, inexact: attention(q, k, v, arrays | inexact)
        out, vjp = jax.vjp(call, q, k, v, inexact)
        *gradients, others = vjp(dout)
        return out, *gradients, *others.values()

    return forward, both


@jax.jit
def _relative_error(got, wanted):
    got, wanted = got.astype(jnp.float32), wanted.astype(jnp.float32)
    return jnp.linalg.norm((got - wanted).ravel()) / jnp.linalg.norm(wanted.ravel())


def _mask_rows(x, lengths):
    if lengths is None or x.shape[0] != lengths.shape[0]:
        return x
    inside = jnp.arange(x.shape[1])[None] < lengths[:, None]
    return jnp.where(inside[:, :, None, None], x, 0)


def _refusal(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}"


def _compiled(function: Any, args: tuple) -> Any:
    """Compiled, or why not: a peer that refuses a shape is a row of the table, too."""
    try:
        return function.lower(*args).compile()
    except Exception as error:
        return _refusal(error)


def run_shape(
    shape: Shape,
    dtype: Any,
    measure: Callable[..., float] | None = None,
    rounds: int = ROUNDS,
    **which: bool,
) -> dict:
    """Checks and times one shape with every implementation; `which` as in `implementations`.

    Times are the least of several rounds.
    """
    if measure is None:
        measure = kernel_times if jax.default_backend() == "gpu" else wall_times
    (q, k, v, dout), lengths, arrays = inputs(shape, dtype)
    arguments = dict(forward=(q, k, v, arrays), both=(q, k, v, dout, arrays))
    wanted = ("forward",) if shape.queries else ("forward", "both")
    chosen = implementations(shape, **which)
    made = {
        (name, way): (f, arguments[way])
        for name, attention in chosen.items()
        for way, f in zip(("forward", "both"), passes(attention), strict=True)
        if way in wanted
    }
    with ThreadPoolExecutor() as pool:  # compiling takes longer than timing
        programs = dict(zip(made, pool.map(lambda m: _compiled(*m), made.values()), strict=True))
    row: dict[str, Any] = dataclasses.asdict(shape) | {"results": {}}
    reference = None
    for name in reversed(chosen):  # peers first: ours is checked against the last of them
        row["results"][name] = result = {}
        refused = [programs[name, way] for way in wanted if isinstance(programs[name, way], str)]
        if refused:
            result["failed"] = refused[0]
            continue
        try:
            last = wanted[-1]
            got = jax.tree.leaves(programs[name, last](*arguments[last]))
            got = [_mask_rows(x, lengths) for x in got]
            if reference is None:
                reference = got
            else:
                errors = [float(_relative_error(a, b)) for a, b in zip(got, reference, strict=True)]
                result["relative_errors"] = errors
                if not max(errors) < MAX_RELATIVE_ERROR:
                    result["failed"] = f"relative errors {errors}"
                    continue
            del got
        except Exception as error:
            result["failed"] = _refusal(error)
    if "failed" not in row["results"].get(REFERENCE, {}):
        row["results"].pop(REFERENCE, None)
    for _ in range(rounds):
        for name, result in row["results"].items():
            timed = {way: (programs[name, way], arguments[way]) for way in wanted}
            if "failed" not in result:
                _time(timed, measure, result)
    for result in row["results"].values():
        if "both_ms" in result:
            result["backward_ms"] = result["both_ms"] - result["forward_ms"]
    return row


def _time(programs: dict[str, tuple], measure: Callable[..., float], result: dict) -> None:
    """Enters the times of each way into `result`, where they are less than what is there."""
    try:
        for way, (program, arguments) in programs.items():
            time.sleep(PAUSE_S if jax.default_backend() == "gpu" else 0.0)
            times = {f"{way}_ms": measure(program, *arguments)}
            times[f"{way}_wall_ms"] = wall_times(program, *arguments)
            result |= {name: min(ms, result.get(name, ms)) for name, ms in times.items()}
    except Exception as error:
        result["failed"] = _refusal(error)


def _shape_of(row: dict) -> Shape:
    """The shape of a row, also of one that was read from a file."""
    given = {f.name: row[f.name] for f in dataclasses.fields(Shape) if f.name in row}
    return Shape(**given)


def _best_peer(row: dict, what: str) -> float:
    """The least time of a peer; NaN where all refuse."""
    peers = (r for name, r in row["results"].items() if name not in NO_PEERS)
    return min((r[what] for r in peers if what in r and "failed" not in r), default=math.nan)


def _print_row(row: dict, dtype: Any, speeds: hardware.GpuSpeeds | None) -> None:
    shape = _shape_of(row)
    ways = [w for w in ("forward", "backward") if not (shape.queries and w == "backward")]
    for name in sorted(row["results"], key=lambda n: n != "pallas_flash"):
        result = row["results"][name]
        line = f"{row['name']:34s} {name:13s}"
        if "failed" in result:
            print(line, "FAILED", result["failed"], flush=True)
            continue
        for way in ways:
            milliseconds, backward = result[f"{way}_ms"], way == "backward"
            rate = shape.flops(dtype, backward=backward) / milliseconds / 1e9
            line += f" {way[:3]} {milliseconds:8.3f} ms {rate:6.1f} TFLOP/s"
            if speeds is not None:
                floor = shape.floor_ms(dtype, backward=backward, speeds=speeds)
                line += f" {100 * floor / milliseconds:3.0f} % of floor"
        line += f" wall {result[f'{"forward" if shape.queries else "both"}_wall_ms']:.3f}"
        if name == "pallas_flash":
            best = (f"{w[:3]} x{_best_peer(row, w + '_ms') / result[w + '_ms']:.3f}" for w in ways)
            line += "  " + " ".join(best)
        print(line, flush=True)


def markdown_table(told: dict) -> str:
    """The figures of a `--json` file as a table: ours, the best peer's, and the ratio of times."""
    rows = [row for row in told["rows"] if not row.get("queries")]
    lines = []
    if rows:
        lines += [
            "| shape | forward, TFLOP/s | best peer | ratio | backward, TFLOP/s | best peer |"
            " ratio |",
            "|---|---|---|---|---|---|---|",
        ]
    for row in rows:
        cells = [row["name"]]
        for way in ("forward", "backward"):
            flops = _shape_of(row).flops(told["dtype"], backward=way == "backward")
            cells += _cells(row, f"{way}_ms", lambda ms, flops=flops: f"{flops / ms / 1e9:.0f}")
        lines.append("| " + " | ".join(cells) + " |")
    decoding = [row for row in told["rows"] if row.get("queries")]
    if decoding:
        lines += [""] * bool(rows) + [
            "| decoding | TB/s | best peer | ratio | of the copy's rate |",
            "|---|---|---|---|---|",
        ]
    for row in decoding:
        size = _shape_of(row).bytes(told["dtype"])
        cells = _cells(row, "forward_ms", lambda ms, size=size: f"{size / ms / 1e9:.2f}")
        share = size / row["results"]["pallas_flash"]["forward_ms"] * 1e3
        share /= told["speeds"]["hbm_copy_bytes_s"]
        lines.append("| " + " | ".join([row["name"], *cells, f"{share:.2f}"]) + " |")
    return "\n".join(lines)


def naive_table(told: dict) -> str:
    """Milliseconds of plain attention by XLA and of ours, where both were timed."""
    lines = [
        "| shape | forward, plain, ms | ours | ratio | forward+backward, plain | ours | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in told["rows"]:
        plain, ours = row["results"].get("naive", {}), row["results"]["pallas_flash"]
        if "both_ms" in plain:
            cells = [row["name"]]
            for what in ("forward_ms", "both_ms"):
                cells += [f"{plain[what]:.3f}", f"{ours[what]:.3f}"]
                cells.append(f"{plain[what] / ours[what]:.1f}")
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) if len(lines) > 2 else ""


def _cells(row: dict, what: str, rate: Callable[[float], str]) -> list[str]:
    """Our rate, the best peer's, and how many times as fast ours is."""
    mine, best = row["results"]["pallas_flash"][what], _best_peer(row, what)
    if math.isnan(best):
        return [rate(mine), "refused", ""]
    return [rate(mine), rate(best), f"{best / mine:.2f}"]


def geometric_means(told: dict) -> dict[str, float]:
    """Of the best peer's time over ours, by direction, over all shapes that a peer takes."""
    means = {}
    for way in ("forward", "backward"):
        ratios = [
            _best_peer(row, f"{way}_ms") / row["results"]["pallas_flash"][f"{way}_ms"]
            for row in told["rows"]
            if f"{way}_ms" in row["results"]["pallas_flash"]
        ]
        means[way] = statistics.geometric_mean([r for r in ratios if not math.isnan(r)] or [1.0])
    return means


def plot(told: dict, path: Path) -> None:
    """How many times as fast as the best peer, a bar for each shape and direction."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [r for r in told["rows"] if not math.isnan(_best_peer(r, "forward_ms"))]
    figure, axes = pyplot.subplots(figsize=(8, 1 + 0.28 * len(rows)))
    for offset, way in ((-0.2, "forward"), (0.2, "backward")):
        ratios = [
            _best_peer(r, f"{way}_ms") / r["results"]["pallas_flash"].get(f"{way}_ms", math.nan)
            for r in rows
        ]
        places, widths = [i + offset for i in range(len(rows))], [r - 1 for r in ratios]
        axes.barh(places, widths, 0.38, left=1.0, label=way)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_yticks(range(len(rows)), [r["name"] for r in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set_xscale("log")
    ticks = [0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.5, 2, 3, 5, 10]
    low, high = axes.get_xlim()
    axes.set_xticks([], minor=True)
    axes.set_xticks([x for x in ticks if low <= x <= high], minor=False)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel("time of the fastest peer / time of pallas_flash (above 1: ahead)")
    axes.set_title(f"{told['device']}, JAX {told['jax']}, {told['dtype']}", fontsize=9)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _parsed(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="three shapes only")
    parser.add_argument(
        "--only",
        default="",
        help="the shape of this name, or those whose name contains it; or several, by commas",
    )
    parser.add_argument(
        "--deterministic", action="store_true", help="also time deterministic_backward=True"
    )
    parser.add_argument("--naive", action="store_true", help="also time plain attention by XLA")
    parser.add_argument(
        "--sustained", action="store_true", help="time two seconds of calls, by the wall clock"
    )
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--plot", type=Path, help="draw the ratios to the best peer here")
    parser.add_argument("--show", type=Path, help="print the table of a --json file and stop")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    options = _parsed(argv)
    told = json.loads(options.show.read_text()) if options.show else _run(options)
    if options.show:
        print(*filter(None, (markdown_table(told), naive_table(told))), sep="\n\n")
    if options.plot:
        plot(told, options.plot)


def _chosen(names: list[str], only: str) -> set[str]:
    """Those that `--only` asks for: by a whole name that one, else all that contain the part."""
    chosen = set()
    for part in only.split(","):
        chosen |= {part} if part in names else {name for name in names if part in name}
    return chosen


def _run(options: argparse.Namespace) -> dict:
    """Times the shapes that are asked for; what `--json` writes."""
    on_gpu = jax.default_backend() == "gpu"
    shapes = GPU_SHAPES if on_gpu else CPU_SHAPES
    shapes = (QUICK_SHAPES if on_gpu else CPU_SHAPES[:2]) if options.quick else shapes
    dtype = jnp.bfloat16 if on_gpu else jnp.float32
    speeds = measured_speeds() if on_gpu else None
    told: dict[str, Any] = dict(
        device=jax.devices()[0].device_kind, jax=jax.__version__, dtype=jnp.dtype(dtype).name
    )
    print(", ".join(told.values()), flush=True)
    if speeds is not None:
        told["speeds"] = dataclasses.asdict(speeds)
        product, copy = speeds.matmul_flops_s / 1e12, speeds.hbm_copy_bytes_s / 1e12
        print(f"matrix product {product:.0f} TFLOP/s, copy {copy:.2f} TB/s", flush=True)
    told["rows"] = rows = []
    measure, rounds = (sustained_times, 1) if options.sustained else (None, ROUNDS)
    told["rounds"] = rounds
    chosen = _chosen([shape.name for shape in shapes], options.only)
    for shape in shapes:
        if shape.name in chosen:
            which = dict(deterministic=options.deterministic, naive=options.naive)
            rows.append(run_shape(shape, dtype, measure, rounds, **which))
            _print_row(rows[-1], dtype, speeds)
            if options.json:
                options.json.write_text(json.dumps(told, indent=1) + "\n")
    for way, mean in geometric_means(told).items():
        print(f"{way}: {mean:.3f} times as fast as the best peer, geometric mean", flush=True)
    return told


if __name__ == "__main__":
    main()
