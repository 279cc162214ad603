"""Ours and every other implementation that is installed, behind one signature.

Each is f(q, k, v, arrays) of a `Shape`: arrays by the argument's name in our own function. A peer
that cannot run a shape raises, and the benchmark says so.
"""

import functools
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import jax

import pallas_flash
from pallas_flash.benchmark_shapes import Shape

Attention = Callable[..., jax.Array]

MOST_NAIVE = 4096  # queries and keys


def implementations(
    shape: Shape, deterministic: bool = False, naive: bool = False
) -> dict[str, Attention]:
    """By name, ours first; the last is what the others are checked against.

    deterministic: our other backward, too. naive: on a GPU XLA's plain attention, too, where the
    scores fit in memory.
    """
    attend = lambda f, **options: functools.partial(f, shape, **options)
    found = {"pallas_flash": attend(_ours)}
    if deterministic and not shape.bias and not shape.queries:
        found["deterministic"] = attend(_ours, deterministic_backward=True)
    if jax.default_backend() != "gpu":
        return found | {"jax.nn xla": attend(_jax_nn, implementation="xla")}
    if naive and shape.length <= MOST_NAIVE:
        found["naive"] = attend(_jax_nn, implementation="xla")
    if find_spec("flash_attn3_jax"):
        found["fa3"] = attend(_fa3)
    if find_spec("tokamax"):
        found["tokamax"] = attend(_tokamax)
    found["cudnn"] = attend(_jax_nn, implementation="cudnn")
    if shape.soft_cap or shape.head_dim_v:  # which cuDNN does not take: something must check ours
        found["chunked xla"] = attend(_ours, implementation="xla")
    return found


def _common(shape: Shape) -> dict[str, Any]:
    window = dict(local_window_size=(shape.window, 0)) if shape.window else {}
    return dict(is_causal=shape.causal) | window


def _ours(shape: Shape, q, k, v, arrays, **options):
    if shape.soft_cap:
        options["logits_soft_cap"] = shape.soft_cap
    return pallas_flash.dot_product_attention(q, k, v, **arrays, **_common(shape), **options)


def _with_mask_array(arrays: dict[str, Any]) -> dict[str, Any]:
    """Segment ids, which peers do not know, as a mask."""
    arrays = dict(arrays)
    if "query_segment_ids" in arrays:
        ids = arrays.pop("query_segment_ids")
        del arrays["key_value_segment_ids"]
        arrays["mask"] = ids[:1, None, :, None] == ids[:1, None, None, :]
    return arrays


def _jax_nn(shape: Shape, q, k, v, arrays, implementation):
    if shape.soft_cap:
        raise NotImplementedError("jax.nn has no soft cap")
    arrays = _with_mask_array(arrays)
    options = _common(shape) | dict(implementation=implementation)
    return jax.nn.dot_product_attention(q, k, v, **arrays, **options)


def _fa3(shape: Shape, q, k, v, arrays):
    if arrays or shape.soft_cap or shape.head_dim_v or shape.head_dim > 128:
        raise NotImplementedError("FlashAttention-3 here takes no arrays and head dims up to 128")
    import flash_attn3_jax  # pyright: ignore[reportMissingImports]

    window = (shape.window, 0) if shape.window else (-1, -1)
    return flash_attn3_jax.flash_mha(q, k, v, is_causal=shape.causal, window_size=window)


def _tokamax(shape: Shape, q, k, v, arrays):
    import tokamax  # pyright: ignore[reportMissingImports]

    arrays = _with_mask_array(arrays)
    options = _common(shape) | dict(implementation="mosaic_gpu")
    if shape.soft_cap:
        options["logits_soft_cap"] = shape.soft_cap
    return tokamax.dot_product_attention(q, k, v, **arrays, **options)
