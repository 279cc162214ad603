"""The fused backward in Pallas' interpret mode, against float64 gradients written out in NumPy."""

import dataclasses
import heapq

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash import dropout, hardware, masks
from pallas_flash.config import BackwardConfig
from pallas_flash.kernels.sm90 import backward, backward_keys, backward_launch, backward_roles
from pallas_flash.kernels.sm90.call import Extras
from tests.interpreted import int32, interpreted
from tests.races import MISSING_WAIT, races_raise
from tests.spoiled import spoiled

KEYS_64 = BackwardConfig(block_q=128)
KEYS_128 = BackwardConfig(block_q=64)
ROLES = BackwardConfig(split="roles", block_kv=64)


@dataclasses.dataclass(frozen=True)
class Case:
    """B the number of lengths, else `rows`; T, S true lengths; N query heads, K kv heads."""

    q_len: int = 136
    kv_len: int = 136
    num_q_heads: int = 1
    num_kv_heads: int = 1
    head_dim: int = 64
    head_dim_v: int = 64
    dtype: str = "bfloat16"
    config: BackwardConfig = KEYS_64
    causal_shift: int | None = None
    query_lengths: tuple[int, ...] | None = None
    kv_lengths: tuple[int, ...] | None = None
    make_dq: bool = True
    has_dq_factor: bool = False
    kv_parts: int = 1
    segments: bool = False
    dropout_rate: float = 0.0
    rows: int = 1

    @property
    def batch(self) -> int:
        return len(self.query_lengths or self.kv_lengths or (0,) * self.rows)

    @property
    def mask(self) -> masks.Mask:
        mask = masks.And()
        if self.causal_shift is not None:
            mask = mask & masks.Causal(self.causal_shift)
        if self.query_lengths or self.kv_lengths:
            mask = mask & masks.Lengths(bool(self.query_lengths), bool(self.kv_lengths))
        return mask & masks.Segments() if self.segments else mask

    def segment_ids(self, length: int) -> np.ndarray | None:
        """int32 (B, length): three documents, of equal shares of each sequence."""
        ids = np.arange(length, dtype=np.int32) * 3 // length
        return np.tile(ids, (self.batch, 1)) if self.segments else None

    def dropout_rows(self) -> jax.Array | None:
        if not self.dropout_rate:
            return None
        counters = dropout.counters((self.batch, self.num_q_heads, self.q_len), None, False)
        return jnp.stack(dropout.row_keys(jnp.array([5, 7], jnp.uint32), *counters), axis=2)


