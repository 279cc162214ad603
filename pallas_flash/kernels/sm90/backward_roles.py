"""The split for head dims above 128: consumer 0 owns dv, consumer 1 owns dk, of all 64 keys.

One accumulator [64, 256] a consumer is all that fits. Consumer 0 makes P and hands it over in
shared memory; consumer 1 makes dP and from both dS, which it hands back: each consumer makes some
columns of dq. Dropout and a soft cap reach consumer 1 through P: by its sign, and as a factor.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.kernels.sm90 import backward_common as common
from pallas_flash.kernels.sm90 import logits, registers
from pallas_flash.kernels.sm90.backward_common import Block, Ref
from pallas_flash.kernels.sm90.backward_launch import Launch
from pallas_flash.kernels.sm90.smem import tiled_smem

KEYS = 64
DV_OWNER, DK_OWNER = 0, 1
# Consumer 1 writes dS of tile i once it has P of tile i, so after consumer 0's dq of tile i - 2.
DS_SLOTS = 2


class Smem(NamedTuple):
    """Shared memory. `accumulators` is empty on a GPU."""

    q: Ref  # [num_stages, block_q, head_dim]
    dout: Ref  # [num_stages, block_q, head_dim_v]
    parts: Ref  # [num_stages, block_q, 8], or None like each of the next two
    neg_lse: Ref  # [num_stages, block_q]
    neg_delta: Ref  # [num_stages, block_q]
    bias: Ref  # [num_stages, block_q, 64], or None
    k: Ref  # [64, head_dim], at the end dk
    v: Ref  # [64, head_dim_v], at the end dv
    p: Ref  # [num_stages, 64, block_q], with a cap times its slope
    ds: Ref  # [DS_SLOTS, 64, block_q]
    accumulators: tuple[dict[str, Ref], ...]  # of each consumer


class Barriers(NamedTuple):
    """See the table in backward.py."""

    kv_ready: Ref
    tile_ready: Ref
    tile_consumed: Ref
    done: Ref
    p_ready: Ref
    ds_ready: Ref


class Accumulators(NamedTuple):
    grad: Any  # [64, head_dim_v] or [64, head_dim]
    x: Any  # [64, block_q]: S^T or dP^T
    dq: Any = None  # [block_q, this consumer's columns]


def _dq_columns(launch: Launch, role: int) -> tuple[int, int]:
    """First column of dq and number of columns that consumer `role` makes: whole swizzles of 64."""
    if not launch.make_dq:
        return 0, 0
    mine = -(-launch.head_dim // 128) * 64 if launch.head_dim > 64 else 0
    return (0, mine) if role == DV_OWNER else (mine, launch.head_dim - mine)


def _accumulator_shapes(launch: Launch, role: int) -> dict[str, tuple[int, int]]:
    block_q, (_, columns) = launch.config.block_q, _dq_columns(launch, role)
    shapes = dict(
        grad=(KEYS, launch.head_dim_v if role == DV_OWNER else launch.head_dim),
        x=(KEYS, block_q),
    )
    return shapes | (dict(dq=(block_q, columns)) if columns else {})


def check(launch: Launch) -> None:
    """Raises ValueError where this split cannot cut the problem."""
    if launch.config.block_q != 64:
        raise ValueError(f"block_q={launch.config.block_q} must be 64 with split='roles'")


def scratch(launch: Launch) -> dict[str, Any]:
    """Shared memory and barriers of one block."""
    block_q, stages = launch.config.block_q, launch.config.num_stages
    ds = tiled_smem((DS_SLOTS, KEYS, block_q), launch.dtype)
    return dict(
        smem=Smem(
            p=tiled_smem((stages, KEYS, block_q), launch.dtype),
            ds=ds if launch.make_dq else None,
            accumulators=tuple(
                launch.op.accumulator_scratch(1, **_accumulator_shapes(launch, role))
                for role in (DV_OWNER, DK_OWNER)
            ),
            **common.tile_smem(launch),
        ),
        bars=Barriers(
            p_ready=plgpu.Barrier(num_barriers=stages),
            ds_ready=plgpu.Barrier(num_barriers=DS_SLOTS),
            **common.tile_barriers(launch),
        ),
    )


def run_roles(block: Block, wg) -> None:
    """What warpgroup `wg` does."""
    pl.when(wg == DV_OWNER)(lambda: _consume(block, DV_OWNER))
    pl.when(wg == DK_OWNER)(lambda: _consume(block, DK_OWNER))
    pl.when(wg == common.CONSUMERS)(lambda: common.produce(block))


@dataclasses.dataclass(frozen=True)
class _Consumer:
    """One consumer warpgroup: its role, its columns of dq, its accumulators."""

    block: Block
    role: int
    units: logits.Units
    acc: Accumulators


def _consume(block: Block, role: int) -> None:
    """A consumer warpgroup: all tiles of the walk, then dv or dk leaves."""
    plgpu.set_max_registers(block.launch.registers[0], action="increase")
    launch, smem, bars = block.launch, block.smem, block.bars
    if launch.make_dq and role == DK_OWNER:  # dS of the tile before the first: zero
        smem.ds[DS_SLOTS - 1] = common.zeros((KEYS, launch.config.block_q)).astype(launch.dtype)
        launch.op.fence_async()
        plgpu.barrier_arrive(bars.ds_ready.at[DS_SLOTS - 1])
    units = block.units()
    plgpu.barrier_wait(bars.kv_ready)
    grad = launch.op.with_accumulators(
        lambda **acc: _walk(_Consumer(block, role, units, Accumulators(**acc))),
        smem.accumulators[role],
        0,
        **_accumulator_shapes(launch, role),
    )
    _finish(block, role, grad)


def _walk(c: _Consumer):
    """All tiles; returns dv, or dk before the scale."""
    block = c.block
    step = functools.partial(_step, c)
    tests = c.role == DV_OWNER
    carry = (jnp.int32(0),) * 2
    done, before = block.walk.over_tiles(block.launch, step, carry, tests=tests)
    _issue_dq(c, done + DS_SLOTS - 1)
    _add_dq(c, done - 1, before, in_flight=0)
    return block.launch.op.load(c.acc.grad)


def _step(c: _Consumer, carry, head, qi, masked: bool):
    """One q tile: dv += P^T dout in one role, dk += dS^T q in the other; dq one tile late."""
    launch, smem, bars, acc = c.block.launch, c.block.smem, c.block.bars, c.acc
    op = launch.op
    i, before = carry
    slot = common.ring(i, launch.config.num_stages)
    place = c.block.place(head, qi, c.block.walk.kv0, KEYS)

    plgpu.barrier_wait(bars.tile_ready.at[slot])
    if c.role == DV_OWNER:
        a, b = _probs(c, slot, i, place, masked), smem.dout.at[slot]
    else:
        a, b = _dlogits(c, slot, i, place), smem.q.at[slot]
    _issue_dq(c, i + DS_SLOTS - 1)
    op.wgmma(acc.grad, a, b)
    _add_dq(c, i - 1, before, in_flight=1)
    op.wait(0)
    plgpu.barrier_arrive(bars.tile_consumed.at[slot])
    return i + 1, c.block.dq_row(head, qi)


def _probs(c: _Consumer, slot, i, place: logits.Place, masked: bool):
    """P^T [64 keys, block_q], which goes to the owner of dk as well.

    There negative where dropped, and with a cap times its slope: the tanh is at hand here, and of
    P it would take a logarithm.
    """
    smem, op = c.block.smem, c.block.launch.op
    is_tame = c.block.start_scores(c.acc.x, slot, place, c.units)
    keys = smem.k.at[common.unhoisted(0, KEYS, i)]
    op.wgmma(c.acc.x, keys, common.transposed(smem.q.at[slot]))  # S^T - lse / scale
    products, neg_lse = op.load(c.acc.x), c.block.neg_lse_apart(slot, 0, place)
    weights, slope = c.block.weights(
        products, neg_lse, place, c.units, masked=masked, is_tame=is_tame
    )
    p = c.block.signed_by_dropout(weights, place)
    smem.p[slot] = (p if slope is None else p * slope).astype(c.block.launch.dtype)
    plgpu.barrier_arrive(c.block.bars.p_ready.at[slot])
    return c.block.kept(p.astype(c.block.launch.dtype))


def _dlogits(c: _Consumer, slot, i, place: logits.Place):
    """dS^T [64 keys, block_q], handed to the owner of dv as well."""
    smem, bars, op, dtype = c.block.smem, c.block.bars, c.block.launch.op, c.block.launch.dtype
    c.block.start_dprobs(c.acc.x, slot, KEYS)
    values = smem.v.at[common.unhoisted(0, KEYS, i)]
    op.wgmma(c.acc.x, values, common.transposed(smem.dout.at[slot]))  # dP^T - delta
    plgpu.barrier_wait(bars.p_ready.at[slot])
    p = plgpu.load(smem.p.at[slot], layout=registers.ACC_LAYOUT).astype(jnp.float32)
    # This role runs masked and plain steps alike and sees no bias: it asks whether any step hides.
    has_hidden = c.block.walk.hides or "bias" in c.block.launch.terms
    dlogits = c.block.dlogits(p, op.load(c.acc.x), slot, has_hidden=has_hidden)
    c.block.add_dbias(dlogits, place, c.block.walk.ki, 0)
    ds = dlogits.astype(dtype)
    if c.block.launch.make_dq:
        ds_slot = common.ring(i, DS_SLOTS)
        smem.ds[ds_slot] = ds
        op.fence_async()
        plgpu.barrier_arrive(bars.ds_ready.at[ds_slot])
    return ds


def _issue_dq(c: _Consumer, i) -> None:
    """This consumer's columns of dq from the dS in ring place i."""
    launch, smem, op = c.block.launch, c.block.smem, c.block.launch.op
    first, columns = _dq_columns(launch, c.role)
    if columns:
        slot = common.ring(i, DS_SLOTS)
        plgpu.barrier_wait(c.block.bars.ds_ready.at[slot])
        op.set(c.acc.dq, common.zeros((launch.config.block_q, columns)))
        keys = smem.k if columns == launch.head_dim else smem.k.at[:, pl.ds(first, columns)]
        op.wgmma(c.acc.dq, common.transposed(smem.ds.at[slot]), keys)


def _add_dq(c: _Consumer, i, row, in_flight: int) -> None:
    """Adds the columns that were issued, of tile i if there is one, to their place."""
    launch, op = c.block.launch, c.block.launch.op
    first, columns = _dq_columns(launch, c.role)
    if columns:
        block_q = launch.config.block_q
        part = c.block.dq_part(row, first * block_q, columns * block_q)
        op.add_dq(op.load(c.acc.dq, in_flight), part, where=i >= 0)


def _finish(block: Block, role: int, grad) -> None:
    """dv leaves through V and dk through K, once both consumers have read them."""
    plgpu.barrier_arrive(block.bars.done)
    plgpu.barrier_wait(block.bars.done)
    smem, gmem = block.smem, block.gmem
    grad = grad * block.dk_factor() if role == DK_OWNER else block.of_p(block.undropped(grad))
    buffer, out = (smem.v, gmem.dv) if role == DV_OWNER else (smem.k, gmem.dk)
    common.store_grad(block, grad, buffer, out, block.walk.kv0)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
