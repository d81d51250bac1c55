"""What two runs are compared by."""

import json
from pathlib import Path
from typing import Any

import torch

from aiayn import storage


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


def rows(folder: Path) -> list[dict[str, Any]]:
    """The metrics without the times."""
    found = [json.loads(line) for line in storage.read_lines(folder / "metrics.jsonl")]
    return [{key: value for key, value in row.items() if "seconds" not in key} for row in found]


def cores(number: int) -> list[str]:
    """So many devices of a CPU."""
    return [str(core) for core in range(number)]
