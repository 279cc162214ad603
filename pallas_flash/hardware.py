"""Limits of a GPU by compute capability. Facts only: knows nothing of attention."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class GpuLimits:
    """What one multiprocessor offers a kernel.

    Attributes:
      smem_bytes: shared memory one block may use.
      num_sms: multiprocessors of the largest part of this family (a grid's natural width).
    """

    smem_bytes: int
    num_sms: int


SM90 = GpuLimits(smem_bytes=232_448, num_sms=132)
