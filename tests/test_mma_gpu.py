"""The GPU bodies of the tensor-core seam, each alone on a GPU: interpret mode does not run them."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash import masks
from pallas_flash.kernels.sm90 import mma, query_parts, registers, visits
from pallas_flash.kernels.sm90.smem import tiled_smem

pytestmark = pytest.mark.gpu
op = mma.GpuOps


def _accumulator_kernel(body, out_shape, *args, num_threads=1):
    """body(*arg refs, out ref) in a kernel of one block."""

    def kernel(*refs):
        body(*refs)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(out_shape, jnp.float32),
        num_threads=num_threads,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(*args)


BOUNDS = [
    masks.Bounds(*limits)
    for limits in itertools.product((None, -5), (None, 3), (None, 70), (None, 49))
    if any(limit is not None for limit in limits)
]


@pytest.mark.parametrize("q_axis", [0, 1])
@pytest.mark.parametrize("width", [64, 128])
def test_hide_outside_is_allowed(q_axis, width):
    shape = (64, width)
    rng = np.random.default_rng(0)
    scores = jnp.asarray(rng.standard_normal(shape).astype(np.float32))
    q0, kv0 = 32, 24
    q_pos = q0 + lax.broadcasted_iota(jnp.int32, shape, q_axis)
    kv_pos = kv0 + lax.broadcasted_iota(jnp.int32, shape, 1 - q_axis)
    for bounds in BOUNDS:
        present = {n: b for n, b in vars(bounds).items() if b is not None}
        values = jnp.array([*present.values()], jnp.int32)

        def body(scores_ref, values_ref, out_ref, present=present):
            traced = masks.Bounds(**{n: values_ref[i] for i, n in enumerate(present)})
            tile = plgpu.load(scores_ref, layout=registers.ACC_LAYOUT, optimized=False)
            hidden = op.hide_outside(tile, traced, jnp.int32(q0), jnp.int32(kv0), q_axis)
            out_ref[...] = hidden

        got = _accumulator_kernel(body, shape, scores, values)
        wanted = masks.hide(scores, bounds.allowed(q_pos, kv_pos))
        np.testing.assert_array_equal(got, wanted, err_msg=str(bounds))


@pytest.mark.parametrize("where", [True, False])
@pytest.mark.parametrize(("m", "n"), [(64, 64), (64, 32), (128, 64)])
def test_add_dq_and_its_order(m, n, where):
    rng = np.random.default_rng(0)
    tile = jnp.asarray(rng.standard_normal((m, n)).astype(np.float32))
    start = jnp.asarray(rng.standard_normal(m * n).astype(np.float32))

    def add(tile, start):
        buffer = jax.new_ref(start)

        def body(tile_ref, buffer_ref, out_ref):
            value = plgpu.load(tile_ref, layout=registers.ACC_LAYOUT, optimized=False)
            op.add_dq(value, buffer_ref, where=lax.axis_index("wg") == (0 if where else 1))
            out_ref[...] = plgpu.layout_cast(jnp.zeros((64, 8), jnp.float32), registers.ACC_LAYOUT)

        done = _accumulator_kernel(body, (64, 8), tile, buffer)
        return op.order_dq(jax.freeze(buffer), m, n), done

    got, _ = jax.jit(add)(tile, start)
    wanted = tile if where else jnp.zeros_like(tile)
    np.testing.assert_allclose(got - op.order_dq(start, m, n), wanted, atol=1e-5)


@pytest.mark.parametrize("where", [True, False])
@pytest.mark.parametrize(("dtype", "n"), [("bfloat16", 64), ("float16", 48)])
def test_store_dq(dtype, n, where):
    """To a part of some rows of one head; the rest stays as it was."""
    rng = np.random.default_rng(0)
    tile = jnp.asarray(rng.standard_normal((64, n)).astype(np.float32))
    start = jnp.asarray(rng.standard_normal((2, 192, 3, 128)), dtype)
    at = 1, slice(64, 128), 2, slice(16, 16 + n)

    def store(tile, start):
        buffer = jax.new_ref(start)

        def body(tile_ref, buffer_ref, out_ref):
            value = plgpu.load(tile_ref, layout=registers.ACC_LAYOUT, optimized=False)
            part = buffer_ref.at[1, pl.ds(64, 64), 2, pl.ds(16, n)]
            where_wg = lax.axis_index("wg") == (0 if where else 1)
            op.store_dq(value.astype(dtype), part, where=where_wg)
            out_ref[...] = plgpu.layout_cast(jnp.zeros((64, 8), jnp.float32), registers.ACC_LAYOUT)

        done = _accumulator_kernel(body, (64, 8), tile, buffer)
        return jax.freeze(buffer), done

    got, _ = jax.jit(store)(tile, start)
    wanted = start.at[at].set(tile.astype(dtype)) if where else start
    np.testing.assert_array_equal(got.astype(np.float32), wanted.astype(np.float32))


def test_any_greater_is_true_where_a_row_of_the_warp_is():
    """A warp holds 16 rows: only the warp with the greater row changes its values."""
    rows = jnp.zeros(64).at[37].set(1.0)  # warp 2

    def body(rows_ref, out_ref):
        values = plgpu.load(rows_ref, layout=registers.ROW_LAYOUT, optimized=False)
        zero = plgpu.layout_cast(jnp.zeros((64,), jnp.float32), registers.ROW_LAYOUT)
        ones = plgpu.layout_cast(jnp.ones((64, 8), jnp.float32), registers.ACC_LAYOUT)
        greater = op.any_greater(values, zero)
        out_ref[...] = lax.cond(greater, lambda: ones * 2.0, lambda: ones)

    got = _accumulator_kernel(body, (64, 8), rows)
    wanted = np.ones((64, 8))
    wanted[32:48] = 2.0
    np.testing.assert_array_equal(got, wanted)


def test_token_orders_two_warpgroups():
    """Warpgroup 0 must write before warpgroup 1 reads: the token carries that."""

    def body(out_ref, shared):
        wg = lax.axis_index("wg")

        @pl.when(wg == 0)
        def _():
            shared[...] = plgpu.layout_cast(
                jnp.full((64, 8), 3.0, jnp.float32), registers.ACC_LAYOUT
            )
            op.fence_async()
            op.token_pass(jnp.int32(1), 2)

        @pl.when(wg == 1)
        def _():
            op.token_take(wg)
            out_ref[...] = plgpu.load(shared, layout=registers.ACC_LAYOUT, optimized=False)

    got = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((64, 8), jnp.float32),
        scratch_types=[plgpu.SMEM((64, 8), jnp.float32)],
        num_threads=2,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )()
    np.testing.assert_array_equal(got, np.full((64, 8), 3.0))


def test_persistent_accumulator_keeps_adding():
    """set, issue twice, read with one product in flight, read the rest."""
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.standard_normal((64, 64)), jnp.bfloat16) for _ in range(2))
    tile = plgpu.SMEM(
        (64, 64),
        jnp.bfloat16,
        transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)),
    )

    def body(a_ref, b_ref, out_ref, a_smem, b_smem, ready):
        plgpu.copy_gmem_to_smem(a_ref, a_smem, ready)
        plgpu.copy_gmem_to_smem(b_ref, b_smem, ready)
        plgpu.barrier_wait(ready)

        def scoped(acc, other):
            op.set(acc, plgpu.layout_cast(jnp.ones((64, 64), jnp.float32), registers.ACC_LAYOUT))
            op.wgmma(acc, a_smem, b_smem)
            op.wgmma(other, a_smem, b_smem)
            first = op.load(acc, 1)
            op.wait(0)
            return first + op.load(other, None)

        shape = (64, 64)
        out_ref[...] = op.with_accumulators(scoped, {}, 0, acc=shape, other=shape)

    got = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((64, 64), jnp.float32),
        scratch_types=[tile, tile, plgpu.Barrier(num_arrivals=2)],
        num_threads=1,
        thread_name="wg",
    )(a, b)
    wanted = 1 + 2 * np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    np.testing.assert_allclose(got, wanted, atol=1e-3)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(("rows", "width"), [(16, 128), (32, 64), (48, 192)])
def test_some_rows_of_a_product(rows, width, dtype):
    """In sixteens, onto products in flight: other rows, and all of them."""
    rng = np.random.default_rng(0)
    a = jnp.asarray(rng.standard_normal((64, 64)), dtype)
    b = jnp.asarray(rng.standard_normal((64, width)), dtype)

    def body(a_ref, b_ref, out_ref, b_smem, ready):
        plgpu.copy_gmem_to_smem(b_ref, b_smem, ready)
        plgpu.barrier_wait(ready)

        def scoped(acc):
            left = plgpu.load(a_ref, layout=registers.ACC_LAYOUT, optimized=False)
            op.wgmma(acc, left, b_smem)
            op.wgmma_rows(acc, left[:, :rows], b_smem, 0)
            op.wgmma_rows(acc, left[:, :rows], b_smem, 64 - rows)
            return op.load(acc)

        out_ref[...] = op.with_accumulators(scoped, {}, 0, acc=(64, width))

    got = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((64, width), jnp.float32),
        scratch_types=[tiled_smem((64, width), dtype), plgpu.Barrier()],
        num_threads=1,
        thread_name="wg",
    )(a, b)
    left, right = np.asarray(a, np.float64), np.asarray(b, np.float64)
    wanted = left @ right + left[:, :rows] @ (right[:rows] + right[64 - rows :])
    np.testing.assert_allclose(got, wanted, atol=2e-3)


@pytest.mark.parametrize("has_start", [False, True])
@pytest.mark.parametrize("first", [query_parts.LSE, query_parts.DELTA])
@pytest.mark.parametrize("queries", [64, 128])
def test_statistic_in_every_row(queries, first, has_start):
    """What the tensor cores make of its parts is the float32 that was split, and is added to."""
    rng = np.random.default_rng(0)
    statistics = rng.standard_normal((2, queries)) * 10.0 ** rng.integers(-3, 4, (2, queries))
    statistics = jnp.asarray(statistics, jnp.float32).at[0, ::5].set(-jnp.inf)
    start = jnp.asarray(rng.standard_normal((64, queries)), jnp.float32)

    def body(statistics_ref, start_ref, out_ref, parts):
        for strip in range(queries // 64):
            rows = pl.ds(64 * strip, 64)
            row_of = lambda i, rows=rows: plgpu.load(
                statistics_ref.at[i, rows], layout=registers.ROW_LAYOUT, optimized=False
            )
            parts[rows] = query_parts.split(row_of(0), row_of(1))
        plgpu.commit_smem()

        def scoped(acc):
            onto = plgpu.load(start_ref, layout=registers.ACC_LAYOUT, optimized=False)
            op.set(acc, op.in_every_row(parts, first, onto if has_start else None))
            return op.load(acc)

        out_ref[...] = op.with_accumulators(scoped, {}, 0, acc=(64, queries))

    got = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((64, queries), jnp.float32),
        scratch_types=[plgpu.SMEM((queries, query_parts.COLUMNS), jnp.bfloat16)],
        num_threads=1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )(statistics, start)
    wanted = np.maximum(statistics[first // query_parts.DELTA], query_parts.HIDDEN)
    wanted = np.asarray(wanted, np.float64) + (np.asarray(start) if has_start else 0.0)
    np.testing.assert_allclose(got, np.broadcast_to(wanted, (64, queries)), rtol=3e-7, atol=1e-6)


@pytest.mark.parametrize("n", [64, 128])
@pytest.mark.parametrize("width", [64, 80, 96, 112, 128, 192, 256])
def test_rows_times_rows_from_zero(width, n):
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.standard_normal((m, width)), jnp.bfloat16) for m in (128, n))

    def issue(acc, a, b):
        op.set(acc, plgpu.layout_cast(jnp.ones((64, n), jnp.float32), registers.ACC_LAYOUT))
        op.wgmma_from_zero(acc, a.at[pl.ds(64, 64)], b)

    got = _product(
        issue,
        n,
        (a, tiled_smem(a.shape, a.dtype)),
        (b, tiled_smem(b.shape, b.dtype)),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )
    wanted = np.asarray(a, np.float64)[64:] @ np.asarray(b, np.float64).T
    np.testing.assert_allclose(got, wanted, atol=1e-3)


@pytest.mark.parametrize(
    ("width", "first", "n"), [(80, 0, 48), (80, 48, 32), (96, 64, 32), (112, 64, 48), (128, 64, 64)]
)
def test_transposed_rows_times_some_columns(width, first, n):
    """dq of one consumer: dS swizzled as K is, and whole swizzles of K's columns."""
    rng = np.random.default_rng(0)
    ds, k = (jnp.asarray(rng.standard_normal((128, m)), jnp.bfloat16) for m in (64, width))

    def issue(acc, ds, k):
        op.wgmma(acc, ds.transpose((1, 0)), k.at[:, pl.ds(first, n)])

    got = _product(
        issue,
        n,
        (ds, tiled_smem(ds.shape, ds.dtype, beside=width)),
        (k, tiled_smem(k.shape, k.dtype)),
    )
    wanted = np.asarray(ds, np.float64).T @ np.asarray(k, np.float64)[:, first : first + n]
    np.testing.assert_allclose(got, wanted, atol=1e-3)


