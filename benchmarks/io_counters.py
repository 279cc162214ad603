"""The IO model against the hardware's counters: Nsight Compute over our kernels and over XLA's.

    python benchmarks/io_counters.py                     measure here, write and print
    python benchmarks/io_counters.py --show FILE         print what was measured

Needs an H200 and `ncu`, with the right to read counters. One run of ncu profiles, for each shape, a
forward and a backward once, every kernel of them, between markers; caches are flushed and
invalidated before each kernel. So reads from device memory are those of a cold cache. Writes are
those that happened while the kernel ran: up to the size of L2 of them may come later, when the
kernel is over, and are seen by nobody. Raw counters, kernel by kernel, go into the file.
"""

import argparse
import csv
import ctypes
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from pallas_flash import hardware, io_counts, io_model  # noqa: E402
from pallas_flash.benchmark_shapes import Shape  # noqa: E402

FILE = Path(__file__).with_name("io_counters_h200.json")
DTYPE = "bfloat16"
MARKER, FORWARD = "io_counters_marker", "flash_forward"
SECTOR_BYTES = 32

SHAPES = (  # the first three fit in L2
    Shape("d128-t1024-full", 1, 1024, 16, 16, 128, False),
    Shape("d64-t2048-causal", 1, 2048, 16, 16, 64, True),
    Shape("window-512-d128-t2048", 1, 2048, 16, 16, 128, True, window=511),
    Shape("d128-t4096-full", 4, 4096, 16, 16, 128, False),
    Shape("d128-t4096-causal", 4, 4096, 16, 16, 128, True),
    Shape("gqa-32-8-d128-t4096-full", 2, 4096, 32, 8, 128, False),
)
# Bounds only: the regime in which the model gives an estimate.
STREAMING = Shape("d128-t32768-causal", 1, 32768, 16, 16, 128, True)
NAIVE = (
    Shape("xla-d128-t4096-full", 1, 4096, 16, 16, 128, False),
    Shape("xla-d64-t2048-causal", 4, 2048, 16, 16, 64, True),
)
NAIVE_SCORE_BYTES = 4  # XLA keeps scores in float32 and probabilities in the dtype of the inputs

NEEDED = ("dram__bytes_read.sum", "dram__bytes_write.sum")
TO_SM = "l1tex__m_xbar2l1tex_read_bytes.sum"
FROM_SM = "l1tex__m_l1tex2xbar_write_bytes.sum"
WANTED = (  # collected where this ncu knows them
    TO_SM,
    FROM_SM,
    "l1tex__m_xbar2l1tex_read_bytes_mem_global_op_tma_ld.sum",
    "l1tex__m_l1tex2xbar_write_bytes_mem_global_op_red.sum",
    "lts__t_sectors_op_read.sum",
    "lts__t_sectors_op_write.sum",
    "lts__t_sectors_op_red.sum",
    "lts__t_sectors_op_atom.sum",
    "lts__t_sectors_srcunit_tex.sum",
    "lts__t_sectors_srcunit_ltcfabric.sum",
    "lts__t_bytes.sum",
    "gpu__time_duration.sum",
)


def _stop(why: str) -> NoReturn:
    print(f"io_counters: {why}", file=sys.stderr)
    raise SystemExit(2)


# --- what is profiled ----------------------------------------------------------------------------


class _Driver:
    """Starts and stops the profiler around what is to be counted."""

    def __init__(self):
        self.cuda = ctypes.CDLL("libcuda.so.1")
        context = ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self._call("cuCtxSetCurrent", context)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self.cuda, name)(*arguments)
        if status:
            _stop(f"{name} returned {status}")

    def start(self) -> None:
        self._call("cuProfilerStart")

    def stop(self) -> None:
        self._call("cuProfilerStop")


def _marker():
    """A kernel, of anything small, whose name stands between two shapes."""
    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def body(_, out):
        values = jnp.zeros((128,), jnp.float32)
        out[...] = plgpu.layout_cast(values, plgpu.Layout.WG_STRIDED((128,), vec_size=1))

    mark = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
        grid=(1,),
        grid_names=("block",),
        kernel_name=MARKER,
    )
    return jax.jit(mark)


