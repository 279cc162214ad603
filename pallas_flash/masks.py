"""The mask algebra: which query may see which key, and which tiles can be skipped.

A mask is a small frozen value. `Mask.allowed` is the only truth about one pair; everything that
skips work (loop bounds of the kernels, chunks of the XLA implementation) comes from the
intervals of `Bounds`, which agree with `allowed` by construction. Masks know nothing of kernels.

Positions count from 0 in each sequence; intervals are half-open. A mask's run-time numbers
(lengths, window sides, segment ids) arrive in a `MaskValues`, already cut to the batch row and the
tile in question, so that a new value compiles nothing.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# An int, an int32 scalar (traced, or read inside a kernel), or a NumPy array of ints: many tiles
# at once, for whoever counts them on the host.
Int = Any


class MaskValues(NamedTuple):
    """Run-time numbers of a mask for one batch row (and, where they have an axis, one tile).

    Attributes:
      query_length: int32 scalar, queries from here on see nothing.
      kv_length: int32 scalar, keys from here on are hidden.
      window_left: int32 scalar, keys further back than this are hidden.
      window_right: int32 scalar, keys further ahead than this are hidden.
      query_segments: int32, one id a query, shaped to broadcast against the tile.
      kv_segments: int32, one id a key, shaped to broadcast against the tile.
      dense: bool, shaped to broadcast against the tile.
    """

    query_length: Any = None
    kv_length: Any = None
    window_left: Any = None
    window_right: Any = None
    query_segments: Any = None
    kv_segments: Any = None
    dense: Any = None


def _on_host(*values: Int) -> bool:
    return all(isinstance(x, (int, np.ndarray)) for x in values)


def _i32(x: Int) -> Int:
    """Host numbers stay as they are; arrays become int32 (mixed widths do not lower under x64)."""
    return x if _on_host(x) else lax.convert_element_type(x, jnp.int32)


def _combine(pick_int, pick_numpy, pick_array, a: Int | None, b: Int | None) -> Any:
    if a is None or b is None:
        return b if a is None else a
    if isinstance(a, int) and isinstance(b, int):
        return pick_int(a, b)
    if _on_host(a, b):
        return pick_numpy(a, b)
    return pick_array(jnp.int32(a), jnp.int32(b))


def smaller(a: Int | None, b: Int | None) -> Any:
    """The smaller of two bounds; None is no bound."""
    return _combine(min, np.minimum, lax.min, a, b)


def larger(a: Int | None, b: Int | None) -> Any:
    """The larger of two bounds; None is no bound."""
    return _combine(max, np.maximum, lax.max, a, b)


def _only_if_positive(count: Int, hi: Int) -> Int:
    """`hi` where count > 0, else 0: an interval that starts at 0 or later becomes empty."""
    if isinstance(count, int):
        return hi if count > 0 else 0
    if _on_host(count, hi):
        return np.where(count > 0, hi, 0)
    return jnp.where(count > 0, jnp.int32(hi), jnp.int32(0))


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Pairs with lower <= kv_pos - q_pos <= upper, q_pos < q_end and kv_pos < kv_end.

    Each bound is an int, an int32 scalar or None (no bound). Causal attention, windows and
    lengths are all of this form, so one compare an element serves them all.
    """

    lower: Int | None = None
    upper: Int | None = None
    q_end: Int | None = None
    kv_end: Int | None = None

    def __and__(self, other: "Bounds") -> "Bounds":
        return Bounds(
            larger(self.lower, other.lower),
            smaller(self.upper, other.upper),
            smaller(self.q_end, other.q_end),
            smaller(self.kv_end, other.kv_end),
        )

    def allowed(self, q_pos, kv_pos):
        """Bool, broadcast of q_pos and kv_pos; None when nothing is hidden."""
        tests = []
        if self.lower is not None:
            tests.append(kv_pos - q_pos >= self.lower)
        if self.upper is not None:
            tests.append(kv_pos - q_pos <= self.upper)
        if self.q_end is not None:
            tests.append(q_pos < self.q_end)
        if self.kv_end is not None:
            tests.append(kv_pos < self.kv_end)
        return _all(tests)

    def kv_any(self, q_lo: Int, q_hi: Int, kv_len: Int) -> tuple[Int, Int]:
        """Keys outside [lo, hi) are hidden from every query of [q_lo, q_hi). hi may be <= lo."""
        lo = 0 if self.lower is None else larger(0, _i32(q_lo + self.lower))
        hi = smaller(kv_len, self.kv_end)
        if self.q_end is not None:  # no query of the tile is left: no key either
            hi = _only_if_positive(_i32(self.q_end - q_lo), hi)
            q_hi = smaller(q_hi, self.q_end)
        if self.upper is not None:
            hi = smaller(hi, _i32(q_hi + self.upper))
        return lo, larger(hi, 0)

    def kv_all(self, q_lo: Int, q_hi: Int, kv_len: Int) -> tuple[Int, Int]:
        """Every key of [lo, hi) is seen by every query of [q_lo, q_hi). hi may be <= lo."""
        lo = 0 if self.lower is None else larger(0, _i32(q_hi - 1 + self.lower))
        hi = smaller(kv_len, self.kv_end)
        if self.q_end is not None:  # a tile cut by q_end has rows that see nothing
            hi = _only_if_positive(_i32(self.q_end - q_hi + 1), hi)
        if self.upper is not None:
            hi = smaller(hi, _i32(q_lo + 1 + self.upper))
        return lo, larger(hi, 0)

    def transposed(self) -> "Bounds":
        """The same pairs with the roles of queries and keys exchanged."""
        flip = lambda x: None if x is None else -x
        return Bounds(flip(self.upper), flip(self.lower), self.kv_end, self.q_end)

    def q_any(self, kv_lo: Int, kv_hi: Int, q_len: Int) -> tuple[Int, Int]:
        """Queries outside [lo, hi) see no key of [kv_lo, kv_hi). hi may be <= lo."""
        return self.transposed().kv_any(kv_lo, kv_hi, q_len)

    def q_all(self, kv_lo: Int, kv_hi: Int, q_len: Int) -> tuple[Int, Int]:
        """Every query of [lo, hi) sees every key of [kv_lo, kv_hi). hi may be <= lo."""
        return self.transposed().kv_all(kv_lo, kv_hi, q_len)


