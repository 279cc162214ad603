"""The forward kernel in interpret mode: numerics against float64, races, garbage behind lengths."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_flash import masks
from pallas_flash.config import ForwardConfig
from pallas_flash.kernels.sm90 import forward, mma, tiles
from pallas_flash.kernels.sm90.call import Extras
from pallas_flash.kernels.sm90.forward_common import Plan
from tests.interpreted import int32, interpreted
from tests.races import MISSING_WAIT, races_raise
from tests.spoiled import spoiled

TWO_OVERLAPPED = ForwardConfig(compute_wgs=2, block_kv=64, q_stages=2)
THREE_IN_TURN = ForwardConfig(
    compute_wgs=3, block_kv=64, overlap=False, q_stages=1, output_through_q=False
)
ONE_IN_TURN = ForwardConfig(
    compute_wgs=1, block_kv=64, num_stages=3, overlap=False, persistent=False, blocks_per_sm=2
)
CONFIGS = {
    "2-overlapped": TWO_OVERLAPPED,
    "3-in-turn": THREE_IN_TURN,
    "2-in-turn-no-schedule": dataclasses.replace(TWO_OVERLAPPED, overlap=False, persistent=False),
    "2-overlapped-threshold": dataclasses.replace(TWO_OVERLAPPED, rescale_threshold=8.0),
    "3-overlapped-kv128": dataclasses.replace(THREE_IN_TURN, overlap=True, block_kv=128),
    "3-in-turn-threshold": dataclasses.replace(THREE_IN_TURN, rescale_threshold=8.0),
}


@dataclasses.dataclass(frozen=True)
class Case:
    q_len: int = 136
    kv_len: int = 136
    num_q_heads: int = 1
    num_kv_heads: int = 1
    head_dim: int = 64
    head_dim_v: int = 64
    dtype: str = "bfloat16"
    mask: masks.Mask = masks.And()
    query_lengths: tuple[int, ...] | None = None
    kv_lengths: tuple[int, ...] | None = None
    window: tuple[int, int] | None = None

    @property
    def batch(self) -> int:
        lengths = self.kv_lengths or self.query_lengths
        return 1 if lengths is None else len(lengths)


def make_inputs(case: Case):
    rng = np.random.default_rng(0)
    dtype = jnp.dtype(case.dtype)

    def draw(rows, heads, dim):
        return rng.standard_normal((case.batch, rows, heads, dim)).astype(dtype)

    q = draw(case.q_len, case.num_q_heads, case.head_dim)
    k = draw(case.kv_len, case.num_kv_heads, case.head_dim)
    v = draw(case.kv_len, case.num_kv_heads, case.head_dim_v)
    scale = (0.3 / np.sqrt(case.head_dim) * (1 + np.arange(case.batch))).astype(np.float32)
    return q, k, v, scale


def reference(case: Case, q, k, v, scale):
    """out and lse in float64; garbage behind lengths must already be away."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, case.num_q_heads // case.num_kv_heads, axis=2) for x in (k, v))
    scores = np.einsum("bthd,bshd->bhts", q, k) * scale[:, None, None, None]
    for b in range(case.batch):
        values = mask_values(case, b)
        q_pos, kv_pos = np.arange(case.q_len)[:, None], np.arange(case.kv_len)[None]
        allowed = case.mask.allowed(q_pos, kv_pos, values)
        if allowed is not None:
            scores[b] = np.where(np.asarray(allowed), scores[b], -np.inf)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isinf(top), 0.0, top))
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = np.where(np.isinf(top), -np.inf, top + np.log(total))[..., 0]
    probs = weights / np.where(total == 0, 1.0, total)
    return np.einsum("bhts,bshd->bthd", probs, v), lse


def mask_values(case: Case, b: int) -> masks.MaskValues:
    return masks.MaskValues(
        query_length=None if case.query_lengths is None else case.query_lengths[b],
        kv_length=None if case.kv_lengths is None else case.kv_lengths[b],
        window_left=None if case.window is None else case.window[0],
        window_right=None if case.window is None else case.window[1],
    )


def run(case: Case, config: ForwardConfig, num_sms: int = 2):
    """Kernel and reference; checks that nothing is NaN before anything is compared."""
    q, k, v, scale = make_inputs(case)
    expected_out, expected_lse = reference(case, q, k, v, scale)

    attend = interpreted(
        forward.flash_forward,
        mask=case.mask,
        q_len=case.q_len,
        kv_len=case.kv_len,
        config=config,
        num_sms=num_sms,
    )

    with races_raise():
        out, lse = attend(
            spoiled(q, case.query_lengths),
            spoiled(k, case.kv_lengths),
            spoiled(v, case.kv_lengths),
            scale,
            extras=Extras(
                query_lengths=int32(case.query_lengths),
                kv_lengths=int32(case.kv_lengths),
                window=None if case.window is None else int32([case.window]),
            ),
        )
        jax.block_until_ready((out, lse))
    assert out.dtype == q.dtype and lse.dtype == jnp.float32
    out = np.asarray(out, np.float64)[:, : case.q_len]
    lse = np.asarray(lse, np.float64)[:, :, : case.q_len]
    assert not np.isnan(out).any() and not np.isnan(lse).any()
    return (out, lse), (expected_out, expected_lse)


