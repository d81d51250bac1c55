"""What Triton makes of the kernels for a GPU, where there is none; what they compute: test_tiles.py."""

import ast
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from aiayn import config, tiles

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")

SHARED = 227 * 1024  # bytes that a program may have on Hopper
WIDTHS = [[16, 16], [16, 64], [32, 32], [32, 64], [64, 64], [128, 128], [512, 512]]


def compiled(folder: Path, *arguments: Any, **changes: int) -> dict[str, list[dict[str, int]]]:
    """In a process of its own, since in this one kernels are interpreted."""
    child = Path(__file__).with_name("children") / "compile_tile_kernels.py"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder)
    asked = json.dumps({"arguments": arguments, "changes": changes})
    done = subprocess.run(
        [sys.executable, child], input=asked, capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def imported_at_once(module: Path) -> set[str]:
    return {
        name.name
        for statement in ast.parse(module.read_text()).body
        if isinstance(statement, ast.Import | ast.ImportFrom)
        for name in statement.names
    }


def test_nobody_imports_them_before_they_are_needed() -> None:
    """Where Triton is not installed, all else works."""
    modules = list(Path(tiles.__file__).parent.glob("*.py"))
    assert [module.stem for module in modules if "tile_kernels" in imported_at_once(module)] == []
    assert [module.stem for module in modules if "tiles" in imported_at_once(module)]  # control


def test_these_are_the_widths_of_all_rows() -> None:
    assert sorted({(run.model.d_k, run.model.d_v) for run in config.rows().values()}) == [*map(tuple, WIDTHS)]


@pytest.mark.parametrize(
    "widths", [pytest.param(w, marks=[] if w == [64, 64] else pytest.mark.slow) for w in WIDTHS], ids=str
)
def test_every_kernel_fits_a_gpu_spills_no_register_and_is_compiled_once(widths: list[int], tmp_path: Path) -> None:
    found = compiled(tmp_path, widths, "bfloat16")
    assert len(found) == 3
    for name, variants in found.items():
        assert len(variants) == 2, name  # causal or not, whatever the number of sentences
        for variant in variants:
            assert 0 < variant["shared"] <= SHARED, name
            assert 0 < variant["registers"] <= 255, name
            assert variant["stack"] == 0, name


@pytest.mark.slow
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_in_32_bits_every_kernel_fits_a_gpu(widths: list[int], tmp_path: Path) -> None:
    """There registers are spilled: it is right, and nobody's way to be fast."""
    found = compiled(tmp_path, widths, "float32")
    assert max(variant["shared"] for variants in found.values() for variant in variants) <= SHARED


@pytest.mark.slow
def test_a_kernel_that_does_not_fit_or_spills_is_seen(tmp_path: Path) -> None:  # control
    larger = compiled(tmp_path, [512, 512], "bfloat16", TILE=64, num_warps=8)
    assert max(variant["shared"] for variant in larger["backward_to_queries"]) > SHARED
    assert max(variant["stack"] for variant in larger["forward"]) > 0
