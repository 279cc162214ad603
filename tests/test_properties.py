"""Any composition of features, drawn by hypothesis, against the float64 oracle.

Hypothesis draws what is static, so that a failure shrinks to the fewest features; each example
runs with values of every kind that `random_problems` has.
"""

import functools

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_flash import dot_product_attention, reference
from pallas_flash.arguments import Arguments, normalize
from tests.cases import Case
from tests.random_problems import (
    HAS_ALIBI,
    KINDS,
    arguments,
    dense_arguments,
    draw_values,
    seen_keys,
)
from tests.tolerance import assert_close

DIFFERENTIABLE = ("query", "key", "value", "bias", "scale", "logits_soft_cap", "sinks")
DIFFERENTIABLE += ("alibi_slopes",) * HAS_ALIBI
BATCH = 2

LENGTHS = ((1, 9), (9, 1), (13, 24), (24, 13), (24, 24))
HEADS = ((1, 1), (2, 2), (4, 2), (3, 1))
DIMS = ((8, 8), (4, 12))
WINDOWS = ((), ("left",), ("right",), ("left", "right"))
STATIC = {
    "is_causal": (False, True),
    "causal_alignment": ("top_left", "bottom_right"),
    "scale": (None, 0.5, -0.3),
    "logits_soft_cap": (None, 2.0),
}


@st.composite
def cases(draw) -> Case:
    """The first choice of everything is the plainest: examples shrink towards it."""
    pick = lambda options: draw(st.sampled_from(options))
    present = lambda: draw(st.booleans())
    (t, s), (n, k), dims = pick(LENGTHS), pick(HEADS), pick(DIMS)
    any_shape = lambda: tuple(pick((1, size)) for size in (BATCH, n, t, s))
    static = {name: pick(options) for name, options in STATIC.items()}
    arrays = {f"window_{side}": ("int32", ()) for side in pick(WINDOWS)}
    for side in ("query", "key_value"):
        if present():
            arrays[f"{side}_seq_lengths"] = ("int32", (BATCH,))
    if present():
        arrays["query_segment_ids"] = ("int32", (BATCH, t))
        arrays["key_value_segment_ids"] = ("int32", (BATCH, s))
    if present():
        arrays["mask"] = ("bool", any_shape())
    if present():
        arrays["bias"] = ("float32", any_shape())
    for name in ("sinks", "alibi_slopes")[: 1 + HAS_ALIBI]:
        if present():
            arrays[name] = ("float32", (n,))
    if static["scale"] is None and present():
        arrays["scale"] = ("float32", ())
    if present():
        arrays["dropout_rng"] = ("uint32", (2,))
        static |= {"dropout_rate": 0.3, "broadcast_dropout": present()}
    return Case("random", BATCH, t, s, (n, k), dims, "float32", static, arrays)


def compiled(case: Case):
    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def run(arrays, dout, dlse):
        def call(wrt):
            given = arguments(case, arrays | wrt)
            return dot_product_attention(**given, return_residual=True, implementation="xla")

        (out, lse), vjp = jax.vjp(call, {n: arrays[n] for n in DIFFERENTIABLE if n in arrays})
        return out, lse, vjp((dout, dlse))[0]

    return run


@settings(max_examples=10, deadline=None, derandomize=True)
@given(cases())
def test_any_composition_matches_the_oracle(case):
    run = compiled(case)
    for number in range(len(KINDS)):
        check(case, run, draw_values(case, 0, number))


def check(case: Case, run, draw) -> None:
    out, lse, grads = jax.tree.map(np.asarray, run(draw.garbage, draw.dout, draw.dlse))
    problem, operands = normalize(Arguments(**dense_arguments(case, draw)))
    dlse = np.swapaxes(draw.dlse, 1, 2)
    want_out, want_lse, want = reference.oracle(operands, problem, draw.dout, dlse)
    # Gradients are sums of terms that may cancel, each with a query or a key as a factor.
    floor = max(1.0, *(float(np.abs(draw.arrays[name]).max()) for name in ("query", "key")))
    close = functools.partial(assert_close, plain=None, dtype="float32")
    close(out, want_out, what="out", floor=1.0)
    close(lse, np.swapaxes(want_lse, 1, 2), what="lse", floor=1.0)
    assert set(grads) == set(want)
    for name, gradient in grads.items():
        close(gradient, want[name].reshape(gradient.shape), what=f"d{name}", floor=floor)
    rows = np.swapaxes(draw.visible.any(axis=-1), 1, 2)
    keys = seen_keys(case, draw.visible)
    for name, x, seen in (
        ("out", out, rows),
        ("dquery", grads["query"], rows),
        ("dkey", grads["key"], keys),
        ("dvalue", grads["value"], keys),
    ):
        assert not x[~seen].any(), f"{name}: not 0 where nothing is visible"
    if not problem.has_sinks:
        assert (np.isneginf(lse) == ~rows).all()
