"""What only a GPU can show: repeatability, limits of size, memory, hard data, compile time."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_flash import dot_product_attention, explain
from tests.tolerance import assert_close

pytestmark = pytest.mark.gpu
LSE_FLOOR = 1.0  # log-sum-exp may be near 0 where the logits it sums are not


def _qkv(shape, kv_heads=None, dtype=jnp.bfloat16, seed=0):
    keys = jax.random.split(jax.random.key(seed), 4)
    kv = (*shape[:-2], kv_heads or shape[-2], shape[-1])
    shapes = (shape, kv, kv, shape)
    return [jax.random.normal(k, s, dtype) for k, s in zip(keys, shapes, strict=True)]


def _both(**kwargs):
    """Jitted: (q, k, v, dout) -> out, lse, dq, dk, dv on the kernels."""

    @jax.jit
    def run(q, k, v, dout):
        call = lambda *x: dot_product_attention(
            *x, **kwargs, return_residual=True, implementation="mosaic_gpu"
        )
        (out, lse), vjp = jax.vjp(call, q, k, v)
        return out, lse, *vjp((dout, jnp.zeros_like(lse)))

    return run


def _bits(x):
    return np.asarray(x).view(np.uint16 if x.dtype.itemsize == 2 else np.uint32)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_deterministic_backward_is_bit_equal(head_dim, causal):
    args = _qkv((1, 4092, 8, head_dim), kv_heads=4)
    run = _both(is_causal=causal, deterministic_backward=True)
    first = run(*args)
    for _ in range(20):
        for a, b in zip(run(*args), first, strict=True):
            np.testing.assert_array_equal(_bits(a), _bits(b))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_all_but_dq_is_bit_equal_by_default_and_both_ways_agree(head_dim, causal):
    args = _qkv((1, 4092, 8, head_dim), kv_heads=4, seed=1)
    run = _both(is_causal=causal)
    first = run(*args)
    for _ in range(10):
        for i, (a, b) in enumerate(zip(run(*args), first, strict=True)):
            if i != 2:  # dq is added in no fixed order
                np.testing.assert_array_equal(_bits(a), _bits(b))
    other = _both(is_causal=causal, deterministic_backward=True)(*args)
    for a, b in zip(first, other, strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert np.linalg.norm(a - b) <= 6e-3 * np.linalg.norm(b)  # P is rounded before dS or not


def _reference(q, k, v, dout, causal):
    """Dense attention and gradients in float32 at full precision."""
    q, k, v, dout = (x.astype(jnp.float32) for x in (q, k, v, dout))

    def attend(q, k, v):
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
        logits = jnp.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(q.shape[-1])
        if causal:
            seen = jnp.tril(jnp.ones(logits.shape[-2:], bool))
            logits = jnp.where(seen, logits, -jnp.inf)
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits), v), logits

    with jax.default_matmul_precision("highest"):
        (out, logits), vjp = jax.vjp(attend, q, k, v)
        grads = vjp((dout, jnp.zeros_like(logits)))
        return out, jnp.swapaxes(jax.nn.logsumexp(logits, axis=-1), 1, 2), *grads


def _hard(kind, q, k, v):
    """Data on which rescaling really runs, and probabilities are peaked."""
    length = k.shape[1]
    if kind == "maxima grow along the loop":  # which runs from the last key to the first
        factor = jnp.linspace(12.0, 0.1, length)
    elif kind == "maxima shrink along the loop":
        factor = jnp.linspace(0.1, 12.0, length)
    else:  # one dominant key
        factor = jnp.ones(length).at[length // 3].set(40.0)
    return q, (k.astype(jnp.float32) * factor[None, :, None, None]).astype(k.dtype), v


@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 256])
@pytest.mark.parametrize(
    "kind", ["maxima grow along the loop", "maxima shrink along the loop", "one dominant key"]
)
def test_hard_data(kind, head_dim):
    """Errors at most twice those of plain attention in bfloat16, and a rounding."""
    q, k, v, dout = _qkv((1, 1000, 4, head_dim), kv_heads=2, seed=2)
    q, k, v = _hard(kind, q, k, v)
    for causal in (False, True):
        got = _both(is_causal=causal)(q, k, v, dout)
        wanted = _reference(q, k, v, dout, causal)
        plain_call = lambda *x, c=causal: jax.nn.dot_product_attention(
            *x, is_causal=c, implementation="xla"
        )
        plain_out, vjp = jax.vjp(plain_call, q, k, v)
        plain = (plain_out, None, *vjp(dout))
        names = ("out", "lse", "dq", "dk", "dv")
        for name, a, p, b in zip(names, got, plain, wanted, strict=True):
            assert_close(a, b, p, "float32" if p is None else "bfloat16", name, floor=LSE_FLOOR)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_hidden_nan_stays_hidden_under_a_soft_cap(head_dim):
    """Logits too large for the polynomial: two keys share a reciprocal where both are seen."""
    q, k, v, _ = _qkv((1, 512, 4, head_dim), kv_heads=2, seed=4)
    call = lambda k: dot_product_attention(
        q * 30, k, v, is_causal=True, logits_soft_cap=20.0, implementation="mosaic_gpu"
    )
    clean = call(k)
    for key in (101, 300):
        got = call(k.at[:, key].set(jnp.nan))
        np.testing.assert_array_equal(_bits(got[:, :key]), _bits(clean[:, :key]))
        assert np.isnan(np.asarray(got[:, key:], np.float32)).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_an_outlier_feature(dtype):
    """Two flash implementations round `out` before they compare it with dP; plain attention does
    not. So gradients are held against the larger error of jax.nn's two implementations."""
    q, k, v, dout = _qkv((1, 304, 2, 64), dtype=dtype, seed=3)
    q, k = q.at[..., 5].multiply(50), k.at[..., 5].multiply(50)
    got = _both()(q, k, v, dout)
    wanted = _reference(q, k, v, dout, False)
    peers = []
    for implementation in ("xla", "cudnn"):
        call = lambda *x, i=implementation: jax.nn.dot_product_attention(*x, implementation=i)
        out, vjp = jax.vjp(call, q, k, v)
        peers.append((out, None, *vjp(dout)))
    for name, a, p, c, b in zip(("out", "lse", "dq", "dk", "dv"), got, *peers, wanted, strict=True):
        if p is not None:
            a, p, c, b = (np.asarray(x, np.float64) for x in (a, p, c, b))
            ours, xla, cudnn = (np.abs(x - b).max() / np.abs(b).max() for x in (a, p, c))
            print(f"outlier {dtype} {name}: ours {ours:.2e}, xla {xla:.2e}, cudnn {cudnn:.2e}")
            assert ours <= 2 * max(xla, cudnn) + 1e-3, name


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_one_kv_head_for_all(head_dim, causal):
    """Several blocks of the backward share the query heads of a tile of keys, two heads or four."""
    args = _qkv((4, 2048, 16, head_dim), kv_heads=1, seed=4)
    got, wanted = _both(is_causal=causal)(*args), _reference(*args, causal)
    plain_call = lambda *x: jax.nn.dot_product_attention(*x, is_causal=causal, implementation="xla")
    plain_out, vjp = jax.vjp(plain_call, *args[:3])
    plain = (plain_out, None, *vjp(args[3]))
    names = ("out", "lse", "dq", "dk", "dv")
    for name, a, p, b in zip(names, got, plain, wanted, strict=True):
        assert_close(a, b, p, "float32" if p is None else "bfloat16", name, floor=LSE_FLOOR)


