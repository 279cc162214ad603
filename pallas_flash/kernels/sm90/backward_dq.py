"""dq alone, without atomics: the second kernel of the deterministic backward.

One block makes one tile of dq and walks the keys in a fixed order, so two runs give the same bits:

    for each kv tile:   S  = Q K^T                    [64, block_kv] a consumer; see `logits` for
                                                      bias, ALiBi, soft cap and masks
                        dP = dO V^T
                        P  = 2^(scale2 S - lse2)
                        dS = P (dP - delta)
                        dQ = dQ + dS K                registers, until the end
    dq = scale dQ       through the rows of Q in shared memory

One producer warpgroup loads Q and dO once and rings of K and V by TMA; consumer warpgroups hold 64
query rows each. dQ of step i - 1 is issued at the top of step i, ahead of its S and dP: these three
run back to back while the other consumer, which waits for the tensor-core token, computes its P and
dS. Step -1 has dS = 0, which costs one small product a tile and saves a copy of the loop. A tile
without visible keys makes one step in which everything is hidden.

Queries are rows here, so lse and -delta are two registers a thread each and accumulators start from
zero, which is free while other products run; a start from the statistics would wait for them.

Shared memory: q [block_q, H], dout [block_q, Hv], k [k_stages, block_kv, H],
v [v_stages, block_kv, Hv].

| barrier    | arrives        | waits     | arrivals    | means |
|------------|----------------|-----------|-------------|---------------------------------|
| q_ready    | TMA            | consumers | 1           | q is there                      |
| dout_ready | TMA            | consumers | 1           | dout is there                   |
| k_ready    | TMA            | consumers | 1           | a slot of the K ring is there   |
| k_consumed | each consumer  | producer  | compute_wgs | S and dQ of that step are done  |
| v_ready    | TMA            | consumers | 1           | a slot of the V ring is there   |
| v_consumed | each consumer  | producer  | compute_wgs | dP of that step is done         |
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash import dropout, io_kernels, masks, tile_math
from pallas_flash.config import DqConfig
from pallas_flash.kernels.sm90 import logits, registers, smem, tails, tiles
from pallas_flash.kernels.sm90.backward_ends import whole_strips
from pallas_flash.kernels.sm90.call import NO_EXTRAS, Extras, div, rem
from pallas_flash.kernels.sm90.cost import cost_estimate
from pallas_flash.kernels.sm90.visits import prepared

Array = Any
Int = masks.Int


def flash_backward_dq(
    q: Array,
    k: Array,
    v: Array,
    dout: Array,
    lse: Array,
    neg_delta: Array,
    scale: Array,
    *,
    mask: masks.Mask,
    q_len: int,
    kv_len: int,
    extras: Extras = NO_EXTRAS,
    alibi_shift: int = 0,
    dropout_rate: float = 0.0,
    config: DqConfig,
    out_float32: bool = False,
    interpret: bool = False,
) -> jax.Array:
    """dq of attention, bit-equal from run to run.

    B batch, T queries, S keys, N query heads, K kv heads, H head_dim, Hv head_dim_v.

    Args:
      q: (B, T, N, H), bfloat16 or float16; T and S are multiples of 8, zero past q_len and kv_len.
      k: (B, S, K, H).
      v: (B, S, K, Hv); query head n reads kv head n // (N / K).
      dout: (B, T, N, Hv).
      lse: float32 (B, N, >= q_len), natural log; -inf for a row that sees no key.
      neg_delta: float32 (B, N, whole strips of 64 queries), dlse - rowsum(out * dout), over the
        factor of dropout; 0 for a row that sees no key.
      scale: float32 (1|B,), positive.
      mask: what hides pairs.
      q_len: true number of queries, at most T and more than T - 8.
      kv_len: true number of keys, at most S and more than S - 8.
      extras: arrays of the mask and of further terms. Behind lengths the others may hold anything.
      alibi_shift: of the diagonal where ALiBi's distance is 0.
      dropout_rate: with `extras.dropout_rows`.
      config: tiles and rings.
      out_float32: return dq / scale, in float32.
      interpret: run in Pallas' interpret mode.

    Returns:
      (B, T, N, H), dq in the dtype of q, or dq / scale in float32. A row that sees no key has 0.
      Rows at or past q_len mean nothing.

    Raises:
      ValueError: where the scratch of `config` does not fit in shared memory.
    """
    batch, padded_len, num_q_heads, head_dim = q.shape
    plan = _Plan(
        batch=batch,
        q_len=q_len,
        kv_len=kv_len,
        num_q_heads=num_q_heads,
        num_kv_heads=k.shape[2],
        head_dim=head_dim,
        head_dim_v=v.shape[3],
        dtype=jnp.dtype(q.dtype).name,
        mask=mask,
        terms=extras.present(),
        alibi_shift=alibi_shift,
        dropout_rate=dropout_rate,
        facts=tiles.mask_facts(mask, q_len, kv_len, config),
        config=config,
        out_float32=out_float32,
        interpret=interpret,
    )
    on_gpu = _scratch(dataclasses.replace(plan, interpret=False))
    smem.check_smem(f"{config} with head_dim={head_dim}, head_dim_v={v.shape[3]}", on_gpu)
    kv_lengths = extras.kv_lengths
    tail = lambda x: None if kv_lengths is None else tails.tail_tile(x, kv_lengths, config.block_kv)
    operands = _Gmem(
        q=q,
        k=k,
        v=v,
        dout=dout,
        lse=whole_strips(plan, lse, -jnp.inf),
        neg_delta=neg_delta,
        scale=scale,
        extras=prepared(plan, extras, at_least_one=True),
        k_tail=tail(k),
        v_tail=tail(v),
    )
    operands, structure = jax.tree.flatten(operands)

    def flash_backward_dq_kernel(*refs, scratch):
        gmem = jax.tree.unflatten(structure, refs[:-1])._replace(dq=refs[-1])
        tile = _only_tile(plan, gmem)
        wg = lax.axis_index("wg")
        pl.when(wg < config.compute_wgs)(lambda: _consume(plan, gmem, scratch, tile, wg))
        pl.when(wg == config.compute_wgs)(lambda: _produce(plan, gmem, scratch, tile))

    dq = plgpu.kernel(
        flash_backward_dq_kernel,
        out_type=plan.out_type(padded_len),
        scratch_types=dict(scratch=_scratch(plan)),
        grid=(plan.num_tiles,),
        grid_names=("block",),
        num_threads=config.compute_wgs + 1,
        thread_name="wg",
        **cost_estimate(plan, io_kernels.dq_kernel),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else None,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
    )(*operands)
    return dq[:, :padded_len]


def dq_smem_bytes(config: DqConfig, head_dim: int, head_dim_v: int, dtype) -> int:
    """Bytes of shared memory that a launch takes, counted from its own scratch."""
    plan = _Plan(
        head_dim=head_dim, head_dim_v=head_dim_v, dtype=jnp.dtype(dtype).name, config=config
    )
    return smem.smem_bytes(_scratch(plan))


def _only_tile(plan: "_Plan", gmem: Any) -> tiles.Tile:
    """The tile of this block, found as the forward finds its own."""
    zero = jnp.int32(0)
    return tiles.tile_at(plan, gmem, lax.axis_index("block"), zero, zero)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Plan(tiles.Plan):
    """Everything static about one launch."""

    config: DqConfig
    out_float32: bool = False

    def out_type(self, padded_len: int) -> jax.ShapeDtypeStruct:
        """float32 leaves by plain stores, which clip nothing: whole tiles."""
        if not self.out_float32:
            rows, dtype = padded_len, jnp.dtype(self.dtype)
        else:
            rows, dtype = self.num_q_tiles * self.config.block_q, jnp.float32
        return jax.ShapeDtypeStruct((self.batch, rows, self.num_q_heads, self.head_dim), dtype)

    @property
    def accumulators(self) -> dict[str, tuple[int, int]]:
        tile = (tiles.WG_ROWS, self.config.block_kv)
        return dict(dq=(tiles.WG_ROWS, self.head_dim), scores=tile, dp=tile)


class _Scratch(NamedTuple):
    """Shared memory of a block; the module's docstring says who uses it."""

    q: Any
    dout: Any
    k: Any
    v: Any
    accumulators: Any
    q_ready: Any
    dout_ready: Any
    k_ready: Any
    k_consumed: Any
    v_ready: Any
    v_consumed: Any


