"""Shared memory by name: how tiles are declared, and how many bytes a scratch tree takes.

A kernel declares its scratch in one function; the launch uses it and the byte count reads it, so
the two cannot drift apart. Knows nothing of attention.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash import hardware

_ALIGNMENT = 1024  # Mosaic starts every buffer at a multiple of this
_BARRIER_BYTES = 8
_BARRIERS = (plgpu.Barrier, plgpu.ClusterBarrier)


def tiled_smem(shape: tuple[int, ...], dtype, *, beside: int | None = None):
    """A buffer as wgmma and TMA want it: 8-row tiles, swizzled as widely as the rows allow.

    With `beside`, as widely as rows of so many columns do: the two operands of a wgmma must agree.
    """
    return plgpu.SMEM(shape, dtype, transforms=transforms(beside or shape[-1], dtype))


def transforms(columns: int, dtype) -> tuple[plgpu.TilingTransform, plgpu.SwizzleTransform]:
    """How `tiled_smem` lays out rows of so many columns."""
    bits = jnp.dtype(dtype).itemsize * 8
    swizzle = plgpu.find_swizzle(columns * bits)
    return plgpu.TilingTransform((8, swizzle * 8 // bits)), plgpu.SwizzleTransform(swizzle)


def _is_scratch(x) -> bool:
    return isinstance(x, _BARRIERS) or hasattr(x, "shape")


def smem_bytes(scratch) -> int:
    """Bytes of shared memory of a scratch tree (buffers and barriers) at launch."""
    buffers = barriers = 0
    for leaf in jax.tree.leaves(scratch, is_leaf=_is_scratch):
        if isinstance(leaf, _BARRIERS):
            barriers += _BARRIER_BYTES * int(np.prod(leaf.num_barriers))
        else:
            size = math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize
            buffers += -(-size // _ALIGNMENT) * _ALIGNMENT
    return buffers + barriers


def fits_smem(scratch, limits: hardware.GpuLimits = hardware.SM90) -> bool:
    """Whether the scratch fits one block."""
    return smem_bytes(scratch) <= limits.smem_bytes


def check_smem(what: str, scratch, limits: hardware.GpuLimits = hardware.SM90) -> None:
    """Raises ValueError where the scratch of `what` does not fit one block."""
    needed = smem_bytes(scratch)
    if not fits_smem(scratch, limits):
        raise ValueError(
            f"{what} needs {needed} bytes of shared memory, the GPU has {limits.smem_bytes} a "
            "block; choose fewer stages or smaller tiles"
        )
