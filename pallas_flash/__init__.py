"""Exact FlashAttention for JAX as Pallas kernels. The public names, nothing else."""

from pallas_flash.api import dot_product_attention, explain

__all__ = ["dot_product_attention", "explain"]
