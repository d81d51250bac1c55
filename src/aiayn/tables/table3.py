"""Table 3, or other rows, in numbers: which runs count, and every row's figures beside the paper's."""

import dataclasses
import itertools
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from aiayn.config import compose, folders
from aiayn.config.schema import BEYOND, ROWS, Config, Scale, result_affecting
from aiayn.runs.records import OF_ROW, SHARED, Run, changed, comparable, look_up, place_in_result, printable, row_group

Metric = Literal["PPL", "BLEU"]
METRICS: tuple[Metric, ...] = ("PPL", "BLEU")
KEYS: dict[Metric, str] = {"PPL": "dev.ppl", "BLEU": "dev.bleu.paper"}
# Published base models spread over 0.8 BLEU on newstest2013; from base to A h=1, Table 3 loses 0.37 PPL for 0.9 BLEU
TOLERANCES: dict[Metric, float] = {"PPL": 0.16, "BLEU": 0.4}

# The columns that say what a row is: (the paper's symbol, section of the config, field).
DEFINITION = (
    *(("N", "model", "num_layers"), ("d_model", "model", "d_model"), ("d_ff", "model", "d_ff")),
    *(("h", "model", "num_heads"), ("d_k", "model", "d_k"), ("d_v", "model", "d_v")),
    *(("P_drop", "model", "dropout"), ("ε_ls", "training", "label_smoothing"), ("steps", "training", "max_steps")),
)
# What made a run, and where a result has it.
ORIGINS = {"source code": "sha256.code", "processor": "hardware.accelerator"}


class Measured(NamedTuple):
    """Mean and sample standard deviation over a row's finished seeds; no deviation of a single one."""

    mean: float
    deviation: float | None


@dataclasses.dataclass(frozen=True)
class Line:
    """One row of Table 3: what the paper has, and what became of our runs of it."""

    config: Config  # at the paper's own scale
    trained: Config  # at the scale of the table
    runs: tuple[Run, ...]
    stale: tuple[Run, ...]  # finished, but not as the row is now, or not under the conditions of the table
    claims: Mapping[str, Any]  # what is true of every run that counts

    @property
    def name(self) -> str:
        """The row's name: `a_h1`."""
        return self.config.experiment

    @property
    def group(self) -> str:
        """The paper's letter for the row's group; base and big stand alone."""
        return row_group(self.name)

    def papers(self, metric: Metric) -> float:
        """The figure of Table 3, of a row that stands in it."""
        value = self.published(metric)
        assert value is not None, f"{self.name} has no {metric} in Table 3"
        return value

    def published(self, metric: Metric) -> float | None:
        """The paper's figure; of a row beyond Table 3 what others published, if they did."""
        theirs = self.config.published if self.name in BEYOND else self.config.paper
        return theirs.ppl if metric == "PPL" else theirs.bleu

    @property
    def source(self) -> str:
        """Where `published` is from, and how it was made: `Author year, conditions`."""
        return self.config.published.where or "Vaswani et al. 2017, newstest2013 en-de, Table 3"

    @property
    def finished(self) -> list[dict[str, Any]]:
        """The results that count, one for each finished seed."""
        return [run.result for run in self.runs if run.result is not None]

    @property
    def status(self) -> str:
        """`finished` when a seed is, otherwise the worst that is known of the row."""
        known = {run.status for run in self.runs} | ({"stale"} if self.stale else set())
        order = ("finished", "failed", "unreadable", "stale", "half-done")
        return next((status for status in order if status in known), "missing")

    @property
    def notes(self) -> list[tuple[str, str, str]]:
        """(run, status, detail) of every run that is not among the figures."""
        notes = []
        for run in self.stale:
            # A factor of the scale before the values that it multiplies
            changes = sorted(changed(self.claims, run.result), key=lambda change: not change[0].startswith("scale."))
            (key, value, claim), *others = changes
            was, now = (str(part)[:12] if key.startswith("sha256.") else part for part in (value, claim))
            where = ", as in most runs of this table" if key in SHARED else ""
            more = f", and {len(others)} more" if others else ""
            give = f"give {key}={value}, or " * key.startswith("scale.")
            detail = f"{key} was {was}, is {now}{where}{more}: {give}delete its folder and train it again"
            notes.append((run, "stale", detail))
        for run in self.runs:
            if run.status in ("failed", "unreadable"):
                notes.append((run, run.status, f"{run.cause}; log: {run.log}" if run.log else run.cause))
            elif run.status == "half-done":
                notes.append((run, "half-done", f"{run.steps_done:,} of {self.trained.training.max_steps:,} updates"))
        names = (f"{self.name} seed {run.seed}".removesuffix(" seed -1") for run, _, _ in notes)
        return [(name, status, printable(detail)) for name, (_, status, detail) in zip(names, notes, strict=True)]

    def values(self, key: str) -> list[float]:
        """A figure of the row's results, by its dotted key: one for each finished seed that has it."""
        found = (look_up(result, key) for result in self.finished)
        return [float(value) for value in found if value is not None]

    def origins(self, origin: str) -> list[str]:
        """What made the row's runs, each once; older ones do not say their code, and of a processor only `cpu`."""
        found = (look_up(result, ORIGINS[origin]) for result in self.finished)
        return list(dict.fromkeys(printable(str(value)) for value in found if value is not None))

    def measured(self, key: str) -> Measured | None:
        """The same over the seeds; None when none is finished."""
        values = self.values(key)
        deviation = statistics.stdev(values) if len(values) > 1 else None
        return Measured(statistics.mean(values), deviation) if values else None


