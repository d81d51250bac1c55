"""What became of every run, and Table 3 in numbers: never a traceback, whatever lies in a run's folder."""

import dataclasses
import json
import re
import statistics
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from aiayn import config as configuration
from aiayn import storage
from aiayn.schema import MEANING, PATHS, ROWS, Config, Scale, meaning

SCHEMA = 1
RESULT, FAILURE, METRICS, CHECKPOINTS = "result.json", "failure.json", "metrics.jsonl", "checkpoints"
LOG = "worker.log"

Status = Literal["finished", "failed", "half-done", "missing"]

# The data of Table 3: on other text, cut in another way or at another scale, a difference from the paper's numbers says
# nothing. Precision is no such condition: the paper names none.
PAPER_DATA = "wmt14_en_de"
# What a row says of itself.
_OF_ROW = ("model.", "fidelity.", "training.", "scale.", "decoding.")
# What all runs of a table share, or they cannot be averaged or compared: all else that a run means, but for its seed.
# Paths are not among it: the hashes say which text and which vocabulary, wherever a run was trained.
SHARED = (
    *sorted(key for key in MEANING - PATHS - {"experiment", "seed"} if not key.startswith(_OF_ROW)),
    *("sha256.data", "sha256.tokenizer"),
)
# The columns that say what a row is: (the paper's symbol, section of the config, field).
DEFINITION = (
    ("N", "model", "num_layers"),
    ("d_model", "model", "d_model"),
    ("d_ff", "model", "d_ff"),
    ("h", "model", "num_heads"),
    ("d_k", "model", "d_k"),
    ("d_v", "model", "d_v"),
    ("P_drop", "model", "dropout"),
    ("ε_ls", "training", "label_smoothing"),
    ("steps", "training", "max_steps"),
)

_FOLDER = re.compile(r"(?P<experiment>\w[\w.-]*(\+\w+)?)/seed(?P<seed>0|[1-9][0-9]{0,9})", re.ASCII)
# What the report reads; the rest of a result is for people and may change without a new schema.
_TABLES = ("config", "config.model", "config.training", "config.scale", "config.data", "device_seconds")
_TEXTS = ("experiment", "scale", "data")
_COUNTS = ("seed", "params", "params_at_40960_rows", "steps")
_NUMBERS = (
    *("train_seconds", "dev.ppl", "dev.bits_per_character"),
    *("dev.bleu.paper", "dev.bleu.sacrebleu", "dev.bleu.intl"),
)
_LARGEST = 1e100
_LONGEST_TEXT = 300
# The sequences by which a terminal is told to change colour, move its cursor or set its title.
_ESCAPE_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b.")


@dataclass(frozen=True)
class Run:
    """One row of Table 3 under one seed: what became of it."""

    experiment: str  # `a_h1`, or `a_h1+1f2e3d4c` with overrides that are not Table 3's
    seed: int
    status: Status
    cause: str  # one printable line; empty unless failed
    result: dict[str, Any] | None  # the checked result.json when finished
    steps_done: int
    log: str = ""  # where a failed run's own output is


def read_runs(folder: Path) -> list[Run]:
    """Every run under `folder` (runs/<data>-<scale>), by name and seed; folders that are no runs are passed over."""
    found = [run for path in folder.glob("*/*/") if (run := read_run(path))]
    return sorted(found, key=lambda run: (run.experiment, run.seed))


def read_run(folder: Path) -> Run | None:
    """What became of the run in this folder; None for a folder that is none of a run."""
    match = _FOLDER.fullmatch(f"{folder.parent.name}/{folder.name}")
    return _read_run(folder, match["experiment"], int(match["seed"])) if match else None


def read_result(path: Path) -> dict[str, Any]:
    """The result.json at `path`. ValueError says what is wrong with one that is torn, foreign or of another schema."""
    result = _read_json(path)
    if result.get("schema") != SCHEMA or result.get("status") != "finished":
        raise ValueError(f"{path.name}: not a finished result of schema {SCHEMA}")
    shared = (str | int, [_place(key) for key in SHARED])
    for kind, keys in ((dict, _TABLES), (str, _TEXTS), (int, _COUNTS), (int | float, _NUMBERS), shared):
        for key in keys:
            value = look_up(result, key)
            out_of_range = isinstance(value, int | float) and not 0 <= value <= _LARGEST
            if not isinstance(value, kind) or isinstance(value, bool) or out_of_range:
                raise ValueError(f"{path.name}: {key} is missing or has no sensible value")
    return result


def changed(claims: Mapping[str, Any], result: dict[str, Any] | None) -> list[tuple[str, Any, Any]]:
    """What is claimed about a run's meaning or hashes, but its result denies: (key, the result's value, the claim)."""
    values = ((key, look_up(result or {}, _place(key)), claim) for key, claim in claims.items())
    return [(key, value, claim) for key, value, claim in values if value != claim]


