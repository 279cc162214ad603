"""Every shipped configuration compiles for sm_90a with no more spills than its row records.

Needs no GPU: the compiler works from a description of one. It sees spills and serialized tensor
core work, which make a kernel slower and change no result, so no other test on a CPU would fail.
"""

import os

import jax
import jax.numpy as jnp
import pytest

import pallas_flash
from pallas_flash import dispatch, tuned
from tests import aot

MASKS = {  # name: (static arguments, lengths too, query heads a kv head)
    "full": ({}, False, 1),
    "causal-lengths": ({"is_causal": True}, True, 2),
}
# Equal head dims are what people run: no mask and the one of most registers, and the other dtype.
THOROUGH = [
    ("full", "bfloat16"),
    ("causal-lengths", "bfloat16"),
    ("causal-lengths", "float16"),
    ("causal-lengths", "bfloat16", True),  # deterministic: dq has a kernel of its own
]
BRIEF = [("causal-lengths", "bfloat16")]
LOG = """
ptxas info    : (C7511) Potential Performance Loss: wgmma.mma_async instructions are serialized \
due to insufficient register resources for the wgmma pipeline in the function 'a_mosaic_gpu_kernel'
ptxas info    : (C7519) warpgroup.arrive is injected in around line 489 by compiler to allow use \
of registers in GMMA in function 'a_mosaic_gpu_kernel'
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'a_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for a_mosaic_gpu_kernel
    1240 bytes stack frame, 1508 bytes spill stores, 1600 bytes spill loads
ptxas info    : Used 255 registers, used 2 barriers, 1240 bytes cumulative stack size, 1 bytes smem
ptxas info    : Compiling entry function 'b_mosaic_gpu_kernel' for 'sm_90a'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 90 registers, used 2 barriers, 1 bytes smem
"""


def gradient(head_dim, head_dim_v, mask, dtype, deterministic=False):
    """A function whose kernels are the forward and the backward of one call, and its arguments."""
    static, has_lengths, q_per_kv = MASKS[mask]
    batch, length, kv_heads = 2, 1024, 2
    shape = lambda heads, width: jax.ShapeDtypeStruct((batch, length, heads, width), dtype)
    arrays = {
        "query": shape(kv_heads * q_per_kv, head_dim),
        "key": shape(kv_heads, head_dim),
        "value": shape(kv_heads, head_dim_v),
    }
    if has_lengths:
        lengths = jax.ShapeDtypeStruct((batch,), jnp.int32)
        arrays |= {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths}

    def run(arrays, dout):
        def attend(qkv):
            return pallas_flash.dot_product_attention(
                **(arrays | qkv),
                **static,
                implementation="mosaic_gpu",
                deterministic_backward=deterministic,
            )

        with dispatch.assume_device("gpu", (9, 0)):
            qkv = {name: arrays[name] for name in ("query", "key", "value")}
            out, vjp = jax.vjp(attend, qkv)
            return out, vjp(dout)

    return run, (arrays, shape(kv_heads * q_per_kv, head_dim_v))


def _require_wheels() -> None:
    missing = aot.missing_wheels()
    if missing and os.environ.get("CI"):
        pytest.fail(f"{missing}: the gate would not be looked at")
    if missing:
        pytest.skip(missing)


def test_log_is_read():
    a, b = aot.parse_ptxas_log(LOG)
    assert (a.name, a.registers, a.spill_bytes) == ("a", 255, 1508)
    assert len(a.notes) == 1 and "C7511" in a.notes[0]
    assert b == aot.Kernel("b", registers=90, spill_bytes=0, notes=())


def test_unreadable_log_is_an_error():
    with pytest.raises(ValueError, match="cannot read"):
        aot.parse_ptxas_log("Compiling entry function 'a' for 'sm_90a'\n")


@pytest.mark.parametrize("head_dim", tuned.HEAD_DIMS)
def test_compiles_clean(head_dim):
    _require_wheels()
    cases = [
        (head_dim, head_dim_v, *variant)
        for head_dim_v in tuned.HEAD_DIMS
        for variant in (THOROUGH if head_dim == head_dim_v else BRIEF)
    ]
    for case, kernels in zip(cases, aot.kernels_of("tests.test_aot:gradient", cases), strict=True):
        print(case, *kernels, sep="\n  ")
        backward = [kernel for kernel in kernels if "backward" in kernel.name]
        assert len(backward) == 1 + (True in case), "backward and, if asked for, dq"
        # A deterministic call shares its forward with the other, and newer JAX compiles it once.
        assert len(kernels) - len(backward) == 1 or True in case, "forward"
        for kernel in kernels:
            row = _row(kernel.name, *case[:2], mask=case[2])
            assert not kernel.notes, f"{case} {kernel.name}: tensor core work is serialized"
            assert kernel.spill_bytes <= row.spill_bytes, f"{case} {kernel}, recorded: {row}"


def _row(kernel_name, head_dim, head_dim_v, *, mask):
    if "dq" in kernel_name:
        return tuned.tuned_dq(head_dim, head_dim_v)
    find = tuned.tuned_backward if "backward" in kernel_name else tuned.tuned_forward
    return find(head_dim, head_dim_v, is_masked=mask != "full")