def _scratch(plan: _Plan) -> _Scratch:
    c, dtype = plan.config, jnp.dtype(plan.dtype)
    ready, consumed = plgpu.Barrier, functools.partial(plgpu.Barrier, num_arrivals=c.compute_wgs)
    return _Scratch(
        q=smem.tiled_smem((c.block_q, plan.head_dim), dtype),
        dout=smem.tiled_smem((c.block_q, plan.head_dim_v), dtype),
        k=smem.tiled_smem((c.k_stages, c.block_kv, plan.head_dim), dtype),
        v=smem.tiled_smem((c.v_stages, c.block_kv, plan.head_dim_v), dtype),
        accumulators=plan.op.accumulator_scratch(c.compute_wgs, **plan.accumulators),
        q_ready=ready(),
        dout_ready=ready(),
        k_ready=ready(num_barriers=c.k_stages),
        k_consumed=consumed(num_barriers=c.k_stages),
        v_ready=ready(num_barriers=c.v_stages),
        v_consumed=consumed(num_barriers=c.v_stages),
    )


class _Gmem(NamedTuple):
    """Operands and results by name; None where absent."""

    q: Any
    k: Any
    v: Any
    dout: Any
    lse: Any
    neg_delta: Any
    scale: Any
    extras: Extras
    k_tail: Any = None
    v_tail: Any = None
    dq: Any = None


