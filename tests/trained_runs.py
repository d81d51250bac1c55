"""What two runs are compared by."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from aiayn.config import compose
from aiayn.config.schema import Config
from aiayn.core import storage


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


def trained(run: Config, folder: Path) -> Path:
    """The folder, in which the run is trained to its end."""
    from aiayn.training import train  # takes seconds

    storage.write_text(folder / "config.yaml", compose.to_yaml(run))
    train.train(run, folder)
    return folder


def rows(folder: Path) -> list[dict[str, Any]]:
    """The metrics without the times."""
    found = [json.loads(line) for line in storage.read_lines(folder / "metrics.jsonl")]
    return [{key: value for key, value in row.items() if "seconds" not in key} for row in found]


def at_call(patch: Any, owner: Any, name: str, call: int, act: Callable[[], None], *, before: bool = True) -> None:
    """Has something happen in one call of a function, before it does anything or when it has."""
    original, calls = getattr(owner, name), itertools.count(1)

    def acting(*arguments: Any, **named: Any) -> Any:
        due = next(calls) == call
        if due and before:
            act()
        found = original(*arguments, **named)
        if due and not before:
            act()
        return found

    patch.setattr(owner, name, acting)
