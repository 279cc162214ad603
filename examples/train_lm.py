"""Trains a small language model on bytes of real text, with pallas_flash inside Flax's attention.

    uv run --extra examples examples/train_lm.py                        # Python's own library
    uv run --extra examples examples/train_lm.py --text my_notes/ --steps 500
    uv run --extra cuda --extra examples examples/train_lm.py --compare --perturb   # on a GPU
    XLA_FLAGS=--xla_force_host_platform_device_count=8 uv run --extra examples \
        examples/train_lm.py --mesh data=2,sequence=2,model=2                       # on 8 devices

`--compare` trains twice from one seed, once with pallas_flash and once with jax.nn's attention
(cuDNN on a GPU), and plots both curves. `--perturb` adds a third run, jax.nn's again from an
embedding table that differs by one bfloat16 rounding: two runs that differ by no more than that
pair do, differ by rounding alone. `--mesh` splits the batch, the sequence (ring attention, in
zigzag order) and the heads over devices; the losses are those of one device, but for rounding.
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
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from tqdm import tqdm

import byte_lm
import pallas_flash.linen
from byte_lm import ByteLM, Sizes
from pallas_flash import parallel

# --- attention: the one line that changes ---------------------------------------------------------

ATTENTION: dict[str, Callable] = {
    "flash": functools.partial(pallas_flash.linen.attention_fn, is_causal=True),
    "jax": byte_lm.jax_attention,
}


# --- devices --------------------------------------------------------------------------------------

MESH_AXES = ("data", "sequence", "model")


def parse_mesh(text: str) -> jax.sharding.Mesh:
    """ "data=2,sequence=2,model=2" as a mesh; an axis that is not named has size 1."""
    sizes = dict.fromkeys(MESH_AXES, 1)
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name not in sizes or not size.isdigit() or int(size) < 1:
            raise argparse.ArgumentTypeError(f"{part!r} is none of {MESH_AXES} = a number")
        sizes[name] = int(size)
    wanted = math.prod(sizes.values())
    if wanted > len(jax.devices()):
        raise argparse.ArgumentTypeError(f"{wanted} devices, but JAX sees {len(jax.devices())}")
    return jax.make_mesh(
        tuple(sizes.values()),
        MESH_AXES,
        axis_types=(AxisType.Auto,) * 3,
        devices=jax.devices()[:wanted],
    )


@dataclasses.dataclass(frozen=True)
class RingAttention:
    """Causal attention over a mesh; the sequence is in zigzag order. Equal meshes are equal."""

    mesh: jax.sharding.Mesh

    def __call__(self, query, key, value, bias=None, mask=None):
        if bias is not None or mask is not None:
            raise ValueError("a split sequence takes neither bias nor mask")
        return parallel.dot_product_attention(
            query,
            key,
            value,
            mesh=self.mesh,
            batch_axis="data",
            head_axis="model",
            order="zigzag",
            is_causal=True,
        )


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a run lies on its devices: one, or a mesh."""

    mesh: jax.sharding.Mesh | None = None

    def order(self, positions):
        """Positions, [seq], in the order in which the devices hold them."""
        if self.mesh is None:
            return positions
        return parallel.to_zigzag(positions, self.mesh.shape["sequence"], axis=0)

    def shardings(self, params):
        """Matrices split over "model" along their last axis that divides, the rest everywhere.

        Of parameters or of an optimizer's state, by their shapes; None on one device.
        """
        return None if self.mesh is None else jax.tree.map(self._split_last, params)

    def _split_last(self, x) -> NamedSharding:
        assert self.mesh is not None
        axes: list[str | None] = [None] * x.ndim
        divides = [i for i, n in enumerate(x.shape) if n % self.mesh.shape["model"] == 0]
        if x.ndim > 1 and divides:
            axes[divides[-1]] = "model"
        return NamedSharding(self.mesh, PartitionSpec(*axes))

    def rows(self, window):
        """A batch, split over "data"."""
        if self.mesh is None:
            return window
        return jax.device_put(window, NamedSharding(self.mesh, PartitionSpec("data")))


ONE_DEVICE = Layout()


# --- loss and data --------------------------------------------------------------------------------


def loss_of(model: ByteLM, layout: Layout, params, window) -> jax.Array:
    """Mean cross-entropy of each next byte, in nats; window is [batch, seq + 1]."""
    order = layout.order(jnp.arange(window.shape[1] - 1))
    logits = jnp.asarray(model.apply(params, window[:, order], order))
    return optax.softmax_cross_entropy_with_integer_labels(logits, window[:, order + 1]).mean()