def look_up(result: Mapping[str, Any], key: str) -> Any:
    """The value at a dotted key such as `dev.bleu.paper`; None when there is none."""
    value: Any = result
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def printable(text: str) -> str:
    """`text` as one line that no terminal or page acts upon: no escape sequences, controls or changes of direction."""
    line = " ".join(_ESCAPE_SEQUENCE.sub("", text).split())
    line = "".join(character for character in line if not unicodedata.category(character).startswith("C"))
    return line if len(line) <= _LONGEST_TEXT else f"{line[: _LONGEST_TEXT - 1]}…"


@dataclass(frozen=True)
class Measured:
    """Mean and sample standard deviation over a row's finished seeds; no deviation of a single one."""

    mean: float
    deviation: float | None


@dataclass(frozen=True)
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

    @property
    def finished(self) -> list[dict[str, Any]]:
        """The results that count, one for each finished seed."""
        return [run.result for run in self.runs if run.result is not None]

    @property
    def status(self) -> str:
        """`finished` when a seed is, otherwise the worst that is known of the row."""
        known = {run.status for run in self.runs} | ({"stale"} if self.stale else set())
        return next((status for status in ("finished", "failed", "stale", "half-done") if status in known), "missing")

    @property
    def notes(self) -> list[tuple[str, str, str]]:
        """(run, status, detail) of every run that is not among the figures."""
        notes = []
        for run in self.stale:
            (key, value, claim), *others = changed(self.claims, run.result)
            was, now = (str(part)[:12] if key.startswith("sha256.") else part for part in (value, claim))
            shared = key in SHARED
            where = ", as in most runs of this table" if shared else ""
            remedy = f"delete its folder and train it again{', or give it another data.name' if shared else ''}"
            more = f", and {len(others)} more" if others else ""
            notes.append((run, "stale", f"{key} was {was}, is {now}{where}{more}: {remedy}"))
        for run in self.runs:
            if run.status == "failed":
                notes.append((run, "failed", f"{run.cause}; log: {run.log}" if run.log else run.cause))
            elif run.status == "half-done":
                notes.append((run, "half-done", f"{run.steps_done:,} of {self.trained.training.max_steps:,} steps"))
        return [(f"{self.name} seed {run.seed}", status, printable(detail)) for run, status, detail in notes]

    def measured(self, key: str) -> Measured | None:
        """A figure of the row's results, by its dotted key; None when no seed is finished."""
        values = [float(look_up(result, key)) for result in self.finished]
        if not values:
            return None
        return Measured(statistics.mean(values), statistics.stdev(values) if len(values) > 1 else None)


@dataclass(frozen=True)
class Table:
    """Table 3 in numbers, before any format."""

    lines: tuple[Line, ...]
    scale: Scale
    data: str
    others: int  # runs with other settings than these rows'
    reference: Mapping[str, Any]  # a result with what all that count share; while there is none, the command's config

    @property
    def base(self) -> Line:
        """The row that the others are measured against: the first."""
        return self.lines[0]

    def opens_group(self, number: int) -> bool:
        """Whether a line is the first of the paper's group."""
        return number == 0 or self.lines[number].group != self.lines[number - 1].group

    @property
    def seeds(self) -> list[int]:
        """Every seed that finished in some row."""
        return sorted({run.seed for line in self.lines for run in line.runs if run.result})

    @property
    def comparable(self) -> bool:
        """Whether our figures were made under the paper's conditions."""
        return comparable(self.scale, look_up(self.reference, "config.data"))

    @property
    def notes(self) -> list[tuple[str, str, str]]:
        """(run, status, detail) of everything that is not among the figures; rows never begun come last, together."""
        notes = [note for line in self.lines for note in line.notes]
        missing = ", ".join(line.name for line in self.lines if line.status == "missing")
        return [*notes, (missing, "missing", "not begun")] if missing else notes

    def effects(self, values: Sequence[float | None]) -> list[float | None]:
        """One value for each line, minus that of base; None for base itself and where either is missing."""
        base, *others = values
        return [None, *(None if base is None or value is None else value - base for value in others)]


