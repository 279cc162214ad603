"""The IO model's counts against a simulator that walks each algorithm and tallies what it moves."""

import collections
import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_flash import io_counts, io_kernels, masks, tuned
from pallas_flash.kernels.sm90 import backward_common, backward_launch, tiles, visits
from pallas_flash.kernels.sm90.call import Call, Extras
from pallas_flash.problem import Operands, Problem
from pallas_flash.tile_walks import NO_OPERANDS, tile_walks, visible_pairs

BATCH, HEADS, KV_HEADS, Q_LEN, KV_LEN = 2, 4, 2, 296, 504
Q_POS, KV_POS = np.arange(Q_LEN)[:, None], np.arange(KV_LEN)[None]
AHEAD = KV_POS - Q_POS
Q_LENGTHS, KV_LENGTHS = np.array([296, 130]), np.array([500, 0])


def _sorted_ids(length, seed):
    return np.sort(np.random.default_rng(seed).integers(0, 5, (BATCH, length)), axis=1)


def _blocks(seed):
    """A mask array with whole tiles hidden, one for each head."""
    share = np.random.default_rng(seed).choice([0.0, 0.5, 1.0], (1, HEADS, 5, 8))
    share = share.repeat(64, 2).repeat(64, 3)[:, :, :Q_LEN, :KV_LEN]
    return np.random.default_rng(seed + 1).random(share.shape) < share


@dataclasses.dataclass(frozen=True)
class Masking:
    """A mask, its arrays, and by its definition what it hides.

    Attributes:
      parts: bool, broadcastable to (B, N, T, S): a tile is skipped where a part hides all of it.
    """

    mask: masks.Mask
    arrays: dict[str, Any]
    parts: tuple[np.ndarray, ...]
    by_id_range: bool = False

    def visited(self, b, n, q0, q1, k0, k1) -> bool:
        if self.by_id_range:  # of segments the kernels compare the ranges of ids in a tile
            q_ids, kv_ids = self.arrays["query_segments"], self.arrays["kv_segments"]
            q_ids, kv_ids = q_ids[b, q0:q1], kv_ids[b, k0:k1]
            if q_ids.min() > kv_ids.max() or kv_ids.min() > q_ids.max():
                return False
        whole = (BATCH, HEADS, Q_LEN, KV_LEN)
        return all(np.broadcast_to(p, whole)[b, n, q0:q1, k0:k1].any() for p in self.parts)

    def visible(self) -> int:
        every = np.ones((BATCH, HEADS, Q_LEN, KV_LEN), bool)
        for part in self.parts:
            every &= part
        if self.by_id_range:
            q_ids, kv_ids = self.arrays["query_segments"], self.arrays["kv_segments"]
            every &= (q_ids[:, :, None] == kv_ids[:, None])[:, None]
        return int(every.sum())


WITHIN = (Q_POS < Q_LENGTHS[:, None, None]) & (KV_POS < KV_LENGTHS[:, None, None])
LENGTHS = dict(query_lengths=Q_LENGTHS, kv_lengths=KV_LENGTHS)
IDS = dict(query_segments=_sorted_ids(Q_LEN, 0), kv_segments=_sorted_ids(KV_LEN, 1))
DENSE = _blocks(2)
MASKS = {
    "full": Masking(masks.And(), {}, (np.True_,)),
    "causal": Masking(masks.Causal(), {}, (AHEAD <= 0,)),
    "causal-bottom-right": Masking(masks.Causal(KV_LEN - Q_LEN), {}, (AHEAD <= KV_LEN - Q_LEN,)),
    "window": Masking(
        masks.Window(True, True),
        dict(window=np.array([70, 120])),
        ((AHEAD >= -70) & (AHEAD <= 120),),
    ),
    "window-left-causal": Masking(
        masks.Causal() & masks.Window(True, False),
        dict(window=np.array([100, 0])),
        ((AHEAD >= -100) & (AHEAD <= 0),),
    ),
    "lengths-causal": Masking(
        masks.Causal() & masks.Lengths(True, True), LENGTHS, ((WITHIN & (AHEAD <= 0))[:, None],)
    ),
    "segments": Masking(masks.Segments(), IDS, (np.True_,), by_id_range=True),
    "segments-causal": Masking(
        masks.Segments() & masks.Causal(), IDS, (AHEAD <= 0,), by_id_range=True
    ),
    "dense": Masking(masks.Dense(), dict(mask=DENSE), (DENSE,)),
    "dense-lengths": Masking(
        masks.Dense() & masks.Lengths(True, True),
        dict(mask=DENSE) | LENGTHS,
        (DENSE, WITHIN[:, None]),
    ),
}