def read_text(paths: list[str]) -> np.ndarray:
    """All text files of these files and folders, one after the other, as bytes."""
    data = b"\n".join(f.read_bytes() for f in byte_lm.text_files(paths))
    return np.frombuffer(data, np.uint8)


def windows(data: np.ndarray, sizes: Sizes, rng: np.random.Generator) -> np.ndarray:
    """A random batch, [batch, seq + 1] int32."""
    starts = rng.integers(0, len(data) - sizes.seq, sizes.batch)
    return np.stack([data[s : s + sizes.seq + 1] for s in starts]).astype(np.int32)


# --- training -------------------------------------------------------------------------------------


@dataclasses.dataclass
class Run:
    """One training run: what `--json` writes."""

    name: str
    losses: list[float]
    step_times_s: list[float]
    held_out_loss: float
    sample: str

    @property
    def median_step_s(self) -> float:
        return statistics.median(self.step_times_s[2:] or self.step_times_s)  # without the compile


def perturbed(params):
    """The embedding table with every entry off by bfloat16's rounding error, up or down."""
    table = params["params"]["embed"]["embedding"]
    sign = jax.random.rademacher(jax.random.key(1), table.shape, table.dtype)
    inner = params["params"] | {"embed": {"embedding": table * (1 + sign * 2.0**-8)}}
    return params | {"params": inner}


@dataclasses.dataclass(frozen=True)
class Program:
    """The jitted functions of one model: runs that differ in numbers only share them."""

    init: Callable
    init_optimizer: Callable
    step: Callable
    loss: Callable
    next_byte: Callable
    sample_window: int


@functools.cache
def compiled_program(attention_fn: Callable, sizes: Sizes, layout: Layout = ONE_DEVICE) -> Program:
    """What trains a ByteLM and writes with it."""
    whole = ByteLM(sizes, attention_fn)  # what writes text and initializes: on one device's order
    split = whole if layout.mesh is None else ByteLM(sizes, RingAttention(layout.mesh))
    loss = functools.partial(loss_of, split, layout)
    optimizer = byte_lm.make_optimizer(sizes)

    def step(params, state, window):
        value, grads = jax.value_and_grad(loss)(params, window)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    def next_byte(params, tokens, last, key):
        logits = jnp.asarray(whole.apply(params, tokens[None], jnp.arange(len(tokens))))[0, last]
        return jax.random.categorical(key, logits / 0.8)

    zeros = jnp.zeros(sizes.seq, jnp.int32)
    init = lambda key: whole.init(key, zeros[None], zeros)
    shapes = jax.eval_shape(init, jax.random.key(0))
    params_lie = layout.shardings(shapes)
    state_lies = layout.shardings(jax.eval_shape(optimizer.init, shapes))
    # Left to the compiler, what the first step returns may lie otherwise than what it was given,
    # and the second would be compiled again.
    return Program(
        init=jax.jit(init),
        init_optimizer=jax.jit(optimizer.init, out_shardings=state_lies),
        step=jax.jit(step, donate_argnums=(0, 1), out_shardings=(params_lie, state_lies, None)),
        loss=jax.jit(loss),
        next_byte=jax.jit(next_byte),
        sample_window=min(sizes.seq, 256),
    )