class _Work(NamedTuple):
    """One q tile in the hands of one warpgroup."""

    plan: _Plan
    scratch: _Scratch
    extras: Extras
    tile: tiles.Tile
    wg: Int

    def place(self, i: Int) -> logits.Place:
        """Where the scores of step i are."""
        block_kv = self.plan.config.block_kv
        kv0 = self.tile.walk.kv_tile(i) * block_kv
        shape = (tiles.WG_ROWS, block_kv)
        return logits.Place(self.tile.batch, self.tile.head, self.row0, kv0, 0, shape)

    @property
    def row0(self) -> Int:
        """First query of this consumer."""
        return self.tile.q_lo + self.wg * tiles.WG_ROWS

    def my_rows(self, ref):
        """This consumer's rows of the q or dout tile."""
        return ref.at[pl.ds(self.wg * tiles.WG_ROWS, tiles.WG_ROWS)]

    def k_slot(self, i: Int) -> Int:
        return rem(i, self.plan.config.k_stages)

    def v_slot(self, i: Int) -> Int:
        return rem(i, self.plan.config.v_stages)


# --- producer ------------------------------------------------------------------------------------


def _produce(plan: _Plan, gmem: _Gmem, scratch: _Scratch, tile: tiles.Tile) -> None:
    """The producer warpgroup: loads everything of this tile, in the order of its use."""
    c, steps = plan.config, jnp.int32(tile.walk.steps)
    tiles.release_registers(c.compute_wgs)
    rows = pl.ds(tile.q_lo, c.block_q)
    load_k = functools.partial(
        _load, plan, gmem, tile, gmem.k, gmem.k_tail, scratch.k, scratch.k_ready, scratch.k_consumed
    )
    load_v = functools.partial(
        _load, plan, gmem, tile, gmem.v, gmem.v_tail, scratch.v, scratch.v_ready, scratch.v_consumed
    )

    def load_both(i, _):
        load_k(i)
        load_v(i)
        return ()

    plgpu.copy_gmem_to_smem(gmem.q.at[tile.batch, rows, tile.head], scratch.q, scratch.q_ready)
    plgpu.copy_gmem_to_smem(
        gmem.dout.at[tile.batch, rows, tile.head], scratch.dout, scratch.dout_ready
    )
    lax.fori_loop(jnp.int32(0), steps, load_both, ())
    tiles.drain(scratch.k_consumed, steps, c.k_stages)
    tiles.drain(scratch.v_consumed, steps, c.v_stages)


