"""Every shipped configuration compiles for sm_90a with no more spills than its row records.

Needs no GPU: the compiler works from a description of one. It sees spills and serialized tensor
core work, which make a kernel slower and change no result, so no other test on a CPU would fail.
"""

import os

import jax
import pytest

import pallas_flash
from pallas_flash import aot, dispatch, tuned

CAUSAL = {"is_causal": True}
# name: (static arguments, arrays by name: (dtype, shape), query heads a kv head). K 2, T 1024, B 2;
# B 32 for several query heads: with fewer tiles of keys each has its own block (`tuned.kv_parts`).
MANY = 32
VARIANTS = {
    "full": ({}, {}, 1),
    "causal-lengths": (
        CAUSAL,
        {"query_seq_lengths": ("int32", (MANY,)), "key_value_seq_lengths": ("int32", (MANY,))},
        2,
    ),
    "causal-lengths-gqa4": (CAUSAL, {"query_seq_lengths": ("int32", (MANY,))}, 4),
    "window": (CAUSAL | {"local_window_size": (300, 0)}, {}, 2),
    "segments": (
        CAUSAL,
        {
            "query_segment_ids": ("int32", (2, 1024)),
            "key_value_segment_ids": ("int32", (2, 1024)),
        },
        1,
    ),
    "mask": ({}, {"mask": ("bool", (2, 1, 1024, 1024))}, 1),
    "bias": ({}, {"bias": ("bfloat16", (1, 2, 1024, 1024))}, 1),
    "soft-cap": (CAUSAL | {"logits_soft_cap": 50.0}, {}, 1),
    "dropout": (CAUSAL | {"dropout_rate": 0.1}, {"dropout_rng": ("uint32", (2,))}, 1),
    "alibi-sinks": (
        CAUSAL,
        {"alibi_slopes": ("float32", (2,)), "sinks": ("float32", (2,))},
        1,
    ),
}
# Equal head dims are what people run: no mask and the one of most registers, and the other dtype.
THOROUGH = [
    ("full", "bfloat16"),
    ("causal-lengths", "bfloat16"),
    ("causal-lengths", "float16"),
    ("causal-lengths", "bfloat16", True),  # deterministic: dq has a kernel of its own
]
TERMS = [(name, "bfloat16") for name in [*VARIANTS][2:]]
LIGHT_TERMS = ("window", "segments", "alibi-sinks")  # few registers: looked at for 128 only
HEAVY_TERMS = ("bias", "soft-cap", "dropout")  # looked at where registers are no problem, too
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


def gradient(head_dim, head_dim_v, variant, dtype, deterministic=False):
    """A function whose kernels are the forward and the backward of one call, and its arguments."""
    static, extra, q_per_kv = VARIANTS[variant]
    batch, length, kv_heads = 2 if q_per_kv == 1 else MANY, 1024, 2
    shape = lambda heads, width: jax.ShapeDtypeStruct((batch, length, heads, width), dtype)
    arrays = {
        "query": shape(kv_heads * q_per_kv, head_dim),
        "key": shape(kv_heads, head_dim),
        "value": shape(kv_heads, head_dim_v),
    }
    arrays |= {name: jax.ShapeDtypeStruct(s, dt) for name, (dt, s) in extra.items()}
    wrt = ("query", "key", "value", "bias", "sinks")

    def run(arrays, dout):
        def attend(inexact):
            return pallas_flash.dot_product_attention(
                **(arrays | inexact),
                **static,
                implementation="mosaic_gpu",
                deterministic_backward=deterministic,
            )

        with dispatch.assume_device("gpu", (9, 0)):
            inexact = {name: arrays[name] for name in wrt if name in arrays}
            out, vjp = jax.vjp(attend, inexact)
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


def _cases(head_dim):
    if head_dim == 192:  # the test of fewest cases
        yield 96, 96, "causal-lengths", "bfloat16"
        yield 96, 80, "causal-lengths", "float16", True
        yield 96, 128, "full", "bfloat16"
    for head_dim_v in tuned.HEAD_DIMS:
        thorough = [v for v in THOROUGH if head_dim <= 128 or v[1] == "bfloat16"]
        for variant in thorough if head_dim == head_dim_v else BRIEF:
            yield head_dim, head_dim_v, *variant