def train(
    name: str,
    attention_fn: Callable,
    data: np.ndarray,
    sizes: Sizes,
    *,
    seed: int,
    sample_bytes: int,
    change_params: Callable[[Any], Any] = lambda params: params,
    layout: Layout = ONE_DEVICE,
) -> Run:
    """Trains from `seed`; the last twentieth of the data is held out."""
    split = len(data) - max(len(data) // 20, sizes.seq + 2)
    train_data, held_out = data[:split], data[split:]
    if split < sizes.seq + 2:
        raise SystemExit(f"{len(data)} bytes of text are too few for --seq {sizes.seq}")

    program = compiled_program(attention_fn, sizes, layout)
    params = change_params(program.init(jax.random.key(seed)))
    params = jax.device_put(params, layout.shardings(params))
    state = program.init_optimizer(params)

    rng = np.random.default_rng(seed)
    losses, times = [], []
    bar = tqdm(range(sizes.steps), desc=name, dynamic_ncols=True)
    for _ in bar:
        window = layout.rows(windows(train_data, sizes, rng))
        start = time.perf_counter()
        params, state, loss = program.step(params, state, window)
        losses.append(float(loss))  # waits for the step
        times.append(time.perf_counter() - start)
        tokens_per_s = sizes.batch * sizes.seq / times[-1]
        bar.set_postfix_str(f"loss {losses[-1]:.3f}, {tokens_per_s:,.0f} tokens/s")

    rng = np.random.default_rng(0)
    batches = [layout.rows(windows(held_out, sizes, rng)) for _ in range(8)]
    held_out_losses = [float(program.loss(params, batch)) for batch in batches]
    sample = generate(program, params, b"def ", length=sample_bytes, seed=seed)
    return Run(name, losses, times, statistics.mean(held_out_losses), sample)


def generate(program: Program, params, prompt: bytes, *, length: int, seed: int) -> str:
    """`length` bytes after the prompt at temperature 0.8, by running the whole window each time."""
    window = program.sample_window
    out = list(prompt)
    for key in jax.random.split(jax.random.key(seed), length):
        tokens = np.zeros(window, np.int32)  # causal: what stands behind the last byte is not seen
        recent = out[-window:]
        tokens[: len(recent)] = recent
        out.append(int(program.next_byte(params, tokens, len(recent) - 1, key)))
    return bytes(out).decode(errors="replace")


# --- results --------------------------------------------------------------------------------------


def save_plot(runs: list[Run], path: Path) -> None:
    """Loss of each run over its steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5))
    axes = figure.subplots()
    for run, dash in zip(runs, ("-", "--", ":"), strict=False):
        label = f"{run.name} (held out {run.held_out_loss:.3f})"
        byte_lm.draw_losses(axes, range(len(run.losses)), run.losses, dash, label)
    axes.set_xlabel("step")
    axes.legend()
    figure.savefig(path, dpi=150, bbox_inches="tight")


def summary(runs: list[Run], sizes: Sizes) -> str:
    """The runs, and how far their losses are apart, as text."""
    lines = []
    for run in runs:
        tokens_per_s = sizes.batch * sizes.seq / run.median_step_s
        lines.append(
            f"{run.name}: loss {run.losses[0]:.3f} -> {np.mean(run.losses[-20:]):.3f}, "
            f"held out {run.held_out_loss:.3f}, "
            f"median step {run.median_step_s * 1e3:.1f} ms, {tokens_per_s:,.0f} tokens/s"
        )
    by_name = {run.name: run for run in runs}
    if {"flash", "jax"} <= by_name.keys():
        flash, reference = by_name["flash"], by_name["jax"]
        lines.append(f"step time jax / flash: {reference.median_step_s / flash.median_step_s:.2f}")
        lines.append(
            "mean |difference| of the last 50 losses, "
            f"flash and jax: {byte_lm.mean_difference(flash.losses, reference.losses):.2e}"
        )
    if {"jax", "jax-perturbed"} <= by_name.keys():
        plain, changed = by_name["jax"], by_name["jax-perturbed"]
        lines.append(
            "mean |difference| of the last 50 losses, jax and jax perturbed by one rounding: "
            f"{byte_lm.mean_difference(plain.losses, changed.losses):.2e}"
        )
    return "\n".join(lines)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    defaults = byte_lm.default_sizes(jax.default_backend() == "gpu")
    parser = byte_lm.option_parser(
        __doc__, attention=ATTENTION, defaults=defaults, plot="train_lm.png"
    )
    add = parser.add_argument
    add("--compare", action="store_true", help="train with both, from one seed")
    add("--perturb", action="store_true", help="and with jax from inputs one rounding away")
    add("--mesh", type=parse_mesh, help="devices, as data=2,sequence=2,model=2; default: one")
    add("--sample", type=int, default=200, help="bytes to write at the end, default 200")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> list[Run]:
    """Runs the program; returns its runs."""
    args = parse_args(argv)
    sizes, data = byte_lm.sizes_of(args), read_text(args.text)
    print(f"{len(data) / 1e6:.1f} MB of text, {sizes}, on {jax.devices()[0].device_kind}")

    names = ["flash", "jax"] if args.compare else [args.attention]
    run = functools.partial(train, data=data, sizes=sizes, seed=args.seed, sample_bytes=args.sample)
    layouts = {"flash": Layout(args.mesh)}  # jax.nn's attention, to compare with, on one device
    runs = [run(name, ATTENTION[name], layout=layouts.get(name, ONE_DEVICE)) for name in names]
    if args.perturb:
        runs.append(run("jax-perturbed", byte_lm.jax_attention, change_params=perturbed))

    for run in runs:
        print(f"\n--- a sample, {run.name} ---\n{run.sample}")
    print(f"\n{summary(runs, sizes)}")
    save_plot(runs, args.plot)
    print(f"loss plot: {args.plot}")
    if args.json:
        results = [dataclasses.asdict(run) | {"median_step_s": run.median_step_s} for run in runs]
        record = {"sizes": dataclasses.asdict(sizes), "seed": args.seed, "runs": results}
        args.json.write_text(json.dumps(record, indent=1))
    return runs


if __name__ == "__main__":
    main()
