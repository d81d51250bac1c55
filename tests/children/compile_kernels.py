"""Compiles kernels for GPUs where there is none: what is asked of it comes as JSON, what the compiler says goes so."""

import json
import re
import subprocess
import sys
import tempfile
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from aiayn import kernels


def compiled(kernel: str, options: dict[str, Any], dtype: str, causal: bool, widths: list[int]) -> dict[str, int]:
    """Shared memory, registers and bytes of stack, which is where registers are spilled to, of a kernel for sm_90."""
    function = getattr(kernels, kernel)
    warps = {name: options.pop(name) for name in ("num_warps", "num_stages")}
    constants = {"CAUSAL": causal, "K": widths[0], "V": widths[1], **options}
    types, attributes = {}, {}
    for number, name in enumerate(function.arg_names):
        if name in constants:
            types[name] = "constexpr"
        elif name in (*kernels.COUNTS, "query_stride", "key_stride"):
            types[name] = "i32"
        else:
            types[name] = "*" + ("i32" if "offsets" in name else "fp32" if name in ("logs", "deltas") else dtype)
        if name not in (*constants, *kernels.COUNTS):
            attributes[(number,)] = [["tt.divisibility", 16]]
    of_numbers = {(function.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(function, types, of_numbers, attributes)
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=warps)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(found.asm["cubin"])
        file.flush()
        asked = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{word}:(\d+)", usage)[1]) for word in ("REG", "STACK"))
    return {"shared": found.metadata.shared, "registers": registers, "stack": stack}


if __name__ == "__main__":
    json.dump([compiled(*asked) for asked in json.load(sys.stdin)], sys.stdout)
