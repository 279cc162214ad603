"""The public call: bad input, explain, batch axes, and behaviours that the contract promises."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_flash
from pallas_flash import dispatch, dot_product_attention, tile_math
from pallas_flash.dropout import dropout_keep_mask
from tests.cases import Case


def _qkv(batch=(2,), t=5, s=7, n=4, k=2, h=8, hv=8, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((*batch, t, n, h), (*batch, s, k, h), (*batch, s, k, hv))
    return tuple(jax.random.normal(x, y, dtype) for x, y in zip(keys, shapes, strict=True))


BAD = {
    "rank": (lambda q, k, v: (q[0, 0], k[0, 0], v[0, 0]), {}, ValueError, "query has 2 axes"),
    "ranks differ": (lambda q, k, v: (q[0], k, v), {}, ValueError, "as many axes"),
    "heads": (lambda q, k, v: (q[:, :, :3], k, v), {}, ValueError, "num_q_heads=3"),
    "dtypes": (lambda q, k, v: (q, k.astype("bfloat16"), v), {}, ValueError, "key is bfloat16"),
    "int dtype": (
        lambda q, k, v: (q.astype(int), k.astype(int), v.astype(int)),
        {},
        ValueError,
        "cast them",
    ),
    "batch": (lambda q, k, v: (q, k[:1], v[:1]), {}, ValueError, "batch axes"),
    "kv length": (lambda q, k, v: (q, k, v[:, :3]), {}, ValueError, "key .* and value"),
    "head dim": (lambda q, k, v: (q[..., :4], k, v), {}, ValueError, "head_dim=4"),
    "not array": (lambda q, k, v: (q, "k", v), {}, TypeError, "key must be an array"),
    "float mask": (None, {"mask": jnp.zeros((1, 1, 5, 7))}, ValueError, "mask is float32"),
    "mask shape": (
        None,
        {"mask": jnp.ones((2, 1, 5, 6), bool)},
        ValueError,
        r"mask of shape \(2, 1, 5, 6\) must broadcast to \(2, 4, 5, 7\)",
    ),
    "bool bias": (None, {"bias": jnp.ones((1, 1, 5, 7), bool)}, ValueError, "bias is bool"),
    "bias shape": (
        None,
        {"bias": jnp.ones((3, 1, 5, 7))},
        ValueError,
        r"bias of shape \(3, 1, 5, 7\)",
    ),
    "scale string": (None, {"scale": "x"}, TypeError, "scale must be"),
    "scale bool": (None, {"scale": True}, TypeError, "scale must be"),
    "scale shape": (None, {"scale": jnp.ones(3)}, TypeError, "scale must be"),
    "scale nan": (None, {"scale": float("nan")}, ValueError, "scale=nan must be finite"),
    "lengths dtype": (
        None,
        {"query_seq_lengths": jnp.ones(2)},
        ValueError,
        "query_seq_lengths is float32",
    ),
    "lengths shape": (
        None,
        {"key_value_seq_lengths": jnp.ones(3, int)},
        ValueError,
        "key_value_seq_lengths of shape",
    ),
    "lengths range": (
        None,
        {"key_value_seq_lengths": np.array([3, 8])},
        ValueError,
        "between 0 and 7",
    ),
    "window type": (None, {"local_window_size": 1.5}, TypeError, "local_window_size"),
    "window negative": (None, {"local_window_size": (-1, 0)}, ValueError, "negative side"),
    "window length": (None, {"local_window_size": (1, 2, 3)}, ValueError, "local_window_size"),
    "segments alone": (
        None,
        {"query_segment_ids": jnp.ones((2, 5), int)},
        ValueError,
        "key_value_segment_ids is missing",
    ),
    "segments shape": (
        None,
        {
            "query_segment_ids": jnp.ones((2, 5), int),
            "key_value_segment_ids": jnp.ones((2, 5), int),
        },
        ValueError,
        "key_value_segment_ids of shape",
    ),
    "segments dtype": (
        None,
        {"query_segment_ids": jnp.ones((2, 5)), "key_value_segment_ids": jnp.ones((2, 7))},
        ValueError,
        "query_segment_ids is float32",
    ),
    "soft cap": (None, {"logits_soft_cap": 0.0}, ValueError, "logits_soft_cap=0.0"),
    "soft cap type": (None, {"logits_soft_cap": "a"}, TypeError, "logits_soft_cap"),
    "sinks shape": (None, {"sinks": jnp.ones(2)}, ValueError, "sinks of shape"),
    "sinks dtype": (None, {"sinks": jnp.ones(4, int)}, ValueError, "sinks is int"),
    "slopes shape": (
        None,
        {"alibi_slopes": jnp.ones((1, 4))},
        ValueError,
        r"alibi_slopes of shape \(1, 4\) must be \(4,\) or \(2, 4\): one slope a query head",
    ),
    "slopes dtype": (None, {"alibi_slopes": [1, 2, 4, 8]}, ValueError, "alibi_slopes is int"),
    "slopes finite": (
        None,
        {"alibi_slopes": np.float32([1, np.inf, 1, 1])},
        ValueError,
        "alibi_slopes holds inf",
    ),
    "slopes type": (None, {"alibi_slopes": "a"}, TypeError, "alibi_slopes must be an array"),
    "dropout rate": (None, {"dropout_rate": 1.0}, ValueError, "dropout_rate=1.0"),
    "dropout key": (None, {"dropout_rate": 0.5}, ValueError, "dropout_rng"),
    "causal": (None, {"is_causal": "yes"}, TypeError, "is_causal"),
    "alignment": (None, {"causal_alignment": "top"}, ValueError, "causal_alignment"),
    "implementation": (None, {"implementation": "cudnn"}, ValueError, "implementation='cudnn'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gives_one_clear_error(name):
    change, kwargs, error, message = BAD[name]
    qkv = _qkv() if change is None else change(*_qkv())
    with pytest.raises(error, match=message):
        dot_product_attention(*qkv, **kwargs)
    with pytest.raises(error, match=message):  # and the same before tracing ends
        jax.eval_shape(lambda: dot_product_attention(*qkv, **kwargs))


def test_implementation_that_cannot_run_names_reason_and_remedy():
    with (
        dispatch.assume_device("cpu"),
        pytest.raises(NotImplementedError, match="the device is cpu.*implementation='xla'"),
    ):
        dot_product_attention(*_qkv(), implementation="mosaic_gpu")


def test_each_choice_is_logged(caplog):
    with caplog.at_level("DEBUG", logger="pallas_flash"):
        dot_product_attention(*_qkv(), implementation="xla")
    assert "runs xla" in caplog.text
    assert "mosaic_gpu: " in caplog.text  # and why not


def test_head_dim_over_256_is_refused_by_the_kernels_alone():
    qkv = _qkv(h=257, hv=8, dtype=jnp.bfloat16)
    with dispatch.assume_device("gpu", (9, 0)):
        with pytest.raises(NotImplementedError, match="head_dim=257: at most 256"):
            dot_product_attention(*qkv, implementation="mosaic_gpu")
        assert pallas_flash.explain(*qkv).implementation == "xla"


@pytest.mark.parametrize(
    ("capability", "dtype", "why"),
    [
        ((7, 5), "bfloat16", "kernels exist for compute capability 9.0"),
        ((8, 0), "bfloat16", "kernels exist for compute capability 9.0"),
        ((9, 0), "float32", "dtype float32"),
    ],
)
def test_capability_is_checked_as_a_plain_function(capability, dtype, why):
    with dispatch.assume_device("gpu", capability):
        told = pallas_flash.explain(*_qkv(dtype=dtype))
    assert told.implementation == "xla"
    assert why in str(told)


def test_explain_takes_shapes_and_names_costs():
    x = jax.ShapeDtypeStruct((1, 1001, 4, 72), jnp.bfloat16)
    with dispatch.assume_device("gpu", (9, 0), "NVIDIA H200"):
        told = pallas_flash.explain(x, x, x, is_causal=True)
    assert told.implementation == "mosaic_gpu"
    assert "q_len=1001" in str(told)
    assert "head_dim=72 is padded to 80 in the backward" in str(told)
    assert "NVIDIA H200 (compute capability 9.0)" in str(told)


@pytest.mark.parametrize(
    ("dims", "padded"),
    [
        ((1, 64), (64, 64)),
        ((65, 80), (80, 80)),
        ((96, 112), (96, 112)),
        ((80, 128), (80, 128)),
        ((113, 127), (128, 128)),
        ((112, 40), (112, 64)),
        ((40, 112), (64, 128)),  # from here on the split is 'roles'
        ((80, 129), (128, 192)),
        ((200, 96), (256, 128)),
    ],
    ids=str,
)
def test_what_the_backward_pads_head_dims_to(dims, padded):
    shape = lambda width: jax.ShapeDtypeStruct((1, 16, 4, width), jnp.bfloat16)
    with dispatch.assume_device("gpu", (9, 0)):
        told = str(pallas_flash.explain(shape(dims[0]), shape(dims[0]), shape(dims[1])))
    for name, size, wide in zip(("head_dim", "head_dim_v"), dims, padded, strict=True):
        note = f"{name}={size} is padded to {wide} in the backward"
        assert (note in told) == (size != wide)


def test_batch_axes():
    q, k, v = _qkv(batch=(2, 3))
    out, lse = dot_product_attention(q, k, v, return_residual=True)
    assert out.shape == (2, 3, 5, 4, 8)
    assert lse.shape == (2, 3, 5, 4)
    one, one_lse = dot_product_attention(q[1, 2], k[1, 2], v[1, 2], return_residual=True)
    np.testing.assert_allclose(out[1, 2], one, atol=1e-6)
    np.testing.assert_allclose(lse[1, 2], one_lse, atol=1e-6)


@pytest.mark.parametrize("lead", [(2, 1), (1, 3), (2, 3), (1, 1)])
def test_mask_with_several_batch_axes(lead):
    q, k, v = _qkv(batch=(2, 3))
    mask = jax.random.bernoulli(jax.random.key(1), 0.7, (*lead, 1, 5, 7))
    lengths = jnp.array([[1, 2, 3], [4, 5, 6]])
    out = dot_product_attention(q, k, v, mask=mask, key_value_seq_lengths=lengths)
    full = jnp.broadcast_to(mask, (2, 3, 1, 5, 7))
    for i in range(2):
        for j in range(3):
            one = dot_product_attention(
                q[i, j], k[i, j], v[i, j], mask=full[i, j], key_value_seq_lengths=lengths[i, j]
            )
            np.testing.assert_allclose(out[i, j], one, atol=1e-6)


def test_scale_of_every_kind_agrees():
    q, k, v = _qkv()
    wanted = dot_product_attention(q, k, v, scale=0.375)  # exact in bfloat16, too
    kinds = np.float32(0.375), np.array(0.375), jnp.float32(0.375), jnp.array(0.375, jnp.bfloat16)
    for scale in kinds:
        got = dot_product_attention(q, k, v, scale=scale)
        np.testing.assert_allclose(got, wanted, atol=1e-6)
    other = dot_product_attention(q, k, v, scale=0.6)
    assert float(jnp.abs(other - wanted).max()) > 1e-3


def test_layer_dependent_scale_in_a_scan():
    q, k, v = _qkv(s=5, k=4)
    scales = jnp.array([0.1, 0.5, 2.0])

    def loss(scales):
        layer = lambda x, scale: (dot_product_attention(x, k, v, scale=scale), None)
        return (jax.lax.scan(layer, q, scales)[0] ** 2).sum()

    got = jax.grad(loss)(scales)
    eps = 1e-2
    for i in range(3):
        step = jnp.zeros(3).at[i].set(eps)
        slope = (loss(scales + step) - loss(scales - step)) / (2 * eps)
        np.testing.assert_allclose(got[i], slope, rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("empty", [dict(batch=(0,)), dict(t=0), dict(s=0)], ids=str)
def test_empty_inputs(empty):
    q, k, v = _qkv(**empty)
    loss = lambda *qkv: dot_product_attention(*qkv).sum()
    out, lse = jax.jit(lambda *x: dot_product_attention(*x, return_residual=True))(q, k, v)
    assert out.shape == (*q.shape[:-1], v.shape[-1])
    assert not np.asarray(out).any()
    assert np.all(np.asarray(lse) == -np.inf)
    for x, g in zip((q, k, v), jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v), strict=True):
        assert g.shape == x.shape
        assert not np.asarray(g).any()


def test_new_values_compile_nothing():
    q, k, v = _qkv()
    count = 0

    @jax.jit
    def step(q, k, v, mask, bias, lengths, window, scale):
        nonlocal count
        count += 1
        return dot_product_attention(
            q,
            k,
            v,
            bias,
            mask,
            scale=scale,
            key_value_seq_lengths=lengths,
            local_window_size=(window, 2),
        )

    for i in range(3):
        mask = jax.random.bernoulli(jax.random.key(i), 0.5, (2, 1, 5, 7))
        bias = jnp.full((1, 4, 5, 7), float(i))
        step(q, k, v, mask, bias, jnp.array([i, 7]), jnp.int32(i), jnp.float32(i))
    assert count == 1


def test_traced_lengths_and_windows_are_clamped():
    q, k, v = _qkv()
    run = jax.jit(
        lambda lengths, window: dot_product_attention(
            q, k, v, key_value_seq_lengths=lengths, local_window_size=(window, None)
        )
    )
    wanted = dot_product_attention(
        q, k, v, key_value_seq_lengths=np.array([0, 7]), local_window_size=(0, None)
    )
    np.testing.assert_allclose(run(jnp.array([-3, 99]), jnp.int32(-5)), wanted, atol=1e-6)


def test_alignment_shows_through_identity_values():
    for t, s in ((3, 5), (5, 3)):
        q = jnp.zeros((1, t, 1, s))
        k = jnp.zeros((1, s, 1, s))
        v = jnp.eye(s)[None, :, None]
        for alignment, shift in (("top_left", 0), ("bottom_right", s - t)):
            out = dot_product_attention(q, k, v, is_causal=True, causal_alignment=alignment)
            seen = np.tril(np.ones((t, s)), shift)
            weights = seen / np.maximum(seen.sum(-1, keepdims=True), 1)
            np.testing.assert_allclose(out[0, :, 0], weights, atol=1e-6)


@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
def test_alibi_is_a_bias_of_distances_shifted_as_the_mask_is(alignment):
    q, k, v = _qkv(batch=(2, 3))
    slopes = jnp.asarray(np.random.default_rng(0).random((2, 3, 4)), jnp.float32)
    shift = 2 if alignment == "bottom_right" else 0
    distance = np.abs(np.arange(7) - np.arange(5)[:, None] - shift)
    attend = functools.partial(dot_product_attention, is_causal=True, causal_alignment=alignment)
    bias = -slopes[..., None, None] * distance
    capped = dict(logits_soft_cap=2.0, return_residual=True)
    got, wanted = attend(q, k, v, alibi_slopes=slopes, **capped), attend(q, k, v, bias, **capped)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), got, wanted)
    # One slope a head for all sequences, one sequence, and one a call under vmap.
    every = attend(q, k, v, alibi_slopes=slopes[1, 2])
    one = attend(q[0, 1], k[0, 1], v[0, 1], alibi_slopes=slopes[1, 2])
    mapped = jax.vmap(lambda slopes: attend(q, k, v, alibi_slopes=slopes))(slopes[1])
    np.testing.assert_allclose(every[0, 1], one, atol=1e-6)
    np.testing.assert_allclose(mapped[2], every, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("shape", [(4,), (2, 4)], ids=str)
def test_the_gradient_of_slopes_is_as_they_were_passed(shape, dtype):
    q, k, v = _qkv(dtype=jnp.bfloat16)
    slopes = jnp.asarray(np.random.default_rng(0).random(shape), dtype)
    loss = lambda x: dot_product_attention(q, k, v, alibi_slopes=x).astype(jnp.float32).sum()
    got = jax.grad(loss)(slopes)
    assert (got.shape, got.dtype) == (slopes.shape, slopes.dtype)
    assert np.asarray(got, np.float32).any()


def test_distances_of_far_positions_are_exact():
    slope, far = jnp.float32(0.25), 2**30 + 1  # a float32 holds integers up to 2**24
    assert tile_math.alibi(slope, jnp.int32(far), jnp.int32(far - 3), 0) == -0.75
    with jax.enable_x64(True):
        assert tile_math.alibi(slope, jnp.int32(far), jnp.int32(far - 3), 1).dtype == jnp.float32


def test_one_sided_window_without_causal():
    q, k, v = _qkv(t=96, s=96)
    left = dot_product_attention(q, k, v, local_window_size=(16, 0))
    both = dot_product_attention(q, k, v, local_window_size=(16, 0), is_causal=True)
    np.testing.assert_allclose(left, both, atol=1e-6)
    mask = np.triu(np.ones((96, 96), bool)) & np.tril(np.ones((96, 96), bool), 16)
    right = dot_product_attention(q, k, v, local_window_size=(0, 16))
    np.testing.assert_allclose(
        right, dot_product_attention(q, k, v, mask=jnp.asarray(mask)[None, None]), atol=1e-6
    )


@pytest.mark.parametrize("ids", [(3, 9), (2, 0)], ids=str)
def test_packed_segments_are_separate_sequences(ids):
    q, k, v = _qkv(batch=(1,), t=30, s=30, n=2, k=1)
    segments = jnp.repeat(jnp.array(ids), jnp.array([11, 19]), total_repeat_length=30)[None]

    @jax.jit
    def packed(q, k, v):
        kwargs = dict(query_segment_ids=segments, key_value_segment_ids=segments)
        attend = lambda *x: dot_product_attention(*x, is_causal=True, **kwargs)
        out, vjp = jax.vjp(attend, q, k, v)
        return out, *vjp(jnp.cos(q))

    @jax.jit
    def alone(q, k, v):
        out, vjp = jax.vjp(lambda *x: dot_product_attention(*x, is_causal=True), q, k, v)
        return out, *vjp(jnp.cos(q))

    results = packed(q, k, v)
    for part in (slice(0, 11), slice(11, 30)):
        one = alone(*(x[:, part] for x in (q, k, v)))
        for got, wanted in zip(results, one, strict=True):
            np.testing.assert_allclose(got[:, part], wanted, atol=2e-6)
    others = packed(q, k.at[:, 11:].multiply(3), v.at[:, 11:].add(5))
    np.testing.assert_array_equal(others[0][:, :11], results[0][:, :11])


def test_dropout_is_the_pattern_of_its_helper_and_rate_zero_is_none():
    q, k, _ = _qkv(t=9, s=7, h=7)
    v = jnp.broadcast_to(jnp.eye(7)[None, :, None], (2, 7, 2, 7))
    attend = jax.jit(dot_product_attention, static_argnames="dropout_rate")
    key = jax.random.key(4)
    plain = attend(q, k, v)
    np.testing.assert_array_equal(attend(q, k, v, dropout_rate=0.0, dropout_rng=key), plain)
    dropped = np.asarray(attend(q, k, v, dropout_rate=0.4, dropout_rng=key))
    kept = dropout_keep_mask(key, rate=0.4, batch=2, num_heads=4, q_len=9, kv_len=7)
    kept = np.swapaxes(np.asarray(kept), 1, 2)  # (B, T, N, S), as out is with an identity as v
    np.testing.assert_allclose(dropped, np.where(kept, plain / 0.6, 0.0), rtol=1e-5)
    np.testing.assert_array_equal(attend(q, k, v, dropout_rate=0.4, dropout_rng=key), dropped)
    other = attend(q, k, v, dropout_rate=0.4, dropout_rng=jax.random.key(5))
    assert ((other == 0) != (dropped == 0)).any()


def test_log_sum_exp_of_empty_rows_does_no_harm_in_a_loss():
    q, k, v = _qkv()
    lengths = jnp.array([0, 4])

    @functools.partial(jax.jit, static_argnums=0)
    def grads(loss, *qkv):
        def run(*qkv):
            both = dict(key_value_seq_lengths=lengths, return_residual=loss != "out alone")
            result = dot_product_attention(*qkv, **both)
            if loss == "out alone":
                return result.sum()
            out, lse = result
            return out.sum() + (jnp.exp(lse).sum() if loss == "exp(lse)" else 0.0)

        return jax.grad(run, (0, 1, 2))(*qkv)

    alone, returned = grads("out alone", q, k, v), grads("out", q, k, v)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-7), returned, alone)
    for g in grads("exp(lse)", q, k, v):
        assert np.isfinite(g).all() and not g[0].any()


def test_agrees_with_jax_nn():
    qkv, _ = Case("x", dtype="float32", heads=(4, 2), batch=2).arguments()
    kwargs = dict(is_causal=True, local_window_size=(20, 0), scale=0.2)
    ours = dot_product_attention(*qkv, **kwargs)
    theirs = jax.nn.dot_product_attention(*qkv, **kwargs)
    np.testing.assert_allclose(ours, theirs, atol=2e-6)


def test_debug_nans_and_infs_stay_quiet():
    q, k, v = _qkv(t=130, s=130)
    loss = lambda q, k, v: dot_product_attention(q, k, v, is_causal=True).sum()
    jax.config.update("jax_debug_nans", True)
    jax.config.update("jax_debug_infs", True)
    try:
        jax.grad(loss, (0, 1, 2))(q, k, v)
        dot_product_attention(q, k, v, is_causal=True)
    finally:
        jax.config.update("jax_debug_nans", False)
        jax.config.update("jax_debug_infs", False)
