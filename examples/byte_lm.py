"""The byte language model that train_lm and train_packed train, and what a training run needs.

Sizes and options, text, the model, its optimizer, loss curves. How bytes become batches, which
attention runs and on which devices is for those two to say.
"""

import argparse
import dataclasses
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

VOCAB = 256  # bytes
TEXT_SUFFIXES = {".py", ".txt", ".md", ".rst", ".c", ".h", ".tex", ".html", ".json", ".csv"}
Series = Sequence[float] | np.ndarray  # an entry a step


# --- sizes and options ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Model and batch. The defaults differ by device; see `default_sizes`."""

    seq: int
    batch: int
    layers: int
    width: int
    heads: int
    steps: int
    lr: float
    dtype: str


def default_sizes(on_gpu: bool) -> Sizes:
    """About two minutes on two CPU cores; on a GPU a sequence where attention is a large part."""
    if on_gpu:
        return Sizes(
            seq=8192, batch=2, layers=16, width=1024, heads=16, steps=300, lr=6e-4, dtype="bfloat16"
        )
    return Sizes(
        seq=256, batch=4, layers=2, width=128, heads=4, steps=500, lr=3e-3, dtype="float32"
    )


def option_parser(
    description: str | None, *, attention: Iterable[str], defaults: Sizes, plot: str
) -> argparse.ArgumentParser:
    """The options of every training run; `sizes_of` reads the sizes.

    Args:
      description: the program's docstring.
      attention: names to choose from; "flash" is the default.
      defaults: of the sizes, an option each.
      plot: the file that the plot goes to by default.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--attention", choices=sorted(attention), default="flash")
    library = sysconfig.get_paths()["stdlib"]
    text = "files or folders; default: Python's library"
    add("--text", nargs="+", metavar="PATH", default=[library], help=text)
    for name, default in dataclasses.asdict(defaults).items():
        add(f"--{name}", type=type(default), default=default, help=f"default {default}")
    add("--seed", type=int, default=0)
    add("--plot", type=Path, default=Path(plot), help=f"default {plot}")
    add("--json", type=Path, help="write what every step lost and took here")
    return parser


def sizes_of(args: argparse.Namespace) -> Sizes:
    """The sizes among parsed options."""
    return Sizes(**{f.name: getattr(args, f.name) for f in dataclasses.fields(Sizes)})


# --- text -----------------------------------------------------------------------------------------


def text_files(paths: Iterable[str]) -> list[Path]:
    """These files, and the text files of these folders, in order."""
    files: list[Path] = []
    for path in map(Path, paths):
        found = sorted(path.rglob("*")) if path.is_dir() else [path]
        files += [f for f in found if f.is_file() and (f == path or f.suffix in TEXT_SUFFIXES)]
    return [f for f in files if "site-packages" not in f.parts]


# --- model ----------------------------------------------------------------------------------------


def jax_attention(query, key, value, bias=None, mask=None):
    """jax.nn's attention, causal, with the signature Flax wants."""
    implementation = "cudnn" if jax.default_backend() == "gpu" else "xla"
    return jax.nn.dot_product_attention(
        query, key, value, bias, mask, is_causal=True, implementation=implementation
    )


class Block(nn.Module):
    """Pre-norm transformer block."""

    sizes: Sizes
    attention_fn: Callable

    @nn.compact
    def __call__(self, x):  # [batch, seq, width]
        dtype, width = self.sizes.dtype, self.sizes.width
        y = nn.LayerNorm(dtype=dtype)(x)
        x = x + nn.MultiHeadDotProductAttention(
            num_heads=self.sizes.heads,
            dtype=jnp.dtype(dtype),
            use_bias=False,
            attention_fn=self.attention_fn,
        )(y)
        y = nn.LayerNorm(dtype=dtype)(x)
        y = nn.Dense(4 * width, dtype=dtype)(y)
        return x + nn.Dense(width, dtype=dtype)(nn.gelu(y))


class ByteLM(nn.Module):
    """Decoder-only transformer over bytes; parameters float32, compute in `sizes.dtype`."""

    sizes: Sizes
    attention_fn: Callable

    @nn.compact
    def __call__(self, tokens, positions):  # int32 [batch, seq], [seq] or [batch, seq]
        dtype, width = self.sizes.dtype, self.sizes.width
        table = self.param("positions", nn.initializers.normal(0.02), (self.sizes.seq, width))
        x = nn.Embed(VOCAB, width, dtype=jnp.dtype(dtype), name="embed")(tokens)
        x = x + table[positions].astype(dtype)
        for _ in range(self.sizes.layers):
            x = Block(self.sizes, self.attention_fn)(x)
        x = nn.LayerNorm(dtype=dtype)(x)
        return nn.Dense(VOCAB, dtype=dtype)(x).astype(jnp.float32)  # [batch, seq, VOCAB]


def make_optimizer(sizes: Sizes) -> optax.GradientTransformation:
    """AdamW with warm-up, cosine decay and clipped gradients."""
    warmup = max(1, sizes.steps // 20)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, sizes.lr, warmup, max(sizes.steps, warmup + 1), end_value=sizes.lr / 10
    )
    return optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.1)
    )


# --- loss curves ----------------------------------------------------------------------------------


def mean_difference(a: Series, b: Series, last: int = 50) -> float:
    """Mean |difference| of the last losses of two runs over the same batches."""
    return float(np.mean(np.abs(np.subtract(a[-last:], b[-last:]))))


def smoothed(values: Series) -> np.ndarray:
    """Running mean over a twentieth of the run."""
    span = max(1, len(values) // 20)
    return np.convolve(values, np.ones(span) / span, mode="valid")


def draw_losses(axes, x: Series, losses: Series, dash: str, label: str) -> str:
    """Losses over x on Matplotlib's axes: every step faint, the running mean strong.

    Returns:
      The colour of both.
    """
    (line,) = axes.plot(smoothed(x), smoothed(losses), dash, label=label)
    axes.plot(x, losses, color=line.get_color(), alpha=0.2, linewidth=0.8)
    axes.set(ylabel="loss (nats a byte)", title="Byte language model")
    axes.grid(alpha=0.3)
    return line.get_color()
