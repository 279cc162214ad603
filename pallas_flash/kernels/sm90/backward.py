"""The fused backward for Hopper: dq, dk and dv in one kernel of five products a tile.

A block of the grid holds the keys and values of one kv head's block_kv positions and walks over
the q tiles that see them, for each query head of the group. Where tiles of keys are too few to fill
the GPU, several blocks share the query heads of one, and their sums of dk and dv are added up
afterwards (`kv_parts`). Everything is transposed, keys in rows, so that P and dS feed dv and dk
from registers:

    S^T  = K Q^T - lse / scale        the accumulator starts from the statistic, which a product of
    dP^T = V dO^T - delta             its own puts there (`query_parts`): nothing is subtracted
    P    = exp2(scale log2(e) S)      masked steps first write -inf where the pair is hidden
    dS   = P dP                       also part of the gradient of a bias, where that is wanted
    dv  += P^T dO,  dk += dS^T Q      in registers for the whole walk
    dq  += dS K                       one tile late, added to global memory in float32

(Dao, FlashAttention-2, arXiv:2307.08691, algorithm 2.) Bias and ALiBi are in the accumulator of S
from the start, too; with a soft cap lse is subtracted after the tanh, and dS gets the factor
1 - tanh^2 (`logits.capped_exponents`); dropout leaves its mark in the sign of P.

dq is one tile late because dS of both consumers is needed for it: so no one waits for the other's
current dS, and one consumer does exponentials while the other has the tensor cores. The float32
adds into dq come in no fixed order, so dq is not equal from run to run; dk and dv are. Where one
block has all keys, and tiles are whole, dq leaves it finished (`Launch.stores_dq`).

Blocks are started in an order that lets the launch end with short walks (`Launch.head_group`).

The gradient of a bias is dS summed over what shares the bias. Where that is 2, 4 or 8 batch rows of
whole tiles, their blocks are a cluster: they keep step, copy one tile of the bias for all, and send
each other parts of dS, of which the warpgroup that loads stores the sum (`cluster_sums`, `_peers`).
A block whose bias is its own stores dS likewise. Else dS is added up in global memory.

`backward_ends` has what runs before (the statistics, zeros to add into) and after (dq in its
place). Warpgroups 0 and 1 are consumers, warpgroup 2 loads. `backward_keys` (head dims up to 128)
gives each consumer half of the keys; `backward_roles` (above) gives one dv, the other dk. Shared
memory: K, V; a ring of num_stages tiles of q, dout, their two statistics and (where TMA can copy it
and there is room) the bias; slots of dS; with roles slots of P. dk and dv leave through K and V.

| barrier | arrives | waits | count |
|---|---|---|---|
| kv_ready | copies of K and V | consumers | 1 of 2 |
| tile_ready[stage] | copies of q, dout, their statistics, bias | consumers | num_stages of 3 to 6 |
| tile_consumed[stage] | each consumer, its products done | producer | num_stages of 2 |
| ds_ready[slot] | keys: consumers; roles: owner of dk | who makes dq | 3, 4 of 2; 2 of 1 |
| p_ready[stage] (roles) | owner of dv | owner of dk | num_stages of 1 |
| token (keys, soft cap, no bias) | who has made its weights | the other | of both |
| done | each consumer, at the end | each consumer: K and V are free | 1 of 2 |
| summed (cluster) | producers of the cluster: parts are read | producers | 1 of 1 a block |
| arrived (cluster) | copies from other blocks, and what they bring | producer | 1 of 1 |

In a cluster tile_consumed counts its other blocks, too: each fills a part of all of their biases.

A row without keys (or past a length, or padding) starts from an S of -inf, or next to it, and from
dP = 0, so its P and dS are 0: the kernel hides keys only. Behind lengths an array may hold NaN:
those tiles come from copies made with `tail_tile`.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash import dropout, io_kernels, masks
from pallas_flash.config import BackwardConfig
from pallas_flash.kernels.sm90 import backward_common as common
from pallas_flash.kernels.sm90 import backward_keys, backward_roles
from pallas_flash.kernels.sm90.backward_common import Block
from pallas_flash.kernels.sm90.backward_ends import (
    Statistics,
    finish_dq,
    row_statistics,
    zeros_after,
)
from pallas_flash.kernels.sm90.backward_launch import Gmem, Launch
from pallas_flash.kernels.sm90.call import NO_EXTRAS, Extras, with_bias
from pallas_flash.kernels.sm90.cost import cost_estimate
from pallas_flash.kernels.sm90.smem import check_smem
from pallas_flash.kernels.sm90.tails import tail_tile
from pallas_flash.kernels.sm90.visits import prepared

_SPLITS = dict(keys=backward_keys, roles=backward_roles)


class Gradients(NamedTuple):
    """What `flash_backward` makes; None where it was not asked for.

    Attributes:
      dq: (B, T, N, H).
      dk: (B, S, K * kv_parts, H), the parts of a kv head in sequence.
      dv: (B, S, K * kv_parts, Hv).
      dbias: in the shape of the bias, float32 or its dtype.
      statistics: of the queries, for whoever needs delta.
    """

    dq: jax.Array | None
    dk: jax.Array
    dv: jax.Array
    dbias: jax.Array | None
    statistics: Statistics


def flash_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    dout: jax.Array,
    lse: jax.Array,
    dlse: jax.Array | None,
    scale: jax.Array,
    *,
    mask: masks.Mask,
    q_len: int,
    kv_len: int,
    extras: Extras = NO_EXTRAS,
    alibi_shift: int = 0,
    dropout_rate: float = 0.0,
    config: BackwardConfig,
    make_dq: bool = True,
    make_dbias: bool = False,
    kv_parts: int = 1,
    dq_factor: jax.Array | None = None,
    interpret: bool = False,
) -> Gradients:
    """Gradients of attention.

    B batch, T queries and S keys padded with zeros to a multiple of 8, N query heads, K kv heads,
    H head_dim, Hv head_dim_v (as `config.padded` gives them).

    Args:
      q: (B, T, N, H), float16 or bfloat16.
      k: (B, S, K, H).
      v: (B, S, K, Hv).
      out: (B, T, N, Hv).
      dout: (B, T, N, Hv).
      lse: float32 (B, N, >= q_len), natural log; -inf for a row that sees no key.
      dlse: float32 (B, N, >= q_len), or None for 0.
      scale: float32 (1|B,), positive.
      mask: what hides pairs.
      q_len: queries without padding.
      kv_len: keys without padding.
      extras: arrays of the mask and of further terms. Behind lengths the others may hold anything.
      alibi_shift: of the diagonal where ALiBi's distance is 0.
      dropout_rate: with `extras.dropout_rows`.
      config: how the kernel is cut.
      make_dq: False leaves dq out: what is left is bit-equal from run to run.
      make_dbias: make the gradient of `extras.bias`, too.
      kv_parts: blocks that share the query heads of one kv head and tile of keys; divides N / K.
        Their sums of dk and dv, in the dtype of k and v, are for the caller to add up.
      dq_factor: float32 (1|B,), on dq in the dtype of q; None leaves dq in float32 without the
        scale.
      interpret: run in Pallas' interpret mode.

    Raises:
      ValueError: the tiles of `config` do not fit the problem, or `kv_parts` its heads, or head
        dims are not padded.
    """
    group = q.shape[2] // k.shape[2]
    if group % kv_parts:
        raise ValueError(
            f"kv_parts={kv_parts} must divide the {group} query heads of a kv head: take a divisor"
        )
    launch = Launch(
        batch=q.shape[0],
        q_len=q_len,
        kv_len=kv_len,
        num_q_heads=q.shape[2],
        num_kv_heads=k.shape[2],
        head_dim=q.shape[3],
        head_dim_v=v.shape[3],
        dtype=jnp.dtype(q.dtype).name,
        mask=mask,
        terms=extras.present(),
        alibi_shift=alibi_shift,
        dropout_rate=dropout_rate,
        config=config,
        make_dq=make_dq,
        stores_dq=make_dq and dq_factor is not None and config.stores_dq(mask, q_len, kv_len),
        make_dbias=make_dbias,
        kv_parts=kv_parts,
        interpret=bool(interpret),
    )
    _check_padded(launch)
    split = _SPLITS[config.split]
    split.check(launch)
    launch = with_bias(launch, extras.bias, split.scratch)
    if make_dbias:
        launch = dataclasses.replace(launch, peers=_peers(launch, extras))
    check_smem(f"backward with {config}", _gpu_scratch(launch))

    statistics = row_statistics(
        launch, out, dout, lse, dlse, scale, extras.soft_cap, extras.query_lengths
    )
    of_queries = {name: getattr(statistics, name) for name in launch.statistics}
    extras_here = prepared(launch, extras, by_kv=True, at_least_one=False)
    operands = Gmem(q, k, v, dout, **of_queries, scale=scale, extras=extras_here)
    if extras.query_lengths is not None:
        operands = operands._replace(
            q_tail=tail_tile(q, extras.query_lengths, config.block_q),
            dout_tail=tail_tile(dout, extras.query_lengths, config.block_q),
        )
    if extras.kv_lengths is not None:
        operands = operands._replace(
            k_tail=tail_tile(k, extras.kv_lengths, config.block_kv),
            v_tail=tail_tile(v, extras.kv_lengths, config.block_kv),
        )
    if launch.stores_dq:
        operands = operands._replace(dq_factor=_dq_factor(launch, dq_factor))
    sums = {} if statistics.dq is None else dict(dq=statistics.dq)
    if make_dbias and not (launch.peers and launch.visits_all):
        sums["dbias"] = _zero_dbias(launch, extras.bias, after=next(iter(of_queries.values())))
    made = _run_adding(launch, operands, sums)
    dq = made.get("dq")
    if launch.adds_dq:
        dq = _finished_dq(launch, dq, q, extras, dq_factor)
    dbias = _ordered_dbias(launch, made["dbias"], extras.bias) if make_dbias else None
    return Gradients(dq, made["dk"], made["dv"], dbias, statistics)


def _peers(launch: Launch, extras: Extras) -> int:
    """`Launch.peers`: how many blocks can store the gradient of the bias among themselves.

    In whole tiles, of a bias in the dtype of dS, which is what is summed, where dS lies in lines of
    128 bytes (beside narrow keys it does not), and with the two stages that its slots are for. The
    blocks of a cluster keep step, so their
    walks must be the same.
    """
    bias = extras.bias
    logits = (launch.num_q_heads, launch.q_len, launch.kv_len)
    if (
        launch.interpret
        or launch.config.split != "keys"
        or not (launch.make_dq and launch.is_whole)
        or bias.shape[1:] != logits
        or jnp.dtype(bias.dtype) != jnp.dtype(launch.dtype)
        or launch.head_dim % 64 != 0
        or launch.config.num_stages != 2
    ):
        return 0
    if bias.shape[0] == launch.batch:
        return 1
    differ = extras.visits is not None or {"query_lengths", "kv_lengths"} & launch.terms
    same_walk = launch.mask.is_bounds and not differ and _rows(extras.window) == 1
    return launch.batch if launch.batch in (2, 4, 8) and _rows(bias) == 1 and same_walk else 0


def _rows(array) -> int:
    return 1 if array is None else array.shape[0]


def _check_padded(launch: Launch) -> None:
    for name in ("head_dim", "head_dim_v"):
        size = getattr(launch, name)
        wide = launch.config.padded(size)
        if size != wide:
            split = launch.config.split
            raise ValueError(f"{name}={size} must be padded to {wide} with split={split!r}")


def _gpu_scratch(launch: Launch) -> dict[str, Any]:
    launch = dataclasses.replace(launch, interpret=False)
    return _SPLITS[launch.config.split].scratch(launch)


def _zero_dbias(launch: Launch, bias, after) -> jax.Array:
    """Zeros to add the gradient of the bias into: one tile for all that shares a piece of bias.

    In interpret mode, which has no atomics, every tile of the logits has its own. Where the
    gradient is stored they are what the tiles keep that no block visits.
    """
    if launch.peers:
        stored = _stored_dbias(launch, bias)
        zeros = zeros_after(after, (stored.size // 4096, 4096), dtype=stored.dtype)
        return zeros.reshape(stored.shape)
    tiles = (launch.num_q_tiles, launch.num_kv_tiles)
    tile = launch.config.block_q * launch.config.block_kv
    if launch.op.dq_writers(2) == 1:
        lead = bias.shape[:2]
        tiles = tuple(1 if n == 1 else t for n, t in zip(bias.shape[2:], tiles, strict=True))
    else:
        lead = (launch.batch, launch.num_q_heads)
    return zeros_after(after, (*lead, *tiles, tile), interpret=launch.interpret)


def _stored_dbias(launch: Launch, bias) -> jax.ShapeDtypeStruct:
    """The gradient of the bias where it is stored, and not added up."""
    rows = launch.num_q_heads * launch.q_len
    return jax.ShapeDtypeStruct((bias.shape[0], rows, launch.kv_len), bias.dtype)


def _ordered_dbias(launch: Launch, dbias, bias) -> jax.Array:
    """(b, n, q tiles, kv tiles, block_kv * block_q) in register order -> the shape of the bias."""
    if launch.peers:
        return dbias.reshape(bias.shape)
    block_q, block_kv = launch.config.block_q, launch.config.block_kv
    dbias = launch.op.order_dq(dbias, block_kv, block_q)  # b, n, q tiles, kv tiles, keys, queries
    dbias = dbias.transpose(0, 1, 2, 5, 3, 4)
    for size, axes in ((bias.shape[3], (4, 5)), (bias.shape[2], (2, 3))):
        if size == 1:
            dbias = dbias.sum(axes, keepdims=True)
    b, n, q_tiles, q, kv_tiles, kv = dbias.shape
    dbias = dbias.reshape(b, n, q_tiles * q, kv_tiles * kv)
    dbias = dbias[:, :, : bias.shape[2], : bias.shape[3]]
    if dbias.shape[0] != bias.shape[0]:  # interpret mode
        dbias = dbias.reshape(bias.shape[0], -1, *dbias.shape[1:]).sum(1)
    if dbias.shape[1] != bias.shape[1]:
        dbias = dbias.sum(1, keepdims=True)
    return dbias * dropout.keep_scale(launch.dropout_rate)


def _dq_factor(launch: Launch, factor):
    kept = dropout.keep_scale(launch.dropout_rate)
    return jnp.full((1,), kept, jnp.float32) if factor is None else factor * kept


def _finished_dq(launch: Launch, dq, q, extras: Extras, factor) -> jax.Array:
    return finish_dq(
        dq,
        _dq_factor(launch, factor),
        shape=q.shape,
        dtype=jnp.float32 if factor is None else q.dtype,
        block_q=launch.config.block_q,
        q_len=launch.q_len,
        query_lengths=extras.query_lengths,
        interpret=launch.interpret,
    )


def _run_adding(launch: Launch, operands: Gmem, sums: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """`sums` (dq, dbias) with the launch's share added in place, and what it makes of its own.

    `run_state` and not `jax.new_ref`: inside a custom_jvp the latter does not lower.
    """
    if not sums:
        return _run(launch, operands)

    def body(refs):
        sum_refs, made_refs = refs
        for name, x in _run(launch, operands._replace(**sum_refs)).items():
            made_refs[name][...] = x

    made = _made(launch, operands._replace(**sums))
    zeros = {name: jnp.zeros(x.shape, x.dtype) for name, x in made.items()}
    sums, made = pl.run_state(body)((sums, zeros))
    return sums | made


def _made(launch: Launch, operands: Gmem) -> dict[str, jax.ShapeDtypeStruct]:
    """What the kernel writes without adding to what is there."""
    of_shares = lambda x: (*x.shape[:2], launch.num_shares, x.shape[3])
    made = {
        name: jax.ShapeDtypeStruct(of_shares(x), x.dtype)
        for name, x in (("dk", operands.k), ("dv", operands.v))
    }
    if launch.stores_dq:
        made["dq"] = jax.ShapeDtypeStruct(operands.q.shape, operands.q.dtype)
    if launch.make_dbias and operands.dbias is None:
        made["dbias"] = _stored_dbias(launch, operands.extras.bias)
    return made


def _run(launch: Launch, operands: Gmem) -> dict[str, jax.Array]:
    """Launches the kernel; `operands.dq` and `operands.dbias` are added into."""
    split, made = _SPLITS[launch.config.split], _made(launch, operands)
    given, structure = jax.tree.flatten(operands)

    def body(*refs, smem, bars):
        results = dict(zip(made, refs[len(given) :], strict=True))
        gmem = jax.tree.unflatten(structure, refs[: len(given)])._replace(**results)
        block = Block(launch, gmem, smem, bars, common.find_walk(launch, gmem))
        split.run_roles(block, lax.axis_index("wg"))

    kernel = plgpu.kernel(
        body,
        out_type=list(made.values()),
        scratch_types=split.scratch(launch),
        grid=tuple(launch.grid.values()),
        grid_names=tuple(launch.grid),
        **(dict(cluster=(launch.cluster,), cluster_names=("peer",)) if launch.cluster > 1 else {}),
        num_threads=common.CONSUMERS + 1,
        thread_name="wg",
        kernel_name="flash_backward",
        **cost_estimate(
            launch, io_kernels.backward_kernel, make_dq=launch.make_dq, kv_parts=launch.kv_parts
        ),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=0,
            lowering_semantics=mgpu.LoweringSemantics.Lane,
        ),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if launch.interpret else None,
    )
    return dict(zip(made, kernel(*given), strict=True))
