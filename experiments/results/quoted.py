"""Prints what the README and the pages of `experiments/results/` quote, in Markdown.

    python experiments/results/quoted.py table experiments/results/mini
    python experiments/results/quoted.py claims scale=mini
    python experiments/results/quoted.py fit scale=mini
    python experiments/results/quoted.py lengths scale=lengths
    python experiments/results/quoted.py variance experiment=big scale=mini seed=0 output=runs/criteria

`table` reads `results.csv` of the folder: the effects of the 20 rows in the paper and there, and how well they agree.
`claims` reads finished runs, such as unpacked archives: the verdicts on the paper's claims. Its words are those of
`aiayn report`. What `aiayn prepare` makes with them has to be there, or no verdict on BLEU is certain.
`fit` reads the same: perplexity of the training text and of dev, which tell a row that fits the text worse than base
from one that generalises worse.
`lengths` too: BLEU by the length of the source, in the buckets of the report's figure, and how long the
translations are, of the references' length.
`variance` needs the checkpoints of a run. It is criterion 3d of `scales.md`, one figure for each layer of the encoder:
the variance among the tokens of a sentence, as a share of the mean square. It is 0 when all tokens of a sentence are
alike, so that attention to them has nothing to choose from.
"""

import csv
import dataclasses
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from tabulate import tabulate
from torch import Tensor, nn

from aiayn.cli import one_line_errors
from aiayn.config import compose, folders
from aiayn.config.schema import Config, ConfigError
from aiayn.data.update_plan import gather
from aiayn.paper.transformer import Transformer
from aiayn.report import figures
from aiayn.runs import records
from aiayn.runs.models import trained
from aiayn.tables import beyond, paper_claims, table3
from aiayn.tables.table3 import DEFINITION, METRICS, Metric

VARIANCE_SENTENCES = 400
CLAIM_COLUMNS = {
    "sentence": "claim",
    "metric": "",
    "rows": "rows, worst first",
    "paper": "paper",
    "ours": "ours",
    "interval": "95 % over seeds",
    "sentences": "95 % over sentences",
    "p": "p",
    "verdict": "verdict",
}
CLAIM_NOTE = """\
`a < b`: the paper says that row a is worse than row b. The rise from a to b is in points of BLEU, or in percent of a's
perplexity by which b's is lower. `a = b`: equally good, within 0.4 BLEU or 3.3 % of perplexity. p is corrected for the
number of claims, the intervals are not. A verdict follows p and, on BLEU, the interval over sentences.
"""
FIT_NOTE = """\
Base's perplexity without label smoothing, and each other row's change from it: of the training text in the last tenth
of the updates, with the row's own dropout, and of dev at the end. Rows with another dropout than base's cannot be
compared in training. Means over seeds.
"""

Samples = Mapping[str, Sequence[float]]
"""A figure of each seed of a row, by row."""


def measured(folder: Path, metric: Metric) -> Samples:
    """PPL or BLEU of every row and seed in the folder's `results.csv`. Seed 0 judges the scale and is in no table."""
    samples: dict[str, list[float]] = {}
    with (folder / "results.csv").open(newline="") as file:
        for line in csv.DictReader(file):
            if line["seed"] != "0":
                samples.setdefault(line["row"], []).append(float(line[metric.lower()]))
    return samples


def published(row: Config, metric: Metric) -> float:
    """The figure of a row in the paper's Table 3."""
    value = row.paper.ppl if metric == "PPL" else row.paper.bleu
    assert value is not None
    return value


def definition(row: Config, base: Config) -> str:
    """What a row changes in base; of base, its sizes."""
    texts = []
    for symbol, section, key in DEFINITION:
        value, of_base = (getattr(getattr(config, section), key) for config in (row, base))
        if value != of_base or (row is base and section == "model" and key != "dropout"):
            texts.append(f"{value // 1000}K steps" if key == "max_steps" else f"{symbol} {value}")
    return ", ".join(texts) or "learned positions"