CASES = {
    "full": Case(q_len=256, kv_len=256),
    "causal-ragged": Case(q_len=203, kv_len=203, causal_shift=0),
    "bottom-right-more-keys": Case(q_len=72, kv_len=200, causal_shift=128),
    "bottom-right-more-queries": Case(q_len=300, kv_len=140, causal_shift=-160),
    "top-left-keys-nobody-sees": Case(q_len=100, kv_len=300, causal_shift=0),
    "top-left-more-queries": Case(q_len=300, kv_len=100, causal_shift=0),
    "gqa2-lengths": Case(
        q_len=200, kv_len=200, num_q_heads=2, query_lengths=(130, 0), kv_lengths=(70, 200)
    ),
    "kv-lengths": Case(q_len=136, kv_len=264, kv_lengths=(0, 1, 128, 200)),
    "query-lengths": Case(q_len=264, kv_len=136, query_lengths=(0, 1, 128, 200)),
    "lengths-bottom-right": Case(
        q_len=136, kv_len=264, causal_shift=128, query_lengths=(136, 9), kv_lengths=(264, 100)
    ),
    "f16": Case(dtype="float16", causal_shift=0),
    "no-dq": Case(q_len=200, kv_len=200, causal_shift=0, make_dq=False),
    "d128-causal-ragged": Case(
        q_len=203, kv_len=203, head_dim=128, head_dim_v=128, config=KEYS_128, causal_shift=0
    ),
    "d96-causal-ragged": Case(
        q_len=139, kv_len=139, head_dim=96, head_dim_v=96, config=KEYS_128, causal_shift=0
    ),
    "d80-96-lengths": Case(
        head_dim=80, head_dim_v=96, config=KEYS_128, query_lengths=(70,), kv_lengths=(130,)
    ),
    "d112-128-three-stages": Case(
        q_len=200,
        kv_len=100,
        head_dim=112,
        head_dim_v=128,
        dtype="float16",
        config=BackwardConfig(num_stages=3),
    ),
    "d80-no-dq": Case(head_dim=80, head_dim_v=80, config=KEYS_128, make_dq=False),
    "d128-64": Case(head_dim=128, head_dim_v=64, config=KEYS_128, kv_lengths=(130,)),
    "d64-128": Case(head_dim=64, head_dim_v=128, config=ROLES, causal_shift=0),
    "d192-128-ragged": Case(q_len=139, head_dim=192, head_dim_v=128, config=ROLES, causal_shift=0),
    "d256-causal": Case(
        q_len=192, kv_len=192, head_dim=256, head_dim_v=256, config=ROLES, causal_shift=0
    ),
    "d256-lengths": Case(
        head_dim=256, head_dim_v=256, config=ROLES, query_lengths=(100,), kv_lengths=(65,)
    ),
    "d256-no-dq": Case(head_dim=256, head_dim_v=256, config=ROLES, make_dq=False),
    "dq-stored": Case(q_len=256, kv_len=77, has_dq_factor=True, rows=2),
    "d128-dq-stored-causal-parts": Case(
        q_len=128,
        kv_len=128,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=128,
        head_dim_v=128,
        config=KEYS_128,
        causal_shift=0,
        has_dq_factor=True,
        kv_parts=2,
    ),
    "d96-80-dq-stored-dropout": Case(
        q_len=64,
        kv_len=128,
        head_dim=96,
        head_dim_v=80,
        config=KEYS_128,
        has_dq_factor=True,
        dropout_rate=0.3,
    ),
    "one-tile-of-keys-that-some-queries-do-not-see": Case(
        q_len=256, kv_len=128, causal_shift=-130, has_dq_factor=True
    ),
    "one-tile-of-keys-lengths": Case(
        q_len=128, kv_len=128, query_lengths=(0, 40, 128), has_dq_factor=True
    ),
    "parts-of-two-heads-lengths": Case(
        q_len=72,
        num_q_heads=8,
        num_kv_heads=2,
        causal_shift=64,
        kv_lengths=(130,),
        kv_parts=2,
    ),
    "parts-segments-dropout": Case(
        q_len=100, num_q_heads=4, kv_parts=2, segments=True, dropout_rate=0.3
    ),
    "parts-no-dq": Case(q_len=72, num_q_heads=3, causal_shift=64, kv_parts=3, make_dq=False),
    "parts-d256-causal-lengths": Case(
        q_len=72,
        kv_len=72,
        num_q_heads=4,
        head_dim=256,
        head_dim_v=256,
        config=ROLES,
        causal_shift=0,
        query_lengths=(70,),
        kv_lengths=(65,),
        kv_parts=2,
    ),
}