def _product(issue, n: int, a, b, **how):
    """The accumulator [64, n] after issue(acc, a, b); each an array and where it lies, shared."""

    def body(a_ref, b_ref, out_ref, a_smem, b_smem, ready):
        plgpu.copy_gmem_to_smem(a_ref, a_smem, ready)
        plgpu.copy_gmem_to_smem(b_ref, b_smem, ready)
        plgpu.barrier_wait(ready)

        def scoped(acc):
            issue(acc, a_smem, b_smem)
            return op.load(acc)

        out_ref[...] = op.with_accumulators(scoped, {}, 0, acc=(64, n))

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((64, n), jnp.float32),
        scratch_types=[a[1], b[1], plgpu.Barrier(num_arrivals=2)],
        num_threads=1,
        thread_name="wg",
        **how,
    )(a[0], b[0])


def _loaded(load, shape, *arrays):
    """What load(*refs) gives, an accumulator of `shape`, as float32."""

    def body(*refs):
        *refs, out_ref = refs
        out_ref[...] = load(*refs).astype(jnp.float32)

    return np.asarray(_accumulator_kernel(body, shape, *arrays))


def _part(whole, q0, kv0, shape, q_axis):
    """The tile of a [q or 1, kv or 1] array, its last row and column repeated past its end."""
    num_q, num_kv = shape if q_axis == 0 else shape[::-1]
    q = np.minimum(np.arange(q0, q0 + num_q), whole.shape[0] - 1)
    kv = np.minimum(np.arange(kv0, kv0 + num_kv), whole.shape[1] - 1)
    tile = whole[q][:, kv]
    return tile if q_axis == 0 else tile.T


