"""Which q tiles a block does, which keys a tile walks, and in which steps it must mask.

Shared by the kernels that hold queries and walk over keys: the forward, and dq of the deterministic
backward. All of it follows from `masks.Bounds`; nothing here knows what a step computes.
"""

import dataclasses
import functools
import heapq
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash import hardware, masks
from pallas_flash.kernels.sm90.call import (
    Call,
    ceil_div,
    div,
    fitting_group,
    interleaved,
    rem,
    with_ragged_end,
)
from pallas_flash.kernels.sm90.visits import needs_visits

WG_ROWS = 64  # query rows of a consumer warpgroup: wgmma's own m
# Registers a thread (consumers, producer), by compute_wgs: 64K in all, multiples of 8. A consumer
# alone launches with what it needs: moving registers would take all 64K for its block.
_REGISTERS = {2: (240, 24), 3: (160, 32)}
_MAX_SCHEDULED_TILES = 16_384  # beyond, the host's schedule costs more than it balances

Int = masks.Int


class MaskFacts(NamedTuple):
    """What is known of a mask before its run-time numbers.

    Attributes:
      is_static: it has no run-time numbers.
      hides: there may be a hidden pair in a tile that is walked.
      hides_before: there is a lower bound.
      one_masked_step: every tile needs its mask in the first step at most.
      sees_at_once: every row sees a key in its tile's first step.
    """

    is_static: bool = False
    hides: bool = False
    hides_before: bool = False
    one_masked_step: bool = False
    sees_at_once: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(Call):
    """Everything static about one launch.

    `config` has head_group, too; `persistent` and `blocks_per_sm` where a schedule is wanted.
    """

    facts: MaskFacts = MaskFacts()
    num_sms: int = hardware.SM90.num_sms

    @property
    def num_tiles(self) -> int:
        return self.batch * self.num_q_heads * self.num_q_tiles

    @property
    def is_scheduled(self) -> bool:
        """Blocks follow a schedule made on the host.

        It must know how long tiles are, or at least that neighbours are about equally long.
        """
        return (
            self.config.persistent
            and self.num_tiles <= _MAX_SCHEDULED_TILES
            and (self.facts.is_static or self.mask.is_steady)
        )

    @property
    def num_blocks(self) -> int:
        at_a_time = self.num_sms * self.config.blocks_per_sm
        return min(at_a_time, self.num_tiles) if self.is_scheduled else self.num_tiles

    @property
    def head_group(self) -> int:
        """Consecutive (batch, head) pairs whose tiles are interleaved; divides their number."""
        if self.shares_bias:
            return self.sharing_group
        return fitting_group(self.config.head_group, self.batch * self.num_q_heads)


def claim_registers(compute_wgs: int) -> None:
    """A consumer's part of the registers."""
    if compute_wgs in _REGISTERS:
        plgpu.set_max_registers(_REGISTERS[compute_wgs][0], action="increase")


def release_registers(compute_wgs: int) -> None:
    """The producer's, who gives up the rest."""
    if compute_wgs in _REGISTERS:
        plgpu.set_max_registers(_REGISTERS[compute_wgs][1], action="decrease")


class Walk(NamedTuple):
    """The keys of one q tile: step i takes kv tile `last - i`, or that of a table.

    Steps [0, masked) need the mask, in [masked, unmasked) everything is allowed, [unmasked, steps)
    need the mask again; the last interval is empty without a lower bound.
    """

    last: Int
    masked: Int
    unmasked: Int
    steps: Int
    order: Any = None  # int32 (kv tiles,), see `Visits`

    def kv_tile(self, i: Int) -> Int:
        return self.last - i if self.order is None else self.order[i]


