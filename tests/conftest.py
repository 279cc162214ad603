"""The environment of every test. Set here, before anything imports jax."""

import collections
import os
import shutil
from importlib.metadata import version
from pathlib import Path

import pytest

HAS_GPU = Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None

# Interpret mode parks one of XLA's threads in a callback for each warpgroup: with as few threads
# as two cores give, a kernel of three warpgroups waits for ever.
XLA_FLAGS = ["--xla_force_host_platform_device_count=32"]
if HAS_GPU:  # several test processes share the card
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
else:  # with the CUDA plugin installed, JAX would look for a GPU and complain
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
if os.environ.get("JAX_PLATFORMS") == "cpu":
    # The tests are small programs, each run once: most of their time is LLVM's.
    XLA_FLAGS += [
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
    ]
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *XLA_FLAGS]).strip()

import jax  # noqa: E402

jax.config.update("jax_enable_x64", False)


def _on_gpu() -> bool:
    return HAS_GPU and jax.default_backend() == "gpu"


def pytest_report_header(config) -> str:
    del config
    device = jax.devices()[0].device_kind if _on_gpu() else "cpu"
    return f"jax {jax.__version__}, jaxlib {version('jaxlib')}, on {device}"


def pytest_addoption(parser) -> None:
    parser.addoption(
        "--thin",
        type=int,
        default=1,
        metavar="N",
        help="run every Nth case only of the tests with many cases that execute attention",
    )


@pytest.hookimpl(tryfirst=True)  # ahead of `-m`, which selects by the markers
def pytest_collection_modifyitems(config, items) -> None:
    on_gpu = _on_gpu()
    items[:] = _thinned(items, config.getoption("thin"))
    for item in items:
        if on_gpu and _runs_kernels(item):
            item.add_marker("gpu")
        if on_gpu and item.path.stem.endswith("_interpret"):
            reason = "interpret mode needs the CPU: set JAX_PLATFORMS=cpu"
            item.add_marker(pytest.mark.skip(reason=reason))
        if not on_gpu and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU that JAX can use"))


def _runs_kernels(item) -> bool:
    """Whether the test is one of those that interpret the kernels only for want of a GPU."""
    callspec = getattr(item, "callspec", None)
    return callspec is not None and callspec.params.get("implementation") == "mosaic_gpu"


def _thinned(items, every):
    """Every Nth case of each test; all of tests of few cases and of tests that execute nothing."""
    kept, seen = [], collections.Counter()
    cases = collections.Counter(map(_group, items))
    for item in items:
        group = _group(item)
        if cases[group] <= 4 or not group[1] or seen[group] % every == 0:
            kept.append(item)
        seen[group] += 1
    return kept


def _group(item):
    """(test, what makes it execute attention: an implementation, the interpreter or nothing)."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    interprets = item.path.stem if item.path.stem.endswith("_interpret") else None
    test = getattr(item, "originalname", item.name)
    return item.path.stem + test, params.get("implementation", interprets)