def table(run: Config, runs: Sequence[Run]) -> Table:
    """The paper's table with what `runs` found at the scale, on the data and with the fidelity and precision of `run`.

    Only here it is decided which runs count: those that are as their row is now and share with most others what no row
    says (SHARED). Where as many share one thing as another, it is what base's first seed has.
    """
    rows = configuration.rows(run.fidelity.name)
    trained = {name: configuration.scaled(dataclasses.replace(rows[name], scale=run.scale)) for name in ROWS}
    own = {name: [found for found in runs if found.experiment == name] for name in ROWS}
    as_row = [
        found.result
        for name in ROWS
        for found in own[name]
        if found.result and not changed(_claims(trained[name]), found.result)
    ]
    kinds = Counter(map(_conditions, as_row))
    # Of kinds with equally many runs the first, and base is the first row
    most = max(kinds, key=kinds.__getitem__, default=())
    reference = next((result for result in as_row if _conditions(result) == most), {"config": dataclasses.asdict(run)})
    shared = dict(zip(SHARED, most, strict=False))
    lines = []
    for name in ROWS:
        claims = {**_claims(trained[name]), **shared}
        stale = [found for found in own[name] if found.result and changed(claims, found.result)]
        counted = tuple(found for found in own[name] if found not in stale)
        lines.append(Line(rows[name], trained[name], counted, tuple(stale), claims))
    others = sum(found.experiment not in rows for found in runs)
    return Table(tuple(lines), run.scale, configuration.setting(run), others, reference)


def row_group(row: str) -> str:
    """The paper's letter for a row's group, `(A)`; base and big stand alone."""
    return row if row in ("base", "big") else f"({row[0].upper()})"


def comparable(scale: Scale, data: Mapping[str, Any]) -> bool:
    """Whether figures of this scale and these data settings may stand beside the paper's."""
    return not unlike(data, PAPER_DATA) and changes_nothing(scale)


def unlike(data: Mapping[str, Any], corpus: str) -> list[str]:
    """The data settings that are not those of a corpus of ours, each with its value and the corpus's."""
    own = configuration.corpus_settings(corpus).items()
    return [
        printable(f"data.{key}={data.get(key)} instead of {value!r}")
        for key, value in own
        if f"data.{key}" in MEANING and data.get(key) != value
    ]


def factors(scale: Scale) -> dict[str, float]:
    """What a scale multiplies, and by how much."""
    others = ("name", "max_words", "pairs")
    return {name: factor for name, factor in dataclasses.asdict(scale).items() if name not in others}


def changes_nothing(scale: Scale) -> bool:
    """Whether rows and text are the paper's: every factor is 1, every pair is used."""
    return all(factor == 1 for factor in factors(scale).values()) and not (scale.max_words or scale.pairs)


def _read_run(folder: Path, experiment: str, seed: int) -> Run:
    try:
        if (folder / RESULT).exists():
            result = read_result(folder / RESULT)
            _check_place(result, folder.parent.parent.name, experiment, seed)
            return Run(experiment, seed, "finished", "", result, result["steps"])
        steps = _steps_done(folder / METRICS)
        if (folder / FAILURE).exists():
            failure = _read_json(folder / FAILURE)
            cause = f"{failure.get('cause', 'no cause recorded')} (exit code {failure.get('exit_code', 'unknown')})"
            log = printable(str(folder / LOG)) if (folder / LOG).exists() else ""
            return Run(experiment, seed, "failed", printable(cause), None, steps, log)
        begun = (folder / METRICS).exists() or (folder / CHECKPOINTS).exists()
        return Run(experiment, seed, "half-done" if begun else "missing", "", None, steps)
    except (OSError, ValueError) as error:
        return Run(experiment, seed, "failed", printable(f"{error}: delete that file and train again"), None, 0)


def _check_place(result: dict[str, Any], sweep: str, experiment: str, seed: int) -> None:
    """ValueError for a result that was copied here from another run's folder."""
    here = (sweep, seed, experiment.partition("+")[0])
    says = (f"{result['data']}-{result['scale']}", result["seed"], result["experiment"].partition("+")[0])
    if says != here:
        raise ValueError(f"{RESULT}: belongs to {says[0]}/{says[2]}/seed{says[1]}, not to this folder")


def _read_json(path: Path) -> dict[str, Any]:
    def refuse(constant: str) -> float:
        raise ValueError(f"{path.name}: holds {constant}, which is no number")

    try:
        value = json.loads(path.read_text("utf-8"), parse_constant=refuse)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path.name}: not JSON, perhaps torn ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path.name}: not a JSON object")
    return value


def _steps_done(metrics: Path) -> int:
    """The last update that metrics.jsonl names; 0 when there is none."""
    try:
        for line in reversed(storage.read_lines(metrics)):
            step = json.loads(line)["step"]
            if isinstance(step, int):
                return step
    except (OSError, storage.StorageError, ValueError, TypeError, KeyError, RecursionError):
        pass  # Damaged curves are for train to refuse; here they only say how far a half-done run came.
    return 0


def _claims(line: Config) -> dict[str, Any]:
    """What a row says of every run of its line."""
    return {key: value for key, value in meaning(line).items() if key.startswith(_OF_ROW)}


def _conditions(result: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(look_up(result, _place(key)) for key in SHARED)


def _place(key: str) -> str:
    """Where a result holds a hash, or a key of the configuration."""
    return key if key.startswith("sha256.") else f"config.{key}"
