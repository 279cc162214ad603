"""Times attention against the other implementations installed here, in one process.

    python -m pallas_flash.benchmark                 the named shapes, ours and every peer
    python -m pallas_flash.benchmark --quick         a few of them
    python -m pallas_flash.benchmark --only d128     those whose name contains it
    python -m pallas_flash.benchmark --show FILE     the table of figures written by --json

Every result is checked before it is timed, against a peer or, where none takes the shape, against
our XLA implementation or our other backward (`--deterministic`). On a GPU a time is that of the
kernels (CUPTI: three warm-ups, then the median of ten launches), elsewhere wall time. `forward` is
the call alone, `backward` is forward+backward minus forward, so it includes everything a gradient
needs. TFLOP/s are of the products over visible pairs; floor/time is the least time that these and
the bytes of inputs and results can take on an H200 (`io_model`). These are bursts, not what a
power-limited card holds for seconds: read the ratios.
"""

import argparse
import dataclasses
import functools
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_flash
from pallas_flash import io_model, masks
from pallas_flash.problem import Operands, Problem
from pallas_flash.tile_walks import NO_OPERANDS

WARM_UPS = 3
LAUNCHES = 10
MAX_RELATIVE_ERROR = 1e-2  # between two bfloat16 implementations; rounding alone is 2e-3..4e-3


@dataclasses.dataclass(frozen=True)
class Shape:
    """A named problem: B batch, T queries and keys, N and K heads, H head_dim.

    Attributes:
      head_dim_v: of the value, where it differs.
      lengths: true lengths, one a batch row.
      documents: tokens of each of the documents packed into a row.
      window: keys that a query sees before its own.
      bias: dtype of a bias (1, N, T, T), which has a gradient, too.
      soft_cap: of the logits.
    """

    name: str
    batch: int
    length: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    causal: bool
    lengths: tuple[int, ...] | None = None
    head_dim_v: int | None = None
    documents: int | None = None
    window: int | None = None
    bias: str | None = None
    soft_cap: float | None = None

    def described(self, dtype: Any) -> tuple[Problem, Operands]:
        """For the IO model: the problem, and what its mask needs."""
        mask, operands = masks.And(), NO_OPERANDS
        if self.causal:
            mask &= masks.Causal()
        if self.window:
            mask &= masks.Window(True, True)
            operands = operands._replace(window=np.array((self.window, 0)))
        if self.lengths is not None:
            mask &= masks.Lengths(True, True)
            lengths = np.array(self.lengths)
            operands = operands._replace(query_lengths=lengths, kv_lengths=lengths)
        if self.documents:
            mask &= masks.Segments()
            ids = np.arange(self.length)[None] // self.documents
            operands = operands._replace(query_segments=ids, kv_segments=ids)
        problem = Problem(
            batch=self.batch,
            q_len=self.length,
            kv_len=self.length,
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            head_dim_v=self.head_dim_v or self.head_dim,
            dtype=jnp.dtype(dtype).name,
            mask=mask,
        )
        return problem, operands

    def flops(self, dtype: Any, *, backward: bool) -> int:
        """Of the products over the pairs that are visible: two forward, five backward."""
        return io_model.visible_flops(*self.described(dtype), backward=backward)

    def floor_ms(self, dtype: Any, *, backward: bool) -> float:
        """The least time on an H200."""
        return 1e3 * io_model.problem_floor_s(*self.described(dtype), backward=backward)


