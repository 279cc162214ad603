"""The fused backward for Hopper: dq, dk and dv in one kernel of five products a tile.

A block of the grid holds the keys and values of one kv head's block_kv positions and walks over
the q tiles that see them, for each query head of the group. Everything is transposed, keys in
rows, so that P and dS feed dv and dk from registers:

    S^T  = K Q^T - lse / scale        the accumulator starts from the statistic: no subtraction,
    dP^T = V dO^T - delta             and no row of statistics is live afterwards
    P    = exp2(scale log2(e) S)      masked steps first write -inf where the pair is hidden
    dS   = P dP
    dv  += P^T dO,  dk += dS^T Q      in registers for the whole walk
    dq  += dS K                       one tile late, added to global memory in float32

(Dao, FlashAttention-2, arXiv:2307.08691, algorithm 2.) dq is one tile late because dS of both
consumers is needed for it: so no one waits for the other's current dS, and one consumer does
exponentials while the other has the tensor cores. The float32 adds into dq come in no fixed order,
so dq is not equal from run to run; dk and dv are.

Warpgroups 0 and 1 are consumers, warpgroup 2 loads. `backward_keys` (head dims up to 128) gives
each consumer half of the keys; `backward_roles` (above) gives one dv, the other dk. Shared memory:
K, V; a ring of num_stages tiles of q, dout and their two statistics; slots of dS; with roles slots
of P. dk and dv leave through K and V.

| barrier | arrives | waits | count |
|---|---|---|---|
| kv_ready | copies of K and V | consumers | 1 of 2 |
| tile_ready[stage] | copies of q, dout, neg_lse, neg_delta | consumers | num_stages of 4 |
| tile_consumed[stage] | each consumer, its products done | producer | num_stages of 2 |
| ds_ready[slot] | keys: each consumer; roles: owner of dk | who makes dq | 4 of 2; 2 of 1 |
| p_ready[stage] (roles) | owner of dv | owner of dk | num_stages of 1 |
| done | each consumer, at the end | each consumer: K and V are free | 1 of 2 |

A row without keys (or past a length, or padding) starts from S = -inf and dP = 0, so its P and dS
are 0: the kernel hides keys only. Behind lengths an array may hold NaN: those tiles come from
copies made with `tail_tile`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash import masks
from pallas_flash.config import BackwardConfig
from pallas_flash.kernels.sm90 import backward_common as common
from pallas_flash.kernels.sm90 import backward_keys, backward_roles
from pallas_flash.kernels.sm90.backward_common import Block, Gmem, Launch
from pallas_flash.kernels.sm90.smem import check_smem
from pallas_flash.kernels.sm90.tails import tail_tile

_SPLITS = dict(keys=backward_keys, roles=backward_roles)


def flash_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    dout: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    scale: jax.Array,
    *,
    mask: masks.Mask,
    q_len: int,
    kv_len: int,
    query_lengths: jax.Array | None = None,
    kv_lengths: jax.Array | None = None,
    config: BackwardConfig,
    make_dq: bool = True,
    interpret: bool = False,
) -> tuple[jax.Array | None, jax.Array, jax.Array]:
    """Gradients of attention.

    B batch, T queries and S keys padded with zeros to a multiple of 8, N query heads, K kv heads,
    H head_dim, Hv head_dim_v (64, 128, 192 or 256).

    Args:
      q: (B, T, N, H), float16 or bfloat16.
      k: (B, S, K, H).
      v: (B, S, K, Hv).
      dout: (B, T, N, Hv).
      lse: float32 (B, N, >= q_len), natural log; -inf for a row that sees no key.
      delta: float32 (B, N, >= q_len), rowsum(out * dout) - dlse.
      scale: float32 (B,), positive.
      mask: what hides pairs; `mask.is_bounds`.
      q_len: queries without padding.
      kv_len: keys without padding.
      query_lengths: int32 (B,), where `mask` has them.
      kv_lengths: int32 (B,), where `mask` has them.
      config: how the kernel is cut.
      make_dq: False leaves dq out: what is left is bit-equal from run to run.
      interpret: run in Pallas' interpret mode.

    Returns:
      dq: float32 (B, T, N, H) before the factor scale, or None; dk: (B, S, K, H);
      dv: (B, S, K, Hv).

    Raises:
      ValueError: the mask is more than bounds, or the tiles of `config` do not fit the problem.
    """
    if not mask.is_bounds:
        raise ValueError(f"mask={mask} is more than bounds; use the XLA implementation")
    launch = Launch(
        batch=q.shape[0],
        q_len=q_len,
        kv_len=kv_len,
        num_q_heads=q.shape[2],
        num_kv_heads=k.shape[2],
        head_dim=q.shape[3],
        head_dim_v=v.shape[3],
        dtype=q.dtype,
        mask=mask,
        config=config,
        make_dq=make_dq,
        interpret=bool(interpret),
    )
    _SPLITS[config.split].check(launch)
    check_smem(f"backward with {config}", _gpu_scratch(launch))

    operands = Gmem(q, k, v, dout, *_initial_accumulators(launch, lse, delta, scale, query_lengths))
    operands = operands._replace(scale=scale)
    if query_lengths is not None:
        operands = operands._replace(
            query_lengths=query_lengths,
            q_tail=tail_tile(q, query_lengths, config.block_q),
            dout_tail=tail_tile(dout, query_lengths, config.block_q),
        )
    if kv_lengths is not None:
        operands = operands._replace(
            kv_lengths=kv_lengths,
            k_tail=tail_tile(k, kv_lengths, config.block_kv),
            v_tail=tail_tile(v, kv_lengths, config.block_kv),
        )
    if not make_dq:
        return None, *_run(launch, operands)
    dq, dk, dv = _run_adding_dq(launch, operands, _zero_dq(launch, delta))
    return _ordered_dq(launch, dq)[:, : q.shape[1]], dk, dv


def _gpu_scratch(launch: Launch) -> dict[str, Any]:
    launch = dataclasses.replace(launch, interpret=False)
    return _SPLITS[launch.config.split].scratch(launch)


def _initial_accumulators(launch: Launch, lse, delta, scale, query_lengths):
    """-lse / scale and -delta, (B, N, whole q tiles); -inf and 0 for rows that see no key."""
    lse, delta = lse[..., : launch.q_len], delta[..., : launch.q_len]
    sees = lse > -jnp.inf
    if query_lengths is not None:
        row = lax.iota(jnp.int32, launch.q_len)
        sees &= row < query_lengths.astype(jnp.int32)[:, None, None]
    neg_lse = jnp.where(sees, -lse / scale[:, None, None], -jnp.inf)
    neg_delta = jnp.where(sees, -delta, 0.0)
    padding = launch.num_q_tiles * launch.config.block_q - launch.q_len
    pad = lambda x, value: jnp.pad(x, ((0, 0), (0, 0), (0, padding)), constant_values=value)
    return pad(neg_lse, -jnp.inf), pad(neg_delta, 0.0)


def _zero_dq(launch: Launch, delta) -> jax.Array:
    """Zeros to add dq into, made no earlier than delta: `out` can be freed before."""
    zero = lax.optimization_barrier((delta, jnp.float32(0)))[1]
    writers = launch.op.dq_writers(launch.num_kv_blocks)
    tiles = launch.num_q_heads * launch.num_q_tiles
    tile = launch.config.block_q * launch.head_dim
    return jnp.full((writers, launch.batch, tiles, tile), zero)


def _ordered_dq(launch: Launch, dq: jax.Array) -> jax.Array:
    """(writers, B, N * q tiles, block_q * H) in register order -> (B, q tiles * block_q, N, H)."""
    dq = dq[0] if dq.shape[0] == 1 else dq.sum(0)
    block_q, head_dim = launch.config.block_q, launch.head_dim
    dq = dq.reshape(launch.batch, launch.num_q_heads, launch.num_q_tiles, block_q * head_dim)
    dq = jnp.swapaxes(dq, 1, 2)  # tiles before heads: (B, q tiles, N, ...)
    dq = jnp.swapaxes(launch.op.order_dq(dq, block_q, head_dim), 2, 3)
    return dq.reshape(launch.batch, -1, launch.num_q_heads, head_dim)


def _run_adding_dq(launch: Launch, operands: Gmem, dq: jax.Array):
    """dq with the launch's share added in place, dk and dv.

    `run_state` and not `jax.new_ref`: inside a custom_jvp the latter does not lower.
    """

    def body(refs):
        dq_ref, dk_ref, dv_ref = refs
        dk_ref[...], dv_ref[...] = _run(launch, operands._replace(dq=dq_ref))

    zeros = [jnp.zeros(x.shape, x.dtype) for x in (operands.k, operands.v)]
    return pl.run_state(body)((dq, *zeros))


def _run(launch: Launch, operands: Gmem) -> tuple[jax.Array, jax.Array]:
    """Launches the kernel: dk and dv; `operands.dq` is added into."""
    split = _SPLITS[launch.config.split]
    given = [name for name, x in operands._asdict().items() if x is not None]

    def body(*refs, smem, bars):
        gmem = Gmem(**dict(zip([*given, "dk", "dv"], refs, strict=True)))
        block = Block(launch, gmem, smem, bars, common.find_walk(launch, gmem))
        split.run_roles(block, lax.axis_index("wg"))

    kernel = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (operands.k, operands.v)],
        scratch_types=split.scratch(launch),
        grid=(launch.num_blocks,),
        grid_names=("block",),
        num_threads=common.CONSUMERS + 1,
        thread_name="wg",
        kernel_name="flash_backward",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=0,
            lowering_semantics=mgpu.LoweringSemantics.Lane,
        ),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if launch.interpret else None,
    )
    return kernel(*(getattr(operands, name) for name in given))
