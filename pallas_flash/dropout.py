"""The dropout pattern: one bit for each (batch, head, query, key), from a key and those counters.

No state and no order: an implementation may cut the logits as it likes and still drops the same
weights, forward and backward. Only uint32 arithmetic, so a GPU kernel can do the same. The work
is split by cost: `row_keys` mixes key, batch, head and query once a row (a kernel may load its
result, two words a row, as it loads the log-sum-exp); `keep_in_row` adds the key position in ten
integer operations an element. Knows nothing of attention.
"""

from typing import Any

import jax
import jax.numpy as jnp

Array = Any


def key_data(key: Array) -> jax.Array:
    """The two words of a JAX random key.

    Args:
      key: a typed key (`jax.random.key`) of any implementation, or a raw uint32 key
        (`jax.random.PRNGKey`).

    Returns:
      uint32, (2,). Keys of other sizes are folded into two words.

    Raises:
      TypeError: key is not one key of either kind.
    """
    if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        words = jax.random.key_data(key)
    else:
        words = jnp.asarray(key)
    if words.dtype != jnp.uint32 or words.ndim != 1 or words.size == 0:
        raise TypeError(
            f"a dropout key must be one key from jax.random.key(seed), or uint32 of shape (2,); "
            f"got {words.dtype} of shape {words.shape}"
        )
    if words.size == 2:
        return words
    state = (jnp.uint32(0), jnp.uint32(0))
    for i in range(words.size):  # not an xor of halves: the two halves of an rbg key are equal
        state = _absorb(state, words[i])
    return jnp.stack(state)


def keep(key: Array, batch: Array, head: Array, q_pos: Array, kv_pos: Array, rate: float):
    """Whether each attention weight survives.

    Args:
      key: uint32, (2,), from `key_data`.
      batch, head, q_pos, kv_pos: global counters, integers that broadcast together.
      rate: probability of dropping a weight.

    Returns:
      bool of the broadcast shape of the counters.
    """
    return keep_in_row(row_keys(key, batch, head, q_pos), kv_pos, rate)


def row_keys(
    key: Array, batch: Array, head: Array, q_pos: Array, first_kv: Array | int = 0
) -> tuple[Array, Array]:
    """Two uint32 words for each query row, of the broadcast shape of the counters.

    first_kv: the global position of the key that `keep_in_row` calls 0.
    """
    state = (key[0], key[1])
    for counter in (batch, head, q_pos):
        state = _absorb(state, _uint32(counter))
    first, second = state
    return first + _uint32(first_kv), second


def counters(sizes: tuple[int, ...], origin: Array | None, broadcast: bool) -> Any:
    """uint32 counters of batch rows, heads, queries and keys: an open mesh, one axis each.

    Args:
      sizes: of the call.
      origin: (4,), the first counter of each; None: 0.
      broadcast: one pattern for all batch rows and heads: their counters are 0, of size 1.
    """
    made = []
    for axis, size in enumerate(sizes):
        shared = broadcast and axis < 2
        first = jnp.uint32(0) if origin is None or shared else _uint32(origin[axis])
        shape = [-1 if i == axis else 1 for i in range(len(sizes))]
        made.append(first + jnp.arange(1 if shared else size, dtype=jnp.uint32).reshape(shape))
    return made


def keep_in_row(row_key: tuple[Array, Array], kv_pos: Array, rate: float):
    """Whether the weight of key `kv_pos` survives in the row of `row_key`."""
    first, second = row_key
    bits = _xor_shift(_uint32(kv_pos) + first, 16) * jnp.uint32(0x7FEB352D)
    # The second word comes between the rounds: rows whose first words are close are no shifted
    # copies of each other.
    bits = (_xor_shift(bits, 15) ^ second) * jnp.uint32(0x846CA68B)
    return _xor_shift(bits, 16) >= jnp.uint32(drop_threshold(rate))


def drop_threshold(rate: float) -> int:
    """Weights whose 32 random bits are below this are dropped."""
    return min(round(rate * 2**32), 2**32 - 1)


def keep_scale(rate: float) -> float:
    """The factor on a surviving weight: its expectation stays what it was."""
    return 1.0 / (1.0 - rate) if rate < 1.0 else 0.0


def dropout_keep_mask(
    key: Array,
    rate: float,
    *,
    batch: int,
    num_heads: int,
    q_len: int,
    kv_len: int,
    broadcast: bool = False,
    origin: Array | None = None,
) -> jax.Array:
    """The whole dropout pattern of one call, for tests and inspection.

    It is as large as the logits that attention never stores. B = batch, N = num_heads,
    T = q_len, S = kv_len.

    Args:
      key: the `dropout_rng` of the call.
      rate: its `dropout_rate`.
      batch, num_heads, q_len, kv_len: sizes of the call.
      broadcast: its `broadcast_dropout`: one pattern for all batch rows and heads.
      origin: uint32 (4,), of a part of a call: its first batch row, head, query and key.

    Returns:
      bool, (B, N, T, S), True where the weight is kept (and multiplied by 1 / (1 - rate)).
    """
    shape = (batch, num_heads, q_len, kv_len)
    b, n, t, s = counters(shape, origin, broadcast)
    kept = keep(key_data(key), b, n, t, s, rate)
    return jnp.broadcast_to(kept, shape)


def _uint32(x: Array) -> Array:
    return jnp.asarray(x).astype(jnp.uint32)


def _xor_shift(x: Array, shift: int) -> Array:
    return x ^ (x >> jnp.uint32(shift))


def _mix(x: Array) -> Array:
    """A bijection of 32 bits without visible structure (multipliers of C. Wellons' lowbias32)."""
    x = _xor_shift(x, 16) * jnp.uint32(0x7FEB352D)
    x = _xor_shift(x, 15) * jnp.uint32(0x846CA68B)
    return _xor_shift(x, 16)


def _absorb(state: tuple[Array, Array], word: Array) -> tuple[Array, Array]:
    """Mixes one word into a state of two; a bijection of the state for every word."""
    first = _mix(state[0] + word)
    second = _mix(state[1] ^ first)
    return second, first + second
