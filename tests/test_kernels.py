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

NAMES = ("forward", "backward_to_queries", "backward_to_keys_and_values")
SHARED = 227 * 1024  # bytes that a program may have on Hopper
WIDTHS = [[16, 16], [16, 64], [32, 32], [32, 64], [64, 64], [128, 128], [512, 512]]


def compiled(folder: Path, *asked: list[Any]) -> list[dict[str, int]]:
    """In a process of its own, since in this one kernels are interpreted."""
    child = Path(__file__).with_name("children") / "compile_kernels.py"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder)
    done = subprocess.run(
        [sys.executable, child], input=json.dumps(asked), capture_output=True, text=True, env=environment, check=False
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
    assert [module.stem for module in modules if "kernels" in imported_at_once(module)] == []
    assert [module.stem for module in modules if "tiles" in imported_at_once(module)]  # control


def test_these_are_the_widths_of_all_rows() -> None:
    assert sorted({(run.model.d_k, run.model.d_v) for run in config.rows().values()}) == [*map(tuple, WIDTHS)]


@pytest.mark.parametrize("widths", [pytest.param(w, marks=[] if w == [64, 64] else pytest.mark.slow) for w in WIDTHS])
def test_every_kernel_fits_a_gpu_and_spills_no_register(widths: list[int], tmp_path: Path) -> None:
    asked = [[name, tiles.options(*widths), "bf16", causal, widths] for name in NAMES for causal in (False, True)]
    for what, found in zip(asked, compiled(tmp_path, *asked), strict=True):
        assert 0 < found["shared"] <= SHARED, what
        assert 0 < found["registers"] <= 255, what
        assert found["stack"] == 0, what


@pytest.mark.slow
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_in_32_bits_every_kernel_fits_a_gpu(widths: list[int], tmp_path: Path) -> None:
    asked = [[name, tiles.options(*widths), "fp32", False, widths] for name in NAMES]
    assert max(found["shared"] for found in compiled(tmp_path, *asked)) <= SHARED


@pytest.mark.slow
def test_one_that_does_not_fit_or_spills_is_seen(tmp_path: Path) -> None:  # control
    widths = [512, 512]
    larger = {**tiles.options(*widths), "TILE": 32, "num_warps": 4}
    spilled, beyond = compiled(
        tmp_path,
        ["forward", larger, "bf16", False, widths],
        ["backward_to_queries", {**larger, "TILE": 64, "num_warps": 16}, "bf16", False, widths],
    )
    assert spilled["stack"] > 0
    assert beyond["shared"] > SHARED
