"""Transformations: what composes with the call, on the XLA implementation and on the kernels.

The kernels run in interpret mode here and for real on a GPU; what interpret mode cannot do
(`jax.checkpoint`) is read off the program lowered for CUDA.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_flash import dispatch, dot_product_attention
from tests.test_attention import runnable

IMPLEMENTATIONS = ("xla", "mosaic_gpu")


def _dtype(implementation):
    return jnp.float32 if implementation == "xla" else jnp.bfloat16


def _qkv(implementation, shape=(1, 24, 2, 64), kv_heads=None, seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    kv_shape = (*shape[:-2], kv_heads or shape[-2], shape[-1])
    shapes = (shape, kv_shape, kv_shape)
    return [
        jax.random.normal(k, s, _dtype(implementation)) for k, s in zip(keys, shapes, strict=True)
    ]


def _dense(q, k, v, scale):
    """Dense causal attention: what derivatives of every order are compared with."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
    logits = scale * jnp.einsum("btnh,bsnh->bnts", q, k)
    seen = jnp.tril(jnp.ones(logits.shape[-2:], bool))
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(jnp.where(seen, logits, -jnp.inf)), v)


def _close(got, wanted, implementation, factor=1):
    rtol = factor * (2e-5 if implementation == "xla" else 3e-2)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, atol=rtol * np.abs(b).max())


def _wide(tree):
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


@pytest.mark.parametrize(
    ("in_axes", "implementation"),
    [((0, 0, 0), "xla"), ((0, None, None), "xla"), ((None, 0, 0), "xla"), ((2, 1, 1), "xla")]
    + [
        pytest.param((0, None, None), "mosaic_gpu", marks=pytest.mark.gpu),
        ((2, 1, 1), "mosaic_gpu"),
    ],
)
def test_vmap_of_value_and_gradient(implementation, in_axes):
    q, k, v = _qkv(implementation, (1, 24, 2, 64), kv_heads=1)
    seeds = range(2)
    arrays = []
    for position, (x, axis) in enumerate(zip((q, k, v), in_axes, strict=True)):
        variants = [x * (1 + 0.1 * i + 0.05 * position) for i in seeds]
        arrays.append(x if axis is None else jnp.stack(variants, axis).astype(x.dtype))

    def loss(attention, q, k, v):
        return (attention(q, k, v).astype(jnp.float32) ** 2).sum()

    ours = functools.partial(
        dot_product_attention, is_causal=True, scale=0.1, implementation=implementation
    )
    dense = functools.partial(_dense, scale=0.1)
    both = lambda f: jax.vmap(jax.value_and_grad(functools.partial(loss, f), (0, 1, 2)), in_axes)
    with runnable(implementation):
        got = both(ours)(*arrays)
    _close(got, jax.jit(both(dense))(*_wide(arrays)), implementation, factor=2)


@pytest.mark.parametrize(
    "implementation", ["xla", pytest.param("mosaic_gpu", marks=pytest.mark.gpu)]
)
def test_vmap_over_a_scale_and_lengths(implementation):
    q, k, v = _qkv(implementation, (2, 24, 1, 64))
    scales, lengths = jnp.array([-0.3, 0.0]), jnp.array([[24, 3], [0, 20]])

    def loss(scale, lengths):
        out = dot_product_attention(
            q, k, v, scale=scale, key_value_seq_lengths=lengths, implementation=implementation
        )
        return (out.astype(jnp.float32) ** 2).sum()

    with runnable(implementation):
        got = jax.vmap(jax.value_and_grad(loss))(scales, lengths)
        one = [jax.value_and_grad(loss)(s, n) for s, n in zip(scales, lengths, strict=True)]
    wanted = tuple(jnp.stack(x) for x in zip(*one, strict=True))
    _close(got, wanted, "xla")


