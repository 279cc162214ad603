"""Imports of the package point one way only, from the public surface down to plain facts."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "pallas_flash"
STREET = (  # a module imports from its own row or from rows below it
    "benchmark autotune",
    "peers",
    "benchmark_shapes",
    "linen nnx",
    "flax_common",
    "flax_common",
    "api parallel",
    "ring all_gather",
    "ring_step split_pair",
    "autodiff split_problem",
    "dispatch",
    "kernels",
    "sharding arguments tile_math dropout reference io_model io_sweep io_report",
    "io_counts io_kernels io_few_queries link_model",
    "tile_walks tuned",
    "problem",
    "masks config hardware aot sequence_order",
)
ROW = {name: row for row, names in enumerate(STREET) for name in names.split()}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def _imported(path: Path) -> set[str]:
    """Modules of this package that the file names, each by its first name below the package."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno} imports relatively"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return {name.split(".")[1] for name in names if name.startswith("pallas_flash.")}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path):
    row = ROW[path.relative_to(PACKAGE).parts[0].removesuffix(".py")]
    upward = sorted(name for name in _imported(path) if ROW[name] < row)
    assert not upward, f"{path.name} imports {upward}, which stand above it in {STREET}"


def test_importing_the_package_loads_no_gpu_code():
    code = "import sys, pallas_flash; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    gpu = ("jax.experimental.mosaic", "jax.experimental.pallas.mosaic", "pallas_flash.kernels.sm")
    loaded = [name for name in out.stdout.split() if name.startswith(gpu)]
    assert not loaded, f"import pallas_flash loads {loaded[:5]}"
