"""Limits of a GPU by compute capability. Facts only: knows nothing of attention."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class GpuLimits:
    """What one multiprocessor offers a kernel.

    Attributes:
      smem_bytes: shared memory one block may use.
      registers: 32-bit registers of a multiprocessor.
      num_sms: multiprocessors of the largest part of this family (a grid's natural width).
    """

    smem_bytes: int
    registers: int
    num_sms: int


SM90 = GpuLimits(smem_bytes=232_448, registers=65_536, num_sms=132)

_BY_CAPABILITY = {(9, 0): SM90}


def gpu_limits(capability: tuple[int, int]) -> GpuLimits | None:
    """The limits of that compute capability, or None when we have no kernels for it."""
    return _BY_CAPABILITY.get(capability)
