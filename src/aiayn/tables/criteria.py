"""`aiayn criteria`: do the rows of a scale train as the paper's do? Read from finished runs alone."""

import contextlib
import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from aiayn.config import folders
from aiayn.config.schema import ROWS, Config, ConfigError
from aiayn.core import storage
from aiayn.runs import records
from aiayn.runs.records import METRICS, Run, look_up
from aiayn.tables import table3
from aiayn.tables.table3 import Line, Table

Points = Sequence[tuple[int, float]]
"""(update, value), in order."""


Behaviour = Mapping[str, float]
"""How one run trained, by the columns of CRITERIA, and its `minutes`; nan where it was too short to be measured."""

_DAMAGED = (storage.StorageError, ValueError, TypeError, KeyError, ArithmeticError)


@dataclass(frozen=True)
class Criterion:
    """What every row of a scale must fulfil."""

    text: str
    column: str
    holds: Callable[[float], bool]
    form: str
    rows: tuple[str, ...] = ROWS


CRITERIA = (
    Criterion(
        "the corpus is seen 15 to 40 times",
        "epochs",
        lambda value: 15 <= value <= 40,
        ".1f",
        tuple(row for row in ROWS if row != "big"),  # which trains three times as long in the paper, too
    ),
    Criterion(
        "dev PPL falls by at most 2 % in the last tenth of the updates", "fall %", lambda value: value <= 2, "+.1f"
    ),
    Criterion(
        "no plateau at the start: half of the training loss's fall is made in a fifth of the updates",
        *("start", lambda value: value >= 0.5, ".2f"),
    ),
    Criterion(
        "no relapse: the training loss of a twentieth of the updates is at most 0.1 nats above the one before",
        *("relapse", lambda value: value <= 0.1, "+.2f"),
    ),
    Criterion(
        "seeds agree: ln(dev PPL) has a standard deviation below 0.03", "spread", lambda value: value < 0.03, ".3f"
    ),
    Criterion(
        "without dropout the training loss ends below the dev loss",
        *("train - dev", lambda value: value < 0, "+.2f", ("d_dropout00",)),
    ),
    Criterion("the bootstrap 95 % interval of BLEU is at most ±1.5", "± BLEU", lambda value: value <= 1.5, ".2f"),
)


def behaviour(run: Run, line: Line, metrics: Path) -> Behaviour:
    """How a finished run of a row trained. StorageError for metrics that are damaged."""
    result = run.result
    assert result is not None
    updates = result["steps"]
    nats, ppl = _points(metrics, "train/nats"), _points(metrics, "dev/ppl")
    before = [value for step, value in ppl if step <= 0.9 * updates]
    # Nats a token, without smoothing
    first, fifth, last = (_mean(nats, updates, *part) for part in ((0, 0.01), (0.19, 0.2), (0.9, 1)))
    twentieths = [_mean(nats, updates, i / 20, (i + 1) / 20) for i in range(20)]
    low, high = look_up(result, "dev.bleu_ci95")
    logarithms = [math.log(ppl) for ppl in line.values("dev.ppl")]
    return {
        "epochs": result["epochs"],
        "fall %": 100 * (1 - look_up(result, "dev.ppl") / before[-1]) if before else math.nan,
        "start": (first - fifth) / (first - last),
        "relapse": max(after - earlier for earlier, after in itertools.pairwise(twentieths)),
        "spread": statistics.stdev(logarithms) if len(logarithms) > 1 else math.nan,
        "train - dev": last - math.log(look_up(result, "dev.ppl")),
        "± BLEU": (high - low) / 2,
        "minutes": result["train_seconds"] / 60,
    }


@dataclass(frozen=True)
class Judgement:
    """What the finished rows say of one criterion."""

    text: str
    missed: tuple[str, ...]  # rows that miss it, with their values
    known: int  # rows in which it is measured
    rows: int  # rows that must fulfil it

    def __str__(self) -> str:
        if self.missed:
            return f"MISSED: {self.text} ({', '.join(self.missed)})"
        return f"{'holds' if self.known == self.rows else 'open'}: {self.text} ({self.known} of {self.rows} rows)"


