"""What interpret mode says of a kernel whose warpgroups do not wait for each other."""

import contextlib
import io
from collections.abc import Iterator

import jax

# A race, or a barrier whose phase nobody waited for: whichever is met first.
MISSING_WAIT = "RACE DETECTED|no threads observed phase"


@contextlib.contextmanager
def races_raise() -> Iterator[None]:
    """Within, a race is an error on every JAX version: 0.11 only prints it.

    Results must be made NumPy arrays within, too: the kernel runs later than it is called.
    """
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        yield
        jax.effects_barrier()
    if "RACE DETECTED" in printed.getvalue():
        raise RuntimeError(printed.getvalue())