def _problem(masking: Masking, **changes) -> tuple[Problem, Operands]:
    sizes: dict[str, Any] = dict(
        batch=BATCH,
        q_len=Q_LEN,
        kv_len=KV_LEN,
        num_q_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=64,
        head_dim_v=64,
        dtype="bfloat16",
        mask=masking.mask,
    )
    return Problem(**sizes | changes), NO_OPERANDS._replace(**masking.arrays)


class Tally:
    """What a walk moved: bytes in all, and bytes of different places."""

    def __init__(self):
        self.moved = collections.Counter()
        self.places = collections.defaultdict(dict)

    def move(self, way: str, tensor: str, place, size: int) -> None:
        self.moved[way, tensor] += size
        if place is not None:
            self.places[way, tensor][place] = size

    def load(self, tensor, place, size):
        self.move("read", tensor, place, size)

    def store(self, tensor, place, size):
        self.move("write", tensor, place, size)

    def check(self, told) -> None:
        """Equal to what the model says, tensor by tensor."""
        moved, distinct = collections.Counter(), collections.Counter()
        for one in told if isinstance(told, list) else [told]:
            for way, accesses in (("read", one.reads), ("write", one.writes)):
                for access in accesses:
                    moved[way, access.tensor] += access.moved
                    distinct[way, access.tensor] += access.distinct
        places = {key: sum(sizes.values()) for key, sizes in self.places.items()}
        assert {k: n for k, n in moved.items() if n} == {k: n for k, n in self.moved.items() if n}
        assert {k: n for k, n in distinct.items() if n} == {k: n for k, n in places.items() if n}


def _spans(length: int, block: int, limit: int | None = None):
    """(number, first, one past the last, rows there are up to `limit`) of each tile."""
    for i, lo in enumerate(range(0, length, block)):
        hi = min(lo + block, length)
        yield i, lo, hi, min(lo + block, limit or length) - lo


@pytest.mark.parametrize("name", MASKS)
def test_visible_pairs_are_those_of_the_definition(name):
    problem, operands = _problem(MASKS[name])
    assert visible_pairs(problem, operands) == MASKS[name].visible()


@pytest.mark.parametrize("by", ["q", "kv"])
def test_keys_far_past_the_last_query_are_not_visited(by):
    problem, operands = _problem(MASKS["causal"], q_len=100, kv_len=1000)
    walks = tile_walks(problem, operands, 64, 64, by=by)
    assert walks.count == BATCH * HEADS * (1 + 2)


# --- the paper's algorithms ----------------------------------------------------------------------

SRAM_BYTES = 2 * 64 * 4 * 40  # 40 keys a block: B_c = 40, B_r = 40


