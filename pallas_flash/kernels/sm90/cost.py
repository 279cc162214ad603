"""The cost estimate that XLA gets with a kernel: what the IO model counts for this very launch."""

import inspect
from collections.abc import Callable
from typing import Any

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash import io_kernels
from pallas_flash.io_counts import Pass
from pallas_flash.kernels.sm90.call import Call
from pallas_flash.problem import Problem

# JAX 0.11 has no place for an estimate.
IS_TAKEN = "cost_estimate" in inspect.signature(plgpu.kernel).parameters


def cost_estimate(call: Call, count: Callable[..., Pass], **options: Any) -> dict[str, Any]:
    """The keyword argument for `plgpu.kernel`, empty where it takes none.

    Lengths, windows, segments and mask arrays are numbers of the call that are not known when it is
    compiled: they count as if they hid nothing.

    Args:
      call: the launch.
      count: its function of `io_kernels`.
      **options: of that function.
    """
    if not IS_TAKEN:
        return {}
    names = ("batch", "q_len", "kv_len", "num_q_heads", "num_kv_heads", "head_dim", "head_dim_v")
    problem = Problem(**{n: getattr(call, n) for n in names}, dtype=call.dtype, mask=call.mask)
    counted = count(io_kernels.known_ahead(problem), cut=call.config, **options)
    flops = sum(product.flops for product in counted.products)
    estimate: Any = pl.CostEstimate(
        flops=flops,
        transcendentals=counted.products[0].flops // (2 * call.head_dim),  # one a pair
        bytes_accessed=sum(access.distinct for access in (*counted.reads, *counted.writes)),
    )
    return dict(cost_estimate=estimate)
