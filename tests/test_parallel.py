"""A sequence split over devices gives what one device gives: values, gradients, dropout, memory."""

import contextlib
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_flash import dispatch, dot_product_attention, parallel
from tests.tolerance import assert_close

P = PartitionSpec
AXES = ("data", "sequence", "model")
BATCH, LENGTH, HEADS, DIM = 2, 32, 4, 8


def _mesh(shape, kind="Explicit"):
    size = int(np.prod(shape))
    if len(jax.devices()) < size:
        pytest.skip(f"needs {size} devices")
    kinds = (getattr(AxisType, kind),) * 3
    return jax.make_mesh(shape, AXES, axis_types=kinds, devices=jax.devices()[:size])


def _entered(mesh):
    explicit = AxisType.Explicit in mesh.axis_types
    return jax.set_mesh(mesh) if explicit else contextlib.nullcontext()


def _normal(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def _arrays(kv_heads, shape=(BATCH, LENGTH, HEADS, DIM), dtype=jnp.float32):
    """q, k, v and cotangents of out and lse."""
    kv = (*shape[:2], kv_heads, shape[3])
    shapes = (shape, kv, kv, shape)
    qkv_dout = [_normal(i, *s, dtype=dtype) for i, s in enumerate(shapes)]
    return [*qkv_dout, _normal(4, *shape[:3])]


def _results(attention, **static):
    """Jitted: arrays, inexact, rest -> [out, lse, dq, dk, dv], gradients of inexact."""

    @jax.jit
    def run(arrays, inexact, rest):
        q, k, v, dout, dlse = arrays
        call = lambda q, k, v, inexact: attention(
            q, k, v, **inexact, **rest, **static, return_residual=True
        )
        (out, lse), vjp = jax.vjp(call, q, k, v, inexact)
        *grads, of_inexact = vjp((dout, dlse))
        return [out, lse, *grads], of_inexact

    return run


IDS = np.sort(np.random.default_rng(0).integers(0, 4, (BATCH, LENGTH)), axis=1)
SEGMENTS = dict(query_segment_ids=jnp.asarray(IDS), key_value_segment_ids=jnp.asarray(IDS))
LENGTHS = dict(query_seq_lengths=jnp.array([13, 29]), key_value_seq_lengths=jnp.array([30, 9]))
KEY = dict(dropout_rng=jax.random.key_data(jax.random.key(3)))
CAUSAL = dict(is_causal=True)


@dataclasses.dataclass(frozen=True)
class Case:
    """A split call.

    Attributes:
      mesh: sizes of batch x sequence x heads.
      kind: of the axes of the mesh.
      static: options.
      inexact: operands to differentiate by, beside query, key and value.
      rest: other operands.
    """

    mesh: tuple[int, int, int]
    kind: str = "Auto"
    kv_heads: int = 2
    order: str = "contiguous"
    method: str = "ring"
    static: dict[str, Any] = dataclasses.field(default_factory=dict)
    inexact: dict[str, Any] = dataclasses.field(default_factory=dict)
    rest: dict[str, Any] = dataclasses.field(default_factory=dict)


CASES = {
    "full": Case((1, 4, 1)),
    "causal-zigzag": Case((2, 2, 2), "Explicit", order="zigzag", static=CAUSAL),
    "causal-window-ends-the-round-early": Case(
        (1, 4, 1), "Explicit", static=CAUSAL | dict(local_window_size=9)
    ),
    "packed-dropout-zigzag": Case(
        (2, 2, 2), order="zigzag", static=CAUSAL | dict(dropout_rate=0.3), rest=SEGMENTS | KEY
    ),
    "lengths-and-fewer-kv-heads-than-devices": Case((1, 2, 4), rest=LENGTHS),
    "scale-sinks-traced-window": Case(
        (1, 2, 1),
        "Explicit",
        kv_heads=4,
        order="zigzag",
        inexact=dict(scale=jnp.float32(0.4), sinks=jnp.linspace(-1.0, 2.0, HEADS)),
        rest=dict(local_window_size=jnp.int32(11)),
    ),
    "all-gather-everything": Case(
        (1, 4, 1),
        "Explicit",
        order="zigzag",
        method="all_gather",
        static=CAUSAL | dict(dropout_rate=0.3, local_window_size=(20, 3)),
        inexact=dict(sinks=jnp.linspace(-1.0, 2.0, HEADS)),
        rest=SEGMENTS | KEY,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_one_device(name):
    case = CASES[name]
    mesh, n = _mesh(case.mesh, case.kind), case.mesh[1]
    split = functools.partial(
        parallel.dot_product_attention,
        mesh=mesh,
        batch_axis="data",
        head_axis="model",
        order=case.order,
        method=case.method,
    )
    arrays = _arrays(case.kv_heads)
    wanted, wanted_grads = _results(dot_product_attention, **case.static)(
        arrays, case.inexact, case.rest
    )
    ordered = lambda x: parallel.to_zigzag(x, n) if case.order == "zigzag" else x
    with _entered(mesh):
        placed = [_place(mesh, ordered(x)) for x in arrays]
        others = {k: ordered(x) if "segment" in k else x for k, x in case.rest.items()}
        got, got_grads = _results(split, **case.static)(placed, case.inexact, others)
    for x, y in zip(got, (placed[0], placed[4], *placed[:3]), strict=True):
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim), "split as its operand"
    back = lambda x: parallel.from_zigzag(x, n) if case.order == "zigzag" else x
    got = [back(np.asarray(x)) for x in got]
    for what, x, y in zip(("out", "lse", "dq", "dk", "dv"), got, wanted, strict=True):
        assert_close(x, y, None, "float32", what)
    for what, x in got_grads.items():
        assert_close(x, wanted_grads[what], None, "float32", what)


def _place(mesh, x):
    heads = "model" if x.shape[2] % mesh.shape["model"] == 0 else None
    return jax.device_put(x, NamedSharding(mesh, P("data", "sequence", heads)))


def test_zigzag_is_a_permutation_with_an_inverse():
    x = jnp.arange(24).reshape(2, 12)
    np.testing.assert_array_equal(
        parallel.to_zigzag(x, 2)[0], [0, 1, 2, 9, 10, 11, 3, 4, 5, 6, 7, 8]
    )
    np.testing.assert_array_equal(parallel.from_zigzag(parallel.to_zigzag(x, 3), 3), x)


@pytest.mark.parametrize("kind", ["causal", "packed", "window"])
def test_what_nobody_sees_is_not_computed(kind):
    """NaN in the keys of a part is met only by those who would compute with it."""
    mesh = _mesh((1, 4, 1))
    q, k, v = _arrays(HEADS)[:3]
    v = v.at[:, 24:].set(jnp.nan)  # the last device's
    ids = jnp.broadcast_to(jnp.arange(LENGTH) // 8, (BATCH, LENGTH))
    options = {
        "causal": CAUSAL,
        "packed": dict(query_segment_ids=ids, key_value_segment_ids=ids),
        "window": dict(local_window_size=(LENGTH, 0)),
    }[kind]
    with jax.set_mesh(mesh):
        placed = [_place(mesh, x) for x in (q, k, v)]
        out = jax.jit(functools.partial(parallel.dot_product_attention, **options))(*placed)
    assert np.isfinite(np.asarray(out)[:, :24]).all()


def _temporary_kib(devices, order="contiguous"):
    mesh = _mesh((1, devices, 1))
    spec = NamedSharding(mesh, P(None, "sequence"))
    x = jax.ShapeDtypeStruct((1, 1024 * devices, 1, 64), jnp.float32, sharding=spec)
    attend = functools.partial(parallel.dot_product_attention, is_causal=True, mesh=mesh)
    loss = lambda *x: (attend(*x) ** 2).sum()
    with jax.set_mesh(mesh):
        compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, x, x).compile()
    return compiled.memory_analysis().temp_size_in_bytes / 1024


def test_memory_is_that_of_a_part():
    """Twice the devices, twice the sequence: the same memory a device."""
    few, many = _temporary_kib(2), _temporary_kib(4)
    assert many < 1.1 * few, (few, many)


def _lowered(loss, *args):
    with dispatch.assume_device("gpu", (9, 0)):
        traced = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).trace(*args)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def test_the_ring_lowers_for_cuda_and_sends_before_it_computes():
    mesh = _mesh((2, 2, 2), "Auto")
    x = _normal(0, 2, 256, 4, 64, dtype=jnp.bfloat16)
    attend = functools.partial(
        parallel.dot_product_attention,
        mesh=mesh,
        batch_axis="data",
        head_axis="model",
        order="zigzag",
        is_causal=True,
        implementation="mosaic_gpu",
    )
    text = _lowered(lambda *x: attend(*x).astype(jnp.float32).sum(), x, x, x)
    kernels = ("forward", "statistics", "backward", "finish_dq")
    assert text.count("custom_call @mosaic_gpu") == len(kernels), "each once, for every step"
    assert "all_gather" not in text
    loops = text.split("stablehlo.while")[1:]
    assert len(loops) == 2
    for loop in loops:
        body = loop[: loop.index("stablehlo.return", loop.index("} do {"))]
        assert body.index("collective_permute") < body.index("stablehlo.case")


def test_vmap_and_second_derivatives_on_the_xla_implementation():
    mesh = _mesh((1, 2, 1))
    q, k, v = (_normal(i, 2, 1, 4, 1, 3) for i in range(3))

    def second(attend):
        energy = lambda q, k, v: (attend(q, k, v, is_causal=True) ** 3).sum()
        slope = lambda q, k, v: (jax.grad(energy)(q, k, v) ** 2).sum()
        return jax.jit(jax.vmap(jax.grad(slope, (0, 1, 2))))

    wanted = second(dot_product_attention)(q, k, v)
    with jax.set_mesh(mesh):
        got = second(functools.partial(parallel.dot_product_attention, mesh=mesh))(q, k, v)
    for x, y in zip(got, wanted, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-4 * np.abs(y).max())


def _split(mesh, x, **options):
    return parallel.dot_product_attention(x, x, x, mesh=mesh, **options)


X = jnp.ones((2, 16, 2, 4))
ERRORS = {
    "length": (dict(x=jnp.ones((2, 15, 2, 4))), r"query length 15 .* multiple .* pad it"),
    "zigzag": (dict(x=jnp.ones((2, 10, 2, 4)), order="zigzag"), "zigzag .* pad the sequence"),
    "batch": (dict(x=jnp.ones((3, 16, 2, 4)), batch_axis="data"), "batch 3 over .*'data'"),
    "axis": (dict(sequence_axis="time"), "'time' is none of"),
    "order": (dict(order="striped"), "order='striped' must be"),
    "method": (dict(method="ulysses"), "method='ulysses' must be"),
    "mask": (dict(mask=jnp.ones((16, 16), bool)), "mask with a split sequence.* is_causal"),
    "bias": (dict(bias=jnp.ones((16, 16))), "bias with a split sequence"),
    "slopes": (dict(alibi_slopes=jnp.ones(2)), "alibi_slopes with a split sequence"),
    "cap": (dict(logits_soft_cap=jnp.float32(3)), "logits_soft_cap .* pass a Python number"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_bad_input_gives_one_clear_error(name):
    options, message = ERRORS[name]
    options = dict(x=X) | options
    with pytest.raises(ValueError, match=f"(?s){message}"):
        _split(_mesh((2, 2, 1), "Auto"), **options)


def test_errors_of_the_mesh():
    with pytest.raises(ValueError, match="there is no mesh: pass mesh="):
        _split(None, X)
    here, there = _mesh((2, 2, 1)), _mesh((1, 4, 1))
    with jax.set_mesh(here):
        x = jax.device_put(X, NamedSharding(here, P("data")))
        with pytest.raises(ValueError, match="an array lives on a mesh of .* move them"):
            _split(there, x)
        inside = jax.shard_map(lambda x: _split(here, x), in_specs=P("data"), out_specs=P("data"))
        with pytest.raises(ValueError, match="inside jax.shard_map call .*ring_attention"):
            inside(x)
        moved = jax.device_put(X, NamedSharding(here, P(None, "data")))
        with pytest.raises(ValueError, match=r"key is sharded over .* use jax\.sharding\.reshard"):
            parallel.dot_product_attention(x, moved, moved)
    with pytest.raises(ValueError, match="no mesh axis here: call this inside jax.shard_map"):
        parallel.ring_attention(X, X, X, axis_name="sequence")


def test_second_derivatives_of_the_ring_on_the_kernels_say_what_to_do():
    mesh = _mesh((1, 2, 1), "Auto")
    x = _normal(0, 1, 256, 1, 64, dtype=jnp.bfloat16)
    loss = lambda x: _split(mesh, x, implementation="mosaic_gpu").astype(jnp.float32).sum()
    with dispatch.assume_device("gpu", (9, 0)), pytest.raises(TypeError, match="all_gather"):
        jax.jit(jax.grad(lambda x: jax.grad(loss)(x).astype(jnp.float32).sum())).trace(x)


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["ring", "all_gather"])
@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_on_the_kernels_over_a_mesh_of_one_device(method, order):
    """In zigzag order even one device has two parts, and parts that are hidden."""
    mesh = _mesh((1, 1, 1))
    arrays = _arrays(2, (2, 1024, 4, 64), jnp.bfloat16)
    ids = jnp.sort(jax.random.randint(jax.random.key(9), (2, 1024), 0, 5))
    rest = dict(query_segment_ids=ids, key_value_segment_ids=ids) | KEY
    static = dict(implementation="mosaic_gpu", is_causal=True, dropout_rate=0.2)
    wanted, _ = _results(dot_product_attention, **static)(arrays, {}, rest)
    split = functools.partial(parallel.dot_product_attention, method=method, order=order)
    with jax.set_mesh(mesh):
        placed = [_place(mesh, x) for x in arrays]
        got, _ = _results(split, **static)(placed, {}, rest)
    for x, y in zip(got, wanted, strict=True):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        assert np.linalg.norm(x - y) <= 1e-2 * np.linalg.norm(y)