def check(case: Case, config: ForwardConfig, num_sms: int = 2):
    (out, lse), (expected_out, expected_lse) = run(case, config, num_sms)
    empty = np.isneginf(expected_lse)
    np.testing.assert_array_equal(np.isneginf(lse), empty)
    np.testing.assert_allclose(lse[~empty], expected_lse[~empty], atol=2e-5, rtol=1e-5)
    assert np.all(out[np.moveaxis(empty, 1, 2)] == 0.0)
    tolerance = 4e-3 if case.dtype == "bfloat16" else 6e-4
    error = np.linalg.norm(out - expected_out) / max(np.linalg.norm(expected_out), 1e-9)
    assert error < tolerance, f"relative error {error:.1e}"


@pytest.mark.parametrize("name", [name for name in CONFIGS if "threshold" not in name])
def test_every_order_of_the_loop(name):
    mask = (masks.Causal(-64), masks.And())[list(CONFIGS).index(name) % 2]
    check(Case(kv_len=200, num_q_heads=2, mask=mask), CONFIGS[name])


def alternate(name, cases):
    """Both orders in turn: a case costs seconds."""
    return (TWO_OVERLAPPED, THREE_IN_TURN)[list(cases).index(name) % 2]


SHAPES = {
    "bottom-right-more-keys": Case(q_len=136, kv_len=200, mask=masks.Causal(64)),
    "bottom-right-more-queries": Case(q_len=200, kv_len=136, mask=masks.Causal(-64)),
    "top-left-more-keys": Case(q_len=136, kv_len=200, mask=masks.Causal()),
    "top-left-more-queries": Case(q_len=200, kv_len=136, mask=masks.Causal()),
    "ragged-full": Case(q_len=141, kv_len=131),
    "whole-tiles": Case(q_len=128, kv_len=128),
    "gqa2-f16-causal": Case(
        q_len=72, kv_len=72, num_q_heads=4, num_kv_heads=2, dtype="float16", mask=masks.Causal()
    ),
    "dims-64-128": Case(head_dim=64, head_dim_v=128, mask=masks.Causal()),
    "dims-128-64": Case(head_dim=128, head_dim_v=64, mask=masks.Causal()),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name):
    check(SHAPES[name], alternate(name, SHAPES))


ONE_CONSUMER = {
    "full-overlapped-scheduled": (
        Case(q_len=16, kv_len=136, num_q_heads=3, dtype="float16"),
        dataclasses.replace(ONE_IN_TURN, overlap=True, persistent=True, rescale_threshold=8.0),
    ),
    "causal": (Case(q_len=72, kv_len=136, mask=masks.Causal(64)), ONE_IN_TURN),
    "lengths-threshold": (
        Case(q_len=4, kv_len=264, mask=masks.Lengths(False, True), kv_lengths=(0, 1, 128, 200)),
        dataclasses.replace(ONE_IN_TURN, rescale_threshold=8.0),
    ),
    "dims-64-128": (Case(q_len=4, kv_len=264, head_dim_v=128), ONE_IN_TURN),
}


@pytest.mark.parametrize("name", ONE_CONSUMER)
def test_one_consumer(name):
    check(*ONE_CONSUMER[name], num_sms=1)


def test_a_schedule_has_as_many_blocks_as_run_at_a_time():
    plan = Plan(
        config=dataclasses.replace(ONE_IN_TURN, persistent=True),
        head_dim=64,
        head_dim_v=64,
        dtype="bfloat16",
        num_q_heads=3,
        num_sms=1,
        facts=tiles.MaskFacts(is_static=True),
    )
    assert plan.num_blocks == 2
    assert tiles.schedule(plan).tolist() == [[0, 2, 3], [1, 3, 3]]


def test_several_consumers_leave_no_room_for_another_block():
    with pytest.raises(ValueError, match="blocks_per_sm=2 must be 1 with compute_wgs=2"):
        ForwardConfig(blocks_per_sm=2)