def _dense(head_dim: int, length: int, causal: bool, tokens: int = 16_384, width: int = 2048):
    heads = width // head_dim
    name = f"d{head_dim}-t{length}-{'causal' if causal else 'full'}"
    return Shape(name, tokens // length, length, heads, heads, head_dim, causal)


GPU_SHAPES = (
    *(_dense(d, 8192, c) for d in (64, 128, 256) for c in (False, True)),
    *(
        Shape(f"gqa-32-8-d128-t8192-{'causal' if c else 'full'}", 2, 8192, 32, 8, 128, c)
        for c in (False, True)
    ),
    Shape("mha-32-d128-t8192-causal", 2, 8192, 32, 32, 128, True),
    Shape("mha-32-d128-t8192-full", 2, 8192, 32, 32, 128, False),
    *(_dense(d, 2048, c) for d in (64, 128) for c in (False, True)),
    Shape("ragged-d128-t8191-causal", 2, 8191, 16, 16, 128, True),
    *(Shape(f"d{d}-h16-t4096-causal", 4, 4096, 16, 16, d, True) for d in (80, 96, 192)),
    Shape("lengths-d128-causal", 4, 4096, 16, 16, 128, True, (4096, 3000, 1000, 100)),
    *(_dense(128, t, True) for t in (128, 512, 1024)),
    Shape("packed-8x1024-d128-t8192-causal", 2, 8192, 16, 16, 128, True, documents=1024),
    Shape("window-1024-gqa-32-8-d128-t16384", 1, 16384, 32, 8, 128, True, window=1023),
    Shape("bias-d128-t4096-full", 4, 4096, 16, 16, 128, False, bias="bfloat16"),
    Shape("soft-cap-50-d128-t8192-causal", 2, 8192, 16, 16, 128, True, soft_cap=50.0),
    Shape("mla-192-128-t4096-causal", 4, 4096, 16, 16, 192, True, head_dim_v=128),
)
QUICK_SHAPES = tuple(_dense(d, 8192, True) for d in (64, 128, 256))
CPU_SHAPES = tuple(
    Shape(f"d64-t{t}-{'causal' if c else 'full'}", 1, t, 2, 2, 64, c)
    for t in (256, 1024)
    for c in (False, True)
)


def implementations(
    shape: Shape, deterministic: bool = False
) -> dict[str, Callable[..., jax.Array]]:
    """Ours and every peer that is installed: f(q, k, v, arrays)."""
    common: dict[str, Any] = dict(is_causal=shape.causal)
    if shape.window:
        common["local_window_size"] = (shape.window, 0)

    def ours(q, k, v, arrays, **options):
        if shape.soft_cap:
            options["logits_soft_cap"] = shape.soft_cap
        return pallas_flash.dot_product_attention(q, k, v, **arrays, **common, **options)

    def of_jax(q, k, v, arrays, implementation):
        if shape.soft_cap:
            raise NotImplementedError("jax.nn has no soft cap")
        arrays = dict(arrays)
        if shape.documents:
            ids = arrays.pop("query_segment_ids")
            del arrays["key_value_segment_ids"]
            arrays["mask"] = ids[:1, None, :, None] == ids[:1, None, None, :]
        return jax.nn.dot_product_attention(
            q, k, v, **arrays, **common, implementation=implementation
        )

    found: dict[str, Callable[..., jax.Array]] = {"pallas_flash": ours}
    if deterministic and not shape.bias:
        found["deterministic"] = functools.partial(ours, deterministic_backward=True)
    if jax.default_backend() != "gpu":
        found["jax.nn xla"] = functools.partial(of_jax, implementation="xla")
        return found
    found["cudnn"] = functools.partial(of_jax, implementation="cudnn")
    if shape.soft_cap or shape.head_dim_v:  # which cuDNN does not take: something must check ours
        found["chunked xla"] = functools.partial(ours, implementation="xla")
    return found


def kernel_times(function: Callable[..., Any], *args: Any) -> float:
    """Milliseconds of GPU kernels in one call: the sum over kernels of each one's median."""
    from jax.experimental.mosaic.gpu import profiler

    for _ in range(WARM_UPS):
        jax.block_until_ready(function(*args))
    measured = profiler.measure(function, iterations=LAUNCHES, aggregate=False)
    runs: Any = measured(*args)[1]
    by_name: dict[str, list[float]] = {}
    for run in runs:
        for name, milliseconds in run:
            by_name.setdefault(name, []).append(milliseconds)
    return sum(statistics.median(t) * len(t) / LAUNCHES for t in by_name.values())


def wall_times(function: Callable[..., Any], *args: Any) -> float:
    """Milliseconds of one call by the wall clock, the median."""
    times = []
    for _ in range(WARM_UPS + LAUNCHES):
        start = time.perf_counter()
        jax.block_until_ready(function(*args))
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[WARM_UPS:])


def _inputs(shape: Shape, dtype: Any):
    """q, k, v, dout; lengths or None; and the other arrays by argument name, a bias among them."""
    keys = jax.random.split(jax.random.key(0), 5)
    heads = (shape.num_q_heads, shape.num_kv_heads, shape.num_kv_heads, shape.num_q_heads)
    head_dim_v = shape.head_dim_v or shape.head_dim
    dims = (shape.head_dim, shape.head_dim, head_dim_v, head_dim_v)
    q, k, v, dout = (
        jax.random.normal(key, (shape.batch, shape.length, n, dim), dtype)
        for key, n, dim in zip(keys, heads, dims, strict=False)
    )
    arrays, lengths = {}, None
    if shape.lengths is not None:  # implementations differ in rows past the length: ask nothing
        lengths = jnp.array(shape.lengths, jnp.int32)
        inside = jnp.arange(shape.length)[None] < lengths[:, None]
        dout = jnp.where(inside[:, :, None, None], dout, 0)
        arrays |= dict(query_seq_lengths=lengths, key_value_seq_lengths=lengths)
    if shape.documents:
        ids = jnp.arange(shape.length, dtype=jnp.int32) // shape.documents
        ids = jnp.broadcast_to(ids, (shape.batch, shape.length))
        arrays |= dict(query_segment_ids=ids, key_value_segment_ids=ids)
    if shape.bias:
        size = (1, shape.num_q_heads, shape.length, shape.length)
        arrays["bias"] = jax.random.normal(keys[4], size, shape.bias)
    return (q, k, v, dout), lengths, arrays


def _passes(attention: Callable[..., jax.Array]):
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


