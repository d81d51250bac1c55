"""Results of runs as train writes them, made up, and damaged ones."""

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

from aiayn.config import compose
from aiayn.core import storage

RUN = compose.compose_row("scale=mini")


def result(experiment: str = "a_h1", seed: int = 1, ppl: float = 37.5, bleu: float = 19.25) -> dict[str, Any]:
    """A finished run of the mini scale as train writes it."""
    trained = dataclasses.replace(compose.row(experiment, RUN), seed=seed)
    return {
        "schema": 1, "experiment": experiment, "seed": seed, "scale": "mini", "data": "tiny", "status": "finished",
        "config": dataclasses.asdict(trained), "params": 1_234_567, "params_at_40960_rows": 3_456_789, "steps": 1000,
        "source_tokens": 7, "target_tokens": 11, "train_seconds": 93.0, "target_tokens_per_second": 13.0,
        "device_seconds": {"cpu": 186.0},
        "dev": {"ppl": ppl, "nats": 17.0, "tokens": 19, "bits_per_character": 1.5,
                "bleu": {"paper": bleu, "sacrebleu": bleu - 0.25, "intl": bleu + 0.5},
                "bleu_ci95": [bleu - 1, bleu + 1], "signatures": {}},
        "sha256": {"data": "d" * 64, "tokenizer": "7" * 64}, "versions": {}, "hardware": {}, "finished_at": "",
    }  # fmt: skip


def put(sweep: Path, row: str, seed: int, value: dict[str, Any]) -> Path:
    path = sweep / row / f"seed{seed}" / "result.json"
    storage.write_json(path, value)
    return path


def damaged(key: str, value: Any) -> bytes:
    tree = copy.deepcopy(result())
    *parents, last = key.split(".")
    part = tree
    for parent in parents:
        part = part[parent]
    part[last] = value
    return json.dumps(tree).encode()