def walk_keys(bounds: masks.Bounds, q_lo: Int, q_hi: Int, kv_len: int, block_kv: int) -> Walk:
    """The walk of queries [q_lo, q_hi): at least one step, hidden where they see nothing."""
    any_lo, any_hi = bounds.kv_any(q_lo, q_hi, kv_len)
    all_lo, all_hi = bounds.kv_all(q_lo, q_hi, kv_len)
    end: Any = masks.larger(1, ceil_div(any_hi, block_kv))
    masked = end - div(all_hi, block_kv)
    if bounds.lower is None:
        return Walk(last=end - 1, masked=masked, unmasked=end, steps=end)
    steps = end - masks.smaller(div(any_lo, block_kv), end - 1)
    masked = masks.smaller(masked, steps)
    unmasked = masks.smaller(masks.larger(end - ceil_div(all_lo, block_kv), masked), steps)
    return Walk(last=end - 1, masked=masked, unmasked=unmasked, steps=steps)


@functools.lru_cache(maxsize=256)
def mask_facts(mask: masks.Mask, q_len: int, kv_len: int, config) -> MaskFacts:
    if needs_visits(mask):
        return MaskFacts(hides=True)
    # A bound that depends on run-time numbers differs between the smallest and the largest.
    fields = len(masks.MaskValues._fields)
    probes = (masks.MaskValues(*[number] * fields) for number in (-(2**30), 2**30))
    bounds, other = (with_ragged_end(mask.bounds(p), kv_len, config.block_kv) for p in probes)
    present = [b for b in dataclasses.astuple(bounds) if b is not None]
    if mask.has_lower or bounds != other:
        return MaskFacts(False, True, mask.has_lower, False, False)
    one_masked_step = sees_at_once = True
    for q_lo in range(0, q_len, config.block_q):
        q_hi = min(q_lo + config.block_q, q_len)
        walk = walk_keys(bounds, q_lo, q_hi, kv_len, config.block_kv)
        _, least_hi = bounds.kv_any(q_lo, q_lo + 1, kv_len)  # without a lower bound it only grows
        one_masked_step &= walk.masked <= 1
        sees_at_once &= least_hi > walk.last * config.block_kv
    return MaskFacts(True, bool(present), False, one_masked_step, sees_at_once)


def place(plan: Plan, t: Int) -> tuple[Int, Int]:
    """Tile number -> (pair of batch and head, q tile): longest first within a head group."""
    if not plan.facts.hides:
        return interleaved(t, plan.num_q_tiles, plan.sharing_group)
    pair, rank = interleaved(t, plan.num_q_tiles, plan.head_group)
    return pair, (plan.num_q_tiles - 1) - rank


def walk_of(plan: Plan, bounds: masks.Bounds, qi: Int) -> Walk:
    block_q = plan.config.block_q
    q_hi = masks.smaller((qi + 1) * block_q, plan.q_len)
    return walk_keys(bounds, qi * block_q, q_hi, plan.kv_len, plan.config.block_kv)


@functools.lru_cache(maxsize=64)
def schedule(plan: Plan) -> np.ndarray:
    """Tiles of each block, [num_blocks, most tiles of a block + 1], filled up with num_tiles."""
    rows = _balanced(plan) if plan.facts.is_static else _there_and_back(plan)
    table = np.full((plan.num_blocks, max(map(len, rows)) + 1), plan.num_tiles, np.int32)
    for row, tiles in zip(table, rows, strict=True):
        row[: len(tiles)] = tiles
    return table


def _there_and_back(plan: Plan) -> list[list[int]]:
    """Each block in turn, then in reverse: who got the longest tile of a round gets a short one."""
    rows = [[] for _ in range(plan.num_blocks)]
    for t in range(plan.num_tiles):
        turn, block = divmod(t, plan.num_blocks)
        rows[-1 - block if turn % 2 else block].append(t)
    return rows


