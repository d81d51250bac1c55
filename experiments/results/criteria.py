"""Prints the criteria of `scales.md` for the rows of a scale, from the finished runs of one seed, in Markdown.

python experiments/results/criteria.py scale=small seed=0 output=runs/criteria
"""

import itertools
import math
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from aiayn.cli import one_line_errors
from aiayn.config import folders
from aiayn.config.compose import compose_row
from aiayn.config.schema import ROWS, Config
from aiayn.runs import records
from aiayn.runs.records import METRICS, Run, look_up
from aiayn.tables import table3
from aiayn.tables.table3 import Line

# Of each column: how it is printed, when the criterion holds, and what it asks
CRITERIA: dict[str, tuple[str, Callable[[float], bool], str]] = {
    "epochs": (".1f", lambda x: 15 <= x <= 40, "the corpus is seen 15 to 40 times"),
    "fall %": ("+.1f", lambda x: x <= 2, "dev PPL falls by at most 2 % in the last tenth of the updates"),
    "start": (
        ".2f",
        lambda x: x >= 0.5,
        "no plateau at the start: half of the training loss's fall is made in a fifth of the updates",
    ),
    "relapse": (
        "+.2f",
        lambda x: x <= 0.1,
        "no relapse: the training loss of a twentieth of the updates is at most 0.1 nats above the one before",
    ),
    "spread": (".3f", lambda x: x < 0.03, "seeds agree: ln(dev PPL) has a standard deviation below 0.03"),
    "train - dev": ("+.2f", lambda x: x < 0, "without dropout the training loss ends below the dev loss"),
    "± BLEU": (".2f", lambda x: x <= 1.5, "the bootstrap 95 % interval of BLEU is at most ±1.5"),
}
# Criteria of some rows alone: big trains three times as long in the paper, too
OF_ROWS = {"epochs": tuple(row for row in ROWS if row != "big"), "train - dev": ("d_dropout00",)}


def behaviour(run: Run, line: Line, metrics: Path) -> dict[str, float]:
    """How a finished run trained, by the columns of CRITERIA, and its `minutes`; nan where it was too short."""
    result, rows = run.result or {}, records.read_metrics(metrics)
    updates, ppl = result["steps"], look_up(result, "dev.ppl")
    before = [row["dev/ppl"] for row in rows if "dev/ppl" in row and row["step"] <= 0.9 * updates]

    def mean_nats(start: float, end: float) -> float:
        """Nats a token without smoothing, over the updates between two shares of all."""
        first, last = round(start * updates), round(end * updates)
        inside = [row["train/nats"] for row in rows if "train/nats" in row and first < row["step"] <= last]
        return statistics.mean(inside) if inside else math.nan

    first, fifth, last = mean_nats(0, 0.01), mean_nats(0.19, 0.2), mean_nats(0.9, 1)
    twentieths = [mean_nats(i / 20, (i + 1) / 20) for i in range(20)]
    low, high = look_up(result, "dev.bleu_ci95")
    logarithms = [math.log(of_seed) for of_seed in line.values("dev.ppl")]
    return {
        "epochs": result["epochs"],
        "fall %": 100 * (1 - ppl / before[-1]) if before else math.nan,
        "start": (first - fifth) / (first - last),
        "relapse": max(after - earlier for earlier, after in itertools.pairwise(twentieths)),
        "spread": statistics.stdev(logarithms) if len(logarithms) > 1 else math.nan,
        "train - dev": last - math.log(ppl),
        "± BLEU": (high - low) / 2,
        "minutes": result["train_seconds"] / 60,
    }


def verdicts(measured: Mapping[str, Mapping[str, float]], rows: Mapping[str, Config]) -> list[str]:
    """A line for each criterion: whether it holds, which rows miss it, or that it is open."""
    judged = []
    for column, (form, holds, text) in CRITERIA.items():
        rows_asked = OF_ROWS.get(column, ROWS)
        values = {row: measured[row][column] for row in rows_asked if row in measured}
        known = {row: value for row, value in values.items() if not math.isnan(value)}
        missed = [f"{row} {value:{form}}" for row, value in known.items() if not holds(value)]
        judged.append((text, missed, len(known), len(rows_asked)))
    narrow = min(row.model.d_k for row in rows.values())
    missed = [f"d_k {narrow}"] if narrow < 4 else []
    equal = ((one, other) for one, other in itertools.combinations(rows.values(), 2) if one.model == other.model)
    missed += [f"{one.experiment} = {other.experiment}" for one, other in equal if one.training == other.training]
    judged.append(("no row degenerates: d_k is at least 4, no two rows are equal", missed, len(rows), len(rows)))
    return [
        f"- MISSED: {text} ({', '.join(missed)})"
        if missed
        else f"- {'holds' if known == total else 'open'}: {text} ({known} of {total} rows)"
        for text, missed, known, total in judged
    ]


def main(*words: str) -> None:
    """Prints a table of the finished rows, then the verdicts."""
    run = compose_row(*words)
    folder = folders.sweep_folder(run)
    table = table3.table(run, records.read_runs(folder))
    measured = {
        line.name: behaviour(found, line, folder / line.name / f"seed{run.seed}" / METRICS)
        for line in table.lines
        for found in line.runs
        if found.seed == run.seed and found.result is not None
    }
    if not measured:
        sys.exit(f"seed={run.seed}: no row is finished in {folder}; train with `-cn table3`")
    print(f"| row | {' | '.join(CRITERIA)} | minutes |")
    print(f"|---|{'---|' * (len(CRITERIA) + 1)}")
    for row, of_row in measured.items():
        values = (f"{of_row[column]:{form}}" for column, (form, _, _) in CRITERIA.items())
        print(f"| {row} | {' | '.join(values)} | {of_row['minutes']:.1f} |".replace("+nan", "–").replace("nan", "–"))
    print(f"\n{len(measured)} rows, {sum(of_row['minutes'] for of_row in measured.values()):.0f} minutes of training")
    if absent := [row for row in ROWS if row not in measured]:
        print(f"missing: {', '.join(absent)}")
    print(*verdicts(measured, {line.name: line.trained for line in table.lines}), sep="\n")


if __name__ == "__main__":
    with one_line_errors():
        main(*sys.argv[1:])