def _inside(sizes, q0, kv0, q_axis):
    """Rows and columns of a tile that lie in the array."""
    inside = [128 if n == 1 else n - first for n, first in zip(sizes, (q0, kv0), strict=True)]
    return inside if q_axis == 0 else inside[::-1]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("sizes", [(256, 256), (200, 211), (200, 264), (1, 200), (200, 1)])
@pytest.mark.parametrize("q_axis", [0, 1])
def test_load_tile(q_axis, sizes, dtype):
    array = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, *sizes)), dtype)
    q0, kv0, shape = 128, 64, (64, 128)
    is_whole = sizes == (256, 256)
    load = lambda ref: op.load_tile(ref, (1, 2), q0, kv0, shape, q_axis, whole=is_whole)
    got = _loaded(load, shape, array)
    whole = np.asarray(array[1, 2], np.float32)
    wanted = _part(whole, q0, kv0, shape, q_axis)
    rows, cols = _inside(sizes, q0, kv0, q_axis)
    np.testing.assert_array_equal(got[:rows, :cols], wanted[:rows, :cols])


@pytest.mark.parametrize("sizes", [(256, 256), (200, 211), (1, 200), (200, 1)])
@pytest.mark.parametrize("q_axis", [0, 1])
def test_load_bits(q_axis, sizes):
    mask = np.random.default_rng(0).random((2, 3, *sizes)) < 0.5
    q0, kv0, shape = 128, 64, (64, 128)
    packed = visits._packed(jnp.asarray(mask), axis=3 if q_axis == 0 else 2)
    got = _loaded(lambda ref: op.load_bits(ref, (1, 2), q0, kv0, shape, q_axis), shape, packed) != 0
    wanted = _part(mask[1, 2], q0, kv0, shape, q_axis)
    rows, cols = _inside(sizes, q0, kv0, q_axis)
    np.testing.assert_array_equal(got[:rows, :cols], wanted[:rows, :cols])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("q_axis", [0, 1])