def _load(plan, gmem, tile, array, tail, ring, ready, consumed, i: Int) -> None:
    """K or V of step i; the tile that the kv length cuts comes from its clean copy."""
    block_kv, num_slots = plan.config.block_kv, ring.shape[0]
    head, ki = div(tile.head, plan.q_per_kv), tile.walk.kv_tile(i)
    slot = rem(i, num_slots)
    pl.when(i >= num_slots)(lambda: plgpu.barrier_wait(consumed.at[slot]))

    def load(ref, first_key):
        keys = pl.ds(first_key, block_kv)
        plgpu.copy_gmem_to_smem(ref.at[tile.batch, keys, head], ring.at[slot], ready.at[slot])

    if tail is None:
        load(array, ki * block_kv)
        return
    is_cut = ki == div(gmem.extras.kv_lengths[tile.batch], block_kv)
    pl.when(is_cut)(lambda: load(tail, 0))
    pl.when(jnp.logical_not(is_cut))(lambda: load(array, ki * block_kv))


# --- consumers -----------------------------------------------------------------------------------


class _Statistics(NamedTuple):
    """Of the rows of one consumer.

    Attributes:
      units: of the scores.
      lse2: log-sum-exp in log2 units; +inf for a row that sees no key, so that its P is 0. [64]
      neg_delta: as in `flash_backward_dq`. [64]
    """

    units: logits.Units
    lse2: Any
    neg_delta: Any


def _consume(plan: _Plan, gmem: _Gmem, scratch: _Scratch, tile: tiles.Tile, wg: Int) -> None:
    """A consumer warpgroup: dq of its 64 rows."""
    op, num_wgs = plan.op, plan.config.compute_wgs
    tiles.claim_registers(num_wgs)
    work = _Work(plan, scratch, gmem.extras, tile, wg)
    statistics = _load_statistics(work, gmem)
    op.token_start(wg, num_wgs)
    plgpu.barrier_wait(scratch.q_ready)
    plgpu.barrier_wait(scratch.dout_ready)
    dq = op.with_accumulators(
        functools.partial(_walk, work, statistics),
        scratch.accumulators,
        wg,
        **plan.accumulators,
    )
    _finish(work, gmem, dq)


def _load_statistics(work: _Work, gmem: _Gmem) -> _Statistics:
    # A tile may end past the last row; what is made there is stored nowhere.
    row0 = lax.min(work.row0, jnp.int32(gmem.lse.shape[-1] - tiles.WG_ROWS))

    def load(ref):
        rows = ref.at[work.tile.batch, work.tile.head, pl.ds(row0, tiles.WG_ROWS)]
        return plgpu.load(rows, layout=registers.ROW_LAYOUT, optimized=False)

    lse = load(gmem.lse)
    return _Statistics(
        units=logits.units(work.plan, gmem.extras, gmem.scale, work.tile.batch, keeps_tanh=True),
        lse2=jnp.where(lse > -jnp.inf, lse * tile_math.LOG2E, jnp.inf),
        neg_delta=load(gmem.neg_delta),
    )


def _zeros(columns: int):
    return plgpu.layout_cast(jnp.zeros((tiles.WG_ROWS, columns), jnp.float32), registers.ACC_LAYOUT)


def _walk(work: _Work, statistics: _Statistics, *, dq, scores, dp):
    """All steps; returns the sum of dS K. [64, head_dim]"""
    plan, scratch = work.plan, work.scratch
    last = jnp.int32(work.tile.walk.steps) - 1
    step = functools.partial(_step, work, statistics, dq, scores, dp)
    no_ds = _zeros(plan.config.block_kv).astype(plan.dtype)
    ds = tiles.for_each_step(plan.facts, work.tile.walk, 0, step, no_ds)
    plan.op.wgmma(dq, ds, scratch.k.at[work.k_slot(last)])
    acc = plan.op.load(dq)
    plgpu.barrier_arrive(scratch.k_consumed.at[work.k_slot(last)])
    return acc