def _walk_paper(problem, masking, backward):
    """Algorithms 1 and 4, line by line: (pairs computed, tally of the loop)."""
    tally, computed = Tally(), 0
    item, (block_q, block_kv) = 2, io_counts.paper_blocks(problem, SRAM_BYTES)
    row, row_v = problem.head_dim * item, problem.head_dim_v * item
    for b, n in itertools.product(range(problem.batch), range(problem.num_q_heads)):
        kv = n // problem.q_per_kv
        for j, k0, k1, keys in _spans(problem.kv_len, block_kv):
            tally.load("k", (b, kv, j), keys * row)
            tally.load("v", (b, kv, j), keys * row_v)
            for i, q0, q1, rows in _spans(problem.q_len, block_q):
                if not masking.visited(b, n, q0, q1, k0, k1):
                    continue
                computed += rows * keys
                at = (b, n, i)
                in_place = {"dq": row} if backward else {"out": row_v, "l": 4, "m": 4}
                inputs = {"q": row}
                if backward:
                    inputs |= {"out": row_v, "dout": row_v, "l": 4, "m": 4}
                for tensor, size in (inputs | in_place).items():
                    tally.load(tensor, at, rows * size)
                for tensor, size in in_place.items():
                    tally.store(tensor, at, rows * size)
            if backward:
                tally.store("dk", (b, n, j), keys * row)
                tally.store("dv", (b, n, j), keys * row_v)
    return computed, tally


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("name", MASKS)
def test_paper_counts_are_those_of_a_walk(name, backward):
    masking = MASKS[name]
    problem, operands = _problem(masking, head_dim_v=48)
    count = io_counts.paper_backward if backward else io_counts.paper_forward
    begin, loop = count(problem, operands, sram_bytes=SRAM_BYTES).passes
    computed, tally = _walk_paper(problem, masking, backward)
    moved = {("read", a.tensor): a.moved for a in loop.reads}
    moved |= {("write", a.tensor): a.moved for a in loop.writes}
    assert moved == tally.moved
    products = {"forward": (64, 48), "backward": (64, 48, 48, 64, 64)}
    widths = products["backward" if backward else "forward"]
    assert [p.flops for p in loop.products] == [2 * computed * width for width in widths]
    rows, keys = BATCH * HEADS * Q_LEN, BATCH * HEADS * KV_LEN
    zeroed = dict(dq=rows * 128, dk=keys * 128, dv=keys * 96)
    if not backward:
        zeroed = dict(out=rows * 96, l=rows * 4, m=rows * 4)
    assert {a.tensor: a.moved for a in begin.writes} == zeroed and not begin.reads


def test_paper_blocks_are_those_of_line_one():
    problem, _ = _problem(MASKS["full"])
    assert io_counts.paper_blocks(problem, 192 * 1024) == (64, 384)  # ceil(M / 4d), at most d
    assert io_counts.paper_blocks(problem, 1000) == (2, 2)
    with pytest.raises(ValueError, match="four rows of head_dim 64 need 256"):
        io_counts.paper_blocks(problem, 500)


# --- naive attention -----------------------------------------------------------------------------


def _naive_passes(problem, fused, backward):
    """Algorithms 0 and 3: of every pass what it reads and what it writes."""
    drops, masked = bool(problem.dropout_rate), bool(problem.mask.parts())
    weights = "dropped" if drops else "P"
    if not backward:
        yield "q k", "S"
        if not fused and masked:
            yield "S", "S"
        yield "S", "P dropped" if fused and drops else "P"
        if not fused and drops:
            yield "P", "dropped drop_mask"
        yield f"{weights} v", "out"
        return
    yield f"{weights} dout", "dv"
    yield "dout v", "dP"
    if not fused and drops:
        yield "dP drop_mask", "dP"
    yield "P dP dropped" if fused and drops else "P dP", "dS"
    yield "dS k", "dq"
    yield "dS q", "dk"