def _run() -> None:
    """Under ncu: a marker, then the kernels of a shape, for each shape."""
    import jax

    from pallas_flash import benchmark, benchmark_shapes, peers

    driver, small = _Driver(), jax.numpy.zeros((1,))
    mark = functools.partial(_marker(), small)
    jax.block_until_ready(mark())

    def profile(run, *arguments) -> None:
        jax.block_until_ready(run(*arguments))  # compiled and tuned, unseen
        driver.start()
        jax.block_until_ready(mark())
        jax.block_until_ready(run(*arguments))
        driver.stop()

    for shape in (*SHAPES, STREAMING):
        tensors, _, arrays = benchmark_shapes.inputs(shape, DTYPE)
        ours = peers.implementations(shape)["pallas_flash"]
        profile(benchmark.passes(ours)[1], *tensors, arrays)
    for shape in NAIVE:
        (q, k, v, _), _, _ = benchmark_shapes.inputs(shape, DTYPE)
        attention = functools.partial(
            jax.nn.dot_product_attention, is_causal=shape.causal, implementation="xla"
        )
        profile(jax.jit(attention), q, k, v)


def _find_ncu() -> str | None:
    """On PATH, or where CUDA puts it."""
    places = [*Path("/usr/local").glob("cuda*/bin"), *Path("/opt/nvidia/nsight-compute").glob("*")]
    path = os.pathsep.join([os.environ.get("PATH", ""), *map(str, sorted(places, reverse=True))])
    return shutil.which("ncu", path=path)


def _known(metrics: tuple[str, ...], ncu: str) -> list[str]:
    listed = subprocess.run([ncu, "--query-metrics"], capture_output=True, text=True)
    names = {line.split()[0] for line in listed.stdout.splitlines() if line.split()}
    return [metric for metric in metrics if metric.partition(".")[0] in names]


