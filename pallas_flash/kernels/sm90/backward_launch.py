"""The launch of the fused backward: what is static about it, its arrays, the order of its blocks.

Both splits have it; what a block does is in `backward_common` and in theirs.
"""

import dataclasses
from typing import Any, NamedTuple

from jax import lax

from pallas_flash import hardware, masks
from pallas_flash.config import BackwardConfig
from pallas_flash.kernels.sm90.call import NO_EXTRAS, Call, Extras, fitting_group, interleaved

MOST_RUNNING = 8  # pairs; T 512 took 2 % longer with 32 of the 33 that run at a time
MOST_GROUPS = 65_535  # of the slowest axis of a grid

Int = masks.Int
Ref = Any


class Gmem(NamedTuple):
    """Arrays in global memory, in the order the kernel receives them; None where absent.

    Attributes:
      q, dout: (B, T, N, H) and (B, T, N, Hv).
      k, v: (B, S, K, H) and (B, S, K, Hv).
      parts: bfloat16 (B, N, q tiles * block_q, 8), -lse and -delta as `query_parts` has them; see
        `Statistics` for these three.
      neg_lse: float32 (B, N, q tiles * block_q).
      neg_delta: float32, the same shape.
      scale: float32 (1|B,).
      extras: arrays of the mask and of further terms.
      q_tail, dout_tail, k_tail, v_tail: the tile that a length cuts, zeroed behind it.
      dq_factor: float32 (1|B,), on dq, where that is stored.
      dq: float32 (writers, B, N * q tiles, block_q * H), added into; see `mma.add_dq`. Where it is
        stored, see `Launch.stores_dq`, (B, T, N, H) in the dtype of q.
      dbias: float32 (B', N', tiles of q, tiles of kv, block_q * block_kv), added into likewise; an
        axis along which the bias is repeated has size 1. Where it is stored, see `Launch.peers`,
        (B', N * T, S) in the dtype of the bias.
      dk, dv: (B, S, K * parts, H) and (B, S, K * parts, Hv), see `Launch.kv_parts`.
    """

    q: Ref
    k: Ref
    v: Ref
    dout: Ref
    parts: Ref = None
    neg_lse: Ref = None
    neg_delta: Ref = None
    scale: Ref = None
    extras: Extras = NO_EXTRAS
    q_tail: Ref = None
    dout_tail: Ref = None
    k_tail: Ref = None
    v_tail: Ref = None
    dq_factor: Ref = None
    dq: Ref = None
    dbias: Ref = None
    dk: Ref = None
    dv: Ref = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch(Call):
    """All that is static about one kernel.

    Attributes:
      make_dq: make dq, too.
      stores_dq: a block has all keys of its queries: its dq is whole, and leaves finished. Else it
        is added up.
      make_dbias: add up the gradient of the bias, too.
      peers: blocks that have one piece of the bias and no one else has: a cluster, which sums its
        gradient and stores it. 0: it is added up in global memory.
      kv_parts: blocks for one tile of keys. A block has a share, one part of the query heads of one
        kv head, and sums of dk and dv of its own.
    """

    config: BackwardConfig
    make_dq: bool = True
    stores_dq: bool = False
    make_dbias: bool = False
    peers: int = 0
    kv_parts: int = 1

    @property
    def num_shares(self) -> int:
        """Parts of the query heads of all kv heads, the parts of one in sequence."""
        return self.num_kv_heads * self.kv_parts

    @property
    def heads_a_share(self) -> int:
        """Query heads that a block walks over."""
        return self.q_per_kv // self.kv_parts

    @property
    def visits_all(self) -> bool:
        """There is no tile that a mask hides whole."""
        return not self.mask.parts()

    @property
    def adds_dq(self) -> bool:
        return self.make_dq and not self.stores_dq

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return max(self.peers, 1)

    @property
    def registers(self) -> tuple[int, int]:
        """Of a thread that computes, and of one that loads; to sum over a cluster it needs more."""
        return (232, 40) if self.cluster > 1 else (240, 24)

    @property
    def statistics(self) -> tuple[str, ...]:
        """Which of `Gmem.parts`, `neg_lse` and `neg_delta` there are."""
        soft_cap, dropout = "soft_cap" in self.terms, self.dropout_rate > 0
        return tuple(self.config.statistics(soft_cap=soft_cap, dropout=dropout))

    def rank(self) -> Int:
        """Of this block in its cluster."""
        return lax.axis_index("peer") if self.cluster > 1 else 0

    @property
    def num_pairs(self) -> int:
        """Of batch row and share."""
        return self.batch * self.num_shares

    @property
    def head_group(self) -> int:
        """Consecutive pairs whose blocks are interleaved: first the longest walks of all of them.

        As many as run at a time: what starts last is short then, and L2 holds no more of them than
        it would one pair after the other. Not where walks are equally long.
        """
        if self.shares_bias:
            return self.sharing_group
        if not self.mask.parts():
            return 1
        running = min(hardware.SM90.num_sms // self.num_kv_tiles, MOST_RUNNING)
        least = self.config.head_group if self.heads_a_share > 1 else 1
        return fitting_group(max(running, least), self.num_pairs)

    @property
    def has_axes(self) -> bool:
        """The grid has axes for group, tile of keys and pair of the group; else it is flat.

        A block finds its place without dividing, and ptxas makes another schedule of all the rest.
        On an H200, head_dim 128, T 8192, kernel: with a soft cap 3 % faster, causal the same; but
        causal with shares of four heads 5 % slower, without a mask 7 %.
        """
        is_grouped = self.head_group > 1 and not self.shares_bias and self.heads_a_share == 1
        return is_grouped and self.num_pairs // self.head_group <= MOST_GROUPS

    @property
    def grid(self) -> dict[str, int]:
        """Axes of the launch, blocks or clusters; the last is the fastest."""
        if not self.has_axes:
            return dict(block=self.num_pairs * self.num_kv_tiles // self.cluster)
        groups = self.num_pairs // self.head_group
        return dict(group=groups, tile=self.num_kv_tiles, member=self.head_group)

    def pair_and_tile(self) -> tuple[Int, Int]:
        """What this block has: a pair, and a tile of keys."""
        if self.has_axes:
            group, tile, member = (lax.axis_index(name) for name in self.grid)
            return group * self.head_group + member, tile
        block = lax.axis_index("block") * self.cluster + self.rank()
        return interleaved(block, self.num_kv_tiles, self.head_group)
