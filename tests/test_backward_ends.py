"""What runs before and after the fused backward: in interpret mode, and as compiled on a GPU."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_flash.config import BackwardConfig
from pallas_flash.kernels.sm90 import backward_ends, backward_launch, mma, query_parts
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


@dataclasses.dataclass(frozen=True)
class Variant:
    """What a launch may ask of `row_statistics`, and what it may be given."""

    has_dlse: bool = True
    has_scales: bool = True  # one a batch row
    soft_cap: bool = False
    dropout_rate: float = 0.0
    make_dq: bool = True
    split: str = "keys"


VARIANTS = {
    "no-dlse": Variant(has_dlse=False),
    "one-scale": Variant(has_scales=False),
    "soft-cap": Variant(soft_cap=True),
    "dropout": Variant(dropout_rate=0.25),
    "dropout-no-dlse": Variant(has_dlse=False, dropout_rate=0.25),
    "no-dq": Variant(make_dq=False),
    "roles": Variant(split="roles"),
    "roles-soft-cap": Variant(split="roles", soft_cap=True),
    "roles-dropout": Variant(split="roles", dropout_rate=0.25),
}


def _launch(case: Case, variant: Variant, interpret: bool) -> backward_launch.Launch:
    """Two tiles of keys: in interpret mode each adds into a dq of its own."""
    terms = {"soft_cap"} if variant.soft_cap else set()
    return backward_launch.Launch(
        batch=case.batch,
        q_len=case.q_len,
        kv_len=200,
        num_q_heads=case.num_heads,
        num_kv_heads=case.num_heads,
        head_dim=case.head_dim,
        head_dim_v=case.head_dim_v,
        dtype=case.dtype,
        terms=frozenset(terms),
        dropout_rate=variant.dropout_rate,
        config=_config(case, variant),
        make_dq=variant.make_dq,
        interpret=interpret,
    )


def _config(case: Case, variant: Variant) -> BackwardConfig:
    block_kv = 64 if variant.split == "roles" else 128
    return BackwardConfig(split=variant.split, block_q=case.block_q, block_kv=block_kv)


@dataclasses.dataclass
class Given:
    """What `row_statistics` reads: NaN and Inf behind lengths, lse -inf in every third row."""

    out: np.ndarray
    dout: np.ndarray
    lse: np.ndarray
    dlse: np.ndarray
    scale: np.ndarray
    soft_cap: np.ndarray


def _given(case: Case) -> Given:
    rng = np.random.default_rng(0)
    shape = case.batch, case.padded, case.num_heads, case.head_dim_v
    out, dout = (rng.normal(size=shape).astype(jnp.dtype(case.dtype)) for _ in range(2))
    rows = case.batch, case.num_heads, case.q_len
    lse, dlse = (rng.normal(size=rows).astype(np.float32) for _ in range(2))
    lse[..., 1::3] = -np.inf
    for x, spoiled in ((out, np.nan), (dout, np.inf)):
        x[~case.valid(case.padded)] = spoiled
    dlse.swapaxes(1, 2)[~case.valid(case.q_len)] = np.nan
    scale = 0.3 + np.arange(case.batch, dtype=np.float32)
    return Given(out, dout, lse, dlse, scale, 7.0 * scale)


def _wanted(case: Case, variant: Variant, given: Given) -> tuple[np.ndarray, np.ndarray]:
    """-lse and -delta (B, N, tiles * block_q) in float64, from the definition.

    With a soft cap log2 of 4 exp(cap - lse) for the first.
    """
    rows = case.tiles * case.block_q
    pads = ((0, 0), (0, 0), (0, rows - case.q_len))
    pad = lambda x, fill: np.pad(x.astype(np.float64), pads, constant_values=fill)
    sees = (pad(given.lse, -np.inf) > -np.inf) & case.valid(rows)[:, None]
    dots = np.einsum("btnh,btnh->bnt", *(x.astype(np.float64) for x in (given.out, given.dout)))
    delta = dots[..., : case.q_len] - (given.dlse if variant.has_dlse else 0.0)
    neg_delta = np.where(sees, -pad(delta, 0.0) * (1 - variant.dropout_rate), 0.0)
    lse, per_row = pad(given.lse, 0.0), lambda x: x[:, None, None]
    if variant.soft_cap:
        neg_lse = 2 + (per_row(given.soft_cap) - lse) * np.log2(np.e)
    else:
        neg_lse = -lse / per_row(given.scale)
    return np.where(sees, neg_lse, -np.inf), neg_delta


def _check_statistics(case: Case, variant: Variant, interpret: bool) -> None:
    given, launch = _given(case), _launch(case, variant, interpret)
    if not variant.has_scales:
        given.scale, given.soft_cap = given.scale[:1], given.soft_cap[:1]
    lengths = case.launch_arguments()["query_lengths"]
    dlse = given.dlse if variant.has_dlse else None
    soft_cap = given.soft_cap if variant.soft_cap else None
    run = lambda *x: backward_ends.row_statistics(launch, *x, query_lengths=lengths)
    with races_raise():
        made = jax.jit(run)(given.out, given.dout, given.lse, dlse, given.scale, soft_cap)
        made = jax.tree.map(np.asarray, made)
    names = launch.statistics
    made_names = [n for n in ("parts", "neg_lse", "neg_delta") if getattr(made, n) is not None]
    assert made_names == [*names]
    told = launch.config.statistics(soft_cap=variant.soft_cap, dropout=variant.dropout_rate > 0)
    rows = case.batch * case.num_heads * case.tiles * case.block_q
    assert {n: getattr(made, n).nbytes // rows for n in names} == told
    wanted = dict(zip(("neg_lse", "neg_delta"), _wanted(case, variant, given), strict=True))
    for name in {*names} - {"parts"}:
        got = getattr(made, name)
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, wanted[name], rtol=1e-5, atol=1e-5)
    if "parts" in names:
        _check_parts(made.parts, **wanted)
    np.testing.assert_allclose(made.total_neg_delta(), wanted["neg_delta"], rtol=1e-5, atol=1e-5)
    assert (made.dq is not None) == variant.make_dq
    if variant.make_dq:
        shape = case.batch, case.num_heads * case.tiles, case.block_q * case.head_dim
        np.testing.assert_array_equal(
            made.dq, np.zeros((launch.num_kv_tiles if interpret else 1, *shape), np.float32)
        )


def _check_parts(parts, neg_lse, neg_delta) -> None:
    """Three of each statistic, which are finite: the product multiplies some of them by zero."""
    assert parts.dtype == jnp.bfloat16
    assert np.isfinite(parts.astype(np.float32)).all()
    assert (parts[..., [3, 7]] == 0).all()
    finite = np.maximum(neg_lse, query_parts.HIDDEN)
    for first, wanted in ((query_parts.LSE, finite), (query_parts.DELTA, neg_delta)):
        got = query_parts.total(parts, first)
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_row_statistics(case, interpret):
    _check_statistics(case, Variant(), interpret)


CASES_OF_VARIANTS = {
    "ragged-strip-without-rows": CASES["ragged-strip-without-rows"],
    "two-tiles-lengths-float16": Case(
        72, 128, 128, block_q=64, lengths=(70, 0), num_heads=1, dtype="float16"
    ),
}


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
@pytest.mark.parametrize("name", CASES_OF_VARIANTS)
def test_variants_of_row_statistics(name, variant, interpret):
    _check_statistics(CASES_OF_VARIANTS[name], variant, interpret)


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