def run_shape(shape: Shape, dtype: Any, deterministic: bool = False) -> dict:
    """Checks and times one shape with every implementation."""
    measure = kernel_times if jax.default_backend() == "gpu" else wall_times
    (q, k, v, dout), lengths, arrays = _inputs(shape, dtype)
    row: dict[str, Any] = dataclasses.asdict(shape) | {"results": {}}
    chosen = implementations(shape, deterministic)
    passes = {name: _passes(f) for name, f in chosen.items()}
    reference = None
    for name in reversed(chosen):  # peers first: ours is checked against the last of them
        forward, both = passes[name]
        result: dict[str, Any] = {}
        row["results"][name] = result
        try:
            got = [_mask_rows(x, lengths) for x in both(q, k, v, dout, arrays)]
            if reference is None:
                reference = got
            else:
                errors = [float(_relative_error(a, b)) for a, b in zip(got, reference, strict=True)]
                result["relative_errors"] = errors
                if not max(errors) < MAX_RELATIVE_ERROR:
                    result["failed"] = f"relative errors {errors}"
                    continue
            del got
            forward_ms = measure(forward, q, k, v, arrays)
            both_ms = measure(both, q, k, v, dout, arrays)
        except Exception as error:  # a peer that refuses a shape is a row of the table, too
            result["failed"] = f"{type(error).__name__}: {str(error)[:200]}"
            continue
        backward_ms = both_ms - forward_ms
        result |= dict(forward_ms=forward_ms, both_ms=both_ms, backward_ms=backward_ms)
    return row


def _shape_of(row: dict) -> Shape:
    """The shape of a row, also of one that was read from a file."""
    given = {f.name: row[f.name] for f in dataclasses.fields(Shape) if f.name in row}
    return Shape(**given)


def _print_row(row: dict, dtype: Any) -> None:
    results, shape = row["results"], _shape_of(row)
    flops, floors = (
        {b: of(dtype, backward=b) for b in (False, True)} for of in (shape.flops, shape.floor_ms)
    )
    peers = {n: r for n, r in results.items() if n not in ("pallas_flash", "deterministic")}
    for name in sorted(results, key=lambda n: n != "pallas_flash"):
        result = results[name]
        if "failed" in result:
            print(f"{row['name']:32s} {name:14s} FAILED {result['failed']}", flush=True)
            continue
        line = (
            f"{row['name']:32s} {name:14s}"
            f" fwd {result['forward_ms']:8.3f} ms {flops[False] / result['forward_ms'] / 1e9:6.1f}"
            f" TFLOP/s bwd {result['backward_ms']:8.3f} ms"
            f" {flops[True] / result['backward_ms'] / 1e9:6.1f} TFLOP/s"
        )
        if jax.default_backend() == "gpu":
            shares = (
                100 * floors[b] / result[f"{way}_ms"]
                for b, way in ((False, "forward"), (True, "backward"))
            )
            line += " floor/time {:3.0f} % {:3.0f} %".format(*shares)
        if name == "pallas_flash":
            for label, what in (("fwd", "forward_ms"), ("bwd", "backward_ms")):
                best = min((r[what] for r in peers.values() if what in r), default=math.nan)
                line += f"  {label} x{best / result[what]:.3f}"
        print(line, flush=True)


def markdown_table(told: dict) -> str:
    """The figures of a `--json` file as a table: ours, the best peer's, and the ratio of times."""
    lines = [
        "| shape | forward, TFLOP/s | best peer | ratio | backward, TFLOP/s | best peer | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in told["rows"]:
        results = {n: r for n, r in row["results"].items() if "failed" not in r}
        ours = results["pallas_flash"]
        peers = [r for n, r in results.items() if n not in ("pallas_flash", "deterministic")]
        cells = [row["name"]]
        for what in ("forward", "backward"):
            flops = _shape_of(row).flops(told["dtype"], backward=what == "backward")
            mine = ours[what + "_ms"]
            cells.append(f"{flops / mine / 1e9:.0f}")
            if peers:
                best = min(r[what + "_ms"] for r in peers)
                cells.append(f"{flops / best / 1e9:.0f}")
                cells.append(f"{best / mine:.2f}")
            else:
                cells += ["refused", ""]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="three shapes only")
    parser.add_argument(
        "--only", default="", help="shapes whose name contains this, or one of these"
    )
    parser.add_argument(
        "--deterministic", action="store_true", help="also time deterministic_backward=True"
    )
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--show", type=Path, help="print the table of a --json file and stop")
    options = parser.parse_args(argv)
    if options.show:
        print(markdown_table(json.loads(options.show.read_text())))
        return
    on_gpu = jax.default_backend() == "gpu"
    shapes = GPU_SHAPES if on_gpu else CPU_SHAPES
    shapes = (QUICK_SHAPES if on_gpu else CPU_SHAPES[:2]) if options.quick else shapes
    dtype = jnp.bfloat16 if on_gpu else jnp.float32
    device = jax.devices()[0].device_kind
    print(f"{device}, jax {jax.__version__}, {jnp.dtype(dtype).name}", flush=True)
    rows = []
    for shape in shapes:
        if any(part in shape.name for part in options.only.split(",")):
            rows.append(run_shape(shape, dtype, options.deterministic))
            _print_row(rows[-1], dtype)
            if options.json:
                told = dict(device=device, jax=jax.__version__, dtype=jnp.dtype(dtype).name)
                options.json.write_text(json.dumps(told | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