def cell(value: float, base: float, metric: Metric, *, is_base: bool) -> str:
    """The figure of base itself, or a row's change from it: of PPL in percent, of BLEU in points."""
    digits = 2 if metric == "PPL" else 1
    if is_base:
        return f"{value:.{digits}f}"
    change = 100 * (value / base - 1) if metric == "PPL" else value - base
    digits, unit = (0, " %") if metric == "PPL" else (1, "")
    return (f"{change:+.{digits}f}".replace("-", "−") if round(change, digits) else "0") + unit


def table(folder: Path) -> str:
    """The README's table: the paper's effect and ours on PPL and on BLEU, one line for each row that is there."""
    rows = {name: row for name, row in compose.rows().items() if name in measured(folder, "PPL")}
    if "base" not in rows:
        raise ConfigError(f"{folder}: results.csv has no run of base, from which the others differ")
    lines = [[name, definition(row, rows["base"])] for name, row in rows.items()]
    for metric in METRICS:
        samples = measured(folder, metric)
        paper = {name: published(row, metric) for name, row in rows.items()}
        ours = {name: statistics.mean(samples[name]) for name in rows}
        for line, name in zip(lines, rows, strict=True):
            line += [cell(of[name], of["base"], metric, is_base=name == "base") for of in (paper, ours)]
    heads = [
        "row",
        "differs from base in",
        *(f"{metric}, {whose}" for metric in METRICS for whose in ("paper", "ours")),
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * 2 + ["--:"] * 4, *lines))


def agreement(folder: Path) -> list[str]:
    """For each metric Spearman's ρ with the paper and its interval, and how many effects have the paper's sign."""
    texts = []
    for metric in METRICS:
        samples = measured(folder, metric)
        paper = {name: published(row, metric) for name, row in compose.rows().items() if name in samples}
        found = paper_claims.correlation([*paper.values()], [samples[name] for name in paper])
        if found is None:
            return [f"{len(paper)} rows: at least {paper_claims.MIN_ROWS} are needed for a rank correlation"]
        base = statistics.mean(samples["base"])
        effects = [
            (value - paper["base"]) * (statistics.mean(samples[name]) - base)
            for name, value in paper.items()
            if value != paper["base"]
        ]
        rho, low, high = (f"{value:+.2f}".replace("-", "−") for value in found)
        signs = f"{sum(effect > 0 for effect in effects)} of {len(effects)} effects have the paper's sign"
        texts.append(f"{metric}: ρ {rho} ({low} to {high}), {signs}")
    return texts


def claims(*words: str) -> str:
    """A note on how to read it, how far seeds spread, and one line for each claim."""
    run = compose.compose_row(*words)
    if not (runs := records.read_runs(folders.sweep_folder(run))):
        raise ConfigError(f"{folders.sweep_folder(run)} has no runs{folders.other_runs(run)}")
    made = table3.table(run, runs)
    findings = paper_claims.check(made, beyond.on_dev(run, made.lines)[1])
    cells = [[found.texts[key] for key in CLAIM_COLUMNS] for found in findings]
    spreads = []
    for metric in METRICS:
        one, (factor, unit) = paper_claims.common_spread(made, metric), (100, " %") if metric == "PPL" else (1, "")
        told = one and f"standard deviation {factor * one[0] ** 0.5:.2f}{unit}, {one[1]} degrees of freedom"
        spreads.append(f"{metric}: {told or 'each row has its own (Welch)'}")
    note = ";\n".join([f"{CLAIM_NOTE}\nSpread over seeds, of all rows together. {spreads[0]}", f"{spreads[1]}.\n"])
    return f"{note}\n{tabulate(cells, list(CLAIM_COLUMNS.values()), tablefmt='github')}"


