"""The one switch for running the GPU kernels in Pallas' interpret mode, on a CPU, for tests."""

import contextlib
import contextvars
from collections.abc import Iterator

_INTERPRET = contextvars.ContextVar("pallas_flash_interpret", default=False)


def interpret_requested() -> bool:
    """True inside `interpret_kernels()`."""
    return _INTERPRET.get()


@contextlib.contextmanager
def interpret_kernels() -> Iterator[None]:
    """Within, GPU kernels are chosen as on a Hopper GPU and run in interpret mode.

    Read when a call is traced: a function that was jitted outside keeps what it was traced with.
    """
    token = _INTERPRET.set(True)
    try:
        yield
    finally:
        _INTERPRET.reset(token)