def _all(tests):
    out = None
    for test in tests:
        if test is not None:
            out = test if out is None else out & test
    return out


@dataclasses.dataclass(frozen=True)
class Mask:
    """Base of all masks: hides nothing. Compose with `&`."""

    @property
    def reads(self) -> frozenset[str]:
        """Names of the operands that hold its run-time numbers."""
        return frozenset()

    def bounds(self, values: MaskValues) -> Bounds:
        """What of this mask is a band or a length. The conservative default: no bound."""
        del values
        return Bounds()

    def allowed_beyond_bounds(self, q_pos, kv_pos, values: MaskValues):
        """What of this mask `bounds` does not say; None when there is nothing more."""
        del q_pos, kv_pos, values
        return None

    def tiles_beyond_bounds(self, values: MaskValues, block_q: int, block_kv: int):
        """Of the same, for every tile: (may any pair pass, do all pass); None: all do.

        Args:
          values: whole arrays: segments (1|B, T) and (1|B, S), dense (1|B, 1|N, 1|T, 1|S).
          block_q, block_kv: sizes of a tile.

        Returns:
          bool, (1|B, 1|N, 1 or q tiles, 1 or kv tiles). What lies past an end counts for neither.
        """
        del values, block_q, block_kv
        return None

    @property
    def is_bounds(self) -> bool:
        """True when `bounds` says everything."""
        return type(self).allowed_beyond_bounds is Mask.allowed_beyond_bounds

    @property
    def fixed_bounds(self) -> Bounds | None:
        """`bounds` where they say everything and no run-time number takes part; else None."""
        return None if self.reads or not self.is_bounds else self.bounds(MaskValues())

    @property
    def has_lower(self) -> bool:
        """`bounds` hides keys before some position, whatever the run-time numbers."""
        return self.bounds(MaskValues(*[0] * len(MaskValues._fields))).lower is not None

    @property
    def is_steady(self) -> bool:
        """Neighbouring queries see about as many keys, whatever the run-time numbers."""
        return False

    def allowed(self, q_pos, kv_pos, values: MaskValues):
        """Bool, broadcast of q_pos and kv_pos: may this query see this key? None: always."""
        return _all(
            [
                self.bounds(values).allowed(q_pos, kv_pos),
                self.allowed_beyond_bounds(q_pos, kv_pos, values),
            ]
        )

    def __and__(self, other: "Mask") -> "Mask":
        return And(self.parts() + other.parts())

    def __bool__(self):
        raise TypeError("masks are combined with `&`, not with `and`, `or` or `not`")

    def parts(self) -> tuple["Mask", ...]:
        return (self,)