def fit(*words: str) -> str:
    """A note, and for each row the PPL of the training text and of dev, each against base's, and their ratio."""
    run = compose.compose_row(*words)
    folder = folders.sweep_folder(run)
    nats: dict[str, tuple[float, float]] = {}  # geometric means over seeds, like the claims' spread
    for line in table3.table(run, records.read_runs(folder)).lines:
        training, dev = [], [math.log(ppl) for ppl in line.values("dev.ppl")]
        for result in (found.result for found in line.runs if found.result):
            updates = records.read_metrics(path := folder / line.name / f"seed{result['seed']}" / records.METRICS)
            if not updates:
                raise ConfigError(f"{path}: no such file, or an empty one; unpack the run's archive again")
            last = (update for update in updates if update["step"] > 0.9 * result["steps"])
            training.append(statistics.mean(update["train/nats"] for update in last if "train/nats" in update))
        if dev:
            nats[line.name] = statistics.mean(training), statistics.mean(dev)
    if "base" not in nats:
        raise ConfigError(f"{folder}: no run of base is finished, from which the others differ")
    cells = []
    for name, of_row in nats.items():
        ppls = zip(map(math.exp, of_row), map(math.exp, nats["base"]), strict=True)
        changes = (cell(ppl, of_base, "PPL", is_base=name == "base") for ppl, of_base in ppls)
        cells.append([name, *changes, f"{math.exp(of_row[1] - of_row[0]):.2f}"])
    heads = ["row", "training PPL", "dev PPL", "dev / training"]
    return f"{FIT_NOTE}\n{tabulate(cells, heads, tablefmt='github', disable_numparse=True)}"


def lengths(*words: str) -> str:
    """By the length of the source in words, for each row: BLEU, and the translations' length over the references'."""
    run = compose.compose_row(*words)
    stored = records.read_runs(folders.sweep_folder(run))
    made, others = table3.table(run, stored), beyond.table(run, stored)
    lines = {line.name: line for line in (*made.lines, *(others.lines if others else ()))}
    made = dataclasses.replace(made, lines=tuple(lines.values()))
    source_words, counts, missing = beyond.on_dev(run, made.lines)
    if missing:
        raise ConfigError(missing)
    (axes,) = figures.lengths(made, counts, source_words).axes
    heads = ["words of the source", *(label.get_text() for label in axes.get_xticklabels())]
    drawn = {str(line.get_label()): np.asarray(line.get_ydata()) for line in axes.lines}
    bucket_of = np.searchsorted([int(head.split()[-1]) for head in heads[1:]], source_words)
    cells = [[f"{name}, BLEU", *(f"{bleu:.1f}" for bleu in drawn[name])] for name in lines if name in drawn]
    for name in (name for name in lines if name in drawn):
        of_row = np.sum([of_run for (row, _), of_run in counts.items() if row == name], 0)
        sums = [of_row[bucket_of == bucket].sum(0) for bucket in range(len(heads) - 1)]
        cells.append([f"{name}, length", *(f"{ours / references:.2f}" for *_, ours, references in sums)])
    return str(tabulate(cells, heads, tablefmt="github", disable_numparse=True))


def variance(*words: str) -> list[float]:
    """How far the tokens of a dev sentence differ after each layer of a trained run's encoder."""
    model, dataset, *_ = trained(compose.compose_row(*words))
    assert isinstance(model, Transformer)
    batch = gather(dataset.pairs("dev"), np.arange(min(VARIANCE_SENTENCES, len(dataset.pairs("dev")))))
    lengths = batch.source_offsets.diff().tolist()
    shares: list[float] = []

    def measure(layer: nn.Module, inputs: object, output: Tensor) -> None:
        x = output[: sum(lengths)].double()  # (S, D) without the padding at the end
        centred = torch.cat([sentence - sentence.mean(0) for sentence in torch.split(x, lengths)])
        shares.append(float(centred.square().mean() / x.square().mean()))

    for layer in model.encoder:
        layer.register_forward_hook(measure)
    with torch.no_grad():
        model(batch)
    return shares


def main(what: str, *words: str) -> None:
    """Prints a folder's table and how well it agrees, a scale's claims, how its rows fit, BLEU by length or 3d."""
    if what == "claims":
        print(claims(*words))
    elif what == "fit":
        print(fit(*words))
    elif what == "lengths":
        print(lengths(*words))
    elif what == "variance":
        print(*(f"{share:.4f}" for share in variance(*words)))
    else:
        print(table(Path(words[0])), *agreement(Path(words[0])), sep="\n\n")


if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1] not in ("table", "claims", "fit", "lengths", "variance"):
        sys.exit(__doc__)
    with one_line_errors():
        main(*sys.argv[1:])
