"""Lets the operators of `tiles` compile for a GPU where there is none; what the compiler says goes out as JSON."""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from aiayn import tile_kernels, tiles

NAMES = ("forward", "backward_to_queries", "backward_to_keys_and_values")


class Compiled:
    """In the place of a kernel: compiles it for whatever it is launched on, and launches nothing."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.made: dict[int, Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            made = self.kernel.warmup(*arguments, grid=grid, **options)
            self.made[id(made)] = made

        return launch


def usage(made: Any) -> dict[str, int]:
    """Bytes of shared memory, registers, and bytes of stack, where registers are spilled to."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        asked = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        said = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{word}:(\d+)", said)[1]) for word in ("REG", "STACK"))
    return {"shared": made.metadata.shared, "registers": registers, "stack": stack}


def compiled(widths: list[int], dtype: str, **changes: int) -> dict[str, list[dict[str, int]]]:
    """What becomes of each kernel, in self-attention, causal or not, and across, with other numbers of sentences."""
    used = {name: Compiled(kernel) for name, kernel in plain.items()}
    for name, kernel in used.items():
        setattr(tile_kernels, name, kernel)
    tiles.options = lambda *widths: {**options(*widths), **changes}
    sizes, kind = [2, *widths], getattr(torch, dtype)
    query, key_value = 2 * widths[0], 2 * sum(widths)
    for sentences in (16, 19):
        offsets = torch.arange(sentences + 1, dtype=torch.int32)
        for columns, causal in (([query + key_value], True), ([query + key_value], False), ([query, key_value], False)):
            packed = [torch.empty(32, width, dtype=kind, requires_grad=True) for width in columns]
            output, _ = tiles.attend(*packed, *[None] * (2 - len(packed)), offsets, offsets, sizes, causal)
            output.sum().backward()
    return {name: [usage(made) for made in kernel.made.values()] for name, kernel in used.items()}


if __name__ == "__main__":
    plain, options = {name: getattr(tile_kernels, name) for name in NAMES}, tiles.options
    hopper = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    triton.runtime.driver.set_active(hopper)
    asked = json.load(sys.stdin)
    json.dump(compiled(*asked["arguments"], **asked["changes"]), sys.stdout)