def verdicts(found: Mapping[str, Behaviour], rows: Mapping[str, Config]) -> list[Judgement]:
    """Of every criterion: of the rows that are there, which miss it."""
    made = []
    for criterion in CRITERIA:
        measured = {row: found[row][criterion.column] for row in criterion.rows if row in found}
        known = {row: value for row, value in measured.items() if not math.isnan(value)}
        missed = [f"{row} {value:{criterion.form}}" for row, value in known.items() if not criterion.holds(value)]
        made.append(Judgement(criterion.text, tuple(missed), len(known), len(criterion.rows)))
    narrow = min(row.model.d_k for row in rows.values())
    missed = [f"d_k {narrow}"] if narrow < 4 else []
    equal = ((one, other) for one, other in itertools.combinations(rows.values(), 2) if one.model == other.model)
    missed += [f"{one.experiment} = {other.experiment}" for one, other in equal if one.training == other.training]
    every = "no row degenerates: d_k is at least 4, no two rows are equal"
    return [*made, Judgement(every, tuple(missed), len(rows), len(rows))]


def text(found: Mapping[str, Behaviour], rows: Mapping[str, Config]) -> str:
    """A Markdown table of all rows, then the verdicts."""
    lines = [
        f"| row | {' | '.join(criterion.column for criterion in CRITERIA)} | minutes |",
        f"|---|{'---|' * (len(CRITERIA) + 1)}",
    ]
    for row, run in found.items():
        values = [
            f"{run[criterion.column]:{criterion.form}}".replace("+nan", "–").replace("nan", "–")
            for criterion in CRITERIA
        ]
        lines.append(f"| {row} | {' | '.join(values)} | {run['minutes']:.1f} |")
    absent = [row for row in ROWS if row not in found]
    lines += ["", f"{len(found)} rows, {sum(run['minutes'] for run in found.values()):.0f} minutes of training"]
    lines += [f"missing: {', '.join(absent)}"] if absent else []
    return "\n".join([*lines, *(f"- {verdict}" for verdict in verdicts(found, rows))])


def behaviours(table: Table, folder: Path, seed: int) -> dict[str, Behaviour]:
    """The rows of a table that are finished with a seed; those whose files are damaged are left out."""
    found = {}
    for line in table.lines:
        for run in line.runs:
            if run.seed == seed and run.result is not None:
                with contextlib.suppress(*_DAMAGED):
                    found[line.name] = behaviour(run, line, folder / line.name / f"seed{seed}" / METRICS)
    return found


def judged(table: Table, folder: Path) -> Table:
    """The same table with what its first finished seed misses, for its caption."""
    if not table.seeds:
        return table
    found = behaviours(table, folder, table.seeds[0])
    made = verdicts(found, {line.name: line.trained for line in table.lines})
    missed = [(one.text, one.missed) for one in made if one.missed]
    short = (f"{text} ({', '.join(rows) if len(rows) <= 3 else f'{len(rows)} rows'})" for text, rows in missed)
    return dataclasses.replace(table, missed=tuple(short))


def _points(metrics: Path, quantity: str) -> Points:
    return [(row["step"], row[quantity]) for row in records.read_metrics(metrics) if quantity in row]


def _mean(points: Points, updates: int, start: float, end: float) -> float:
    """Over the updates between two shares of all."""
    inside = [value for step, value in points if round(start * updates) < step <= round(end * updates)]
    return statistics.mean(inside) if inside else math.nan


def main(run: Config) -> None:
    """Prints the criteria for the rows of `<output>/<data>-<scale>` that are finished with the seed asked for."""
    folder = folders.sweep_folder(run)
    table = table3.table(run, records.read_runs(folder))
    found = behaviours(table, folder, run.seed)
    if not found:
        raise ConfigError(f"seed={run.seed}: no row is finished in {folder}; train with `-cn table3`")
    print(text(found, {line.name: line.trained for line in table.lines}))