@pytest.mark.parametrize("head_dim", tuned.HEAD_DIMS)
def test_compiles_clean(head_dim):
    _check([*_cases(head_dim)])


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_terms_compile_clean(head_dim):
    names = {
        64: [name for name, _ in TERMS if name not in LIGHT_TERMS],
        128: [name for name, _ in TERMS],
        256: HEAVY_TERMS,
    }[head_dim]
    _check([(head_dim, head_dim, name, "bfloat16") for name in names])


# Of a decoding step: static arguments, arrays by name: (dtype, shape), queries. B 2, S 4096, K 2.
LENGTHS = {"key_value_seq_lengths": ("int32", (2,))}
BOTTOM_RIGHT = CAUSAL | {"causal_alignment": "bottom_right"}
FEW_QUERIES = {
    "full": ({}, {}, 1),
    "lengths": ({}, LENGTHS, 1),
    "written-out": (BOTTOM_RIGHT, LENGTHS, 4),
    "written-out-soft-cap": (BOTTOM_RIGHT, LENGTHS | {"logits_soft_cap": ("float32", ())}, 4),
}


def few_queries(head_dim, head_dim_v, variant):
    """A decoding step of 4 query heads a kv head, and its arguments."""
    static, extra, q_len = FEW_QUERIES[variant]
    shape = lambda *size: jax.ShapeDtypeStruct((2, *size), "bfloat16")
    arrays = {
        "query": shape(q_len, 8, head_dim),
        "key": shape(4096, 2, head_dim),
        "value": shape(4096, 2, head_dim_v),
    }
    arrays |= {name: jax.ShapeDtypeStruct(s, dt) for name, (dt, s) in extra.items()}

    def run(arrays):
        with dispatch.assume_device("gpu", (9, 0)):
            return pallas_flash.dot_product_attention(
                **arrays, **static, implementation="mosaic_gpu"
            )

    return run, (arrays,)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_few_queries_compile_clean_and_blocks_fit(head_dim):
    """A consumer alone moves no registers: what the launch gives it decides how many blocks run."""
    _require_wheels()
    cases = [(head_dim, head_dim, variant) for variant in FEW_QUERIES]
    cases += [(192, 128, "written-out-soft-cap")] if head_dim == 128 else []
    found = aot.kernels_of("tests.test_aot:few_queries", cases)
    for case, (kernel,) in zip(cases, found, strict=True):
        print(case, kernel)
        config = tuned.few_queries(
            *case[:2], is_masked=case[2] != "full", has_soft_cap="soft-cap" in case[2]
        )
        assert not kernel.notes and not kernel.spill_bytes, f"{case} {kernel}"
        threads = 128 * (config.compute_wgs + 1) * config.blocks_per_sm
        assert kernel.registers * threads <= 65_536, f"{case} {kernel}: blocks would not share"


def _check(cases):
    _require_wheels()
    for case, kernels in zip(cases, aot.kernels_of("tests.test_aot:gradient", cases), strict=True):
        print(case, *kernels, sep="\n  ")
        names = [kernel.name for kernel in kernels]
        ends = [name for name in names if name.endswith(("statistics", "zeros", "finish_dq"))]
        backward = [name for name in names if "backward" in name and name not in ends]
        # Kernels that calls share are compiled once: a deterministic one shares its forward.
        assert len(backward) == 1 + (True in case), "backward and, if asked for, dq"
        assert len(names) - len(backward) - len(ends) == 1 or True in case, "forward"
        for kernel in kernels:
            assert not kernel.notes, f"{case} {kernel.name}: tensor core work is serialized"
            limit = 0 if kernel.name in ends else _limit(kernel.name, *case[:3])
            assert kernel.spill_bytes <= limit, f"{case} {kernel}, recorded: {limit}"


def _limit(kernel_name, head_dim, head_dim_v, variant):
    if "dq" in kernel_name:
        row = tuned.tuned_dq(head_dim, head_dim_v)
    else:
        sizes = dict(head_dim=head_dim, head_dim_v=head_dim_v, is_masked=variant != "full")
        if "backward" in kernel_name:
            row = tuned.tuned_backward(**sizes)
        else:
            row = tuned.tuned_forward(**sizes, bias_bytes=2 if variant == "bias" else None)
    return row.term_spill_bytes if (variant, "bfloat16") in TERMS else row.spill_bytes
