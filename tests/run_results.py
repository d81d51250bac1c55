"""Results of runs as train writes them, made up, and damaged ones."""

import copy
import dataclasses
import functools
import json
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aiayn.config import compose, folders
from aiayn.config.schema import Config
from aiayn.core import storage
from aiayn.data import prepare

RUN = compose.compose_row("scale=mini", "prepared=nowhere")


def result_of(run: Config, ppl: float = 2.0, bleu: float = 3.0) -> dict[str, Any]:
    """The run when it is finished, on the text that is prepared for it, if any is."""
    return {
        "schema": 1, "experiment": run.experiment, "seed": run.seed, "scale": run.scale.name, "status": "finished",
        "data": folders.setting(run), "config": dataclasses.asdict(run), "params": 1_234_567, "steps": 1000,
        "params_at_40960_rows": 3_456_789, "source_tokens": 7, "target_tokens": 11, "train_seconds": 93.0,
        "target_tokens_per_second": 13.0,
        "dev": {"ppl": ppl, "nats": 17.0, "tokens": 19, "bits_per_character": 1.5,
                "bleu": {"paper": bleu, "sacrebleu": bleu - 0.25, "intl": bleu + 0.5},
                "bleu_ci95": [bleu - 1, bleu + 1], "signatures": {}},
        "sha256": {"data": prepare.sha256(run) or "d" * 64, "tokenizer": "7" * 64}, "versions": {}, "hardware": {},
        "finished_at": "",
    }  # fmt: skip


def result(experiment: str = "a_h1", seed: int = 1, ppl: float = 37.5, bleu: float = 19.25) -> dict[str, Any]:
    """A finished run of the mini scale."""
    return result_of(dataclasses.replace(compose.row(experiment, RUN), seed=seed), ppl, bleu)


def finish(run: Config, ppl: float, bleu: float, lines: Sequence[str] = ()) -> None:
    """Leaves the folder of a run as train does, with these figures and translations of dev."""
    folder = folders.run_folder(run)
    storage.write_text(folder / "config.yaml", compose.to_yaml(run))
    storage.write_json(folder / "result.json", result_of(run, ppl, bleu))
    storage.write_text(folder / "translations.txt", "".join(line + "\n" for line in lines))


def put(sweep: Path, row: str, seed: int, value: dict[str, Any]) -> Path:
    path = sweep / row / f"seed{seed}" / "result.json"
    storage.write_json(path, value)
    return path


def changed(tree: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """A copy with another value under a dotted key."""
    tree = copy.deepcopy(tree)
    *parents, last = key.split(".")
    functools.reduce(operator.getitem, parents, tree)[last] = value
    return tree


def damaged(key: str, value: Any) -> bytes:
    return json.dumps(changed(result(), key, value)).encode()