def _balanced(plan: Plan) -> list[list[int]]:
    """What a dynamic scheduler would do: the next tile to the block that is free first.

    A tile costs its steps and one more. 30 % faster than a fixed stride at head_dim 128, causal,
    on an H200.
    """
    bounds = with_ragged_end(
        plan.mask.bounds(masks.MaskValues()), plan.kv_len, plan.config.block_kv
    )
    cost = [1 + walk_of(plan, bounds, qi).steps for qi in range(plan.num_q_tiles)]
    heap = [(0, block) for block in range(plan.num_blocks)]
    rows = [[] for _ in heap]
    for t in range(plan.num_tiles):
        busy, block = heapq.heappop(heap)
        rows[block].append(t)
        heapq.heappush(heap, (busy + cost[place(plan, t)[1]], block))
    return rows


class Tile(NamedTuple):
    """One q tile as both roles see it.

    Attributes:
      batch, head, q_lo: where it is.
      bounds: of its batch row.
      walk: its keys.
      turn: tiles this block did before.
      step0: steps this block did before.
    """

    batch: Int
    head: Int
    q_lo: Int
    bounds: masks.Bounds
    walk: Walk
    turn: Int
    step0: Int


def tile_at(plan: Plan, gmem: Any, t: Int, turn: Int, step0: Int) -> Tile:
    pair, qi = place(plan, t)
    batch, head = plan.split_pair(pair, plan.num_q_heads)
    bounds, visits = plan.bounds(gmem.extras, batch), gmem.extras.visits
    if visits is None:
        walk = walk_of(plan, bounds, qi)
    else:
        row = (*plan.entry(visits.order, batch, head), qi)
        masked, visited = visits.counts[(*row, 0)], visits.counts[(*row, 1)]
        walk = Walk(0, masked, visited, visited, visits.order.at[row])
    return Tile(
        batch=batch,
        head=head,
        q_lo=qi * plan.config.block_q,
        bounds=bounds,
        walk=walk,
        turn=turn,
        step0=step0,
    )


def for_each_tile(plan: Plan, gmem: Any, do_tile) -> tuple[Int, Int]:
    """do_tile(tile) for each tile of this block; returns (tiles, steps) done."""
    block, zero = lax.axis_index("block"), jnp.int32(0)
    if not plan.is_scheduled:
        tile = tile_at(plan, gmem, block, zero, zero)
        do_tile(tile)
        return jnp.int32(1), jnp.int32(tile.walk.steps)
    last = jnp.int32(gmem.schedule.shape[1] - 1)

    def do_next(state):
        t, turn, step0 = state
        tile = tile_at(plan, gmem, t, turn, step0)
        following = gmem.schedule[block, lax.min(turn + 1, last)]
        do_tile(tile)
        return following, turn + 1, step0 + tile.walk.steps

    first = (gmem.schedule[block, zero], zero, zero)
    _, tiles, steps = lax.while_loop(lambda state: state[0] < plan.num_tiles, do_next, first)
    return tiles, steps


def drain(consumed, count: Int, num_slots: int) -> None:
    """Waits until the last `num_slots` of `count` uses are over: none is left in flight."""

    def wait(i, _):
        plgpu.barrier_wait(consumed.at[rem(i, num_slots)])
        return ()

    lax.fori_loop(lax.max(count - num_slots, jnp.int32(0)), count, wait, ())


def for_each_step(facts: MaskFacts, walk: Walk, first: int, step, carry):
    """carry = step(i, carry, masked=...) for the steps from `first` on; step 0 is masked."""

    def loop(start, stop, masked, carry):
        body = functools.partial(step, masked=masked)
        return lax.fori_loop(jnp.int32(start), jnp.int32(stop), body, carry)

    start = first
    if facts.hides and not (first == 1 and facts.one_masked_step):
        start = masks.larger(first, walk.masked)
        carry = loop(first, start, True, carry)
    carry = loop(start, walk.unmasked, False, carry)
    if facts.hides_before:
        carry = loop(masks.larger(start, walk.unmasked), walk.steps, True, carry)
    return carry
