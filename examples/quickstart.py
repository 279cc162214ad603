"""pallas_flash against jax.nn.dot_product_attention: values, gradients, memory and time.

uv run examples/quickstart.py
"""

import functools
import time

import jax
import jax.numpy as jnp

import pallas_flash

ON_GPU = jax.default_backend() == "gpu"
SHAPE = (1, 8192, 16, 128) if ON_GPU else (1, 2048, 2, 64)  # batch, length, heads, head_dim
DTYPE = jnp.bfloat16


def loss(attention, q, k, v, cotangent):
    """A scalar whose gradient with respect to the output is `cotangent`."""
    out = attention(q, k, v, is_causal=True)
    return jnp.vdot(out.astype(jnp.float32), cotangent.astype(jnp.float32))


def relative_error(actual, expected) -> float:
    """Largest |actual - expected| over largest |expected|, over all arrays."""
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    return max(float(jnp.max(jnp.abs(a - e)) / jnp.max(jnp.abs(e))) for a, e in pairs)


def median_ms(fn, *args, calls: int = 5) -> float:
    """Median wall time of a call in milliseconds; fn is compiled already."""
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        jax.block_until_ready(fn(*args))
        times.append(time.perf_counter() - start)
    return sorted(times)[calls // 2] * 1e3


def measure(attention, args):
    """(output, gradients), temporary MiB of the gradient, milliseconds of the gradient."""
    gradient = jax.jit(jax.grad(functools.partial(loss, attention), argnums=(0, 1, 2)))
    compiled = gradient.lower(*args).compile()
    memory = compiled.memory_analysis()
    temporary = memory.temp_size_in_bytes / 2**20 if memory else float("nan")
    out = jax.jit(functools.partial(attention, is_causal=True))(*args[:3])
    gradients = jax.block_until_ready(compiled(*args))
    return jax.tree.map(jnp.float32, (out, gradients)), temporary, median_ms(compiled, *args)


def main() -> None:
    """Prints the table."""
    keys = jax.random.split(jax.random.key(0), 4)
    inputs = tuple(jax.random.normal(key, SHAPE, DTYPE) for key in keys)
    print(pallas_flash.explain(*inputs[:3], is_causal=True))

    # The truth: float32 inputs with the same values, products in full precision.
    with jax.default_matmul_precision("highest"):
        plain = functools.partial(jax.nn.dot_product_attention, implementation="xla")
        truth, *_ = measure(plain, tuple(x.astype(jnp.float32) for x in inputs))

    print(f"\ncausal attention and its gradient, {SHAPE} {jnp.dtype(DTYPE).name}")
    print(f"{'':32}{'error out':>11}{'error grad':>12}{'memory MiB':>12}{'ms':>9}")
    peers = {
        "pallas_flash": pallas_flash.dot_product_attention,
        "jax.nn": plain,
    }
    if ON_GPU:
        peers["jax.nn, cuDNN"] = functools.partial(
            jax.nn.dot_product_attention, implementation="cudnn"
        )
    for name, attention in peers.items():
        (out, gradients), temporary, ms = measure(attention, inputs)
        errors = relative_error(out, truth[0]), relative_error(gradients, truth[1])
        print(f"{name:32}{errors[0]:11.1e}{errors[1]:12.1e}{temporary:12.1f}{ms:9.2f}")


if __name__ == "__main__":
    main()
