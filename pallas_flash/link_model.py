"""Ring attention: the bytes of a step over a link against its compute, and when it hides them.

n devices hold T / n queries and S / n keys each. In each of n steps a device attends to the keys
that it holds while they travel on to its neighbour (Liu et al., Ring Attention, arXiv 2310.01889);
backward, their gradients travel with them, in float32. A causal ring is balanced: every step of
every device has half of the pairs (Brandon et al., Striped Attention, arXiv 2311.09431).

Bytes grow with T / n and flops with its square, both with the batch and the head dims alike: so the
number of queries a device from which on the link is hidden depends on the chip, the link and how
many query heads share a kv head, and on nothing else.
"""

import math
from typing import NamedTuple

from pallas_flash import hardware
from pallas_flash.io_counts import FLOAT32_BYTES
from pallas_flash.problem import Problem


class RingStep(NamedTuple):
    """One step of the ring on one device.

    Attributes:
      link_bytes: sent to the neighbour, and received from the other.
      flops: of the matrix products.
      link_s: time of the bytes.
      compute_s: least time of the flops.
      hidden_from: the least number of queries of the whole sequence, as many keys, from which on
        compute_s is at least link_s; a multiple of `devices`.
    """

    link_bytes: int
    flops: int
    link_s: float
    compute_s: float
    hidden_from: int

    @property
    def is_hidden(self) -> bool:
        return self.link_s <= self.compute_s


def ring_step(
    problem: Problem,
    devices: int,
    link_bytes_s: float,
    *,
    is_causal: bool = False,
    backward: bool = False,
    speeds: hardware.GpuSpeeds = hardware.H200,
) -> RingStep:
    """A step of a ring over the sequence.

    Args:
      problem: of all devices together; its mask is not looked at.
      devices: in the ring, at least 2; divides q_len and kv_len.
      link_bytes_s: to one neighbour.
      is_causal: half of the pairs, balanced over the devices.
      backward: keys travel with their gradients; five products instead of two.
      speeds: of a device.

    Raises:
      ValueError: `devices` is below 2 or does not divide the sequence, or the link has no speed.
    """
    if devices < 2:
        raise ValueError(f"devices={devices} must be at least 2: one device has no ring")
    if not link_bytes_s > 0:
        raise ValueError(f"link_bandwidth={link_bytes_s} must be positive")
    for name in ("q_len", "kv_len"):
        if getattr(problem, name) % devices:
            raise ValueError(
                f"{name}={getattr(problem, name)} must be a multiple of devices={devices}: pad it"
            )
    h, hv = problem.head_dim, problem.head_dim_v
    a_key = (h + hv) * (problem.np_dtype.itemsize + (FLOAT32_BYTES if backward else 0))
    a_pair = 2 * (3 * h + 2 * hv) if backward else 2 * (h + hv)
    keys, queries = problem.kv_len // devices, problem.q_len // devices
    link_bytes = problem.batch * problem.num_kv_heads * keys * a_key
    flops = problem.batch * problem.num_q_heads * keys * queries * a_pair // (2 if is_causal else 1)
    # link_s <= compute_s, solved for the queries of a device
    heads = problem.num_kv_heads / problem.num_q_heads * (2 if is_causal else 1)
    needed = heads * a_key * speeds.matmul_flops_s / (link_bytes_s * a_pair)
    return RingStep(
        link_bytes=link_bytes,
        flops=flops,
        link_s=link_bytes / link_bytes_s,
        compute_s=flops / speeds.matmul_flops_s,
        hidden_from=devices * math.ceil(needed),
    )
