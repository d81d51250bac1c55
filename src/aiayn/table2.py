"""Table 2 for our runs: BLEU on the test set of averaged checkpoints, and what training them computed."""

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
    """What the paper has of a row: its name, the checkpoints averaged, BLEU by languages, FLOPs, hours of 8 GPUs."""

    name: str
    average: int
    bleu: dict[str, float]
    flops: float
    hours: float


# Table 2, and 5.2 for the hours: 12, and three days and a half
PAPER = {
    "base": Published("Transformer (base)", 5, {"en-de": 27.3, "en-fr": 38.1}, 3.3e18, 12.0),
    "big": Published("Transformer (big)", 20, {"en-de": 28.4, "en-fr": 41.8}, 2.3e19, 84.0),
}
# 5.1: of byte pairs "about 37000", of word pieces 32000
PIECES = {"en-de": 37_000, "en-fr": 32_000}
# The paper's footnote 5: TFLOPS of a P100, 8 of them (5.2)
P100 = 9.5
HEAD = ("", "BLEU", "", "13a", "intl", "FLOPs by time", "", "FLOPs by count", "")
SUBHEAD = ("model", "paper", "ours", "ours", "ours", "paper", "ours", "paper", "ours")


def evaluation(experiment: str) -> str:
    """The name of the evaluation that Table 2 wants of a row: `test-average5`."""
    return f"test-average{PAPER[experiment].average}"


def holds(run: Config, name: str) -> bool:
    """Whether an evaluation of a run stands in the table: the paper's languages, base or big as it is, averaged so."""
    in_table = run.experiment in PAPER and languages(run) in PIECES
    return in_table and name == evaluation(run.experiment) and _is_row(run)


def languages(run: Config) -> str:
    """From what and into what is translated: `en-de`."""
    return f"{run.data.source_language}-{run.data.target_language}"


def by_time(seconds: float, devices: int, tflops: float) -> float:
    """Section 6.1: training time, times the number of GPUs, times what one of them computes in a second."""
    return seconds * devices * tflops * flops.TERA


def peak(result: dict[str, Any]) -> float | None:
    """TFLOP/s of the device that a run was trained on; None for one that is not known."""
    name = str(results.look_up(result, "hardware.accelerator"))
    if name == "cpu":
        return flops.CORE.peak * int(results.look_up(result, "config.hardware.threads"))
    return flops.peak_of(name)


def span(last: int, every: int, count: int) -> int:
    """The updates from the first to the last of the last `count` checkpoints, written each `every` and at the end."""
    steps: list[int] = [*range(every, last, every), last][-count:]
    return steps[-1] - steps[0]


def published_span(name: str) -> float:
    """The same of the paper's, which are 10 minutes apart (6.1)."""
    return (PAPER[name].average - 1) * config.rows()[name].training.max_steps / (PAPER[name].hours * 6)


def lines(run: Config, dataset: Dataset) -> list[str]:
    """Table 2 with what is trained and evaluated of the same data, scale, seed and fidelity as `run`."""
    made_of = f"{config.setting(run)}, {languages(run)}, seed {run.seed}"
    conditions = "" if _as_published(run) else " (not the paper's conditions)"
    cells = [HEAD, SUBHEAD, *(tuple(_cells(name, run, dataset)) for name in PAPER)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(HEAD))]
    table = ["  ".join(_aligned(row, widths)).rstrip() for row in cells]
    return [
        f"Table 2 at scale {run.scale.name} on {made_of}{conditions}",
        *table,
        "BLEU: the paper's recipe; 13a and intl: sacreBLEU's. Each of the mean of the row's last checkpoints:",
        *(_averaged(name, run) for name in PAPER),
        f"FLOPs by time: training time x devices x TFLOPS of one; the paper took {P100} for a P100, we take the peak of"
        " the data sheet. By count: products for the updates' tokens; the paper's from its steps of 25,000 tokens.",
    ]


def _averaged(name: str, run: Config) -> str:
    row = config.row(name, run)
    published, training, paper = PAPER[name], row.training, config.rows()[name].training
    # How often a run saves is not of its meaning: the command that evaluates it may say otherwise
    every = results.look_up(_result(row), "config.training.checkpoint_every")
    known = isinstance(every, int) and every > 0
    ours = span(training.max_steps, every if known else training.checkpoint_every, published.average)
    line = (
        f"  {name}: the last {published.average}, over {ours:,} of {training.max_steps:,} updates;"
        f" the paper's, one each 10 minutes, over about {round(published_span(name), -2):,.0f} of {paper.max_steps:,}"
    )
    if (name, languages(run)) == ("big", "en-fr"):
        return line + ", and with dropout 0.1 (6.1)"
    return line


def _as_published(run: Config) -> bool:
    corpus = f"wmt14_{languages(run).replace('-', '_')}"
    return run.data.name == corpus and results.changes_nothing(run.scale)


def _cells(name: str, run: Config, dataset: Dataset) -> Iterator[str]:
    published = PAPER[name]
    row = config.row(name, run)
    figures = _read(config.run_folder(row) / f"evaluation-{evaluation(name)}.json")
    result = _result(row)
    yield published.name
    yield f"{published.bleu[languages(run)]:.1f}"
    for kind in ("paper", "sacrebleu", "intl"):
        bleu = results.look_up(figures, f"bleu.{kind}")
        yield f"{bleu:.1f}" if isinstance(bleu, float) else "–"
    yield flops.power(published.flops)
    tflops = peak(result) if result else None
    devices = results.look_up(result, "hardware.devices")
    yield flops.power(by_time(result["train_seconds"], int(devices or 1), tflops)) if tflops else "–"
    paper = config.rows()[name]
    tokens = paper.training.max_steps * paper.training.tokens_per_update
    pieces = PIECES[languages(run)]
    yield flops.power(flops.training_flops(paper.model, pieces, tokens, tokens, flops.LENGTH, flops.LENGTH))
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


def _result(row: Config) -> dict[str, Any]:
    run = results.read_run(config.run_folder(row))
    return (run.result if run else None) or {}


def _is_row(run: Config) -> bool:
    return config.run_folder(run) == config.run_folder(config.row(run.experiment, run))


def _aligned(row: tuple[str, ...], widths: list[int]) -> Iterator[str]:
    for number, (cell, width) in enumerate(zip(row, widths, strict=True)):
        yield cell.rjust(width) if number else cell.ljust(width)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}  # not evaluated yet, or torn: a dash either way
    return found if isinstance(found, dict) else {}