@pytest.mark.parametrize(
    "mapped",
    [*(pytest.param(x, marks=pytest.mark.gpu) for x in ("queries", "terms")), "everything"],
)
def test_vmap_folds_every_term(mapped):
    """Terms that are not mapped serve all examples; a bias that is has a gradient of its own."""
    batch, size, heads, examples = 2, 24, 2, 2
    q, k, v = _qkv("mosaic_gpu", (batch, size, heads, 64))
    normal = lambda i, *shape: jax.random.normal(jax.random.key(i), shape)
    ids = jnp.sort(jax.random.randint(jax.random.key(3), (batch, size), 0, 3))
    terms = dict(
        bias=normal(1, 1, heads, size, size),
        mask=normal(2, 1, 1, size, size) < 1.0,
        query_segment_ids=ids,
        key_value_segment_ids=ids,
        local_window_size=jnp.array([9, 5]),
        sinks=normal(4, heads),
        alibi_slopes=jnp.abs(normal(5, heads)),
        key_value_seq_lengths=jnp.array([20, 24]),
    )
    stack = lambda x: jnp.stack([x, jnp.flip(x, -1)])
    if mapped != "terms":
        q = stack(q)
    if mapped != "queries":
        terms = jax.tree.map(stack, terms)
    inexact = {n: terms.pop(n) for n in ("bias", "sinks")}

    def loss(q, inexact, terms, implementation):
        window = tuple(terms["local_window_size"])
        out = dot_product_attention(
            q,
            k,
            v,
            **inexact,
            **(terms | dict(local_window_size=window)),
            implementation=implementation,
        )
        return (out.astype(jnp.float32) ** 2).sum()

    def run(implementation):
        axes = (None if mapped == "terms" else 0, *(None if mapped == "queries" else 0,) * 2)
        gradients = jax.value_and_grad(loss, (0, 1))
        f = jax.vmap(lambda *x: gradients(*x, implementation), axes, axis_size=examples)
        return (jax.jit(f) if implementation == "xla" else f)(q, inexact, terms)

    with runnable("mosaic_gpu"):
        got = run("mosaic_gpu")
    _close(got, run("xla"), "mosaic_gpu")


@pytest.mark.parametrize(
    "implementation", ["xla", pytest.param("mosaic_gpu", marks=pytest.mark.gpu)]
)
def test_jacobian(implementation):
    q, k, v = _qkv(implementation, (1, 3, 1, 4))
    f = functools.partial(
        dot_product_attention, is_causal=True, scale=0.5, implementation=implementation
    )
    with runnable(implementation):
        got = jax.jacrev(f, (0, 1, 2))(q, k, v)
    dense = jax.jacrev(functools.partial(_dense, scale=0.5), (0, 1, 2))
    wanted = jax.jit(dense)(*_wide((q, k, v)))
    _close(got, wanted, implementation)


def _third(x):
    return (x.astype(jnp.float32) ** 3).sum()


@pytest.mark.parametrize(
    ("derivative", "implementation"),
    [(d, i) for i in IMPLEMENTATIONS for d in ("hessian", "grad_of_grad")]
    + [("scale", "xla"), pytest.param("scale", "mosaic_gpu", marks=pytest.mark.gpu)]
    + [("hvp", "xla"), pytest.param("hvp", "mosaic_gpu", marks=pytest.mark.gpu)],  # slow without
)
def test_second_derivatives(implementation, derivative):
    q, k, v = _qkv(implementation, (1, 4, 1, 3))
    ours = functools.partial(dot_product_attention, is_causal=True, implementation=implementation)

    def second(attention, q, k, v):
        half = jnp.float32(0.5)

        def loss(q, k=k, v=v, scale=half):
            return _third(attention(q, k, v, scale=scale))

        if derivative == "hessian":
            return jax.jacrev(jax.jacrev(loss))(q)
        if derivative == "hvp":  # reverse over reverse: forward mode stops at the custom_vjp
            return jax.vjp(jax.grad(loss, (0, 1, 2)), q, k, v)[1]((q, k, v))
        if derivative == "scale":
            slope = jax.grad(lambda s, q: loss(q, scale=s))
            return jax.grad(slope)(half, q), jax.jacrev(slope, 1)(half, q)
        return jax.grad(lambda v: _third(jax.grad(lambda k: loss(q, k, v))(k)))(v)

    with runnable(implementation):
        got = second(ours, q, k, v)
    wanted = jax.jit(functools.partial(second, _dense))(*_wide((q, k, v)))
    _close(got, wanted, implementation, factor=2 if implementation == "xla" else 4)