@dataclasses.dataclass(frozen=True)
class Table:
    """Table 3 in numbers."""

    lines: tuple[Line, ...]
    scale: Scale
    data: str
    others: int  # runs with other settings than these rows'
    reference: Mapping[str, Any]  # a result with what all that count share; while there is none, the command's config

    @property
    def base(self) -> Line:
        """The row that the others are measured against: the first."""
        return self.lines[0]

    @property
    def opens(self) -> list[bool]:
        """Whether each line is the first of the paper's group."""
        groups = ["", *(line.group for line in self.lines)]
        return [group != before for before, group in itertools.pairwise(groups)]

    @property
    def finished(self) -> int:
        """How many rows have a finished seed."""
        return sum(bool(line.finished) for line in self.lines)

    @property
    def seeds(self) -> list[int]:
        """Every seed that finished in some row."""
        return sorted({run.seed for line in self.lines for run in line.runs if run.result})

    @property
    def comparable(self) -> bool:
        """Whether our figures were made under the paper's conditions."""
        return comparable(self.scale, look_up(self.reference, "config.data"))

    @property
    def origins(self) -> dict[str, list[str]]:
        """Rows with runs of other source code than the first run, or of another processor, which rounds differently."""
        made = {key: [(line.name, value) for line in self.lines for value in line.origins(key)] for key in ORIGINS}
        others = {key: [name for name, value in known if value != known[0][1]] for key, known in made.items()}
        return {key: list(dict.fromkeys(names)) for key, names in others.items() if names}

    @property
    def notes(self) -> list[tuple[str, str, str]]:
        """(run, status, detail) of everything that is not among the figures; rows never begun come last, together."""
        notes = [note for line in self.lines for note in line.notes]
        missing = ", ".join(line.name for line in self.lines if line.status == "missing")
        return [*notes, (missing, "missing", "not begun")] if missing else notes

    def means(self, metric: Metric) -> list[float | None]:
        """Our figure of each line, the mean over its seeds; None where none is finished."""
        found = [line.measured(KEYS[metric]) for line in self.lines]
        return [None if of_line is None else of_line.mean for of_line in found]

    def effects(self, values: Sequence[float | None]) -> list[float | None]:
        """One value for each line, minus that of base; None for base itself and where either is missing."""
        base, *others = values
        return [None, *(None if base is None or value is None else value - base for value in others)]


def table(run: Config, runs: Sequence[Run], rows: Mapping[str, Config] | None = None) -> Table:
    """The table of `rows`, base first, or of the paper's, with those of `runs` that are as their row is and alike."""
    rows = rows or compose.rows(run.fidelity.name)
    trained = {name: compose.scaled(dataclasses.replace(rows[name], scale=run.scale)) for name in rows}
    own = {name: [found for found in runs if found.experiment == name] for name in rows}
    finished = [(name, found.result) for name in rows for found in own[name] if found.result]
    as_row = [result for name, result in finished if not changed(claims_of(trained[name]), result)]
    kinds = Counter(tuple(conditions(result).values()) for result in as_row)
    # What no row says has to be as in most runs; of several kinds the first, and base is the first row
    most = max(kinds, key=kinds.__getitem__, default=())
    shared = dict(zip(SHARED, most, strict=False))
    reference = next((result for result in as_row if conditions(result) == shared), {"config": dataclasses.asdict(run)})
    lines = []
    for name in rows:
        claims = {**claims_of(trained[name]), **shared}
        stale = [found for found in own[name] if found.result and changed(claims, found.result)]
        counted = tuple(found for found in own[name] if found not in stale)
        lines.append(Line(rows[name], trained[name], counted, tuple(stale), claims))
    others = sum(found.experiment not in ROWS + BEYOND for found in runs)
    return Table(tuple(lines), run.scale, folders.setting(run), others, reference)


def claims_of(line: Config) -> dict[str, Any]:
    """What a row says of every run of its line."""
    return {key: value for key, value in result_affecting(line).items() if key.startswith(OF_ROW)}


def conditions(result: dict[str, Any]) -> dict[str, Any]:
    """What a result has of what all runs of a table share."""
    return {key: look_up(result, place_in_result(key)) for key in SHARED}
