"""How a kernel is cut and scheduled: frozen, hashable, self-checking. Numbers are in tuned.py."""

import dataclasses

from pallas_flash.masks import Mask

ROW_TILE = 8  # a swizzled TMA copy moves 8 rows at a time
HEAD_TILE = 16  # a tensor core sums over 16 at a time, and 32 bytes can be swizzled
WIDE_HEAD_TILE = 64  # 128 bytes, the widest swizzle


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """One forward kernel.

    Attributes:
      compute_wgs: consumer warpgroups, 64 query rows each; 1 is for few queries.
      block_kv: keys a step.
      num_stages: slots of the K ring and of the V ring.
      overlap: issue QK of the next step before this step's softmax (else in turn).
      rescale_threshold: in log2 units; rescale the accumulator only when a row's maximum grew by
        more. 0 rescales every step. Exact in real arithmetic either way.
      q_stages: slots of the Q ring.
      output_through_q: stage the output in the Q buffer, where head_dim and head_dim_v are equal.
      persistent: as many blocks as run at a time, over a schedule made ahead (else one a tile).
      blocks_per_sm: blocks that run at a time on a multiprocessor. More than one must be small: of
        one consumer, with their share of shared memory and of registers.
      head_group: heads whose K and V are meant to share L2.
      head_tile: head dims are padded to a multiple of it.
    """

    compute_wgs: int = 2
    block_kv: int = 128
    num_stages: int = 2
    overlap: bool = True
    rescale_threshold: float = 0.0
    q_stages: int = 1
    output_through_q: bool = True
    persistent: bool = True
    blocks_per_sm: int = 1
    head_group: int = 8
    head_tile: int = HEAD_TILE

    def __post_init__(self):
        _require(self.compute_wgs in (1, 2, 3), f"compute_wgs={self.compute_wgs} must be 1, 2 or 3")
        _require(
            self.block_kv % 64 == 0 and 64 <= self.block_kv <= 256,
            f"block_kv={self.block_kv} must be 64, 128, 192 or 256: the swizzle of V needs 64s",
        )
        _require(self.num_stages >= 2, f"num_stages={self.num_stages} must be at least 2")
        _require(self.q_stages >= 1, f"q_stages={self.q_stages} must be at least 1")
        _require(
            self.blocks_per_sm == 1 or (self.blocks_per_sm > 1 and self.compute_wgs == 1),
            f"blocks_per_sm={self.blocks_per_sm} must be 1 with compute_wgs={self.compute_wgs}: "
            "several consumers take all registers of a multiprocessor",
        )
        _require(self.head_group >= 1, f"head_group={self.head_group} must be at least 1")
        _require(
            self.head_tile >= 1 and self.head_tile % HEAD_TILE == 0,
            f"head_tile={self.head_tile} must be a multiple of {HEAD_TILE}",
        )

    @property
    def block_q(self) -> int:
        return 64 * self.compute_wgs

    def padded(self, head_dim: int) -> int:
        """head_dim or head_dim_v as the kernel sees it."""
        return _up(head_dim, self.head_tile)


@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """One fused backward kernel.

    Attributes:
      split: 'keys': each consumer owns half of the block's keys, dk and dv of them; 'roles': one
        consumer owns dv, the other dk, of all keys of the block.
      block_q: queries a step.
      block_kv: keys of a block.
      num_stages: slots of the q and dout ring.
      head_group: at least so many kv heads are interleaved, where several query heads share one and
        walks differ: the longest of all of them come first, which balances the end of a launch.
    """

    split: str = "keys"
    block_q: int = 64
    block_kv: int = 128
    num_stages: int = 2
    head_group: int = 2

    def __post_init__(self):
        _require(self.split in ("keys", "roles"), f"split={self.split!r} must be keys or roles")
        _require(self.block_q in (64, 128), f"block_q={self.block_q} must be 64 or 128")
        _require(
            self.block_kv == (128 if self.split == "keys" else 64),
            f"block_kv={self.block_kv} must be 128 with split='keys', 64 with split='roles'",
        )
        _require(self.num_stages >= 2, f"num_stages={self.num_stages} must be at least 2")
        _require(self.head_group >= 1, f"head_group={self.head_group} must be at least 1")

    def statistics(self, *, soft_cap: bool, dropout: bool) -> dict[str, int]:
        """Arrays of -lse and -delta that a step reads, and bytes a query in each.

        'parts' holds both for `kernels.sm90.query_parts`. A soft cap comes between S and -lse, and
        what dropout drops has only -delta: that one is read by itself then. With 'roles' there is
        no room for all three.
        """
        apart = {"neg_lse": 4} if soft_cap else {}
        apart |= {"neg_delta": 4} if dropout else {}
        if apart and self.split == "roles":
            return {"neg_lse": 4, "neg_delta": 4}
        return {"parts": 16, **apart}

    def stores_dq(self, mask: Mask, q_len: int, kv_len: int) -> bool:
        """One block has all keys of its queries: dq can leave finished, there is nothing to add to.

        Every tile of queries must be visited, whatever the run-time numbers, and be whole.
        """
        bounds = mask.fixed_bounds
        if self.split != "keys" or kv_len > self.block_kv or q_len % self.block_q or bounds is None:
            return False
        return bounds.q_any(0, kv_len, q_len) == (0, q_len)

    def padded(self, head_dim: int) -> int:
        """head_dim or head_dim_v as the kernel sees it, and with it the dq kernel and both ends.

        With 'roles' a consumer's columns of dq are whole swizzles. With 'keys' the consumers of
        head dims above 64 may have unlike parts, below they have rows.
        """
        is_narrow = self.split == "keys" and head_dim > WIDE_HEAD_TILE
        return _up(head_dim, HEAD_TILE if is_narrow else WIDE_HEAD_TILE)


@dataclasses.dataclass(frozen=True)
class DqConfig:
    """One dq kernel of the deterministic backward.

    Attributes:
      compute_wgs: consumer warpgroups, 64 query rows each.
      block_kv: keys a step.
      k_stages: slots of the K ring.
      v_stages: slots of the V ring.
      head_group: heads whose K and V are meant to share L2.
    """

    compute_wgs: int = 2
    block_kv: int = 64
    k_stages: int = 2
    v_stages: int = 2
    head_group: int = 8

    def __post_init__(self):
        _require(self.compute_wgs in (2, 3), f"compute_wgs={self.compute_wgs} must be 2 or 3")
        _require(
            self.block_kv in (64, 128),
            f"block_kv={self.block_kv} must be 64 or 128: more do not fit in registers",
        )
        _require(self.k_stages >= 2, f"k_stages={self.k_stages} must be at least 2")
        _require(self.v_stages >= 1, f"v_stages={self.v_stages} must be at least 1")
        _require(self.head_group >= 1, f"head_group={self.head_group} must be at least 1")

    @property
    def block_q(self) -> int:
        return 64 * self.compute_wgs
