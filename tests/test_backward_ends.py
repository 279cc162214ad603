"""What runs before and after the fused backward: in interpret mode, and as compiled on a GPU."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_flash.kernels.sm90 import backward_ends, mma
from tests.races import races_raise

STRIP = 64


@dataclasses.dataclass(frozen=True)
class Case:
    """B the number of lengths, or 2; T q_len rounded up to a multiple of 8."""

    q_len: int
    head_dim: int = 64
    head_dim_v: int = 64
    block_q: int = 128
    num_heads: int = 2
    lengths: tuple[int, ...] | None = None
    dtype: str = "bfloat16"

    @property
    def batch(self) -> int:
        return len(self.lengths or (0, 0))

    @property
    def padded(self) -> int:
        return -(-self.q_len // 8) * 8

    @property
    def tiles(self) -> int:
        return -(-self.q_len // self.block_q)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.padded, self.num_heads, self.head_dim

    def valid(self, length: int) -> np.ndarray:
        """Bool (B, length): the rows that mean something."""
        ends = np.array(self.lengths or (self.q_len,) * self.batch)
        return np.arange(length)[None] < ends[:, None]

    def launch_arguments(self):
        lengths = None if self.lengths is None else jnp.array(self.lengths, jnp.int32)
        return dict(q_len=self.q_len, query_lengths=lengths)


CASES = {
    "whole": Case(256),
    "short": Case(5, head_dim=128, head_dim_v=128, block_q=64),
    "ragged": Case(203, head_dim=128, head_dim_v=128, block_q=64),
    "ragged-strip-without-rows": Case(130),
    "lengths": Case(264, lengths=(0, 1, 130, 264), num_heads=1),
    "lengths-float16": Case(
        200, 128, 128, block_q=64, lengths=(64, 0, 200), num_heads=1, dtype="float16"
    ),
    "head-dims-differ": Case(136, head_dim=128, head_dim_v=64, block_q=64),
    "d80": Case(139, 80, 80, block_q=64, num_heads=3),
    "d96-112-lengths": Case(136, 96, 112, block_q=64, lengths=(100, 0), num_heads=1),
    "d192": Case(139, 192, 192, block_q=64, num_heads=3, lengths=(139, 65)),
    "d256": Case(136, 256, 256, block_q=64, lengths=(100,), num_heads=1),
}


@pytest.fixture(params=[True, pytest.param(False, marks=pytest.mark.gpu)], ids=["cpu", "gpu"])
def interpret(request) -> bool:
    if request.param and jax.default_backend() == "gpu":
        pytest.skip("interpret mode needs the CPU: set JAX_PLATFORMS=cpu")
    return request.param


def _arrays(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """out and dout in the low precision type: NaN and Inf behind lengths."""
    rng = np.random.default_rng(0)
    shape = case.batch, case.padded, case.num_heads, case.head_dim_v
    arrays = [rng.normal(size=shape).astype(jnp.dtype(case.dtype)) for _ in range(2)]
    for x, spoiled in zip(arrays, (np.nan, np.inf), strict=True):
        x[~case.valid(case.padded)] = spoiled
    return arrays[0], arrays[1]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_row_dots(case, interpret):
    out, dout = _arrays(case)
    arguments = case.launch_arguments()
    run = lambda *x: backward_ends.row_dots(*x, interpret=interpret, **arguments)
    with races_raise():
        delta = np.asarray(jax.jit(run)(out, dout))
    rows = -(-case.q_len // STRIP) * STRIP
    assert delta.shape == (case.batch, case.num_heads, rows)
    assert delta.dtype == np.float32
    wanted = np.einsum("btnh,btnh->btn", out.astype(np.float64), dout.astype(np.float64))
    got = delta.swapaxes(1, 2)[case.valid(rows)]
    np.testing.assert_allclose(got, wanted[case.valid(case.padded)], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("row", [2 * 4096, 64 * 80])
def test_zeros_after(row, interpret):
    shape = (3, 2, row)
    make = lambda x: backward_ends.zeros_after(x, shape, interpret=interpret)
    with races_raise():
        zeros = np.asarray(jax.jit(make)(jnp.ones(5)))
    np.testing.assert_array_equal(zeros, np.zeros(shape, np.float32))


def _gpu_order(part: np.ndarray) -> np.ndarray:
    """[..., m, n] -> [..., m * n] as `mma.GpuOps.add_dq` puts it, written out thread by thread."""
    m, n = part.shape[-2:]
    row, col = (np.arange(size) for size in (m, n))
    thread = row % 64 // 16 * 32 + row % 8 * 4
    at_row = row // 64 * (64 * n) + thread * 4 + row % 16 // 8 * 2
    at_col = col // 8 * 512 + col % 8 // 2 * 4 + col % 2
    flat = np.empty((*part.shape[:-2], m * n), part.dtype)
    flat[..., (at_row[:, None] + at_col).reshape(-1)] = part.reshape(*part.shape[:-2], -1)
    return flat


def _interpret_order(part: np.ndarray) -> np.ndarray:
    m, n = part.shape[-2:]
    part = part.reshape(*part.shape[:-2], m // 64, 64, n // 8, 8)
    return part.swapaxes(-3, -2).reshape(*part.shape[:-4], m * n)


def _buffer(case: Case, dq: np.ndarray, order) -> np.ndarray:
    """The buffer that the backward leaves for dq (B, tiles * block_q, N, H): parts in a row.

    The parts are those of `backward_keys` (two row halves of 128 rows, two parts of the columns of
    64) and of `backward_roles` (the columns of either role). NaN in strips that are not added into.
    """
    dq = dq.copy()
    for row, end in zip(dq, case.lengths or (case.q_len,) * case.batch, strict=True):
        row[-(-end // STRIP) * STRIP :] = np.nan
    tiles = dq.reshape(case.batch, case.tiles, case.block_q, case.num_heads, case.head_dim)
    tiles = tiles.transpose(0, 3, 1, 2, 4).reshape(case.batch, -1, case.block_q, case.head_dim)
    columns = -(-case.head_dim // 128) * 64
    parts = np.split(tiles, [64], 2) if case.block_q == 128 else np.split(tiles, [columns], 3)
    return np.concatenate([order(part) for part in parts if part.size], -1)[None]


def _dq(case: Case) -> np.ndarray:
    """float32 (B, tiles * block_q, N, H), zero where nothing is added."""
    rows = case.tiles * case.block_q
    shape = case.batch, rows, case.num_heads, case.head_dim
    dq = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    dq[~case.valid(rows)] = 0
    return dq


@pytest.mark.parametrize(("m", "n"), [(64, 128), (128, 64), (64, 256)])
def test_register_order_is_what_order_dq_undoes(m, n):
    tile = np.random.default_rng(0).normal(size=(3, m, n)).astype(np.float32)
    for order, op in ((_gpu_order, mma.GpuOps), (_interpret_order, mma.InterpretOps)):
        np.testing.assert_array_equal(op.order_dq(jnp.asarray(order(tile)), m, n), tile)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_finish_dq(case, dtype, interpret):
    if dtype == "bfloat16":
        dtype = case.dtype
    dq = _dq(case)
    factor = np.float32(0.3) + np.arange(case.batch, dtype=np.float32)
    buffer = _buffer(case, dq, _interpret_order if interpret else _gpu_order)
    if interpret:  # one slice a writer
        buffer = np.concatenate([buffer, buffer])
        factor /= 2

    def run(buffer, factor):
        return backward_ends.finish_dq(
            buffer,
            factor,
            shape=case.shape,
            dtype=jnp.dtype(dtype),
            block_q=case.block_q,
            interpret=interpret,
            **case.launch_arguments(),
        )

    got = np.asarray(jax.jit(run)(buffer, factor)).astype(np.float32)
    if interpret:
        factor *= 2
    wanted = (dq[:, : case.padded] * factor[:, None, None, None]).astype(jnp.dtype(dtype))
    rtol = 1e-6 if dtype == "float32" else 2.0**-7  # one step of bfloat16
    np.testing.assert_allclose(got, wanted.astype(np.float32), rtol=rtol, atol=0)