def _walk_naive(problem, fused, backward):
    """Every pass, row by row of its matrices."""
    tally = Tally()
    row_bytes = dict(q=problem.head_dim, k=problem.head_dim, v=problem.head_dim_v)
    row_bytes |= dict(dq=row_bytes["q"], dk=row_bytes["k"], dv=row_bytes["v"])
    row_bytes |= dict(out=problem.head_dim_v, dout=problem.head_dim_v)
    for step, (reads, writes) in enumerate(_naive_passes(problem, fused, backward)):
        for way, names in (("read", reads), ("write", writes)):
            for name in names.split():
                of_keys = name in ("k", "v", "dk", "dv")
                heads = problem.num_kv_heads if of_keys else problem.num_q_heads
                rows = problem.kv_len if of_keys else problem.q_len
                size = row_bytes.get(name, problem.kv_len) * (1 if name == "drop_mask" else 2)
                for place in itertools.product(range(problem.batch), range(heads), range(rows)):
                    tally.move(way, name, (step, *place), size)
    return tally


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("fused", [False, True], ids=["passes", "fused"])
@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_naive_counts_are_those_of_a_walk(fused, rate, backward):
    problem, _ = _problem(MASKS["causal"], q_len=12, kv_len=20, head_dim_v=48, dropout_rate=rate)
    count = io_counts.naive_backward if backward else io_counts.naive_forward
    told = count(problem, fused_softmax=fused)
    _walk_naive(problem, fused, backward).check(list(told.passes))
    pairs = BATCH * HEADS * 12 * 20
    widths = (48, 48, 64, 64) if backward else (64, 48)
    assert told.flops == sum(2 * pairs * width for width in widths)


# --- our kernels ---------------------------------------------------------------------------------


