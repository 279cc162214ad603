"""Compiles CUDA kernels for Hopper on a machine without a GPU, and reads what ptxas made of them.

`kernels_of` runs this file as a program in a process of its own: the compiler's log goes to the
process's standard output, the environment must be set before jax is imported, and a compiler that
aborts takes nothing with it.
"""

import ctypes
import dataclasses
import importlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

WHEELS = ("jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc", "nvidia-nvvm")

CASE_MARK = "--- case ---\n"  # in the compiler's log, ahead of each case

# What XLA wants to know of a GPU that it cannot ask: an H200.
TARGET = """
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  l2_cache_size: 52428800
  memory_bandwidth: 4814000000000
  device_memory_size: 150110011392
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 }
device_description_str: "NVIDIA H200"
"""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What ptxas says of one kernel.

    Attributes:
      name: the kernel's.
      registers: a thread at launch; kernels that set their own registers use others.
      spill_bytes: stored to local memory, a thread.
      notes: lines about serialized wgmma (C7511 to C7514), which make a kernel several times
        slower and change no result.
    """

    name: str
    registers: int
    spill_bytes: int
    notes: tuple[str, ...]


def missing_wheels() -> str:
    """Why nothing can be compiled here, or the empty string."""
    versions = {}
    for wheel in ("jax", *WHEELS):
        try:
            versions[wheel] = importlib.metadata.version(wheel)
        except importlib.metadata.PackageNotFoundError:
            return f"{wheel} is not installed"
    if versions["jax"] != versions["jax-cuda13-plugin"]:
        return f"jax-cuda13-plugin {versions['jax-cuda13-plugin']} is not of jax {versions['jax']}"
    return ""


def kernels_of(factory: str, cases: list[Any], *, timeout_s: float = 240) -> list[list[Kernel]]:
    """Compiles for sm_90a and returns the Mosaic GPU kernels of a function, for each case.

    One process takes all cases, which saves its start. A kernel that two cases share is compiled,
    and returned, once.

    Args:
      factory: 'module:name' of a function that returns (function, arguments), such as
        'tests.test_aot:forward'; arguments are anything with a shape and a dtype, in pytrees.
      cases: the factory's arguments, a list of lists; what JSON can carry.
      timeout_s: for the whole process.

    Raises:
      RuntimeError: when it does not compile, with the end of the compiler's log.
    """
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",  # no CUDA client is made, no driver is looked for
        "XLA_FLAGS": "",  # the tests' own are for programs on the CPU
        "MOSAIC_GPU_DUMP_PTXAS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "JAX_ENABLE_COMPILATION_CACHE": "false",  # a hit has no log
    }
    child = subprocess.run(
        [sys.executable, "-m", "pallas_flash.aot", factory, json.dumps(cases)],
        cwd=Path(__file__).parent.parent,
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    if child.returncode:
        log = (child.stdout + child.stderr)[-3000:]
        raise RuntimeError(f"{factory} of {cases} does not compile for sm_90a:\n{log}")
    return [parse_ptxas_log(log) for log in child.stdout.split(CASE_MARK)[1:]]


def parse_ptxas_log(log: str) -> list[Kernel]:
    """One Kernel an entry function of a `ptxas -v` log."""
    kernels = []
    notes = [line for line in log.splitlines() if re.search(r"C751[1-4]", line)]
    for part in re.split(r"(?=Compiling entry function ')", log)[1:]:
        name = re.search(r"entry function '([^']+)'", part)
        registers = re.search(r"Used (\d+) registers", part)
        spills = re.search(r"(\d+) bytes spill stores", part)
        if not (name and registers and spills):
            raise ValueError(f"cannot read this ptxas log:\n{part}")
        kernels.append(
            Kernel(
                name=name[1].removesuffix("_mosaic_gpu_kernel"),
                registers=int(registers[1]),
                spill_bytes=int(spills[1]),
                notes=tuple(note for note in notes if f"'{name[1]}'" in note),
            )
        )
    named = sum(len(kernel.notes) for kernel in kernels)
    if named != len(notes):
        raise ValueError(f"cannot tell which kernels these notes are about: {notes}")
    return kernels


def _compile(factory: str, cases: list[Any]) -> None:
    import jax
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="h200", target_config=TARGET, topology="1x1x1"
    )
    sharding = jax.sharding.SingleDeviceSharding(topology.devices[0])
    module, name = factory.split(":")
    make = getattr(importlib.import_module(module), name)
    for case in cases:
        fn, operands = make(*case)
        shapes = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), operands
        )
        fn = fn if hasattr(fn, "trace") else jax.jit(fn)
        ctypes.CDLL(None).fflush(None)  # the compiler's C++ has a buffer of its own
        os.write(1, CASE_MARK.encode())
        fn.trace(*shapes).lower(lowering_platforms=("cuda",)).compile()


if __name__ == "__main__":
    _compile(sys.argv[1], json.loads(sys.argv[2]))