def test_forward_mode_on_xla():
    q, k, v = _qkv("xla", (1, 5, 2, 4))
    f = functools.partial(dot_product_attention, is_causal=True, scale=0.5, implementation="xla")
    dense = functools.partial(_dense, scale=0.5)
    tangents_of_dense = jax.jit(functools.partial(jax.jvp, dense))
    _close(jax.jvp(f, (q, k, v), (k, v, q)), tangents_of_dense((q, k, v), (k, v, q)), "xla")
    tangent = jax.linearize(f, q, k, v)[1](v, q, k)
    _close(tangent, tangents_of_dense((q, k, v), (v, q, k))[1], "xla")
    _close(jax.jit(jax.jacfwd(f))(q, k, v), jax.jit(jax.jacfwd(dense))(q, k, v), "xla")
    hessian = lambda g: jax.jit(jax.hessian(lambda q: _third(g(q, k, v))))(q)
    _close(hessian(f), hessian(dense), "xla", factor=2)


def test_forward_mode_on_the_kernels_is_refused_by_jax():
    q, k, v = _qkv("mosaic_gpu")
    with runnable("mosaic_gpu"), pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(lambda q: dot_product_attention(q, k, v, implementation="mosaic_gpu"), (q,), (q,))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_scan_over_layers_that_share_integer_operands(implementation):
    q, k, v = _qkv(implementation, (2, 24, 1, 64))
    lengths = jnp.array([24, 7])

    @jax.jit
    def loss(q, k, v, lengths):
        def layer(x, scale):
            out = dot_product_attention(
                x, k, v, scale=scale, key_value_seq_lengths=lengths, implementation=implementation
            )
            return x + out, None

        return (jax.lax.scan(layer, q, jnp.array([0.1, 0.2]))[0].astype(jnp.float32) ** 2).sum()

    def unrolled(q, k, v):
        for scale in (0.1, 0.2):
            logits = scale * jnp.einsum("btnh,bsnh->bnts", q, k)
            seen = jnp.arange(24)[None, None, None] < lengths[:, None, None, None]
            weights = jax.nn.softmax(jnp.where(seen, logits, -jnp.inf))
            q = q + jnp.einsum("bnts,bsnh->btnh", weights, v)
        return (q**2).sum()

    with runnable(implementation):
        got = jax.grad(loss, (0, 1, 2))(q, k, v, lengths)
    wanted = jax.jit(jax.grad(unrolled, (0, 1, 2)))(*_wide((q, k, v)))
    _close(got, wanted, implementation, factor=2)