def test_load_staged(q_axis, width, dtype):
    """A tile by TMA into swizzled shared memory, the second 64 rows of it into registers."""
    sizes = (128, width) if q_axis == 0 else (width, 128)
    array = jnp.asarray(np.random.default_rng(0).standard_normal(sizes), dtype)

    def body(array_ref, out_ref, tiles, ready):
        tile = tiles.at[jnp.int32(1)]
        plgpu.copy_gmem_to_smem(array_ref, tile, ready)
        plgpu.barrier_wait(ready)
        out_ref[...] = op.load_staged(tile, 64, (64, width), q_axis)

    got = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((64, width), jnp.float32),
        scratch_types=[tiled_smem((2, *sizes), dtype), plgpu.Barrier()],
        num_threads=1,
        thread_name="wg",
    )(array)
    whole = np.asarray(array, np.float32)
    np.testing.assert_array_equal(got, whole[64:] if q_axis == 0 else whole[:, 64:].T)


@pytest.mark.parametrize("axis", [0, 1])
def test_load_along(axis):
    values, shape = jnp.arange(300, dtype=jnp.int32), (64, 128)
    got = _loaded(lambda ref: op.load_along(ref, 100, shape, axis), shape, values)
    wanted = 100 + np.indices(shape)[axis]
    np.testing.assert_array_equal(got, wanted)


