"""What two runs are compared by."""

import json
from pathlib import Path
from typing import Any

import torch

from aiayn.config import compose, folders
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


def finish(run: Config, result: dict[str, Any], ppl: float, bleu: float, sha256: str, lines: list[str]) -> None:
    """A run folder as train leaves it, with that dev set's figures and translations; `result` has all else."""
    folder = folders.run_folder(run)
    updates = run.training.max_steps
    counts = {"source_tokens": 900 * updates, "target_tokens": 1000 * updates}
    dev = {**result["dev"], "ppl": ppl, "bleu": {"paper": bleu, "sacrebleu": bleu, "intl": bleu}}
    found = {**result, **counts, "dev": dev, "sha256": {**result.get("sha256", {}), "data": sha256}}
    storage.write_text(folder / "config.yaml", compose.to_yaml(run))
    storage.write_json(folder / "result.json", found)
    storage.write_text(folder / "translations.txt", "".join(line + "\n" for line in lines))


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


def cores(number: int) -> list[str]:
    """So many devices of a CPU."""
    return [str(core) for core in range(number)]
