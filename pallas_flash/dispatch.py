"""Which implementation runs: decided from the problem and the device, before any tracing.

Never "try it and catch the exception": each backend says in words whether it supports a problem,
forward and backward together, and `explain` prints every verdict; the logger "pallas_flash" tells
each choice at level DEBUG. A backend's module is loaded when
its device is first met, so that importing the package loads no Mosaic module.
"""

import contextlib
import contextvars
import dataclasses
import importlib
import logging
from collections.abc import Iterator
from typing import Any, Literal

import jax
from jax.core import Tracer

from pallas_flash.kernels.interpret import interpret_requested
from pallas_flash.problem import Problem

Implementation = Literal["mosaic_gpu", "xla"]
IMPLEMENTATIONS = ("mosaic_gpu", "xla")

# Compute capability -> module with supports(problem), forward(...) and backward(...).
GPU_FAMILIES = {(9, 0): "pallas_flash.kernels.sm90.backend"}


@dataclasses.dataclass(frozen=True)
class Device:
    """What a call will run on: the platform, and a GPU's compute capability and name."""

    platform: str
    capability: tuple[int, int] | None = None
    kind: str = ""

    def __str__(self) -> str:
        if self.capability is None:
            return self.platform
        return f"{self.kind or 'gpu'} (compute capability {'.'.join(map(str, self.capability))})"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One backend's answer: can it run the problem, and why (not)."""

    implementation: str
    ok: bool
    why: str


_LOG = logging.getLogger("pallas_flash")
_ASSUMED = contextvars.ContextVar[Device | None]("pallas_flash_assumed_device", default=None)


@contextlib.contextmanager
def assume_device(
    platform: str, capability: tuple[int, int] | None = None, kind: str = ""
) -> Iterator[None]:
    """Within, calls are traced for that device: for lowering ahead of time on another machine.

    Example: `with assume_device("gpu", (9, 0)): jax.jit(f).trace(x).lower(
    lowering_platforms=("cuda",))`.
    """
    token = _ASSUMED.set(Device(platform, capability, kind))
    try:
        yield
    finally:
        _ASSUMED.reset(token)


def current_device(array: Any = None) -> Device:
    """The device a call will run on: where a concrete array lies, else JAX's default device."""
    assumed = _ASSUMED.get()
    if assumed is not None:
        return assumed
    device: Any = None
    if isinstance(array, jax.Array) and not isinstance(array, Tracer):
        device = next(iter(array.devices()))
    if device is None:
        device = jax.config.jax_default_device
    if device is None or isinstance(device, str):
        device = jax.local_devices(backend=device)[0]
    return _describe(device)


def _describe(device: Any) -> Device:
    capability = getattr(device, "compute_capability", None)
    if device.platform != "gpu" or not capability or "." not in str(capability):
        return Device(device.platform)
    major, minor = str(capability).split(".")[:2]
    return Device("gpu", (int(major), int(minor)), device.device_kind)


def gpu_family(device: Device):
    """The kernel module for this device, or None."""
    if interpret_requested():
        return importlib.import_module(GPU_FAMILIES[(9, 0)])
    name = GPU_FAMILIES.get(device.capability) if device.capability else None
    return importlib.import_module(name) if name else None


def _gpu_verdict(problem: Problem, device: Device) -> Verdict:
    family = gpu_family(device)
    if family is None:
        supported = ", ".join(".".join(map(str, c)) for c in GPU_FAMILIES)
        why = f"the device is {device}; kernels exist for compute capability {supported}"
        return Verdict("mosaic_gpu", False, why)
    ok, why = family.supports(problem)
    return Verdict("mosaic_gpu", ok, why)


def verdicts(problem: Problem, device: Device) -> tuple[Verdict, ...]:
    """Every backend's answer, in order of preference."""
    return (
        _gpu_verdict(problem, device),
        Verdict("xla", True, "chunked XLA: every problem, every platform, O(T) memory"),
    )


def select(
    problem: Problem, device: Device, implementation: Implementation | None = None
) -> Implementation:
    """The implementation that runs.

    Raises:
      ValueError: `implementation` is not a known name.
      NotImplementedError: the one asked for cannot run this problem here.
    """
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation={implementation!r} must be None (choose), 'mosaic_gpu' or 'xla'"
        )
    answers = verdicts(problem, device)
    told = "; ".join(f"{v.implementation}: {v.why}" for v in answers)
    for verdict in answers:
        if implementation in (None, verdict.implementation) and verdict.ok:
            _LOG.debug("runs %s on %s. %s", verdict.implementation, device, told)
            return verdict.implementation  # type: ignore[return-value]
    raise NotImplementedError(
        f"implementation={implementation!r} cannot run this call. {told}. Use "
        "implementation='xla', or None to have one chosen"
    )