def _step(work: _Work, statistics: _Statistics, dq, scores, dp, i: Int, ds, *, masked: bool):
    """dQ of step i - 1 from its dS; S, dP, P and dS of step i. Returns dS."""
    op, scratch, c = work.plan.op, work.scratch, work.plan.config
    # wgmma's descriptors of Q and dout would be hoisted out of the loop: 32 of 64 bits at
    # head_dim 256, which spill. This makes them depend on the step.
    work = work._replace(wg=lax.optimization_barrier(work.wg))
    slot, v_slot = work.k_slot(i), work.v_slot(i)
    before = work.k_slot(lax.max(i - 1, jnp.int32(0)))  # dS of step -1 is 0: any K that is there
    start = logits.start(work.plan, work.extras, work.place(i), statistics.units)
    op.set(scores, _zeros(c.block_kv) if start.scores is None else start.scores)
    op.set(dp, _zeros(c.block_kv))
    plgpu.barrier_wait(scratch.k_ready.at[slot])
    op.token_take(work.wg)
    op.wgmma(dq, ds, scratch.k.at[before])
    op.wgmma(scores, work.my_rows(scratch.q), scratch.k.at[slot].transpose((1, 0)))
    plgpu.barrier_wait(scratch.v_ready.at[v_slot])
    op.wgmma(dp, work.my_rows(scratch.dout), scratch.v.at[v_slot].transpose((1, 0)))
    op.token_pass(rem(work.wg + 1, c.compute_wgs), c.compute_wgs)

    op.wait(2)
    pl.when(i > 0)(lambda: plgpu.barrier_arrive(scratch.k_consumed.at[before]))
    weights = _weights(work, statistics, i, op.load(scores, 1), masked)
    keep = logits.kept(work.plan, work.extras, work.place(i))
    dp = op.load(dp)
    plgpu.barrier_arrive(scratch.v_consumed.at[v_slot])
    if keep is not None:
        dp = jnp.where(keep, dp, 0.0)
    dp = dp + tile_math.spread(statistics.neg_delta, dp.shape)
    ds = tile_math.dlogits(weights, dp, has_hidden=masked or "bias" in work.plan.terms)
    return ds.astype(work.plan.dtype)


def _weights(work: _Work, statistics: _Statistics, i: Int, products, masked: bool):
    """P of step i [64, block_kv], with a soft cap times its slope."""
    # Rows are independent, those behind the query length are cleared at the end: no test here.
    bounds = dataclasses.replace(work.tile.bounds, q_end=None)
    units = statistics.units
    scores, squashed = logits.finish(
        work.plan, work.extras, work.place(i), bounds, units, products, masked=masked
    )
    weights = tile_math.weights(scores, units.log2, statistics.lse2)
    if "bias" in work.plan.terms:  # rounding at large biases
        weights = jnp.minimum(weights, 1.0)
    return tile_math.sloped(weights, squashed)


def _finish(work: _Work, gmem: _Gmem, dq) -> None:
    """Writes dq of these 64 rows, 0 behind the query length."""
    plan, tile = work.plan, work.tile
    query_lengths = gmem.extras.query_lengths
    if query_lengths is not None:
        row = work.row0 + plgpu.broadcasted_iota(
            jnp.int32, dq.shape, 0, layout=registers.ACC_LAYOUT
        )
        dq = jnp.where(row < query_lengths[tile.batch], dq, 0.0)
    if plan.dropout_rate:
        dq = dq * dropout.keep_scale(plan.dropout_rate)
    out = gmem.dq.at[tile.batch, pl.ds(work.row0, tiles.WG_ROWS), tile.head]
    if plan.out_float32:
        out[...] = dq
        return
    staged = work.my_rows(work.scratch.q)
    scale = gmem.scale[plan.entry(gmem.scale, tile.batch)]
    staged[...] = (dq * scale).astype(plan.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(staged, out)
    plgpu.wait_smem_to_gmem(0)