def _tiles_seen(problem, masking, cut, b, n, q0, q1):
    return [
        (j, keys)
        for j, k0, k1, keys in _spans(problem.kv_len, cut.block_kv, -(-problem.kv_len // 8) * 8)
        if masking.visited(b, n, q0, q1, k0, k1)
    ]


def _walk_keys(problem, masking, cut, inputs, outputs):
    """The forward, and the dq kernel: (tiles computed, tally)."""
    tally, computed = Tally(), 0
    row, row_v = problem.head_dim * 2, problem.head_dim_v * 2
    widths = dict(q=row, dout=row_v, out=row_v, dq=row)
    limit = -(-problem.q_len // 8) * 8
    first_keys = min(cut.block_kv, -(-problem.kv_len // 8) * 8)
    for b, n in itertools.product(range(problem.batch), range(problem.num_q_heads)):
        kv = n // problem.q_per_kv
        for i, q0, q1, rows in _spans(problem.q_len, cut.block_q, limit):
            for tensor in inputs:
                tally.load(tensor, (b, n, i), rows * widths[tensor])
            seen = _tiles_seen(problem, masking, cut, b, n, q0, q1) or [(0, first_keys)]
            computed += len(seen)
            for j, keys in seen:
                tally.load("k", (b, kv, j), keys * row)
                tally.load("v", (b, kv, j), keys * row_v)
            for tensor in outputs:
                tally.store(tensor, (b, n, i), rows * widths[tensor])
        for i, *_ in _spans(problem.q_len, 64):
            if "out" in outputs:
                tally.store("lse", (b, n, i), 64 * 4)
            else:
                tally.load("lse", (b, n, i), 64 * 4)
                tally.load("-delta", (b, n, i), 64 * 4)
    return computed, tally


DIMS = ((64, 64), (192, 128))


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_forward_kernel_counts_are_those_of_a_walk(name, dims):
    masking = MASKS[name]
    problem, operands = _problem(masking, head_dim=dims[0], head_dim_v=dims[1])
    cut = tuned.forward_of(problem)
    told = io_kernels.forward_kernel(problem, operands)
    computed, tally = _walk_keys(problem, masking, cut, ("q",), ("out",))
    tally.check(told)
    tile = 2 * cut.block_q * cut.block_kv
    assert [p.flops for p in told.products] == [computed * tile * d for d in dims]


@pytest.mark.parametrize("name", MASKS)
def test_dq_kernel_counts_are_those_of_a_walk(name):
    masking = MASKS[name]
    problem, operands = _problem(masking)
    told = io_kernels.dq_kernel(problem, operands)
    computed, tally = _walk_keys(problem, masking, tuned.dq_of(problem), ("q", "dout"), ("dq",))
    tally.check(told)
    tile = 2 * 64 * tuned.dq_of(problem).block_q * tuned.dq_of(problem).block_kv
    assert [p.flops for p in told.products] == [computed * tile] * 3


def _walk_queries(problem, masking, cut, parts):
    """The fused backward, `parts` blocks for each tile of keys: (tiles computed, tally)."""
    tally, computed = Tally(), 0
    row, row_v = problem.head_dim * 2, problem.head_dim_v * 2
    limit, q_limit = -(-problem.kv_len // 8) * 8, -(-problem.q_len // 8) * 8
    dq_tile = cut.block_q * problem.head_dim * 4
    heads = problem.num_q_heads // (problem.num_kv_heads * parts)
    shares = itertools.product(range(problem.num_kv_heads), range(parts))
    for b, (share, (kv, part)) in itertools.product(range(problem.batch), enumerate(shares)):
        for j, k0, k1, keys in _spans(problem.kv_len, cut.block_kv, limit):
            tally.load("k", (b, kv, j), keys * row)
            tally.load("v", (b, kv, j), keys * row_v)
            for n in range(share * heads, (share + 1) * heads):
                for i, q0, q1, rows in _spans(problem.q_len, cut.block_q, q_limit):
                    if not masking.visited(b, n, q0, q1, k0, k1):
                        continue
                    computed += 1
                    at = (b, n, i)
                    tally.load("q", at, rows * row)
                    tally.load("dout", at, rows * row_v)
                    tally.load("-lse and -delta, in parts", at, cut.block_q * 16)
                    tally.store("dq sum", at, dq_tile)
                    tally.places["read", "dq sum"][at] = dq_tile  # L2 fetches what it adds to
            tally.store("dk", (b, kv, part, j), keys * row)
            tally.store("dv", (b, kv, part, j), keys * row_v)
    return computed, tally


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("dims", (*DIMS, (80, 96)), ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_backward_kernel_counts_are_those_of_a_walk(name, dims, parts):
    masking = MASKS[name]
    problem, operands = _problem(masking, head_dim=dims[0], head_dim_v=dims[1])
    cut = tuned.backward_of(problem)
    told = io_kernels.backward_kernel(problem, operands, kv_parts=parts)
    computed, tally = _walk_queries(problem, masking, cut, parts)
    tally.check(told)
    tile, (h, hv) = 2 * cut.block_q * cut.block_kv, dims
    assert [p.flops for p in told.products] == [computed * tile * d for d in (h, hv, hv, h, h)]


def test_parts_of_few_tiles_of_keys_are_added_up():
    """As few as fill the chip; none where there are enough tiles, or no heads to share out."""
    parts_of = lambda **sizes: tuned.kv_parts(
        problem := _problem(MASKS["causal"], **sizes)[0], tuned.backward_of(problem)
    )
    mqa = dict(q_len=8192, kv_len=8192, num_q_heads=32, num_kv_heads=1)  # 64 tiles a batch row
    assert [parts_of(**mqa, batch=b) for b in (1, 2, 4, 5, 9)] == [16, 8, 4, 2, 1]
    assert [parts_of(**mqa | dict(num_kv_heads=8), batch=b) for b in (1, 2)] == [2, 1]
    assert parts_of(batch=1, kv_len=128, num_kv_heads=HEADS) == 1
    full = _problem(MASKS["full"], **mqa, batch=3)[0]  # equally long walks
    assert tuned.kv_parts(full, tuned.backward_of(full)) == 1

    problem, operands = _problem(MASKS["causal"], **mqa)
    counts = io_kernels.kernels_backward(problem, operands)
    size = BATCH * 8192 * 64 * 2  # of k, and of v
    assert dict(counts.extra)["dk and dv of parts"] == 8 * 2 * size
    assert [a.moved for a in counts.passes[-1].reads] == [8 * size] * 2
    assert [a.moved for a in counts.passes[-1].writes] == [size] * 2
    enough, _ = _problem(MASKS["causal"], **mqa, batch=9)
    counts = io_kernels.kernels_backward(enough)
    assert "dk and dv of parts" not in dict(counts.extra) and counts.passes[-1].name == "dq"


def test_ends_of_the_backward_read_what_lengths_leave():
    problem, operands = _problem(MASKS["lengths-causal"])
    by_name = {p.name: p for p in io_kernels.kernels_backward(problem, operands).passes}
    strips = (5 * 64 + 3 * 64) * HEADS  # lengths 296 and 130
    rows = (296 + 192) * HEADS  # an array ends at 296
    start, finish = by_name["statistics, dq sum = 0"], by_name["dq"]
    assert [a.moved for a in start.reads] == [rows * 128, rows * 128, strips * 4]
    whole = BATCH * HEADS * 3 * 128  # tiles of 128 queries
    assert [a.moved for a in start.writes] == [whole * 16, whole * 64 * 4]
    assert [a.moved for a in finish.reads] == [strips * 64 * 4]
    assert [a.moved for a in finish.writes] == [BATCH * HEADS * 296 * 128]


def test_deterministic_backward_has_no_sums():
    problem, operands = _problem(MASKS["causal"], deterministic_backward=True)
    counts = io_kernels.kernels_backward(problem, operands)
    tensors = {a.tensor for p in counts.passes for a in (*p.reads, *p.writes)}
    assert "dq sum" not in tensors and "dq sum" not in dict(counts.extra)
    assert io_kernels.dq_kernel(problem, operands) in counts.passes


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_dq_of_one_tile_of_keys_is_stored(mask):
    problem, operands = _problem(MASKS[mask], q_len=256, kv_len=120, num_kv_heads=HEADS)
    counts = io_kernels.kernels_backward(problem, operands)
    assert [p.name for p in counts.passes] == ["statistics", "dk, dv and dq"]
    (dq,) = (a for a in counts.passes[-1].writes if a.tensor == "dq")
    assert dq.moved == dq.distinct == BATCH * HEADS * 256 * 64 * 2
    assert "dQ = dS K" in {product.name for product in counts.passes[-1].products}
    more, _ = _problem(MASKS[mask], q_len=256, kv_len=136)
    assert "dq sum" in dict(io_kernels.kernels_backward(more).extra)


def test_ragged_sizes_cost_copies():
    problem, _ = _problem(MASKS["full"], q_len=301, head_dim=80)
    copies, kernel = io_kernels.kernels_forward(problem).passes
    q, padded_q = BATCH * HEADS * 301 * 80 * 2, BATCH * HEADS * 304 * 80 * 2
    assert (q, padded_q) == (copies.reads[0].moved, copies.writes[0].moved)
    assert kernel.reads[0].moved == padded_q
    whole, _ = _problem(MASKS["full"])
    assert len(io_kernels.kernels_forward(whole).passes) == 1


def test_a_bias_is_read_for_every_tile():
    problem, operands = _problem(
        MASKS["causal"], bias_shape=(1, HEADS, Q_LEN, KV_LEN), bias_dtype="float16"
    )
    cut = tuned.forward_of(problem)
    walks = tile_walks(problem, operands, cut.block_q, cut.block_kv, at_least_one=True)
    [bias] = [a for a in io_kernels.forward_kernel(problem).reads if a.tensor == "bias"]
    assert bias == ("bias", walks.pairs * 2, HEADS * Q_LEN * KV_LEN * 2)


# --- the walks are those of the kernels' own code ------------------------------------------------


def _launched(problem: Problem, operands: Operands, kind, config, **others):
    """The kernels' description of a launch, and its extras."""
    one_row = lambda x: None if x is None else x[None]
    arrays = operands._replace(window=one_row(operands.window))
    names = ("query_lengths", "kv_lengths", "window", "query_segments", "kv_segments", "mask")
    given = {n: getattr(arrays, n) for n in names}
    extras = Extras(**{n: x if x is None else jnp.asarray(x) for n, x in given.items()})
    names = ("batch", "q_len", "kv_len", "num_q_heads", "num_kv_heads", "dtype", "mask")
    sizes = {n: getattr(problem, n) for n in names}
    return kind(config=config, head_dim=64, head_dim_v=64, **sizes, **others), extras


BOUNDS = {name: masking for name, masking in MASKS.items() if masking.mask.is_bounds}
BEGINS_PAST_THE_END = Masking(masks.Window(True, True), dict(window=np.array([70, 20])), ())


@pytest.mark.parametrize("name", BOUNDS)
def test_walks_over_keys_are_those_of_the_kernels(name):
    problem, operands = _problem(MASKS[name])
    cut = tuned.forward_of(problem)
    call, extras = _launched(problem, operands, Call, cut)
    told = tile_walks(problem, operands, cut.block_q, cut.block_kv, at_least_one=True)
    told = np.broadcast_to(told.tiles, (BATCH, 1, call.num_q_tiles))
    for b, qi in itertools.product(range(BATCH), range(call.num_q_tiles)):
        q0, q1 = qi * cut.block_q, min((qi + 1) * cut.block_q, Q_LEN)
        walk = tiles.walk_keys(call.bounds(extras, b), q0, q1, KV_LEN, cut.block_kv)
        assert int(walk.steps) == told[b, 0, qi]


@pytest.mark.parametrize("kv_parts", [1, 2])
@pytest.mark.parametrize("name", [*BOUNDS, "begins-past-the-end"])
def test_walks_over_queries_are_those_of_the_kernels(name, kv_parts):
    problem, operands = _problem(MASKS.get(name, BEGINS_PAST_THE_END))
    cut = tuned.backward_of(problem)
    launch, extras = _launched(problem, operands, backward_launch.Launch, cut, kv_parts=kv_parts)
    gmem = backward_launch.Gmem(*[None] * 6, extras=extras)

    def of_block():
        walk = backward_common.find_walk(launch, gmem)
        return jnp.stack(
            [jnp.int32(x) for x in (walk.b, walk.share, walk.ki)]
            + [jnp.int32(walk.last) - jnp.int32(walk.first)]
        )

    places = of_block
    for axis, size in reversed(launch.grid.items()):
        places = functools.partial(
            jax.vmap(lambda _, inner=places: inner(), axis_name=axis), jnp.arange(size)
        )
    blocks = places().reshape(-1, 4)
    told = tile_walks(problem, operands, cut.block_q, cut.block_kv, by="kv", empty_too=True)
    told = np.broadcast_to(told.tiles, (BATCH, 1, launch.num_kv_tiles))
    assert len({(b, share, ki) for b, share, ki, _ in blocks.tolist()}) == len(blocks)
    assert len(blocks) == launch.num_pairs * launch.num_kv_tiles
    for b, _, ki, steps in blocks.tolist():
        assert steps == told[b, 0, ki]


@pytest.mark.parametrize("by", ["q", "kv"])
@pytest.mark.parametrize("name", ["segments-causal", "dense-lengths"])
def test_tables_of_visits_are_those_of_the_kernels(name, by):
    problem, operands = _problem(MASKS[name])
    cut = tuned.forward_of(problem)
    call, extras = _launched(problem, operands, Call, cut)
    table = visits.make_visits(call, extras, by_kv=by == "kv", at_least_one=by == "q")
    told = tile_walks(problem, operands, cut.block_q, cut.block_kv, by=by, at_least_one=by == "q")
    both = np.broadcast_arrays(told.tiles, table.counts[..., 1])
    np.testing.assert_array_equal(*both)