LENGTHS = masks.Lengths(has_query=True, has_kv=True)
RUN_TIME = {
    "kv-lengths": Case(q_len=72, mask=masks.Lengths(False, True), kv_lengths=(0, 1, 64, 100, 136)),
    "kv-lengths-causal": Case(
        num_q_heads=2, mask=masks.Lengths(False, True) & masks.Causal(), kv_lengths=(0, 63, 128)
    ),
    "query-lengths": Case(
        q_len=200, kv_len=72, mask=masks.Lengths(True, False), query_lengths=(0, 1, 128, 200)
    ),
    "both-lengths-causal": Case(
        q_len=200,
        mask=LENGTHS & masks.Causal(),
        query_lengths=(0, 200, 70, 129),
        kv_lengths=(136, 0, 20, 128),
    ),
    "window": Case(q_len=200, kv_len=200, mask=masks.Window(True, True), window=(30, 10)),
    "window-causal": Case(
        q_len=200, kv_len=200, mask=masks.Window(True, False) & masks.Causal(), window=(70, 0)
    ),
    "window-past-the-keys": Case(
        q_len=264, kv_len=72, mask=masks.Window(True, True), window=(9, 9)
    ),
}


@pytest.mark.parametrize("name", RUN_TIME)
def test_run_time_masks_with_garbage_behind_the_lengths(name):
    check(RUN_TIME[name], alternate(name, RUN_TIME))


def test_growing_maxima_are_rescaled(monkeypatch):
    """Keys grow from last to first, so that a threshold is passed along the loop."""
    plain = make_inputs

    def growing(case):
        q, k, v, scale = plain(case)
        k = k * np.linspace(30.0, 0.1, k.shape[1], dtype=np.float32)[None, :, None, None]
        return q, k.astype(q.dtype), v, scale

    monkeypatch.setattr(f"{__name__}.make_inputs", growing)
    for name in ("2-overlapped-threshold", "3-in-turn-threshold"):
        check(Case(q_len=72, kv_len=200), CONFIGS[name])


def test_many_tiles_a_block():
    """Rings and slots keep their phases over tiles of different length."""
    check(Case(q_len=264, kv_len=264, mask=masks.Causal()), TWO_OVERLAPPED, num_sms=1)


@pytest.mark.parametrize("step", ["_step_in_turn", "_step_overlapped"])
def test_a_missing_wait_is_seen(monkeypatch, step):
    """The test of the test: a kernel that does not wait for V must not pass."""
    config = {"_step_in_turn": THREE_IN_TURN, "_step_overlapped": TWO_OVERLAPPED}[step]
    whole = getattr(forward, step)

    def careless(*args, **kwargs):
        wait = forward.plgpu.barrier_wait
        work = args[0]

        def all_but_v(barrier):
            if barrier.ref is not work.scratch.v_ready:
                wait(barrier)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(forward.plgpu, "barrier_wait", all_but_v)
            return whole(*args, **kwargs)

    monkeypatch.setattr(forward, step, careless)
    with pytest.raises(RuntimeError, match=MISSING_WAIT):
        check(Case(q_len=72, kv_len=264), config)


def test_steps_cover_exactly_what_the_bounds_allow():
    """Unmasked steps hold no hidden pair, and no visible pair lies outside the walk."""
    rng = np.random.default_rng(1)
    for _ in range(300):
        draw = lambda lo, hi: None if rng.random() < 0.4 else int(rng.integers(lo, hi))
        bounds = masks.Bounds(draw(-90, 60), draw(-60, 90), draw(0, 90), draw(0, 90))
        q_lo, block_kv, kv_len = int(rng.integers(0, 80)), 16, 80
        q_pos = np.arange(q_lo, q_lo + 24)[:, None]
        walk = tiles.walk_keys(bounds, q_lo, q_lo + 24, kv_len, block_kv)
        assert walk.steps >= 1 and walk.last - walk.steps + 1 >= 0
        seen = np.zeros(kv_len, bool)
        for i in range(walk.steps):
            kv_pos = (walk.last - i) * block_kv + np.arange(block_kv)[None]
            seen[kv_pos[0][kv_pos[0] < kv_len]] = True
            if walk.masked <= i < walk.unmasked:
                assert np.all(bounds.allowed(q_pos, kv_pos)) if bounds != masks.Bounds() else True
        visible = bounds.allowed(q_pos, np.arange(kv_len)[None])
        assert visible is None or not np.any(visible & ~seen)


def test_too_much_shared_memory_is_an_error_before_compiling():
    config = ForwardConfig(block_kv=256, num_stages=3)
    needed = forward.forward_smem_bytes(config, 256, 256, jnp.bfloat16)
    x = jax.ShapeDtypeStruct((1, 128, 1, 256), jnp.bfloat16)
    call = lambda q, k, v, s: forward.flash_forward(
        q, k, v, s, mask=masks.And(), q_len=128, kv_len=128, config=config
    )
    with pytest.raises(ValueError, match=f"needs {needed} bytes .* 232448"):
        jax.eval_shape(call, x, x, x, jax.ShapeDtypeStruct((1,), jnp.float32))
    assert mma.ops(False).accumulator_scratch(2, scores=(64, 64)) == {}
