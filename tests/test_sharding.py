"""Sharded arrays: right values, sharded as query, nothing gathered, replicated gradients summed.

The XLA implementation runs on host devices. The kernels cannot: what JAX makes of them is read off
the lowered text, and a plain formula stands in for them where the program is to run.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_flash import dispatch, dot_product_attention, sharding
from pallas_flash.kernels import xla
from pallas_flash.problem import Operands

P = PartitionSpec
BATCH, LENGTH, HEADS = 4, 24, 8


def _mesh(kind, shape=(2, 4)):
    kinds = (getattr(AxisType, kind),) * 2
    devices = jax.devices()[: shape[0] * shape[1]]
    if len(devices) < shape[0] * shape[1]:
        pytest.skip("needs eight devices")
    return jax.make_mesh(shape, ("data", "model"), axis_types=kinds, devices=devices)


def _entered(mesh):
    explicit = AxisType.Explicit in mesh.axis_types
    return jax.set_mesh(mesh) if explicit else contextlib.nullcontext()


def _put(mesh, x, *spec):
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


def _normal(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def _arguments(kv_heads, *, dim=16, dtype=jnp.float32, length=LENGTH):
    """(q, k, v), operands to differentiate by, and the rest: all on one device."""
    shapes = ((BATCH, length, n, dim) for n in (HEADS, kv_heads, kv_heads))
    qkv = tuple(_normal(i, *shape, dtype=dtype) for i, shape in enumerate(shapes))
    ids = jnp.sort(jax.random.randint(jax.random.key(6), (BATCH, length), 0, 3))
    inexact = dict(
        bias=_normal(3, 1, HEADS, length, length),
        sinks=_normal(4, HEADS),
        scale=jnp.float32(0.3),
    )
    rest = dict(
        key_value_seq_lengths=jnp.array([3, 20, length, 15]),
        query_segment_ids=ids,
        key_value_segment_ids=ids,
        mask=jax.random.bernoulli(jax.random.key(7), 0.8, (BATCH, 1, length, length)),
        local_window_size=jnp.int32(9),
    )
    return qkv, inexact, rest


def _sharded(mesh, qkv, inexact, rest):
    """q, k, v by batch and heads, what has a batch by batch; the others are whole everywhere."""
    cut = lambda x: "model" if x.shape[2] % mesh.shape["model"] == 0 else None
    qkv = tuple(_put(mesh, x, "data", None, cut(x)) for x in qkv)
    by_batch = {"key_value_seq_lengths", "query_segment_ids", "key_value_segment_ids", "mask"}
    rest = {n: _put(mesh, x, *(["data"] if n in by_batch else [])) for n, x in rest.items()}
    return qkv, {n: _put(mesh, x) for n, x in inexact.items()}, rest


def _value_and_gradients(**static):
    def loss(qkv, inexact, rest):
        out = dot_product_attention(*qkv, **inexact, **rest, **static)
        return (out.astype(jnp.float32) ** 2).sum(), out

    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))


def _assert_close(got, wanted, tolerance=3e-6):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, atol=tolerance * np.abs(b).max())


def _assert_sharded_like_query(mesh, got, qkv):
    (_, out), (grads, _) = got
    for x, y in zip((out, *grads), (qkv[0], *qkv), strict=True):
        assert x.sharding.is_equivalent_to(y.sharding, 4), (x.sharding, y.sharding)


@pytest.mark.parametrize(("kind", "kv_heads"), [("Auto", 8), ("Explicit", 2)])
def test_every_operand_on_the_xla_implementation(kind, kv_heads):
    """With 2 kv heads on 4 devices, too: then key and value are whole along the heads."""
    mesh, given = _mesh(kind), _arguments(kv_heads)
    given[2]["dropout_rng"] = jax.random.key_data(jax.random.key(1))
    run = _value_and_gradients(dropout_rate=0.1)
    with _entered(mesh):
        args = _sharded(mesh, *given)
        compiled = run.lower(*args).compile()
        got = compiled(*args)
    _assert_close(got, run(*given))
    _assert_sharded_like_query(mesh, got, args[0])
    text = str(compiled.as_text())
    assert "all-reduce" in text
    assert "all-gather" not in text


# --- the kernels, with a formula in their place ---------------------------------------------------


def _operands_of(arrays) -> Operands:
    extras = arrays.extras
    one = lambda x: None if x is None else x[0]
    return Operands(
        arrays.q,
        arrays.k,
        arrays.v,
        bias=extras.bias,
        scale=arrays.scale,
        sinks=one(extras.sinks),
        mask=extras.mask,
        kv_lengths=extras.kv_lengths,
        window=one(extras.window),
        query_segments=extras.query_segments,
        kv_segments=extras.kv_segments,
    )


def _run_forward(problem, arrays):
    operands = _operands_of(arrays)
    return xla.attention(problem.resized(operands), operands)


def _run_backward(problem, wanted, arrays, scale, query, out, dout, lse, dlse):
    operands = _operands_of(arrays)
    names = {"query", "key", "value"} | wanted
    attend = lambda given: xla.attention(problem.resized(operands), operands._replace(**given))
    dlse = jnp.zeros_like(lse) if dlse is None else dlse
    grads = jax.vjp(attend, {n: getattr(operands, n) for n in names})[1]((dout, dlse))[0]
    if "sinks" in grads:  # the kernels give it by batch row
        rows = jnp.zeros((lse.shape[0], 1)).at[0].set(1.0)
        grads["sinks"] = rows * grads["sinks"]
    return grads


@pytest.fixture
def formula_for_kernels(monkeypatch):
    """Of problems that no other test traces: JAX remembers a trace by its problem."""
    from pallas_flash.kernels.sm90 import backend

    monkeypatch.setattr(backend, "_run_forward", _run_forward)
    monkeypatch.setattr(backend, "_run_backward", _run_backward)


@pytest.mark.parametrize(("kind", "kv_heads"), [("Auto", 2), ("Explicit", 4)])
def test_every_operand_through_the_rule_of_the_kernels(formula_for_kernels, kind, kv_heads):
    mesh = _mesh(kind)
    given = _arguments(kv_heads, dim=64, dtype=jnp.bfloat16)
    wanted = _value_and_gradients(implementation="xla")(*given)
    run = _value_and_gradients()
    with dispatch.assume_device("gpu", (9, 0)), _entered(mesh):
        args = _sharded(mesh, *given)
        compiled = run.lower(*args).compile()
        got = compiled(*args)
    _assert_close(got, wanted, 2e-2)
    _assert_sharded_like_query(mesh, got, args[0])
    text = str(compiled.as_text())
    assert "all-gather" not in text and "all-to-all" not in text
    assert "all-reduce" in text


def test_vmap_over_a_sharded_axis_and_beside_one(formula_for_kernels):
    """The mapped axis and the batch are folded inside the shards, whichever of them is cut."""
    mesh = _mesh("Auto")
    q, k, v = (_normal(i, 2, 2, LENGTH, 4, 64, dtype=jnp.bfloat16) for i in range(3))

    def loss(q, k, v, implementation):
        out = dot_product_attention(q, k, v, is_causal=True, implementation=implementation)
        return (out.astype(jnp.float32) ** 2).sum()

    def gradients(implementation, **mapping):
        f = functools.partial(loss, implementation=implementation)
        return jax.jit(jax.vmap(jax.grad(f, (0, 1, 2)), (0, None, 0), **mapping))

    wanted = gradients("xla")(q, k[0], v)
    for spec, mapping in (
        (("data", None, None, "model"), dict(spmd_axis_name="data")),
        ((None, "data", None, "model"), {}),
    ):
        args = _put(mesh, q, *spec), _put(mesh, k[0], *spec[1:]), _put(mesh, v, *spec)
        with dispatch.assume_device("gpu", (9, 0)), jax.set_mesh(mesh):
            compiled = gradients("mosaic_gpu", **mapping).lower(*args).compile()
        assert "all-gather" not in str(compiled.as_text())
        got = compiled(*args)
        assert got[0].sharding.is_equivalent_to(args[0].sharding, 5)
        _assert_close(got, wanted, 2e-2)


# --- the kernels, as text -------------------------------------------------------------------------


def _lowered(f, *args):
    with dispatch.assume_device("gpu", (9, 0)):
        return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_a_sharded_program_lowers_for_cuda(kind):
    mesh = _mesh(kind)
    given = _arguments(4, dim=64, dtype=jnp.bfloat16, length=128)
    given[2]["dropout_rng"] = jax.random.key_data(jax.random.key(1))
    with _entered(mesh):
        args = _sharded(mesh, *given)
        text = _lowered(_value_and_gradients(dropout_rate=0.1, implementation="mosaic_gpu"), *args)
    if kind == "Auto":  # the kernels come once the compiler has cut the program
        assert text.count("@CustomSPMDPartitioning") == text.count("sdy.sharding_rule") == 2
    else:
        assert text.count("sdy.manual_computation") == 2
        assert "flash_forward" in text and "flash_backward" in text
        assert "tensor<2x128x2x64xbf16>" in text, "a kernel sees its shard"


@pytest.mark.parametrize("terms", ["causal", "packed"])
def test_kernels_inside_shard_map_with_checked_types(terms):
    mesh = _mesh("Explicit")
    q, k, v = (_normal(i, BATCH, 128, 4, 64, dtype=jnp.bfloat16) for i in range(3))
    lengths, sinks = jnp.array([3, 100, 128, 64]), jnp.zeros(4)
    heads, rows = P("data", None, "model"), P("data")

    def each(q, k, v, lengths, sinks):
        options: dict = dict(is_causal=True)
        if terms == "packed":  # operands that vary over fewer mesh axes than query does
            ids = jnp.broadcast_to(lengths[:, None], q.shape[:2])
            options = dict(query_segment_ids=ids, key_value_segment_ids=ids, sinks=sinks)
            options |= dict(local_window_size=9, key_value_seq_lengths=lengths)
        return dot_product_attention(q, k, v, implementation="mosaic_gpu", **options)

    def loss(*args):
        specs = (heads, heads, heads, rows, P("model"))
        return jax.shard_map(each, in_specs=specs, out_specs=heads)(*args).astype(jnp.float32).sum()

    with jax.set_mesh(mesh):
        args = [_put(mesh, x, *heads) for x in (q, k, v)]
        args += [_put(mesh, lengths, "data"), _put(mesh, sinks, "model")]
        text = _lowered(jax.grad(loss, (0, 1, 2, 4)), *args)
    assert "flash_forward" in text and "flash_backward" in text


# --- errors ---------------------------------------------------------------------------------------


def test_vmap_over_an_axis_that_an_explicit_mesh_shards():
    """XLA runs it, the kernels say what to do."""
    mesh = _mesh("Explicit")
    q = _normal(0, 2, 2, LENGTH, 4, 64, dtype=jnp.bfloat16)

    def attend(implementation):
        return jax.vmap(lambda q: dot_product_attention(q, q, q, implementation=implementation))

    with jax.set_mesh(mesh):
        split = _put(mesh, q, "data", None, None, "model")
        _lowered(attend("xla"), split)
        with pytest.raises(NotImplementedError, match="an Explicit mesh axis.*make the mesh Auto"):
            _lowered(attend("mosaic_gpu"), split)


def test_shardings_that_would_need_communication_are_refused_with_a_remedy():
    mesh = _mesh("Explicit")
    q, k, v = (_normal(i, BATCH, LENGTH, 4, 8) for i in range(3))
    with jax.set_mesh(mesh):
        split = [_put(mesh, x, None, "model") for x in (q, k, v)]
        with pytest.raises(
            ValueError, match=r"query is sharded over .*'model'.* pallas_flash.parallel"
        ):
            dot_product_attention(*split, implementation="xla")
        other = _put(mesh, k, "model")
        with pytest.raises(ValueError, match=r"key is sharded over .* use jax\.sharding\.reshard"):
            dot_product_attention(_put(mesh, q, "data"), other, other, implementation="xla")


def test_a_shard_map_that_leaves_axes_to_the_compiler_says_what_to_do():
    mesh = _mesh("Auto")
    q = _normal(0, BATCH, LENGTH, 4, 64, dtype=jnp.bfloat16)
    attend = lambda q: dot_product_attention(q, q, q, implementation="mosaic_gpu")
    part = jax.shard_map(
        attend, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}
    )
    with pytest.raises(NotImplementedError, match="make every axis manual"):
        _lowered(part, q)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_a_mesh_of_one_device_on_the_kernels(kind):
    mesh = _mesh(kind, (1, 1))
    given = _arguments(4, dim=64, dtype=jnp.bfloat16, length=264)
    wanted = _value_and_gradients()(*given)
    run = _value_and_gradients(implementation="mosaic_gpu")
    with _entered(mesh):
        got = run(*_sharded(mesh, *given))
    _assert_close(got, wanted, 1e-2)


def test_a_program_of_one_device_is_as_without_a_mesh():
    q = _normal(0, 2, 128, 2, 64, dtype=jnp.bfloat16)
    text = _lowered(lambda q: dot_product_attention(q, q, q), q)
    assert "flash_forward" in text and "CustomSPMDPartitioning" not in text
    assert not sharding.explicit_axes(q)