@dataclasses.dataclass(frozen=True)
class And(Mask):
    """Allowed where every part allows. And(()) hides nothing."""

    masks: tuple[Mask, ...] = ()

    @property
    def reads(self):
        return frozenset().union(*(mask.reads for mask in self.masks))

    def bounds(self, values):
        out = Bounds()
        for mask in self.masks:
            out = out & mask.bounds(values)
        return out

    def allowed_beyond_bounds(self, q_pos, kv_pos, values):
        return _all([m.allowed_beyond_bounds(q_pos, kv_pos, values) for m in self.masks])

    @property
    def is_bounds(self):
        return all(mask.is_bounds for mask in self.masks)

    @property
    def is_steady(self):
        return all(mask.is_steady for mask in self.masks)

    def parts(self):
        return self.masks


@dataclasses.dataclass(frozen=True)
class Causal(Mask):
    """kv_pos <= q_pos + shift. Shift 0 aligns top-left, kv_len - q_len bottom-right."""

    shift: int = 0

    @property
    def is_steady(self):
        return True

    def bounds(self, values):
        return Bounds(upper=self.shift)


@dataclasses.dataclass(frozen=True)
class Window(Mask):
    """q_pos + shift - left <= kv_pos <= q_pos + shift + right; a side not present is open.

    A side may be negative: then the window lies beside the diagonal, as it does for the part of a
    longer sequence whose queries and keys do not begin at the same position.
    """

    has_left: bool
    has_right: bool
    shift: int = 0

    @property
    def reads(self):
        return frozenset({"window"})

    @property
    def is_steady(self):
        return True

    def bounds(self, values):
        lower = self.shift - _i32(values.window_left) if self.has_left else None
        upper = self.shift + _i32(values.window_right) if self.has_right else None
        return Bounds(lower=lower, upper=upper)


@dataclasses.dataclass(frozen=True)
class Lengths(Mask):
    """Queries before query_length, keys before kv_length; a side not present is open."""

    has_query: bool
    has_kv: bool

    @property
    def reads(self):
        return frozenset({"query_lengths", "kv_lengths"})

    def bounds(self, values):
        return Bounds(
            q_end=_i32(values.query_length) if self.has_query else None,
            kv_end=_i32(values.kv_length) if self.has_kv else None,
        )


@dataclasses.dataclass(frozen=True)
class Segments(Mask):
    """A query sees the keys of its own segment."""

    @property
    def reads(self):
        return frozenset({"query_segments", "kv_segments"})

    def allowed_beyond_bounds(self, q_pos, kv_pos, values):
        return values.query_segments == values.kv_segments

    def tiles_beyond_bounds(self, values, block_q, block_kv):
        q_ids = _in_blocks(values.query_segments, 1, block_q, mode="edge")
        kv_ids = _in_blocks(values.kv_segments, 1, block_kv, mode="edge")
        (q_min, q_max), (kv_min, kv_max) = (
            (ids.min(2).reshape(shape), ids.max(2).reshape(shape))
            for ids, shape in (
                (q_ids, (-1, 1, q_ids.shape[1], 1)),
                (kv_ids, (-1, 1, 1, kv_ids.shape[1])),
            )
        )
        every = (q_min == q_max) & (kv_min == kv_max) & (q_min == kv_min)
        return (q_min <= kv_max) & (kv_min <= q_max), every


@dataclasses.dataclass(frozen=True)
class Dense(Mask):
    """A boolean array of the user's, True where the pair is visible."""

    @property
    def reads(self):
        return frozenset({"mask"})

    def allowed_beyond_bounds(self, q_pos, kv_pos, values):
        return values.dense

    def tiles_beyond_bounds(self, values, block_q, block_kv):
        def reduced(fill, reduce):
            x = values.dense
            for axis, block in ((3, block_kv), (2, block_q)):
                if x.shape[axis] > 1:
                    x = reduce(_in_blocks(x, axis, block, constant_values=fill), axis + 1)
            return x

        return reduced(False, jnp.any), reduced(True, jnp.all)


def _in_blocks(x, axis: int, block: int, **padding):
    """`axis` cut into (blocks, block), padded at its end."""
    pads = [(0, -n % block if i == axis else 0) for i, n in enumerate(x.shape)]
    x = jnp.pad(x, pads, **padding) if pads[axis][1] else x
    return x.reshape(*x.shape[:axis], -1, block, *x.shape[axis + 1 :])


def hide(scores: jax.Array, allowed) -> jax.Array:
    """Scores with -inf where not allowed (None hides nothing)."""
    return scores if allowed is None else jnp.where(allowed, scores, -jnp.inf)
