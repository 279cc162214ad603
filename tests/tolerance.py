"""When a result is close enough: one rule for every test, after FlashAttention's.

The error against the float64 oracle may be twice that of plain attention in the same dtype, plus
a few roundings of the largest entry. NaN and Inf are looked for first: a comparison of norms
would let them pass or hide where they are.
"""

import jax.numpy as jnp
import numpy as np

PLAIN_FACTOR = 2.0
ROUNDINGS = {"float16": 4.0, "bfloat16": 4.0, "float32": 64.0, "float64": 256.0}


def assert_close(got, oracle, plain, dtype, what: str, *, floor: float = 0.0) -> None:
    """Raises AssertionError unless `got` is as right as its dtype allows.

    Args:
      got: the result under test.
      oracle: the float64 result, of the same shape; -inf must be met by -inf.
      plain: plain attention in `dtype`, or a function that makes it, called only where the
        roundings alone are too few; None: they are all that is allowed.
      dtype: the dtype attention computed in.
      what: names the array in the message.
      floor: magnitude of the terms when they cancel, so that max |oracle| is no measure of them.
    """
    got, oracle = (np.asarray(x, np.float64) for x in (got, oracle))
    assert got.shape == oracle.shape, f"{what}: shape {got.shape}, should be {oracle.shape}"
    assert not np.isnan(got).any(), f"{what}: {np.isnan(got).sum()} NaN of {got.size}"
    infinite = ~np.isfinite(oracle)
    wrong = (got != oracle) & (infinite | ~np.isfinite(got))
    assert not wrong.any(), f"{what}: {wrong.sum()} entries wrongly infinite or finite"
    limit = ROUNDINGS[jnp.dtype(dtype).name] * float(jnp.finfo(dtype).eps)
    limit *= max(_largest(oracle, infinite), floor)
    errors = _distances(got, oracle, infinite)
    error = errors.max(initial=0.0)
    if error > limit and plain is not None:
        plain = np.asarray(plain() if callable(plain) else plain, np.float64)
        limit += PLAIN_FACTOR * _distances(plain, oracle, infinite).max(initial=0.0)
    if error > limit:
        at = tuple(int(i) for i in np.unravel_index(errors.argmax(), errors.shape))
        raise AssertionError(
            f"{what}: error {error:.3g} at {at} (got {got[at]:.6g}, should be {oracle[at]:.6g}), "
            f"allowed {limit:.3g} in {jnp.dtype(dtype).name}"
        )


def _distances(x, y, ignore) -> np.ndarray:
    return np.abs(np.where(ignore, 0.0, x) - np.where(ignore, 0.0, y))


def _largest(x, ignore) -> float:
    return float(np.abs(np.where(ignore, 0.0, x)).max(initial=0.0))