def test_every_integer_operand_is_an_argument_shared_by_layers_under_remat():
    q, k, v = _qkv("xla", (2, 12, 2, 8))
    shared = dict(
        mask=jax.random.bernoulli(jax.random.key(5), 0.7, (2, 1, 12, 12)),
        query_segment_ids=jnp.arange(24).reshape(2, 12) // 9,
        key_value_segment_ids=jnp.arange(24).reshape(2, 12) // 9,
        key_value_seq_lengths=jnp.array([12, 7]),
        query_seq_lengths=jnp.array([12, 12]),
    )
    bias = jax.random.normal(jax.random.key(6), (1, 2, 12, 12))

    def loss(layer, q, bias, shared):
        for _ in range(2):
            q = q + layer(q, k, v, bias, **shared)
        return (q**2).sum()

    layer = jax.checkpoint(dot_product_attention)
    got = jax.jit(jax.grad(functools.partial(loss, layer), (0, 1)))(q, bias, shared)
    seen = shared["mask"] & (jnp.arange(12) < shared["key_value_seq_lengths"][:, None, None, None])
    segments = shared["query_segment_ids"]
    seen &= (segments[:, :, None] == segments[:, None])[:, None]

    def dense(q, k, v, bias):
        logits = jnp.einsum("btnh,bsnh->bnts", q, k) / jnp.sqrt(8.0) + bias
        probs = jax.nn.softmax(jnp.where(seen, logits, -1e30)) * seen.any(-1, keepdims=True)
        return jnp.einsum("bnts,bsnh->btnh", probs, v)

    wanted = jax.jit(jax.grad(lambda q, bias: loss(dense, q, bias, {}), (0, 1)))(q, bias)
    _close(got, wanted, "xla")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_layouts_and_broadcast_cotangents(implementation):
    keys = jax.random.split(jax.random.key(3), 2)
    q = jax.random.normal(keys[0], (1, 2, 24, 64), _dtype(implementation))  # (B, N, T, H)
    kv = jax.random.normal(keys[1], (1, 24, 2, 2, 64), _dtype(implementation))  # fused k and v

    def loss(attention, q, kv):
        out = attention(q.transpose(0, 2, 1, 3), kv[:, :, 0], kv[:, :, 1])
        return out.astype(jnp.float32).transpose(3, 0, 2, 1).sum()

    ours = functools.partial(
        dot_product_attention, is_causal=True, scale=0.2, implementation=implementation
    )
    with runnable(implementation):
        got = jax.jit(jax.grad(functools.partial(loss, ours), (0, 1)))(q, kv)
    dense = functools.partial(_dense, scale=0.2)
    wanted = jax.jit(jax.grad(functools.partial(loss, dense), (0, 1)))(*_wide((q, kv)))
    _close(got, wanted, implementation)


def test_checkpoint_on_xla():
    q, k, v = _qkv("xla")
    loss = lambda q, k, v: (dot_product_attention(q, k, v, implementation="xla") ** 2).sum()
    wanted = jax.grad(loss, (0, 1, 2))(q, k, v)
    for policy in (
        None,
        jax.checkpoint_policies.nothing_saveable,
        jax.checkpoint_policies.save_only_these_names("pallas_flash_out", "pallas_flash_lse"),
    ):
        got = jax.grad(jax.checkpoint(loss, policy=policy), (0, 1, 2))(q, k, v)
        _close(got, wanted, "xla")


@pytest.mark.parametrize(
    ("policy", "forward_kernels"),
    [
        (
            jax.checkpoint_policies.save_only_these_names("pallas_flash_out", "pallas_flash_lse"),
            1,
        ),
        (jax.checkpoint_policies.nothing_saveable, 2),
    ],
    ids=["named", "nothing"],
)
def test_checkpoint_policies_decide_how_often_the_forward_kernel_runs(policy, forward_kernels):
    q, k, v = _qkv("mosaic_gpu", (1, 256, 2, 64))

    def loss(q, k, v):
        attend = jax.checkpoint(lambda *x: jnp.sin(dot_product_attention(*x)), policy=policy)
        return attend(q, k, v).astype(jnp.float32).sum()

    with dispatch.assume_device("gpu", (9, 0)):
        traced = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).trace(q, k, v)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert _calls_of(text, "flash_forward") == forward_kernels
    for kernel in ("flash_backward_statistics", "flash_backward_finish_dq"):
        assert _calls_of(text, kernel) == 1
    assert _calls_of(text, "flash_backward") == 3, "the two, and the backward itself"


def _calls_of(text, kernel):
    """How often the lowered program calls the kernel: calls may sit in shared functions."""
    functions = text.split("func.func ")
    runs = {}
    for body in functions[1:]:
        name = body.split("@", 1)[1].split("(", 1)[0]
        runs[name] = body

    def count(name):
        body = runs[name]
        own = sum(
            1 for line in body.splitlines() if "custom_call @mosaic_gpu" in line and kernel in line
        )
        called = [piece.split("(", 1)[0] for piece in body.split("call @")[1:] if "(" in piece]
        return own + sum(count(c) for c in called if c in runs)

    return count("main")