def _profiled(ncu: str, metrics: list[str]) -> list[dict[str, str]]:
    """One run of ncu over `_run`: a row a kernel, in order."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        command = [ncu, "--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log)]
        command += ["--clock-control", "none", "--cache-control", "all"]
        command += ["--profile-from-start", "off", "--metrics", ",".join(metrics)]
        command += [sys.executable, __file__, "--run"]
        # No command buffers: a kernel is a launch of its own.
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer="
        env = os.environ | {"XLA_FLAGS": flags.strip(), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
        text = log.read_text() if log.exists() else ""
        if "ERR_NVGPUCTRPERM" in text + done.stdout + done.stderr:
            _stop("no right to read the GPU's counters here (ERR_NVGPUCTRPERM)")
        lines = [line for line in text.splitlines() if line.startswith('"')]
        if done.returncode or not lines:
            tail = " ".join((text + done.stdout + done.stderr).split())[-600:]
            _stop(f"ncu ended with {done.returncode}: {tail}")
        return list(csv.DictReader(lines))[1:]  # the first row has the units


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def _by_shape(rows: list[dict[str, str]], metrics: list[str]) -> dict[str, list[dict]]:
    """Counters of the kernels that follow each marker."""
    names = [shape.name for shape in (*SHAPES, STREAMING, *NAIVE)]
    groups: list[list[dict]] = []
    for row in rows:
        if MARKER in row["Kernel Name"]:
            groups.append([])
        elif groups:
            counted = {m: _number(row[m]) for m in metrics if row.get(m)}
            groups[-1].append({"kernel": row["Kernel Name"]} | counted)
    if len(groups) != len(names):
        _stop(f"ncu saw {len(groups)} shapes of {len(names)}")
    return dict(zip(names, groups, strict=True))


def measure() -> dict[str, Any]:
    """Everything, in one run of ncu."""
    ncu = _find_ncu()
    if ncu is None:
        _stop("no `ncu` here: Nsight Compute is needed to read the counters")
    metrics = [*NEEDED, *_known(WANTED, ncu)]
    rows = _profiled(ncu, metrics)
    version = subprocess.run([ncu, "--version"], capture_output=True, text=True).stdout.split()[-1]
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    device = subprocess.run(query, capture_output=True, text=True).stdout.splitlines()
    import jax

    return {
        "device": device[0] if device else "",
        "ncu": version,
        "jax": jax.__version__,
        "dtype": DTYPE,
        "metrics": metrics,
        "shapes": _by_shape(rows, metrics),
    }


# --- against the model ---------------------------------------------------------------------------


class Compared(NamedTuple):
    """One figure of one shape and direction.

    Attributes:
      least, most: of the model; equal where it says one number.
    """

    shape: str
    direction: str
    what: str
    least: float
    most: float
    counted: float

    @property
    def deviation(self) -> float:
        """Relative distance of the counter from what the model allows."""
        outside = max(self.least - self.counted, self.counted - self.most, 0.0)
        return outside / max(self.most, 1.0)


def _sum(kernels: list[dict], metric: str) -> float | None:
    """None where it was not collected."""
    found = [kernel[metric] for kernel in kernels if metric in kernel]
    return sum(found) if found else None


def _written(counts: io_counts.Counts) -> tuple[int, int]:
    """Bytes of device memory written while the kernels run, at least and at most."""
    passes = [sum(a.distinct for a in p.writes) for p in counts.passes]
    return sum(max(0, size - hardware.H200.l2_bytes) for size in passes), sum(passes)


def _of_kernels(shape: Shape, kernels: list[dict]) -> Iterator[Compared]:
    problem, operands = shape.described(DTYPE)
    parts = {
        "forward": [k for k in kernels if FORWARD in k["kernel"]],
        "backward": [k for k in kernels if FORWARD not in k["kernel"]],
    }
    for direction, run in parts.items():
        backward = direction == "backward"
        told = io_model.estimates(problem, operands, backward=backward)[-1]
        counts, memory = told.counts, told.memory
        least, most = _written(counts)
        reads = (memory.reads, memory.reads)
        if told.residency.regime == io_model.STREAMING:
            reads, most = (memory.least - most, memory.most), memory.most
        allowed = {
            "device memory read": (*reads, _sum(run, "dram__bytes_read.sum")),
            "device memory written": (least, most, _sum(run, "dram__bytes_write.sum")),
            "L2 to SM": (counts.reads, counts.reads, _sum(run, TO_SM)),
            "SM to L2": (counts.writes, counts.writes, _sum(run, FROM_SM)),
        }
        for what, (low, high, counted) in allowed.items():
            if counted is not None:
                yield Compared(shape.name, direction, what, low, high, counted)


def _of_naive(shape: Shape, kernels: list[dict]) -> Iterator[Compared]:
    problem, _ = shape.described(DTYPE)
    counts = io_counts.naive_forward(problem, score_bytes=NAIVE_SCORE_BYTES)
    least, most = _written(counts)
    read, written = (_sum(kernels, metric) for metric in NEEDED)
    assert read is not None and written is not None
    name = shape.name
    yield Compared(name, "forward", "device memory read", counts.reads, counts.reads, read)
    yield Compared(name, "forward", "device memory written", least, most, written)


def compared(told: dict[str, Any]) -> list[Compared]:
    """Every figure that the model has for what was measured."""
    rows: list[Compared] = []
    for shape in (*SHAPES, STREAMING):
        rows += _of_kernels(shape, told["shapes"][shape.name])
    for shape in NAIVE:
        rows += _of_naive(shape, told["shapes"][shape.name])
    return rows


def _print(told: dict[str, Any]) -> None:
    print(f"{told['device']}, jax {told['jax']}, ncu {told['ncu']}, {told['dtype']}; MB")
    print(f"{'shape':26s} {'':8s} {'':22s} {'model':>19s} {'counted':>9s} deviation")
    for row in compared(told):
        model = f"{row.least / 1e6:.1f}"
        model += "" if row.least == row.most else f"..{row.most / 1e6:.1f}"
        print(
            f"{row.shape:26s} {row.direction:8s} {row.what:22s} {model:>19s} "
            f"{row.counted / 1e6:9.1f} {100 * row.deviation:6.2f} %"
        )


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--show", type=Path, help="print the comparison of a file and stop")
    parser.add_argument("--out", type=Path, default=FILE, help="write raw counters here")
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)  # under ncu
    options = parser.parse_args(argv)
    if options.run:
        _run()
        return
    if options.show is None:
        options.out.write_text(json.dumps(measure(), indent=1) + "\n")
    _print(json.loads((options.show or options.out).read_text()))


if __name__ == "__main__":
    main()
