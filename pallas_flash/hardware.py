"""Limits and speeds of a GPU by compute capability. Facts only: knows nothing of attention."""

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

    def smem_share(self, blocks: int) -> int:
        """Shared memory of each of several blocks; the system takes 1 KB for each."""
        return (self.smem_bytes + 1024) // blocks - 1024


SM90 = GpuLimits(smem_bytes=232_448, num_sms=132)


@dataclasses.dataclass(frozen=True)
class GpuSpeeds:
    """What a whole part does at most.

    Attributes:
      name: of the part.
      matmul_flops_s: 16-bit matrix products, measured on 8192 x 8192 x 8192.
      hbm_bytes_s: device memory, by the data sheet: nothing is faster.
      hbm_copy_bytes_s: device memory, measured on a large copy, read + written: what is reached.
      l2_bytes: second-level cache.
      nvlink_bytes_s: to the other GPUs of a host, each direction.
      network_bytes_s: to other hosts, each direction, a GPU.
    """

    name: str
    matmul_flops_s: int
    hbm_bytes_s: int
    hbm_copy_bytes_s: int
    l2_bytes: int
    nvlink_bytes_s: int
    network_bytes_s: int

    def floor_s(self, flops: float, dram_bytes: float) -> float:
        """The least time for so many flops and bytes: they overlap at best."""
        return max(flops / self.matmul_flops_s, dram_bytes / self.hbm_bytes_s)


# Measured 2026-11-29 (matrix product 830-844, copy); the others by NVIDIA's data sheet: NVLink 4 is
# 900 GB/s both ways together, InfiniBand NDR 400 Gbit/s.
H200 = GpuSpeeds(
    name="NVIDIA H200",
    matmul_flops_s=835_000_000_000_000,
    hbm_bytes_s=4_800_000_000_000,
    hbm_copy_bytes_s=4_300_000_000_000,
    l2_bytes=60 * 2**20,
    nvlink_bytes_s=450_000_000_000,
    network_bytes_s=50_000_000_000,
)
