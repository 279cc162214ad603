"""Trains a byte model on documents of many lengths twice: packed into rows, and one to a row.

    uv run --extra examples examples/train_packed.py                    # Python's own library
    uv run --extra examples examples/train_packed.py --text my_notes/ --mode packed
    uv run --extra cuda --extra examples examples/train_packed.py --window 1024     # on a GPU

A document is what stands between two blank lines of a text file (in Python: a function or a class),
up to `--seq` bytes of it. `packed` places documents end to end, each with a segment id of its own:
no document sees another. `padded` gives each document a row, and attention its length. Every step
trains on the same documents either way, padded in as many passes as it needs, with gradients added
up: the losses are the same but for rounding, and the time a real token takes is not.

Before training, the logits of packed documents are compared with those of padded ones.
`--attention jax` runs the same on jax.nn's attention, which needs a mask of seq x seq booleans.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

import byte_lm
import pallas_flash.linen
from byte_lm import ByteLM, Sizes

Document = np.ndarray  # [length] uint8
Rows = list[list[Document]]  # the documents of each row of a packed batch
WAITING = 64  # documents that did not fit end a step


def packed_sizes(on_gpu: bool) -> Sizes:
    """ByteLM's defaults; fewer steps, since padded rows take several passes a step."""
    sizes = byte_lm.default_sizes(on_gpu)
    if on_gpu:
        return dataclasses.replace(sizes, steps=150)
    return dataclasses.replace(sizes, seq=1024, batch=2, steps=50)


# --- documents, and the rows they fill ------------------------------------------------------------


def read_documents(paths: list[str], seq: int) -> list[Document]:
    """What stands between two blank lines of these files and folders, each cut off at `seq`."""
    texts = (file.read_bytes() for file in byte_lm.text_files(paths))
    parts = itertools.chain.from_iterable(re.split(rb"\n{3,}", text) for text in texts)
    return [np.frombuffer(part[:seq], np.uint8) for part in parts if len(part) > 1]


def first_fit(documents: Iterable[Document], sizes: Sizes) -> Iterator[Rows]:
    """The rows of step after step. A document that fits in none waits for the next step."""
    stream, waiting = iter(documents), []
    while True:
        rows: Rows = [[] for _ in range(sizes.batch)]
        free = [sizes.seq] * sizes.batch
        left = []
        for document in itertools.chain(waiting, stream):
            row = next((i for i, room in enumerate(free) if room >= len(document)), None)
            if row is None:
                left.append(document)
            else:
                rows[row].append(document)
                free[row] -= len(document)
            if len(left) == WAITING:
                break
        if not any(rows):
            return
        waiting = left
        yield rows


class Batch(NamedTuple):
    """One pass. Positions count from 0 in each document and are 0 on padding."""

    tokens: np.ndarray  # [rows, seq] int32
    positions: np.ndarray  # [rows, seq] int32
    segments: np.ndarray | None = None  # [rows, seq] int32, packed only
    lengths: np.ndarray | None = None  # [rows] int32, padded only


def place(rows: Rows, seq: int) -> Batch:
    """Documents end to end; segment ids count up in a row, and padding has the next one."""
    tokens, positions, segments = np.zeros((3, len(rows), seq), np.int32)
    for i, documents in enumerate(rows):
        start = 0
        for number, document in enumerate(documents):
            end = start + len(document)
            tokens[i, start:end] = document
            positions[i, start:end] = np.arange(len(document))
            segments[i, start:end] = number
            start = end
        segments[i, start:] = len(documents)
    return Batch(tokens, positions, segments)


def packed(rows: Rows, sizes: Sizes) -> list[Batch]:
    """The documents of a step in one pass."""
    return [place(rows, sizes.seq)]


def padded(rows: Rows, sizes: Sizes) -> list[Batch]:
    """The documents of a step, one a row, in passes of `sizes.batch` rows and one of the rest."""
    documents = list(itertools.chain.from_iterable(rows))
    batches = []
    for few in itertools.batched(documents, sizes.batch):
        one_each = place([[document] for document in few], sizes.seq)
        lengths = np.array([len(document) for document in few], np.int32)
        batches.append(one_each._replace(segments=None, lengths=lengths))
    return batches


LAYOUTS: dict[str, Callable[[Rows, Sizes], list[Batch]]] = {"packed": packed, "padded": padded}


# --- attention: what keeps documents apart --------------------------------------------------------


def flash_attention(batch: Batch, window: int | None) -> Callable:
    """pallas_flash, told of segments, lengths and the window: no array is seq x seq."""
    return functools.partial(
        pallas_flash.linen.attention_fn,
        is_causal=True,
        local_window_size=None if window is None else (window, 0),
        query_segment_ids=batch.segments,
        key_value_segment_ids=batch.segments,
        query_seq_lengths=batch.lengths,
        key_value_seq_lengths=batch.lengths,
    )