def test_batches_past_the_limits_of_a_grid_axis():
    q, k, v, dout = _qkv((8300, 1, 16, 128))
    got = _both()(q, k, v, dout)
    np.testing.assert_array_equal(np.asarray(got[0][-3:]), np.asarray(v[-3:]))
    np.testing.assert_allclose(
        np.asarray(got[4][-3:], np.float32), np.asarray(dout[-3:], np.float32), rtol=1e-2
    )
    assert all(bool(jnp.isfinite(x).all()) for x in got)
    for shape in ((65536, 16, 1, 80), (70000, 1, 1, 16)):
        q, k, v, _ = _qkv(shape)
        out = dot_product_attention(q, k, v, implementation="mosaic_gpu")
        wanted = dot_product_attention(q[-2:], k[-2:], v[-2:], implementation="xla")
        np.testing.assert_allclose(
            np.asarray(out[-2:], np.float32), np.asarray(wanted, np.float32), atol=2e-2
        )


def test_arrays_past_two_to_the_31_elements():
    """2.1e9 elements of q: offsets need 64 bits, dq's buffer (float32) more of them."""
    shape = (132, 1024, 128, 128)
    assert np.prod(shape) > 2**31
    key = jax.random.key(0)
    q = jax.random.normal(key, shape, jnp.bfloat16)
    k, v = (jax.random.normal(jax.random.key(i), (132, 128, 1, 128), jnp.bfloat16) for i in (1, 2))
    loss = lambda q, k, v: dot_product_attention(q, k, v, implementation="mosaic_gpu")[-1].sum()
    dq = jax.jit(jax.grad(lambda *x: loss(*x).astype(jnp.float32)))(q, k, v)
    wanted = jax.grad(
        lambda q: (
            dot_product_attention(q, k[-1:], v[-1:], implementation="xla").astype(jnp.float32).sum()
        )
    )(q[-1:])
    got, wanted = np.asarray(dq[-1], np.float32), np.asarray(wanted[0], np.float32)
    assert np.linalg.norm(got - wanted) <= 2e-2 * np.linalg.norm(wanted)
    assert not bool(jnp.any(dq[:-1] != 0))


