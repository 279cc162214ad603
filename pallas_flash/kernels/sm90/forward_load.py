"""The producer of the forward: Q, K, V and tiles of a bias into shared memory, by TMA."""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash import masks
from pallas_flash.kernels.sm90 import tiles
from pallas_flash.kernels.sm90.call import div, rem
from pallas_flash.kernels.sm90.forward_common import Gmem, Plan, Scratch

Int = masks.Int


def produce(plan: Plan, gmem: Gmem, scratch: Scratch) -> None:
    """The producer warpgroup: loads Q, K and V of every tile of this block."""
    c = plan.config
    tiles.release_registers(c.compute_wgs)
    tiles_done, steps = tiles.for_each_tile(
        plan, gmem, functools.partial(_produce_tile, plan, gmem, scratch)
    )
    tiles.drain(scratch.q_consumed, tiles_done, c.q_stages)
    tiles.drain(scratch.k_consumed, steps, c.num_stages)
    tiles.drain(scratch.v_consumed, steps, c.num_stages)


def _produce_tile(plan: Plan, gmem: Gmem, scratch: Scratch, tile: tiles.Tile) -> None:
    c = plan.config
    slot = rem(tile.turn, c.q_stages)
    pl.when(tile.turn >= c.q_stages)(lambda: plgpu.barrier_wait(scratch.q_consumed.at[slot]))
    plgpu.copy_gmem_to_smem(
        gmem.q.at[tile.batch, pl.ds(tile.q_lo, c.block_q), tile.head],
        scratch.q.at[slot],
        scratch.q_ready.at[slot],
    )
    load_k = functools.partial(_load_k, plan, gmem, scratch, tile)
    load_v = functools.partial(_load_v, plan, gmem, scratch, tile)
    lag = 1 if c.overlap else 0  # in the order in which consumers wait
    if lag:
        load_k(jnp.int32(0))

    def load_both(i, _):
        load_k(i)
        load_v(i - lag)
        return ()

    steps = jnp.int32(tile.walk.steps)
    lax.fori_loop(jnp.int32(lag), steps, load_both, ())
    if lag:
        load_v(steps - 1)


def _free_slot(plan: Plan, consumed, step: Int) -> Int:
    """The ring slot of this step (of the block), once its last use is over."""
    num_stages = plan.config.num_stages
    slot = rem(step, num_stages)
    pl.when(step >= num_stages)(lambda: plgpu.barrier_wait(consumed.at[slot]))
    return slot


def _load_k(plan: Plan, gmem: Gmem, scratch: Scratch, tile: tiles.Tile, i: Int) -> None:
    block_kv, head = plan.config.block_kv, div(tile.head, plan.q_per_kv)
    slot = _free_slot(plan, scratch.k_consumed, tile.step0 + i)
    kv0, ready = tile.walk.kv_tile(i) * block_kv, scratch.k_ready.at[slot]
    plgpu.copy_gmem_to_smem(
        gmem.k.at[tile.batch, pl.ds(kv0, block_kv), head], scratch.k.at[slot], ready
    )
    if plan.staged_bias:
        dst = scratch.bias.at[slot]
        plan.copy_bias(gmem.extras, tile.batch, tile.head, tile.q_lo, kv0, dst, ready)


def _load_v(plan: Plan, gmem: Gmem, scratch: Scratch, tile: tiles.Tile, i: Int) -> None:
    """V of step i; the tile that the kv length cuts comes from its clean copy."""
    block_kv, head = plan.config.block_kv, div(tile.head, plan.q_per_kv)
    slot = _free_slot(plan, scratch.v_consumed, tile.step0 + i)
    ki = tile.walk.kv_tile(i)

    def load(ref, first_key):
        plgpu.copy_gmem_to_smem(
            ref.at[tile.batch, pl.ds(first_key, block_kv), head],
            scratch.v.at[slot],
            scratch.v_ready.at[slot],
        )

    if gmem.v_tail is None:
        load(gmem.v, ki * block_kv)
        return
    is_cut = ki == div(gmem.extras.kv_lengths[tile.batch], block_kv)
    pl.when(is_cut)(lambda: load(gmem.v_tail, 0))
    pl.when(jnp.logical_not(is_cut))(lambda: load(gmem.v, ki * block_kv))