def masked_attention(batch: Batch, window: int | None) -> Callable:
    """jax.nn's attention, told the same by a mask."""
    seq = batch.tokens.shape[1]
    index = jnp.arange(seq)
    mask = jnp.ones((1, 1, seq, seq), bool)  # [rows or 1, heads: 1, seq, seq]
    if batch.segments is not None:
        mask &= batch.segments[:, None, :, None] == batch.segments[:, None, None, :]
    if batch.lengths is not None:
        mask &= index < batch.lengths[:, None, None, None]
    if window is not None:
        mask &= index[:, None] - index <= window
    return lambda query, key, value: byte_lm.jax_attention(query, key, value, mask=mask)


ATTENTION: dict[str, Callable[[Batch, int | None], Callable]] = {
    "flash": flash_attention,
    "jax": masked_attention,
}


# --- training -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Program:
    """The jitted functions of one model, for both layouts."""

    init: Callable  # (key) -> params
    init_optimizer: Callable  # (params) -> state
    logits: Callable  # (params, batch) -> [rows, seq, VOCAB]
    accumulate: Callable  # (params, grads, batch, count) -> grads, share of the step's loss
    update: Callable  # (params, state, grads) -> params, state


def compile_program(attention: Callable[[Batch], Callable], sizes: Sizes) -> Program:
    """What trains a ByteLM whose attention depends on the batch."""
    optimizer = byte_lm.make_optimizer(sizes)
    model_for = lambda batch: ByteLM(sizes, attention(batch))

    def init(key):
        anything = place([[np.zeros(1, np.uint8)]], sizes.seq)
        return model_for(anything).init(key, anything.tokens, anything.positions)

    def logits_of(params, batch):
        return jnp.asarray(model_for(batch).apply(params, batch.tokens, batch.positions))

    def loss_of(params, batch, count):
        """Cross-entropy of each byte that continues a document, over the step's count of them."""
        logits = logits_of(params, batch)[:, :-1]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.tokens[:, 1:])
        return jnp.sum(losses, where=batch.positions[:, 1:] > 0) / count

    def accumulate(params, grads, batch, count):
        value, more = jax.value_and_grad(loss_of)(params, batch, count)
        return jax.tree.map(jnp.add, grads, more), value

    def update(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return Program(
        init=jax.jit(init),
        init_optimizer=jax.jit(optimizer.init),
        logits=jax.jit(logits_of),
        accumulate=jax.jit(accumulate, donate_argnums=1),
        update=jax.jit(update, donate_argnums=(0, 1)),
    )


def check_apart(program: Program, sizes: Sizes, rows: Rows, *, seed: int) -> float:
    """Largest difference of packed from padded logits, over the largest logit.

    Three documents, cut to a quarter of a row each, and the padding behind them.

    Raises:
      SystemExit: the difference is more than rounding.
    """
    documents = [document[: sizes.seq // 4] for document in itertools.chain.from_iterable(rows)][:3]
    params = program.init(jax.random.key(seed))
    small = dataclasses.replace(sizes, batch=len(documents))
    (together,) = np.asarray(program.logits(params, packed([documents], small)[0]))
    apart = np.asarray(program.logits(params, padded([documents], small)[0]))
    ends = np.cumsum([len(document) for document in documents])
    pairs = [
        (together[end - len(document) : end], alone[: len(document)])
        for document, end, alone in zip(documents, ends, apart, strict=True)
    ]
    scale = max(np.abs(alone).max() for _, alone in pairs)
    error = float(max(np.abs(logits - alone).max() for logits, alone in pairs) / scale)
    tolerance = 1e-3 if sizes.dtype == "float32" else 3e-2
    if not error < tolerance:  # NaN stops, too
        raise SystemExit(
            f"packed and padded logits of the same documents differ by {error:.1e} of the largest, "
            f"more than the {tolerance} of rounding in {sizes.dtype}: documents see each other"
        )
    return error


@dataclasses.dataclass
class Run:
    """One training run: what `--json` writes. Lists have an entry a step."""

    name: str
    losses: list[float]  # nats a byte
    real_tokens: list[int]
    all_tokens: list[int]  # with padding
    passes: list[int]
    step_times_s: list[float]

    @property
    def padding(self) -> float:
        """Share of the computed tokens."""
        return 1 - sum(self.real_tokens) / sum(self.all_tokens)

    @property
    def tokens_per_s(self) -> float:
        """Real tokens."""
        return sum(self.real_tokens) / sum(self.step_times_s)


def train(name: str, program: Program, plan: list[Rows], sizes: Sizes, *, seed: int) -> Run:
    """One step on each entry of the plan, in the layout of that name; compiles before the clock."""
    layout = LAYOUTS[name]

    def start():
        params = program.init(jax.random.key(seed))
        return params, program.init_optimizer(params)

    def step(params, state, batches, count):
        grads, loss = jax.tree.map(jnp.zeros_like, params), jnp.zeros(())
        for batch in batches:
            grads, share = program.accumulate(params, grads, batch, count)
            loss += share
        return *program.update(params, state, grads), float(loss)  # waits for the last pass

    every = itertools.chain.from_iterable(layout(rows, sizes) for rows in plan)
    for batch in {len(batch.tokens): batch for batch in every}.values():
        step(*start(), [batch], 1.0)

    params, state = start()
    run = Run(name, [], [], [], [], [])
    bar = tqdm(plan, desc=name, dynamic_ncols=True)
    for rows in bar:
        batches = layout(rows, sizes)
        lengths = [len(document) for documents in rows for document in documents]
        begin = time.perf_counter()
        params, state, loss = step(params, state, batches, float(sum(lengths) - len(lengths)))
        jax.block_until_ready(params)
        run.step_times_s.append(time.perf_counter() - begin)
        run.losses.append(loss)
        run.real_tokens.append(sum(lengths))
        run.all_tokens.append(sum(batch.tokens.size for batch in batches))
        run.passes.append(len(batches))
        bar.set_postfix_str(f"loss {loss:.3f}, {run.tokens_per_s:,.0f} real tokens/s")
    return run


# --- results --------------------------------------------------------------------------------------


def save_plot(runs: list[Run], path: Path) -> None:
    """Loss over real tokens; real tokens/s."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5))
    left, right = figure.subplots(1, 2, width_ratios=(3, 1))
    for run, dash in zip(runs, ("-", "--"), strict=False):
        color = byte_lm.draw_losses(left, np.cumsum(run.real_tokens), run.losses, dash, run.name)
        bars = right.bar(run.name, run.tokens_per_s, color=color)
        right.bar_label(bars, fmt="{:,.0f}")
    left.set_xlabel("real tokens")
    left.legend()
    right.set(title="real tokens/s")
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def summary(runs: list[Run]) -> str:
    """The runs, and how far they are apart, as text."""
    lines = [
        f"{run.name}: {len(run.losses)} steps in {sum(run.passes)} passes, "
        f"{run.padding:.1%} padding, loss {run.losses[0]:.3f} -> {np.mean(run.losses[-20:]):.3f} "
        f"over {sum(run.real_tokens):,} real tokens, {run.tokens_per_s:,.0f} real tokens/s"
        for run in runs
    ]
    if len(runs) == 2:
        first, second = runs
        ratio = first.tokens_per_s / second.tokens_per_s
        lines.append(f"real tokens/s, {first.name} / {second.name}: {ratio:.2f}")
        difference = byte_lm.mean_difference(first.losses, second.losses)
        lines.append(f"mean |difference| of the last 50 losses: {difference:.2e}")
    return "\n".join(lines)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    defaults = packed_sizes(jax.default_backend() == "gpu")
    parser = byte_lm.option_parser(
        __doc__, attention=ATTENTION, defaults=defaults, plot="train_packed.png"
    )
    add = parser.add_argument
    add("--mode", choices=[*LAYOUTS, "compare"], default="compare", help="default: both layouts")
    add("--window", type=int, metavar="N", help="a byte sees itself and N before it; default: all")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> list[Run]:
    """Runs the program; returns its runs."""
    args = parse_args(argv)
    sizes = byte_lm.sizes_of(args)
    documents = read_documents(args.text, sizes.seq)
    if len(documents) < 3:
        raise SystemExit(f"{len(documents)} documents are too few: give --text with three or more")
    lengths = [len(document) for document in documents]
    print(
        f"{len(documents):,} documents of {min(lengths)} to {max(lengths)} bytes, median "
        f"{np.median(lengths):.0f}; {sizes}, {args.attention}, on {jax.devices()[0].device_kind}"
    )
    order = np.random.default_rng(args.seed).permutation(len(documents))
    stream = itertools.cycle(documents[i] for i in order)
    plan = list(itertools.islice(first_fit(stream, sizes), sizes.steps))

    attention = lambda batch: ATTENTION[args.attention](batch, args.window)
    program = compile_program(attention, sizes)
    error = check_apart(program, sizes, plan[0], seed=args.seed)
    print(f"packed and padded logits of the same documents differ by {error:.1e} of the largest")

    names = list(LAYOUTS) if args.mode == "compare" else [args.mode]
    runs = [train(name, program, plan, sizes, seed=args.seed) for name in names]
    print(f"\n{summary(runs)}")
    save_plot(runs, args.plot)
    print(f"plot: {args.plot}")
    if args.json:
        derived = lambda run: {"padding": run.padding, "tokens_per_s": run.tokens_per_s}
        record = {
            "sizes": dataclasses.asdict(sizes),
            "seed": args.seed,
            "attention": args.attention,
            "window": args.window,
            "device": jax.devices()[0].device_kind,
            "packed_against_padded_logits": error,
            "runs": [dataclasses.asdict(run) | derived(run) for run in runs],
        }
        args.json.write_text(json.dumps(record, indent=1))
    return runs


if __name__ == "__main__":
    main()