@pytest.mark.parametrize("heads", [(16, 16), (32, 4)])
def test_memory_of_a_gradient_at_32k(heads):
    """Temporaries at most the bytes of q, k, v and out together."""
    (n, kv_heads), length = heads, 32_768
    q = jax.ShapeDtypeStruct((1, length, n, 128), jnp.bfloat16)
    kv = jax.ShapeDtypeStruct((1, length, kv_heads, 128), jnp.bfloat16)
    assert explain(q, kv, kv, is_causal=True).implementation == "mosaic_gpu"

    def loss(q, k, v, w):
        out = dot_product_attention(q, k, v, is_causal=True)
        return (out.astype(jnp.float32) * w.astype(jnp.float32)).sum()

    compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, kv, kv, q).compile()
    used = compiled.memory_analysis().temp_size_in_bytes
    limit = 2 * sum(int(np.prod(x.shape)) for x in (q, kv, kv, q))
    print(f"heads {heads}: temporaries {used / 2**20:.0f} MiB of {limit / 2**20:.0f} MiB")
    assert used <= limit


def test_first_compile_of_a_pass():
    """In seconds; the limit leaves room for the other tests compiling beside it."""
    q, k, v, dout = _qkv((1, 1152, 4, 128))
    for name, run in (
        ("forward", jax.jit(lambda q, k, v, dout: dot_product_attention(q, k, v, is_causal=True))),
        ("forward and backward", _both(is_causal=True)),
    ):
        start = time.perf_counter()
        run.lower(q, k, v, dout).compile()
        seconds = time.perf_counter() - start
        print(f"first compile, {name}: {seconds:.1f} s")
        assert seconds < 30


def test_checkpoint_runs_the_kernels():
    q, k, v, dout = _qkv((1, 256, 4, 64))
    loss = lambda q, k, v: (
        (dot_product_attention(q, k, v, implementation="mosaic_gpu") * dout)
        .astype(jnp.float32)
        .sum()
    )
    wanted = jax.grad(loss, (1, 2))(q, k, v)
    for policy in (
        jax.checkpoint_policies.nothing_saveable,
        jax.checkpoint_policies.save_only_these_names("pallas_flash_out", "pallas_flash_lse"),
    ):
        got = jax.jit(jax.grad(jax.checkpoint(loss, policy=policy), (1, 2)))(q, k, v)
        for a, b in zip(got, wanted, strict=True):
            np.testing.assert_array_equal(_bits(a), _bits(b))
