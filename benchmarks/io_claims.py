"""Shows two claims of docs/io.md by a run on any machine: exactness in blocks, and memory.

python benchmarks/io_claims.py order      keys in blocks, the blocks in other orders
python benchmarks/io_claims.py memory     temporaries of a compiled gradient over T
"""

import argparse
import functools
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import numpy as np

from pallas_flash import dot_product_attention

HEADS, HEAD_DIM = 2, 64


class Order(NamedTuple):
    """Relative errors of one dtype, the largest of any entry over the largest entry.

    Attributes:
      between_orders: of two orders of the same blocks of keys.
      tiled, plain: of tiled and of plain attention against float64.
    """

    dtype: str
    between_orders: float
    tiled: float
    plain: float


def _distance(a, b) -> float:
    a, b = (np.asarray(x, np.float64) for x in (a, b))
    return float(np.abs(a - b).max() / np.abs(b).max())


def _dense(q, k, v) -> np.ndarray:
    """Attention in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    scores = np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(HEAD_DIM)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bnts,bsnh->btnh", weights / weights.sum(-1, keepdims=True), v)


def order(dtype: str, length: int = 1024, block: int = 128, orders: int = 4) -> Order:
    """Attention over the same keys and values, their blocks in other orders.

    The sum over keys has no order, and the running maximum rescales what came before: so the result
    differs by rounding, as two implementations of plain attention do.
    """
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (1, length, HEADS, HEAD_DIM), dtype) for key in keys)
    tiled = jax.jit(functools.partial(dot_product_attention, implementation="xla"))
    first, between = tiled(q, k, v), 0.0
    for seed in range(orders):
        shuffled = np.random.default_rng(seed).permutation(length // block)
        at = (shuffled[:, None] * block + np.arange(block)).ravel()
        between = max(between, _distance(tiled(q, k[:, at], v[:, at]), first))
    exact, plain = _dense(q, k, v), jax.nn.dot_product_attention(q, k, v)
    return Order(dtype, between, _distance(first, exact), _distance(plain, exact))


class Memory(NamedTuple):
    """Temporaries of the compiled gradient by q, k and v, bytes."""

    length: int
    tiled: int
    plain: int


def memory(length: int) -> Memory:
    """What XLA says that it allocates, on this machine."""
    shape = jax.ShapeDtypeStruct((1, length, HEADS, HEAD_DIM), jnp.float32)

    def temporaries(attention) -> int:
        loss = lambda q, k, v: attention(q, k, v, is_causal=True).sum()
        compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(shape, shape, shape).compile()
        analysis = compiled.memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    tiled = functools.partial(dot_product_attention, implementation="xla")
    return Memory(length, temporaries(tiled), temporaries(jax.nn.dot_product_attention))


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("claim", choices=["order", "memory"])
    claim = parser.parse_args(argv).claim
    if claim == "order":
        for dtype in ("float32", "bfloat16"):
            told = order(dtype)
            print(
                f"{dtype:9s} between two orders {told.between_orders:.0e}; against float64:"
                f" tiled {told.tiled:.0e}, plain {told.plain:.0e}"
            )
    else:
        for length in (1024, 2048, 4096):
            told = memory(length)
            print(
                f"T {length}: temporaries of the gradient, tiled {told.tiled / 2**20:.1f} MiB,"
                f" plain {told.plain / 2**20:.1f} MiB"
            )


if __name__ == "__main__":
    main()
