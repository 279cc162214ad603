"""The chunked XLA implementation against the dense oracle: values, every gradient, memory.

Most cases cut a small problem into blocks of 8, so that carries, padding and skipped blocks are
all met; XLA's optimiser is off for them, which halves the time to compile.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_flash import masks, reference
from pallas_flash.kernels import xla
from pallas_flash.masks import And, Causal, Dense, Lengths, Segments, Window
from pallas_flash.problem import DIFFERENTIABLE, Operands, Problem
from tests.tolerance import assert_close

BLOCKS = dict(block_q=8, block_kv=8)
FAST_COMPILE = {"xla_backend_optimization_level": 0}


def problem_of(operands: Operands, **static) -> Problem:
    (b, t, n, h), (s, k) = operands.query.shape, operands.key.shape[1:3]
    static = dict(scale=None if operands.scale is not None else h**-0.5) | static
    if operands.bias is not None:
        static |= dict(bias_shape=operands.bias.shape, bias_dtype=operands.bias.dtype.name)
    h_v, dtype = operands.value.shape[-1], operands.query.dtype.name
    static |= dict(has_sinks=operands.sinks is not None)
    return Problem(b, t, s, n, k, h, h_v, dtype, **static)


def normal(*shape, seed=0, dtype="float32", scale=1.0):
    draw = np.random.default_rng([seed, *shape]).normal(size=shape) * scale
    return jnp.asarray(draw, dtype)


def qkv(b=2, t=13, s=21, n=2, k=2, h=8, h_v=8, dtype="float32", scale=1.0, **more) -> Operands:
    q = normal(b, t, n, h, seed=1, dtype=dtype, scale=scale)
    key = normal(b, s, k, h, seed=2, dtype=dtype, scale=scale)
    return Operands(q, key, normal(b, s, k, h_v, seed=3, dtype=dtype), **more)


def cotangents(operands, problem):
    b, t, n, _ = operands.query.shape
    wide = jnp.promote_types(problem.dtype, jnp.float32)
    dout = normal(b, t, n, problem.head_dim_v, seed=4, dtype=problem.dtype)
    return dout, normal(b, n, t, seed=5, dtype=wide)


def gradients(operands, problem, dout, dlse, blocks):
    """out, lse and the gradient of every differentiable operand present."""
    return _gradients(problem, tuple(blocks.items()), operands, dout, dlse)


@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options=FAST_COMPILE)
def _gradients(problem, blocks, operands, dout, dlse):
    names = [n for n in DIFFERENTIABLE if getattr(operands, n) is not None]
    f = lambda chosen: xla.attention(problem, operands._replace(**chosen), **dict(blocks))
    (out, lse), vjp = jax.vjp(f, {n: getattr(operands, n) for n in names})
    return out, lse, vjp((dout, dlse))[0]


def check(operands, problem, blocks=BLOCKS, plain=False):
    """Asserts that values and gradients match the oracle; returns them."""
    dout, dlse = cotangents(operands, problem)
    out, lse, grads = gradients(operands, problem, dout, dlse, blocks)
    want_out, want_lse, want = reference.oracle(operands, problem, dout, dlse)
    plains = functools.cache(lambda: reference.plain_gradients(operands, problem, dout, dlse))
    of_plain = lambda pick: (lambda: pick(*plains())) if plain else None
    dtype = problem.dtype
    assert out.dtype == dtype
    assert_close(out, want_out, of_plain(lambda out, lse, grads: out), dtype, "out")
    assert_close(lse, want_lse, of_plain(lambda out, lse, grads: lse), lse.dtype, "lse")
    assert set(grads) == set(want)
    for name, grad in grads.items():
        assert grad.dtype == getattr(operands, name).dtype, name
        plain_grad = of_plain(lambda out, lse, grads, name=name: grads[name])
        assert_close(grad, want[name], plain_grad, dtype, f"d{name}", floor=0.1)
    return out, lse, grads


def i32(*values):
    return jnp.array(values, jnp.int32)


SLOPES = jnp.float32([[0.5, 0.25, 0.0, -0.1], [0.1, 1.0, 0.3, 0.0]])
CASES = {
    "plain-ragged": (qkv(), {}),
    "one-query": (qkv(t=1, s=30), {}),
    "one-key": (qkv(t=30, s=1), {}),
    "causal-more-keys": (qkv(), dict(mask=Causal())),
    "causal-bottom-right-fewer-keys": (qkv(t=21, s=13), dict(mask=Causal(-8))),
    "window": (qkv(t=20, s=20, window=i32(5, 2)), dict(mask=Window(True, True))),
    "window-left-causal": (
        qkv(t=20, s=20, window=i32(9, 0)),
        dict(mask=Causal() & Window(True, False)),
    ),
    "lengths-of-zero": (
        qkv(b=3, query_lengths=i32(13, 5, 0), kv_lengths=i32(0, 9, 21)),
        dict(mask=Lengths(True, True)),
    ),
    "segments-with-gaps": (
        qkv(
            t=20,
            s=20,
            query_segments=jnp.asarray(np.arange(40).reshape(2, 20) // 7 * 5, jnp.int32),
            kv_segments=jnp.asarray(np.arange(40).reshape(2, 20) // 9 * 5, jnp.int32),
        ),
        dict(mask=Causal() & Segments()),
    ),
    "gqa-wide-values": (qkv(n=6, k=2, h_v=12), dict(mask=Causal())),
    "mqa": (qkv(n=5, k=1), {}),
    "cap-scale-sinks-traced": (
        qkv(
            n=4,
            scale=2.0,
            bias=normal(1, 4, 13, 21),
            sinks=normal(4),
            soft_cap=jnp.float32(3.0),
        )._replace(scale=jnp.float32([0.7, 0.0])),
        dict(mask=Causal(), soft_cap="operand", scale=None),
    ),
    "alibi-causal-more-keys": (qkv(alibi_slopes=SLOPES[:, :2]), dict(mask=Causal(), alibi_shift=0)),
    "alibi-gqa-cap-bias-lengths": (
        qkv(
            n=4,
            bias=normal(1, 4, 13, 21),
            kv_lengths=i32(0, 9),
            alibi_slopes=SLOPES[:1],
        ),
        dict(mask=Lengths(False, True), soft_cap=3.0, alibi_shift=8),
    ),
    "alibi-of-each-sequence-fewer-keys": (
        qkv(t=21, s=13, n=4, alibi_slopes=SLOPES, sinks=normal(4)),
        dict(mask=Causal(-8), alibi_shift=-8),
    ),
    "sinks-without-keys": (
        qkv(sinks=normal(2), kv_lengths=i32(0, 4)),
        dict(mask=Lengths(False, True)),
    ),
    "dropout": (
        qkv(n=4, dropout_key=jnp.uint32([1, 2])),
        dict(mask=Causal(), dropout_rate=0.3),
    ),
    "dropout-broadcast": (
        qkv(dropout_key=jnp.uint32([1, 2])),
        dict(dropout_rate=0.5, broadcast_dropout=True),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_matches_oracle(name):
    operands, static = CASES[name]
    check(operands, problem_of(operands, **static))


@pytest.mark.parametrize(
    ("kind", "blocks"),
    [("causal", (8, 16)), ("window", (16, 8)), ("window", (5, 32)), ("causal", (40, 8))],
)
def test_unequal_blocks(kind, blocks):
    window = i32(13, 0) if kind == "window" else None
    mask = {"causal": Causal(), "window": Window(True, True)}[kind]
    operands = qkv(b=1, t=40, s=37, n=1, k=1, window=window)
    block_q, block_kv = blocks
    check(operands, problem_of(operands, mask=mask), dict(block_q=block_q, block_kv=block_kv))


@pytest.mark.parametrize(
    ("given", "mask"),
    [(("query",), Causal()), (("kv",), And()), (("kv",), Causal()), (("query", "kv"), Causal())],
)
def test_lengths_around_the_block_edges(given, mask):
    lengths = i32(1, 7, 8, 9, 20)
    said = {f"{name}_lengths": lengths if name == "kv" else lengths[::-1] for name in given}
    operands = qkv(b=5, t=20, s=20, n=1, k=1, **said)
    mask = mask & Lengths("query" in given, "kv" in given)
    out, _, grads = check(operands, problem_of(operands, mask=mask))
    if "query" in given:
        behind = np.arange(20) >= np.asarray(lengths)[::-1, None]
        assert not np.asarray(out)[behind].any() and not np.asarray(grads["query"])[behind].any()


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_gradients_are_sums_over_the_group(kv_heads):
    operands = qkv(n=4, k=kv_heads)
    repeat = lambda x: jnp.repeat(x, 4 // kv_heads, axis=2)
    repeated = operands._replace(key=repeat(operands.key), value=repeat(operands.value))
    shared = cotangents(operands, problem_of(operands))
    _, _, got = gradients(operands, problem_of(operands, mask=Causal()), *shared, BLOCKS)
    _, _, one = gradients(repeated, problem_of(repeated, mask=Causal()), *shared, BLOCKS)
    for name in ("key", "value"):
        summed = one[name].reshape(*got[name].shape[:2], kv_heads, -1, 8).sum(3)
        np.testing.assert_allclose(got[name], summed, atol=1e-5)


@pytest.mark.parametrize(("n", "k", "t"), [(40, 1, 1), (40, 1, 33), (24, 2, 1)])
def test_more_query_heads_than_rows_of_a_block(n, k, t):
    operands = qkv(b=3, t=t, s=50, n=n, k=k, kv_lengths=i32(0, 1, 50))
    check(operands, problem_of(operands, mask=Lengths(False, True)), dict(block_q=8, block_kv=32))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_low_precision_is_as_good_as_plain_attention(dtype):
    operands = qkv(t=60, s=60, h=16, dtype=dtype, bias=normal(2, 1, 60, 60))  # a float32 bias
    operands = operands._replace(query=operands.query.at[..., 0].multiply(20))
    check(operands, problem_of(operands, mask=Causal()), dict(block_q=32, block_kv=32), plain=True)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_low_precision_gradients_are_rounded_once_not_block_by_block(dtype):
    operands = qkv(b=1, t=64, s=64, n=4, h=16, h_v=16, dtype=dtype)
    problem = problem_of(operands)
    dout, dlse = cotangents(operands, problem)
    grads = gradients(operands, problem, dout, dlse, BLOCKS)[2]
    for name, want in reference.oracle(operands, problem, dout, dlse)[2].items():
        error, rounding = (
            np.linalg.norm(np.asarray(x, np.float64) - want)
            for x in (grads[name], jnp.asarray(want, dtype))
        )
        assert error < 1.1 * rounding, f"d{name}: {error:.3g}, one rounding is {rounding:.3g}"


def test_reference_says_the_same_as_the_oracle():
    alibi = "alibi-gqa-cap-bias-lengths", "alibi-of-each-sequence-fewer-keys"
    for name in ("cap-scale-sinks-traced", "lengths-of-zero", "dropout", *alibi):
        operands, static = CASES[name]
        problem = problem_of(operands, **static)
        dout, dlse = cotangents(operands, problem)
        want_out, want_lse, want = reference.oracle(operands, problem, dout, dlse)
        out, lse, grads = reference.plain_gradients(operands, problem, dout, dlse)
        assert_close(out, want_out, None, "float32", "out")
        assert_close(lse, want_lse, None, "float32", "lse")
        for n, grad in grads.items():
            assert_close(grad, want[n], None, "float32", n, floor=0.1)


def _broadcastable_shapes(b, n, t, s):
    return list(itertools.product((1, b), (1, n), (1, t), (1, s)))


def _in_one_block_and_in_many(arrays):
    """(array, blocks): all in one block, and where blocks cut differently also in many."""
    cut = [x for x in arrays if x.shape[0] == 1 and x.shape[1] > 1]
    return [(x, {}) for x in arrays] + [(x, BLOCKS) for x in cut]


def test_every_mask_shape():
    operands = qkv(n=4, t=10, s=14)
    shapes = _broadcastable_shapes(2, 4, 10, 14)
    problem = problem_of(operands, mask=Dense())
    draw = np.random.default_rng(0)

    @functools.partial(jax.jit, compiler_options=FAST_COMPILE)
    def run(arrays):
        calls = _in_one_block_and_in_many(arrays)
        return [
            (m, *xla.attention(problem, operands._replace(mask=m), **blocks)) for m, blocks in calls
        ]

    for mask, out, lse in run([jnp.asarray(draw.random(shape) < 0.7) for shape in shapes]):
        want, want_lse = reference.numpy_attention(operands._replace(mask=mask), problem)
        assert_close(out, want, None, "float32", f"out with mask {mask.shape}")
        assert_close(lse, want_lse, None, "float32", f"lse with mask {mask.shape}")


def test_every_bias_shape_and_its_gradient():
    operands = qkv(n=4, k=2, t=10, s=14)
    dout = normal(2, 10, 4, 8, seed=8)

    def grad_of(bias, blocks):
        filled = operands._replace(bias=bias)
        problem = problem_of(filled, mask=Causal())
        loss = lambda bias: jnp.vdot(
            xla.attention(problem, filled._replace(bias=bias), **blocks)[0], dout
        )
        return jax.grad(loss)(bias)

    @functools.partial(jax.jit, compiler_options=FAST_COMPILE)
    def run(biases):
        return [(b, grad_of(b, blocks)) for b, blocks in _in_one_block_and_in_many(biases)]

    shapes = _broadcastable_shapes(2, 4, 10, 14)
    for bias, grad in run([normal(*shape, seed=7) for shape in shapes]):
        filled = operands._replace(bias=bias)
        want = reference.oracle(filled, problem_of(filled, mask=Causal()), dout)[2]["bias"]
        assert_close(grad, want, None, "float32", f"gradient of {bias.shape}", floor=1.0)


def test_rows_without_a_key_are_zero_in_every_way():
    band = np.tril(np.ones((8, 8), bool)) & ~np.tril(np.ones((8, 8), bool), -2)
    keys = np.arange(8) < np.array([8, 6])[:, None]
    mask = jnp.asarray((band & keys[:, None, :])[:, None])
    operands = qkv(t=8, s=8, n=1, k=1, h=16, mask=mask)
    out, lse, grads = check(operands, problem_of(operands, mask=Dense()), {})
    assert not mask[1, 0, 7].any()
    assert (out[1, 7] == 0).all() and lse[1, 0, 7] == -np.inf
    assert (grads["query"][1, 7] == 0).all() and (grads["key"][1, 6:] == 0).all()


def test_a_band_said_in_three_ways_behind_hidden_blocks():
    ahead = np.arange(36)[None, :] - np.arange(36)[:, None]
    visible = (ahead <= 0) & (ahead > -4)
    plain = qkv(b=1, t=36, s=36, n=1, k=1)
    said = {
        "bias": (plain._replace(bias=jnp.where(visible, 0.0, -np.inf)[None, None]), And()),
        "mask": (plain._replace(mask=jnp.asarray(visible)[None, None]), Dense()),
        "window": (plain._replace(window=i32(3, 0)), Causal() & Window(True, True)),
    }
    results = {n: check(ops, problem_of(ops, mask=m)) for n, (ops, m) in said.items()}
    for name in ("mask", "window"):
        np.testing.assert_allclose(results[name][0], results["bias"][0], atol=1e-6)


def test_a_bias_of_minus_infinity_hides_under_a_soft_cap():
    bias = jnp.where(np.random.default_rng(0).random((1, 1, 13, 21)) < 0.5, -jnp.inf, 1.0)
    operands = qkv(bias=bias)
    _, _, grads = check(operands, problem_of(operands, soft_cap=2.0))
    assert (grads["bias"][jnp.isneginf(bias)] == 0).all()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_saturated_bias_is_a_low_logit_not_a_hidden_one(dtype):
    lowest = float(jnp.finfo(dtype).min)
    bias = jnp.where(np.arange(21) < np.arange(13)[:, None], 0.0, lowest)  # row 0: only lowest
    operands = qkv(dtype=dtype, bias=jnp.asarray(bias, dtype)[None, None])
    problem = problem_of(operands)
    _, lse, _ = check(operands, problem, plain=dtype == "float16")
    assert np.isfinite(lse).all()
    zeros = jax.tree.map(jnp.zeros_like, cotangents(operands, problem))
    assert all((g == 0).all() for g in gradients(operands, problem, *zeros, BLOCKS)[2].values())


def test_large_logits():
    operands = qkv(b=1, t=20, s=20, h=16, bias=jnp.zeros((1, 1, 20, 20)))
    problem = problem_of(operands)
    thousand = jnp.full(operands.query.shape, 1000.0)
    same = operands._replace(query=thousand, key=thousand)
    out, _, grads = gradients(same, problem, *cotangents(same, problem), BLOCKS)
    np.testing.assert_allclose(out, np.broadcast_to(same.value.mean(1)[:, None], out.shape), 1e-4)
    assert all(np.isfinite(g).all() for g in grads.values())
    check(operands._replace(query=operands.query * 900.0), problem, plain=True)
    check(operands._replace(bias=normal(1, 1, 20, 20, scale=1e4)), problem, plain=True)


def test_garbage_behind_masks_and_lengths_changes_nothing():
    clean = qkv(
        t=20,
        s=20,
        n=4,
        query_lengths=i32(20, 11),
        kv_lengths=i32(7, 20),
        soft_cap=jnp.float32(3.0),
        mask=jnp.asarray(np.arange(20) % 3 != 1)[None, None, None],
    )._replace(scale=jnp.float32([0.7]))
    problem = problem_of(clean, mask=Dense() & Lengths(True, True), soft_cap="operand")
    behind_q = np.arange(20)[None, :, None, None] >= np.array([20, 11])[:, None, None, None]
    behind_kv = np.arange(20)[None, :, None, None] >= np.array([7, 20])[:, None, None, None]
    masked = ~np.asarray(clean.mask).reshape(1, 20, 1, 1)
    huge = float(jnp.finfo(jnp.float32).max)

    def spoiled(x, behind, garbage):
        return jnp.where(behind, garbage, jnp.where(masked, -huge, x) if garbage == np.inf else x)

    dirty = clean._replace(
        query=spoiled(clean.query, behind_q, np.nan),
        key=spoiled(clean.key, behind_kv, np.inf),
        value=spoiled(clean.value, behind_kv, np.inf),
    )
    shared = cotangents(clean, problem)
    want, got = (gradients(ops, problem, *shared, BLOCKS) for ops in (clean, dirty))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    hidden = np.broadcast_to(behind_kv | masked, clean.key.shape)
    assert (got[2]["key"][hidden] == 0).all() and (got[2]["value"][hidden] == 0).all()
    assert (got[0][np.broadcast_to(behind_q, got[0].shape)] == 0).all()


def test_derivatives_of_higher_order_match_the_dense_reference():
    with jax.enable_x64(True):
        small = qkv(b=1, t=3, s=5, n=2, k=1, h=2, h_v=2, dtype="float64", sinks=jnp.ones(2))
        small = small._replace(soft_cap=jnp.float64(2.0), alibi_slopes=jnp.float64([[0.5, 0.2]]))
        problem = problem_of(small, mask=Causal(), soft_cap="operand", alibi_shift=0)
        weight = normal(1, 3, 2, 2, seed=9, dtype="float64")

        def loss_of(attend):
            def loss(q, k, v):
                out, lse = attend(small._replace(query=q, key=k, value=v))
                return jnp.vdot(out, weight) + jnp.sin(lse).sum()

            return loss

        ours = loss_of(lambda ops: xla.attention(problem, ops, block_q=2, block_kv=2))
        dense = loss_of(lambda ops: reference.attention_reference(ops, problem))
        point = (small.query, small.key, small.value)

        def derivatives(loss):
            grad = jax.grad(loss, (0, 1, 2))
            return {
                "jvp": jax.jvp(loss, point, point),
                "hessian": jax.hessian(loss, (0, 1, 2))(*point),
                "grad of grad": jax.grad(lambda *a: sum((g**3).sum() for g in grad(*a)), (0, 1, 2))(
                    *point
                ),
            }

        got, want = (
            jax.jit(functools.partial(derivatives, f), compiler_options=FAST_COMPILE)()
            for f in (ours, dense)
        )
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-11), got, want)


def test_float64_and_unchanged_results_under_x64():
    operands, static = CASES["cap-scale-sinks-traced"]
    operands = operands._replace(alibi_slopes=SLOPES)
    problem = problem_of(operands, **static, alibi_shift=8)
    shared = cotangents(operands, problem)
    plain = gradients(operands, problem, *shared, BLOCKS)
    with jax.enable_x64(True):
        under_x64 = gradients(operands, problem, *shared, BLOCKS)
        jax.tree.map(np.testing.assert_array_equal, under_x64, plain)
        assert [x.dtype for x in jax.tree.leaves(under_x64)] == [
            x.dtype for x in jax.tree.leaves(plain)
        ]
        wide = jax.tree.map(lambda x: x.astype("float64"), operands)
        check(wide, dataclasses.replace(problem, dtype="float64", bias_dtype="float64"))


def test_dropout_pattern_does_not_depend_on_the_blocks():
    operands, static = CASES["dropout"]
    problem = problem_of(operands, **static)
    whole = xla.attention(problem, operands)[0]
    cut = xla.attention(problem, operands, block_q=5, block_kv=16)[0]
    np.testing.assert_allclose(cut, whole, atol=1e-6)


@pytest.mark.parametrize("sizes", [dict(b=0), dict(t=0), dict(s=0), dict(b=0, s=0)])
def test_empty_inputs(sizes):
    operands = qkv(**sizes, sinks=normal(2))
    problem = problem_of(operands)
    out, lse, grads = gradients(operands, problem, *cotangents(operands, problem), {})
    assert out.shape == operands.query.shape and not out.any()
    want = np.broadcast_to(np.asarray(operands.sinks)[None, :, None], lse.shape)
    np.testing.assert_array_equal(lse, want)
    assert all(np.isfinite(g).all() for g in grads.values())


def test_new_values_compile_nothing():
    traces = []

    @jax.jit
    def run(operands):
        traces.append(1)
        return xla.attention(problem, operands, **BLOCKS)

    make = lambda w, n: qkv(t=20, s=20, window=i32(w, 0), kv_lengths=i32(n, 20))
    problem = problem_of(make(1, 1), mask=Window(True, True) & Lengths(False, True))
    outs = [run(make(w, n))[0] for w, n in ((1, 20), (5, 20), (5, 3))]
    assert len(traces) == 1
    assert (outs[0] != outs[1]).any() and (outs[1] != outs[2]).any()


def test_clean_under_the_debug_flags():
    operands, static = CASES["causal-more-keys"]
    problem = problem_of(operands, **static)
    loss = lambda ops: sum(x.sum() for x in xla.attention(problem, ops, **BLOCKS))
    with jax.debug_nans(True), jax.debug_infs(True):
        jax.block_until_ready(jax.grad(loss)(operands))
    empty, static = CASES["lengths-of-zero"]
    problem = problem_of(empty, **static)
    attend = lambda q: xla.attention(problem, empty._replace(query=q), **BLOCKS)[0]
    with jax.debug_nans(True):
        jax.block_until_ready(jax.vjp(attend, empty.query)[1](empty.query))


def test_blocks_nobody_sees_are_behind_a_branch():
    operands = qkv()
    lowered = lambda mask: str(
        jax.make_jaxpr(lambda ops: xla.attention(problem_of(ops, mask=mask), ops, **BLOCKS))(
            operands
        )
    )
    assert "cond[" in lowered(Causal()) and "cond[" not in lowered(And())


def _temporary_mib(f, *arguments) -> float:
    return jax.jit(f).lower(*arguments).compile().memory_analysis().temp_size_in_bytes / 2**20


def test_memory_is_linear_in_length():
    long = jax.eval_shape(lambda: qkv(b=1, t=8192, s=8192, n=1, k=1, h=64, h_v=64))
    problem = problem_of(long, mask=Causal())
    loss = lambda q, k, v: (xla.attention(problem, Operands(q, k, v))[0] ** 2).sum()
    assert _temporary_mib(jax.grad(loss, (0, 1, 2)), *long[:3]) < 24  # scores would be 256


@pytest.mark.parametrize("shape", [(1, 1, 1024, 1024), (4, 1, 1, 1024)])
def test_a_small_bias_needs_no_large_gradient(shape):
    long = jax.eval_shape(lambda: qkv(b=4, t=1024, s=1024, n=4, k=4, h=16, h_v=16))
    bias = jax.ShapeDtypeStruct(shape, "float32")
    problem = problem_of(long._replace(bias=bias))

    def loss(bias, q, k, v):
        return (xla.attention(problem, Operands(q, k, v, bias=bias))[0] ** 2).sum()

    assert _temporary_mib(jax.grad(loss), bias, *long[:3]) < 40  # (B, N, T, S) is 64


@pytest.mark.parametrize("kind", ["Auto", "Explicit", "shard_map"])
def test_a_mesh_shards_it_without_gathering(kind):
    if len(jax.devices()) < 4:
        pytest.skip("needs four devices")
    axis_type = getattr(AxisType, kind, AxisType.Explicit)
    mesh = jax.make_mesh((2, 2), ("rows", "heads"), axis_types=(axis_type,) * 2)
    spec = PartitionSpec("rows", None, "heads")
    operands = qkv(t=20, s=20, n=4, k=2)
    problem = problem_of(operands, mask=Causal())
    local = dataclasses.replace(problem, batch=1, num_q_heads=2, num_kv_heads=1)

    def attend(q, k, v):
        if kind != "shard_map":
            return xla.attention(problem, Operands(q, k, v), **BLOCKS)[0]
        each = lambda q, k, v: xla.attention(local, Operands(q, k, v), **BLOCKS)[0]
        return jax.shard_map(each, in_specs=spec, out_specs=spec)(q, k, v)

    def run(q, k, v, dout):
        out, vjp = jax.vjp(attend, q, k, v)
        return out, *vjp(dout)

    dout = normal(*operands.query.shape, seed=4)
    want_out, _, want = reference.oracle(operands, problem, dout)
    arrays = [jax.device_put(x, NamedSharding(mesh, spec)) for x in (*operands[:3], dout)]
    with jax.set_mesh(mesh):
        compiled = jax.jit(run, compiler_options=FAST_COMPILE).lower(*arrays).compile()
        results = compiled(*arrays)
    assert "all-gather" not in str(compiled.as_text())
    for got, right in zip(results, (want_out, *list(want.values())[:3]), strict=True):
        assert got.sharding.is_equivalent_to(NamedSharding(mesh, spec), 4)
        assert_close(got, right, None, "float32", kind)


def test_the_residuals_are_the_operands():
    operands = qkv(t=64, s=64)
    problem = problem_of(operands, mask=Causal())
    f = lambda q, k, v: xla.attention(problem, Operands(q, k, v), block_q=16, block_kv=16)
    vjp = jax.vjp(f, *operands[:3])[1]
    sizes = [x.size for x in jax.tree.leaves(vjp) if hasattr(x, "size")]
    assert max(sizes) <= operands.query.size and len(sizes) <= 4


def test_default_blocks_are_one_block_for_small_problems():
    assert xla.default_blocks(problem_of(qkv(b=4, t=256, s=256, n=4, k=4, h=32))) == (256, 256)
    assert xla.default_blocks(problem_of(qkv(b=1, t=513, s=100, n=1, k=1))) == (264, 100)
    wide = jax.eval_shape(lambda: qkv(b=64, t=2048, s=4096, n=16, k=16))
    assert xla.default_blocks(problem_of(wide)) == (128, 128)


def test_vmap_matches_a_loop():
    operands = qkv(t=20, s=20, kv_lengths=i32(7, 20))
    problem = problem_of(operands, mask=Lengths(False, True) & masks.Causal())
    lengths = jnp.stack([i32(7, 20), i32(0, 9)])
    f = jax.jit(
        lambda n: xla.attention(problem, operands._replace(kv_lengths=n), **BLOCKS),
        compiler_options=FAST_COMPILE,
    )
    together = jax.jit(jax.vmap(f.__wrapped__), compiler_options=FAST_COMPILE)(lengths)
    for i in range(2):
        one = f(lengths[i])
        jax.tree.map(
            lambda x, y, i=i: np.testing.assert_allclose(x[i], y, atol=1e-6), together, one
        )