def test_count_from():
    shape = (64, 128)
    count = lambda ref: op.count_from(ref[0], shape, row_step=-3, col_step=2)
    got = _loaded(count, shape, jnp.array([7], jnp.int32))
    row, col = np.indices(shape)
    np.testing.assert_array_equal(got, 7 - 3 * row + 2 * col)


def test_all_within_asks_each_warp():
    """A warp holds 16 rows: only the warp with the large value answers no."""
    tile = jnp.zeros((64, 64)).at[37, 5].set(-1.0)

    def body(tile_ref, out_ref):
        values = plgpu.load(tile_ref, layout=registers.ACC_LAYOUT, optimized=False)
        ones = plgpu.layout_cast(jnp.ones((64, 8), jnp.float32), registers.ACC_LAYOUT)
        out_ref[...] = lax.cond(op.all_within(values, 0.9), lambda: ones * 2.0, lambda: ones)

    wanted = np.full((64, 8), 2.0)
    wanted[32:48] = 1.0
    np.testing.assert_array_equal(_accumulator_kernel(body, (64, 8), tile), wanted)


def _reciprocals(tile, **options):
    def body(tile_ref, out_ref):
        values = plgpu.load(tile_ref, layout=registers.ACC_LAYOUT, optimized=False)
        out_ref[...] = op.reciprocal(values, **options)

    return np.asarray(_accumulator_kernel(body, tile.shape, tile))


def test_reciprocal():
    """Of infinity 0, as a tanh wants it."""
    tile = jnp.exp2(jnp.linspace(0.0, 127.0, 64 * 64).reshape(64, 64)).at[3, 5].set(jnp.inf)
    tiny = float(jnp.finfo(jnp.float32).tiny)  # below it the instruction gives 0
    np.testing.assert_allclose(_reciprocals(tile), 1 / np.asarray(tile), rtol=3e-7, atol=tiny)


@pytest.mark.parametrize("pair_axis", [0, 1])
def test_reciprocals_of_pairs(pair_axis):
    """Infinity is 2^60, whatever its neighbour is; NaN reaches one neighbour, along the axis."""
    tile = jnp.exp2(jax.random.uniform(jax.random.key(0), (64, 64)) * 127).at[3, 5].set(jnp.inf)
    got = _reciprocals(tile, pair_axis=pair_axis)
    np.testing.assert_allclose(got, 1 / np.minimum(tile, 2.0**60), rtol=6e-7)
    got = _reciprocals(tile.at[17, 6].set(jnp.nan), pair_axis=pair_axis)
    neighbour = (25, 6) if pair_axis == 0 else (17, 7)
    assert {tuple(at) for at in np.argwhere(np.isnan(got))} == {(17, 6), neighbour}
