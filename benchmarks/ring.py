"""Ring attention and all-gathered keys over the GPUs of one host: checked, then timed.

    python benchmarks/ring.py --json ring.json
    python benchmarks/ring.py --devices 2 --length 32768 --heads 16 --head-dim 128

Each result is compared with that of one device before it is timed. A line a method, order and
direction: the median of ten calls, and how many times faster than one device that is. One device
does the whole sequence, so n devices would be n times faster if nothing were lost.
"""

import argparse
import functools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_flash import dot_product_attention, parallel

METHODS = [("ring", "contiguous"), ("ring", "zigzag"), ("all_gather", "zigzag")]


def functions(attend):
    """Jitted forward and forward with gradients."""

    def both(q, k, v, dout):
        out, vjp = jax.vjp(attend, q, k, v)
        return out, *vjp(dout)

    return {"forward": jax.jit(lambda q, k, v, dout: (attend(q, k, v),)), "both": jax.jit(both)}


def median_s(f, args, repeats: int) -> float:
    jax.block_until_ready(f(*args))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(f(*args))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def error(got, wanted) -> float:
    """The largest relative distance of the arrays, by their norms."""
    wide = lambda arrays: [np.asarray(x, np.float32) for x in arrays]
    pairs = zip(wide(got), wide(wanted), strict=True)
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    devices = jax.devices()[: args.devices] if args.devices else jax.devices()
    n = len(devices)
    mesh = jax.make_mesh((n,), ("sequence",), axis_types=(AxisType.Auto,), devices=devices)
    shape = (1, args.length, args.heads, args.head_dim)
    arrays = [jax.random.normal(jax.random.key(i), shape, jnp.dtype(args.dtype)) for i in range(4)]
    arrays = [jax.device_put(x, devices[0]) for x in arrays]
    options = dict(is_causal=not args.full)
    one = functions(functools.partial(dot_product_attention, **options))
    wanted = one["both"](*arrays)
    one_s = {name: median_s(f, arrays, args.repeats) for name, f in one.items()}
    record: dict[str, Any] = {"device": devices[0].device_kind, "devices": n, "rows": []}
    record |= {"shape": shape, "dtype": args.dtype, "causal": not args.full, "jax": jax.__version__}
    record["one_device_s"] = one_s
    spec = NamedSharding(mesh, PartitionSpec(None, "sequence"))
    for method, order in METHODS:
        zigzag = order == "zigzag"
        place = lambda x, z=zigzag: jax.device_put(parallel.to_zigzag(x, n) if z else x, spec)
        back = lambda x, z=zigzag: parallel.from_zigzag(x, n) if z else x
        split = [place(x) for x in arrays]
        attend = functools.partial(
            parallel.dot_product_attention, mesh=mesh, method=method, order=order, **options
        )
        run = functions(attend)
        off = error([back(x) for x in run["both"](*split)], wanted)
        if not off < args.tolerance:
            raise SystemExit(f"{method} {order}: off by {off:.2e}, allowed {args.tolerance:.0e}")
        for name, f in run.items():
            took = median_s(f, split, args.repeats)
            row = {"method": method, "order": order, "direction": name, "error": off}
            row |= {"time_s": took, "times_faster": one_s[name] / took}
            record["rows"].append(row)
            print(
                f"{method:10} {order:10} {name:8} {took * 1e3:9.2f} ms, "
                f"{row['times_faster']:.2f} times one device, off by {off:.1e}",
                flush=True,
            )
    return record


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--devices", type=int, help="default: all")
    add("--length", type=int, default=32768, help="of the whole sequence, default 32768")
    add("--heads", type=int, default=16)
    add("--head-dim", type=int, default=128)
    add("--dtype", default="bfloat16")
    add("--full", action="store_true", help="without a causal mask")
    add("--repeats", type=int, default=10)
    add("--tolerance", type=float, default=1e-2)
    add("--json", type=Path, help="write the figures here")
    args = parser.parse_args(argv)
    record = measure(args)
    if args.json:
        args.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
