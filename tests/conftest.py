"""The environment of every test. Set here, before anything imports jax."""

import os
import shutil
from importlib.metadata import version
from pathlib import Path

import pytest

HAS_GPU = Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None

# Interpret mode parks one of XLA's threads in a callback for each warpgroup: with as few threads
# as two cores give, a kernel of three warpgroups waits for ever.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=32"
).strip()
if HAS_GPU:  # several test processes share the card
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
else:  # with the CUDA plugin installed, JAX would look for a GPU and complain
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402

jax.config.update("jax_enable_x64", False)


def _on_gpu() -> bool:
    return HAS_GPU and jax.default_backend() == "gpu"


def pytest_report_header(config) -> str:
    del config
    device = jax.devices()[0].device_kind if _on_gpu() else "cpu"
    return f"jax {jax.__version__}, jaxlib {version('jaxlib')}, on {device}"


def pytest_collection_modifyitems(items) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not _on_gpu():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a GPU that JAX can use"))