@dataclasses.dataclass
class Arrays:
    """Inputs in the low precision type, their float64 values, statistics and expected gradients."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray
    out: np.ndarray
    lse: np.ndarray
    dlse: np.ndarray
    delta: np.ndarray
    scale: np.ndarray
    grads: tuple[np.ndarray, np.ndarray, np.ndarray]


def _allowed(case: Case) -> np.ndarray:
    """Bool (B, T, S), from the definition and not from the mask algebra."""
    q, k = np.arange(case.q_len)[:, None], np.arange(case.kv_len)[None]
    out = np.ones((case.batch, case.q_len, case.kv_len), bool)
    if case.causal_shift is not None:
        out &= k <= q + case.causal_shift
    if case.query_lengths is not None:
        out &= q < np.array(case.query_lengths)[:, None, None]
    if case.kv_lengths is not None:
        out &= k < np.array(case.kv_lengths)[:, None, None]
    q_ids, kv_ids = case.segment_ids(case.q_len), case.segment_ids(case.kv_len)
    if q_ids is not None and kv_ids is not None:
        out &= q_ids[:, :, None] == kv_ids[:, None]
    return out


def _kept(case: Case) -> np.ndarray | float:
    """What dropout multiplies weights by, (B, N, T, S)."""
    rows = case.dropout_rows()
    if rows is None:
        return 1.0
    words = rows[:, :, 0, :, None], rows[:, :, 1, :, None]
    keep = dropout.keep_in_row(words, jnp.arange(case.kv_len), case.dropout_rate)
    return np.asarray(keep) / (1 - case.dropout_rate)


def _arrays(case: Case) -> Arrays:
    rng = np.random.default_rng(0)
    sizes = (case.q_len, case.kv_len, case.kv_len, case.q_len)
    heads = (case.num_q_heads, case.num_kv_heads, case.num_kv_heads, case.num_q_heads)
    dims = (case.head_dim, case.head_dim, case.head_dim_v, case.head_dim_v)
    low = [
        rng.normal(size=(case.batch, t, n, h)).astype(jnp.dtype(case.dtype))
        for t, n, h in zip(sizes, heads, dims, strict=True)
    ]
    q, k, v, dout = (x.astype(np.float64) for x in low)
    group = case.num_q_heads // case.num_kv_heads
    k, v = (np.repeat(x, group, axis=2) for x in (k, v))
    scale = np.full(case.batch, case.head_dim**-0.5) * (1 + 0.1 * np.arange(case.batch))
    dlse = rng.normal(size=(case.batch, case.num_q_heads, case.q_len))

    hidden = ~_allowed(case)[:, None]
    logits = np.einsum("btnh,bsnh->bnts", q, k) * scale[:, None, None, None]
    logits = np.where(hidden, -np.inf, logits)
    top = logits.max(-1, keepdims=True)
    p = np.exp(logits - np.where(np.isfinite(top), top, 0.0))
    total = p.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (np.log(total) + np.where(np.isfinite(top), top, 0.0))[..., 0]
    p = p / np.where(total == 0, 1.0, total)
    kept = _kept(case)
    out = np.einsum("bnts,bsnh->btnh", p * kept, v).astype(low[0].dtype)
    delta = np.einsum("btnh,btnh->bnt", out.astype(np.float64), dout) - dlse
    ds = p * (kept * np.einsum("btnh,bsnh->bnts", dout, v) - delta[..., None])
    dq = np.einsum("bnts,bsnh->btnh", ds, k)
    dk = np.einsum("bnts,btnh->bsnh", ds, q) * scale[:, None, None, None]
    dv = np.einsum("bnts,btnh->bsnh", p * kept, dout)
    dk, dv = (x.reshape(*x.shape[:2], -1, group, x.shape[-1]).sum(3) for x in (dk, dv))
    return Arrays(*low, out, lse, dlse, delta, scale, (dq, dk, dv))


def _run(case: Case, arrays: Arrays):
    """dq, dk, dv as NumPy float64, without padding."""
    f32 = lambda x: np.asarray(x, np.float32)
    dlse = arrays.dlse.copy()
    for row, length in zip(dlse, case.query_lengths or (), strict=bool(case.query_lengths)):
        row[:, length:] = np.nan

    run = interpreted(
        backward.flash_backward,
        mask=case.mask,
        q_len=case.q_len,
        kv_len=case.kv_len,
        dropout_rate=case.dropout_rate,
        config=case.config,
        make_dq=case.make_dq,
        kv_parts=case.kv_parts,
    )

    with races_raise():
        made = run(
            spoiled(arrays.q, case.query_lengths),
            spoiled(arrays.k, case.kv_lengths),
            spoiled(arrays.v, case.kv_lengths),
            spoiled(arrays.out, case.query_lengths),
            spoiled(arrays.dout, case.query_lengths),
            f32(arrays.lse),
            f32(dlse),
            f32(arrays.scale),
            dq_factor=f32(-arrays.scale) if case.has_dq_factor else None,
            extras=Extras(
                query_lengths=int32(case.query_lengths),
                kv_lengths=int32(case.kv_lengths),
                query_segments=int32(case.segment_ids(case.q_len)),
                kv_segments=int32(case.segment_ids(case.kv_len)),
                dropout_rows=case.dropout_rows(),
            ),
        )
        made = jax.tree.map(np.asarray, made)
    assert made.dbias is None
    grads = [made.dq, *(_sum_of_parts(g, case.kv_parts) for g in (made.dk, made.dv))]
    sizes = (case.q_len, case.kv_len, case.kv_len)
    return [
        None if g is None else g.astype(np.float64)[:, :n]
        for g, n in zip(grads, sizes, strict=True)
    ]


def _sum_of_parts(grad: np.ndarray, parts: int) -> np.ndarray:
    """(B, S, K * parts, H) -> (B, S, K, H), rounded as the whole sum is."""
    sums = grad.reshape(*grad.shape[:2], -1, parts, grad.shape[3])
    return sums.astype(np.float32).sum(3).astype(grad.dtype)


def _check(case: Case) -> None:
    arrays = _arrays(case)
    got = _run(case, arrays)
    assert (got[0] is not None) == case.make_dq
    bound = 4 * float(jnp.finfo(case.dtype).eps)
    lengths = (case.query_lengths, case.kv_lengths, case.kv_lengths)
    dq, dk, dv = arrays.grads
    if case.has_dq_factor:
        dq = -dq * arrays.scale[:, None, None, None]
    for name, g, want, cut in zip("dq dk dv".split(), got, (dq, dk, dv), lengths, strict=True):
        if g is None:
            continue
        assert np.isfinite(g).all(), name
        assert np.abs(g - want).max() <= bound * max(1.0, np.abs(want).max()), name
        for row, length in zip(g, cut or (), strict=bool(cut)):
            assert not row[length:].any(), f"{name} behind its length"


@pytest.mark.parametrize("name", CASES)
def test_gradients(name):
    _check(CASES[name])


@pytest.mark.parametrize("config", [KEYS_64, ROLES], ids=["keys", "roles"])
def test_a_missing_wait_is_seen(monkeypatch, config):
    """The test of the tests: consumers that do not wait for the tile of q and dout must fail."""
    split = dict(keys=backward_keys, roles=backward_roles)[config.split]
    whole = split._step

    def careless(c, *args):
        wait = plgpu.barrier_wait

        def all_but_tile(barrier):
            if barrier.ref is not c.block.bars.tile_ready:
                wait(barrier)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plgpu, "barrier_wait", all_but_tile)
            return whole(c, *args)

    monkeypatch.setattr(split, "_step", careless)
    with pytest.raises(RuntimeError, match=MISSING_WAIT):
        _check(Case(config=config))


def test_parts_that_do_not_share_out_the_heads_are_refused():
    case = Case(num_q_heads=4, kv_parts=3)
    with pytest.raises(ValueError, match="kv_parts=3 must divide the 4 query heads"):
        _run(case, _arrays(case))


def test_tiles_that_do_not_fit_are_refused():
    """Before anything is compiled, with the number of bytes."""
    case = Case(config=dataclasses.replace(KEYS_64, num_stages=3))
    with pytest.raises(ValueError, match="bytes of shared memory"):
        _run(case, _arrays(case))


@pytest.mark.parametrize(
    ("batch", "bias", "changes", "peers"),
    [
        (4, (1, 2, 256, 256), {}, 4),  # a cluster of the rows that share it
        (4, (4, 2, 256, 256), {}, 1),  # a block has its own
        (1, (1, 2, 256, 256), {}, 1),
        (3, (1, 2, 256, 256), {}, 0),  # no cluster of three
        (4, (1, 1, 256, 256), {}, 0),  # heads share it, too
        (4, (1, 2, 1, 256), {}, 0),
        (4, (1, 2, 256, 256), dict(bias_dtype="float32"), 0),
        (4, (1, 2, 256, 256), dict(bias_dtype="float16"), 0),  # dS is bfloat16
        (4, (1, 2, 256, 256), dict(head_dim=96), 0),  # dS lies in narrow lines
        (4, (1, 2, 256, 256), dict(terms=frozenset({"bias", "kv_lengths"})), 0),  # walks differ
        (4, (1, 2, 256, 200), dict(kv_len=200), 0),  # a tile is cut
        (4, (1, 2, 256, 256), dict(make_dq=False), 0),  # dS is not in shared memory
    ],
)
def test_who_stores_the_gradient_of_a_bias(batch, bias, changes, peers):
    sizes = dict(head_dim=128, head_dim_v=128, q_len=256, kv_len=256, terms=frozenset({"bias"}))
    launch = backward_launch.Launch(
        batch=batch,
        num_q_heads=2,
        num_kv_heads=2,
        dtype="bfloat16",
        config=BackwardConfig(),
        make_dbias=True,
        **sizes | {name: x for name, x in changes.items() if name != "bias_dtype"},
    )
    array = jax.ShapeDtypeStruct(bias, changes.get("bias_dtype", "bfloat16"))
    assert backward._peers(launch, Extras(bias=array)) == peers


@pytest.mark.parametrize(
    ("mask", "q_len", "kv_len", "stores"),
    [
        (masks.And(), 256, 128, True),
        (masks.And(), 256, 77, True),
        (masks.And(), 256, 129, False),
        (masks.And(), 200, 128, False),  # a tile of queries that is not whole
        (masks.Causal(), 128, 128, True),
        (masks.Causal(-1), 128, 128, False),  # the first query sees nothing, nor might its tile
        (masks.Causal(1) & masks.Causal(0), 128, 1, True),
        (masks.Window(True, False), 128, 128, False),  # of a run-time width
        (masks.Lengths(True, False), 128, 128, False),
        (masks.Segments(), 128, 128, False),
    ],
)
def test_who_stores_dq(mask, q_len, kv_len, stores):
    assert KEYS_64.stores_dq(mask, q_len, kv_len) == stores
    assert not ROLES.stores_dq(mask, q_len, min(kv_len, 64))


def _launch(*, length, heads, kv_heads, mask, batch=1):
    return backward_launch.Launch(
        batch=batch,
        num_q_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=128,
        head_dim_v=128,
        q_len=length,
        kv_len=length,
        dtype="bfloat16",
        mask=mask,
        config=KEYS_128,
    )


def _order(launch, monkeypatch) -> list[tuple[int, int]]:
    """(pair, tile of keys) of each block, in the order in which a GPU starts them."""
    index = {}
    monkeypatch.setattr(backward_launch.lax, "axis_index", lambda name: index[name])
    found = []
    for place in np.ndindex(*launch.grid.values()):
        index |= zip(launch.grid, place, strict=True)
        found.append(tuple(int(x) for x in launch.pair_and_tile()))
    return found


@pytest.mark.parametrize(
    ("length", "heads", "kv_heads", "has_axes"),
    [
        (8192, 32, 32, True),
        (4096, 64, 64, True),
        (2048, 128, 128, True),
        (2048, 256, 64, False),
        (16384, 16, 16, False),
    ],
)
def test_a_causal_launch_ends_with_short_walks(length, heads, kv_heads, has_axes, monkeypatch):
    """Each block once; and where the next free multiprocessor takes it, all end together."""
    launch = _launch(length=length, heads=heads, kv_heads=kv_heads, mask=masks.Causal())
    order = _order(launch, monkeypatch)
    assert launch.has_axes == has_axes
    assert sorted(order) == [*np.ndindex(kv_heads, length // 128)]
    work = lambda tile: (length // 64 - 2 * tile) * launch.heads_a_share + 4  # steps; once a block
    ends = [0] * hardware.SM90.num_sms
    for _, tile in order:
        heapq.heapreplace(ends, ends[0] + work(tile))
    even = sum(work(tile) for _, tile in order) / len(ends)
    assert max(ends) <= 1.04 * even


def test_equal_walks_are_not_interleaved(monkeypatch):
    launch = _launch(length=8192, heads=4, kv_heads=4, mask=masks.And())
    assert _order(launch, monkeypatch) == [*np.ndindex(4, 64)]


def test_more_groups_than_an_axis_has():
    launch = _launch(batch=65_536, length=128, heads=16, kv_heads=16, mask=masks.Causal())
    assert launch.grid == dict(block=65_536 * 16)
