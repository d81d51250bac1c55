"""Table 2 for our runs: BLEU on the test set of averaged checkpoints, and what training them computed."""

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiayn import config, flops, results
from aiayn.dataset import Dataset
from aiayn.schema import Config


@dataclass(frozen=True)
class Published:
    """What the paper has of a row: its name, the checkpoints averaged, BLEU en-de, FLOPs, hours of 8 GPUs."""

    name: str
    average: int
    bleu: float
    flops: float
    hours: float


# Table 2, and 5.2 for the hours: 12, and three days and a half
PAPER = {
    "base": Published("Transformer (base)", 5, 27.3, 3.3e18, 12.0),
    "big": Published("Transformer (big)", 20, 28.4, 2.3e19, 84.0),
}
# The paper's footnote 5: TFLOPS of a P100, 8 of them (5.2)
P100 = 9.5
HEAD = ("", "BLEU", "", "13a", "intl", "FLOPs by time", "", "FLOPs by count", "")
SUBHEAD = ("model", "paper", "ours", "ours", "ours", "paper", "ours", "paper", "ours")


def evaluation(experiment: str) -> str:
    """The name of the evaluation that Table 2 wants of a row: `test-average5`."""
    return f"test-average{PAPER[experiment].average}"


def holds(run: Config, name: str) -> bool:
    """Whether an evaluation of that name of a run stands in the table: base or big as it is, averaged as there."""
    return run.experiment in PAPER and name == evaluation(run.experiment) and _is_row(run)


def by_time(seconds: float, devices: int, tflops: float) -> float:
    """Section 6.1: training time, times the number of GPUs, times what one of them computes in a second."""
    return seconds * devices * tflops * flops.TERA


def peak(result: dict[str, Any]) -> float | None:
    """TFLOP/s of the device that a run was trained on; None for one that is not known."""
    name = str(results.look_up(result, "hardware.accelerator")).lower().replace(" ", "")
    if name == "cpu":
        return flops.CORE.peak * int(results.look_up(result, "config.hardware.threads"))
    return next((device.peak for gpu, device in flops.GPUS.items() if gpu in name), None)


def lines(run: Config, dataset: Dataset) -> list[str]:
    """Table 2 with what is trained and evaluated of the same data, scale, seed and fidelity as `run`."""
    conditions = "" if results.comparable(run.scale, run.data.name) else " (not the paper's conditions)"
    cells = [HEAD, SUBHEAD, *(tuple(_cells(name, run, dataset)) for name in PAPER)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(HEAD))]
    table = ["  ".join(_aligned(row, widths)).rstrip() for row in cells]
    every = run.training.checkpoint_every
    return [
        f"Table 2 at scale {run.scale.name} on {config.setting(run)}, seed {run.seed}{conditions}",
        *table,
        "BLEU: the paper's recipe; 13a and intl: sacreBLEU's. Means of the last 5 (base) and 20 (big) checkpoints,"
        f" one each {every:,} updates; the paper's lay 10 minutes apart, about 1,400 updates of base.",
        f"FLOPs by time: training time x devices x TFLOPS of one; the paper took {P100} for a P100, we take the peak of"
        " the data sheet. By count: products for the updates' tokens; the paper's from its steps of 25,000 tokens.",
    ]


def _cells(name: str, run: Config, dataset: Dataset) -> Iterator[str]:
    published = PAPER[name]
    row = _row(name, run)
    folder = config.run_folder(row)
    figures = _read(folder / f"evaluation-{evaluation(name)}.json")
    run_of_folder = results.read_run(folder)
    result = (run_of_folder.result if run_of_folder else None) or {}
    yield published.name
    yield f"{published.bleu:.1f}"
    for kind in ("paper", "sacrebleu", "intl"):
        bleu = results.look_up(figures, f"bleu.{kind}")
        yield f"{bleu:.1f}" if isinstance(bleu, float) else "–"
    yield flops.power(published.flops)
    tflops = peak(result) if result else None
    devices = results.look_up(result, "hardware.devices")
    yield flops.power(by_time(result["train_seconds"], int(devices or 1), tflops)) if tflops else "–"
    paper = config.rows()[name]
    tokens = paper.training.max_steps * paper.training.tokens_per_update
    yield flops.power(flops.training_flops(paper.model, 37_000, tokens, tokens, flops.LENGTH, flops.LENGTH))
    counted = by_count(row, result, dataset)
    yield flops.power(counted) if counted else "–"


def by_count(run: Config, result: dict[str, Any], dataset: Dataset) -> float | None:
    """What the updates of a finished run computed, from the tokens that they really held; None when not finished."""
    source, target = (results.look_up(result, f"{side}_tokens") for side in ("source", "target"))
    if not (isinstance(source, int) and isinstance(target, int)):
        return None
    pairs = dataset.pairs("train")
    rows = run.fidelity.rows(dataset.tokenizer.vocab_size)
    lengths = (flops.weighted_length(side) for side in (pairs.source_lengths, pairs.target_lengths))
    return flops.training_flops(run.model, rows, source, target, *lengths)


def _row(name: str, run: Config) -> Config:
    return dataclasses.replace(config.row(name, run), fidelity=run.fidelity)


def _is_row(run: Config) -> bool:
    return config.run_folder(run) == config.run_folder(_row(run.experiment, run))


def _aligned(row: tuple[str, ...], widths: list[int]) -> Iterator[str]:
    for number, (cell, width) in enumerate(zip(row, widths, strict=True)):
        yield cell.rjust(width) if number else cell.ljust(width)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}  # not evaluated yet, or torn: a dash either way
    return found if isinstance(found, dict) else {}