@pytest.mark.parametrize("q_len", [256, 192])  # the last tile of the backward is half empty
def test_nothing_but_kernels_runs_for_plain_attention(q_len):
    """A constant scale, whole strips, no one differentiates by lse: XLA has nothing to compute."""
    qkv = _qkv("mosaic_gpu", (2, q_len, 4, 64))

    def run(q, k, v, dout):
        out, vjp = jax.vjp(functools.partial(dot_product_attention, is_causal=True), q, k, v)
        return out, vjp(dout)

    with dispatch.assume_device("gpu", (9, 0)):
        traced = jax.jit(run).trace(*qkv, qkv[0])
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 4
    assert not [*_computed(text)]


def _computed(text):
    """Lines that compute at run time: more than one number, that someone reads, and no kernel.

    Nor what JAX 0.11 starts dk and dv from and overwrites whole, which XLA finds by itself.
    """
    for body in text.split("func.func ")[1:]:
        for line in body.splitlines():
            name, found, rest = line.strip().partition(" = stablehlo.")
            if not found or rest.startswith(("constant", "custom_call")):
                continue
            if rest.startswith("broadcast_in_dim %cst") and line.endswith("xbf16>"):
                continue
            is_read = re.search(rf"{name.split(':')[0]}\b", body.replace(line, ""))
            if is_read and not line.endswith(("tensor<f32>", "tensor<1xf32>")):
                yield line


def test_lowers_with_x64():
    q, k, v = _qkv("mosaic_gpu", (2, 136, 4, 64), kv_heads=2)
    lengths = jnp.array([3, 100])

    def loss(q, k, v, lengths, scale):
        out = dot_product_attention(
            q,
            k,
            v,
            is_causal=True,
            scale=scale,
            query_seq_lengths=lengths,
            key_value_seq_lengths=lengths,
        )
        return out.astype(jnp.float32).sum()

    with jax.enable_x64(True), dispatch.assume_device("gpu", (9, 0)):
        traced = jax.jit(jax.grad(loss, (0, 1, 2, 4))).trace(q, k, v, lengths, 0.3)
        lowered = traced.lower(lowering_platforms=("cuda",))
    kernels = ("forward", "statistics", "backward", "finish_dq")
    assert lowered.as_text().count("custom_call @mosaic_gpu") == len(kernels)


def test_every_term_lowers_with_x64():
    q, k, v = _qkv("mosaic_gpu", (2, 128, 4, 128), kv_heads=2)
    ids, normal = jnp.zeros((2, 128), jnp.int32), jax.random.normal
    terms = dict(
        bias=normal(jax.random.key(1), (1, 4, 128, 128)).astype(jnp.bfloat16),
        sinks=jnp.zeros(4),
    )
    rest = dict(
        mask=jnp.ones((2, 1, 128, 128), bool),
        query_segment_ids=ids,
        key_value_segment_ids=ids,
        alibi_slopes=jnp.ones(4),
        dropout_rng=jax.random.key_data(jax.random.key(0)),
    )
    static = dict(dropout_rate=0.1, logits_soft_cap=5.0, local_window_size=(9, 5))

    def lowered(rest, static):
        def loss(q, terms, rest):
            out = dot_product_attention(q, k, v, **terms, **rest, **static)
            return out.astype(jnp.float32).sum()

        with jax.enable_x64(True), dispatch.assume_device("gpu", (9, 0)):
            traced = jax.jit(jax.grad(loss, (0, 1))).trace(q, terms, rest)
            return traced.lower(lowering_platforms=("cuda",)).as_text()

    assert "mosaic_gpu" in lowered(rest, static)
    assert "mosaic_gpu" in lowered({}, {}), "a walk whose ends are static"
