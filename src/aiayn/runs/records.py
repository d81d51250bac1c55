"""The outcome of every run, and its metrics: read from the run's folder so that damage never becomes a traceback."""

import dataclasses
import hashlib
import json
import math
import os
import re
import sys
import unicodedata
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from aiayn.config import compose, folders
from aiayn.config.schema import PATHS, RESULT_AFFECTING, Config, Paper, Scale
from aiayn.core import storage

SCHEMA = 1
RESULT, FAILURE, METRICS, CHECKPOINTS = "result.json", "failure.json", "metrics.jsonl", "checkpoints"
LOG = "worker.log"

# The data of Table 3: on other text or at another scale, a difference from the paper's numbers says nothing. Precision
# is no such condition: the paper names none. What another tokenizer does to PPL stands in docs/results.md.
PAPER_DATA = "wmt14_en_de"
# What a row says of itself.
OF_ROW = ("model.", "fidelity.", "training.", "scale.", "decoding.")
# What all runs of a table share, or they cannot be averaged or compared: all else that a run means, but for its seed.
# The hashes say which text and which vocabulary, wherever a run was trained.
SHARED = (
    *sorted(key for key in RESULT_AFFECTING - {"experiment", "seed"} if not key.startswith(OF_ROW)),
    *("sha256.data", "sha256.tokenizer"),
)

_FOLDER = re.compile(r"\w[\w.-]*(\+\w+)?/seed(0|[1-9][0-9]{0,9})", re.ASCII)
# What the report reads; the rest of a result is for people and may change without a new schema.
_KINDS = (
    (dict, "config config.model config.training config.scale config.data"),
    (str, "experiment scale data"),
    (int, "seed params params_at_40960_rows steps"),
    (int | float, "train_seconds dev.ppl dev.bits_per_character dev.bleu.sacrebleu dev.bleu.intl"),
    (int | float | None, "dev.bleu.paper"),
)
_LARGEST = 1e60  # its fourth power is still a number: variances are squared
_TAIL_BYTES = 4096
_LONGEST_TEXT = 300
# The sequences by which a terminal is told to change colour, move its cursor or set its title.
_ESCAPE_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b.")


@dataclass(frozen=True)
class Run:
    """One row of Table 3 under one seed: what became of it."""

    experiment: str  # `a_h1`, or `a_h1+1f2e3d4c` with overrides that are not Table 3's
    seed: int  # -1 where the folder of the whole row may not be read
    status: Literal["finished", "failed", "unreadable", "half-done", "missing"]
    cause: str  # one printable line; empty unless failed or unreadable
    result: dict[str, Any] | None  # the checked result.json when finished
    steps_done: int
    log: str = ""  # where a failed run's own output is


def read_runs(folder: Path) -> list[Run]:
    """Every run under `folder` (runs/<data>-<scale>), by name and seed; folders that are no runs are passed over."""
    runs: list[Run] = []
    for row in storage.listed(folder, "*"):
        try:
            paths = (path for path in storage.listed(row, "seed*") if _FOLDER.fullmatch(f"{row.name}/{path.name}"))
            runs += map(read_run, paths)
        except storage.StorageError as error:
            runs.append(Run(row.name, -1, "unreadable", printable(str(error)), None, 0))
    return sorted(runs, key=lambda run: (run.experiment, run.seed))


def refuse_unreadable(*runs: Run) -> None:
    """StorageError for the first run that may not be read: it is not missing."""
    for run in runs:
        if run.status == "unreadable":
            raise storage.StorageError(run.cause)


def read_run(folder: Path) -> Run:
    """What became of the run in this folder, whose name is that of a run."""
    experiment, seed = folder.parent.name, int(folder.name.removeprefix("seed"))
    try:
        with suppress(FileNotFoundError, NotADirectoryError):
            result = read_result(folder / RESULT)
            says = f"{result['data']}-{result['scale']}", result["experiment"].partition("+")[0], result["seed"]
            if says != (folder.parent.parent.name, experiment.partition("+")[0], seed):  # it was copied from there
                cause = f"{RESULT}: of {says[0]}/{says[1]}/seed{says[2]}: delete the copied folder {folder}"
                return Run(experiment, seed, "failed", printable(cause), None, 0)
            return Run(experiment, seed, "finished", "", result, result["steps"])
        steps = last_step(folder)
        with suppress(FileNotFoundError, NotADirectoryError):
            failure = read_json(folder / FAILURE)
            cause = f"{failure.get('cause', 'no cause recorded')} (exit code {failure.get('exit_code', 'unknown')})"
            log = printable(str(folder / LOG)) if (folder / LOG).exists() else ""
            return Run(experiment, seed, "failed", printable(cause), None, steps, log)
        begun = (folder / METRICS).exists() or (folder / CHECKPOINTS).exists()
        return Run(experiment, seed, "half-done" if begun else "missing", "", None, steps)
    except OSError as error:
        return Run(experiment, seed, "unreadable", printable(storage.description(error)), None, 0)
    except ValueError as error:
        return Run(experiment, seed, "failed", printable(f"{error}: delete that file and train again"), None, 0)


def read_result(path: Path) -> dict[str, Any]:
    """The result.json at `path`. ValueError says what is wrong with one that is torn, foreign or of another schema."""
    result = read_json(path)
    if result.get("schema") != SCHEMA or result.get("status") != "finished":
        raise ValueError(f"{path.name}: not a finished result of schema {SCHEMA}")
    for kind, keys in (*_KINDS, (str | int, " ".join(map(place_in_result, SHARED)))):
        for key in keys.split():
            value = look_up(result, key)
            largest = 100.001 if key.startswith("dev.bleu.") else _LARGEST  # sacreBLEU's 100 is 100.00000000000004
            out_of_range = isinstance(value, int | float) and not 0 <= value <= largest
            if not isinstance(value, kind) or isinstance(value, bool) or out_of_range:
                raise ValueError(f"{path.name}: {key} is missing or has no sensible value")
    return result


def code() -> str:
    """SHA-256 of this program's source, as it lies on the disk."""
    files = sorted(Path(__file__).parents[1].rglob("[!.]*.py"))  # an editor's own files begin with a dot
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def record_failure(folder: Path, code: int, cause: str) -> int:
    """Leaves `failure.json`: the exit code, and the cause in one line. Returns the code."""
    line = " ".join(without_secrets(cause).split())[:1000]
    try:
        storage.write_json(folder / FAILURE, {"exit_code": code, "cause": line})
    except storage.StorageError as error:  # the disk that stopped the run may be too full for its last word
        print(f"aiayn: {line}; {error}", file=sys.stderr)
    return code


def without_secrets(text: str) -> str:
    """The text without the passwords, keys and tokens that this process finds in its environment."""
    for name, value in os.environ.items():
        secrets = [value] if re.search(r"(?i)key$|token|secret|passw", name) else re.findall(r"://([^/@\s]+)@", value)
        for secret in secrets:
            text = text.replace(secret, "***") if len(secret) >= 8 else text
    return text


def changed(claims: Mapping[str, Any], result: dict[str, Any] | None) -> list[tuple[str, Any, Any]]:
    """What is claimed about a run's keys or hashes, but its result denies: (key, the result's value, the claim)."""
    values = ((key, look_up(result or {}, place_in_result(key)), claim) for key, claim in claims.items())
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


def row_line(config: Config, run: Run) -> str:
    """One line on one run of `config`, to be printed as soon as it ends; beside the paper's figures if comparable."""
    start = f"{folders.label(config):<19} seed {run.seed}  {run.status}"
    if run.result is None:
        done = f"after {run.steps_done:,} updates" if run.steps_done else "no update is recorded yet"
        return f"{start}  {run.cause or done}"
    bleu = look_up(run.result, "dev.bleu.paper")  # it has no meaning for some languages
    bleu = number_text(run.result["dev"]["bleu"]["sacrebleu"] if bleu is None else bleu, 1)
    ppl = number_text(run.result["dev"]["ppl"], 2)
    is_row = "+" not in run.experiment and comparable(config.scale, dataclasses.asdict(config.data))
    paper = config.paper if is_row else Paper()
    their_ppl = f" (paper {paper.ppl:.2f})" if paper.ppl is not None else ""
    their_bleu = f" (paper {paper.bleu:.1f})" if paper.bleu is not None else ""
    return f"{start}  PPL {ppl}{their_ppl}  BLEU {bleu}{their_bleu}  {run.result['train_seconds'] / 60:,.1f} min"


def number_text(value: float, digits: int) -> str:
    """A figure in as few characters as its size allows."""
    return f"{value:.{digits}f}" if value < 1000 else f"{value:.0f}" if value < 1e5 else f"{value:.0e}"


def row_group(row: str) -> str:
    """The paper's letter for a row's group, `(A)`; base and big stand alone."""
    own = row.partition("+")[0]
    return own if own in ("base", "big") else f"({own[0].upper()})"


def comparable(scale: Scale, data: Mapping[str, Any]) -> bool:
    """Whether figures of this scale and these data settings may stand beside the paper's."""
    return not unlike(data, PAPER_DATA) and not changes(scale)


def unlike(data: Mapping[str, Any], corpus: str) -> list[str]:
    """The data settings that are not those of a corpus of ours, each with its value and the corpus's."""
    return [
        printable(f"data.{key}={data.get(key)} instead of {value!r}")
        for key, value in compose.read_folder("conf", "data")[corpus].items()
        if f"data.{key}" in RESULT_AFFECTING | PATHS and data.get(key) != value
    ]


def changes(scale: Scale) -> dict[str, float]:
    """The factors that are not 1 and the limits that are not 0: none where rows and text are the paper's."""
    neutral = {"name": scale.name, "max_words": 0, "max_train_words": 0, "pairs": 0}
    return {key: value for key, value in vars(scale).items() if value != neutral.get(key, 1)}


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file of a run's folder. ValueError where it is torn, no object, or holds NaN or infinity."""

    def refuse(constant: str) -> float:
        raise ValueError(f"{path.name}: holds {constant}, which is no number")

    try:
        value = json.loads(path.read_text("utf-8-sig"), parse_constant=refuse)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path.name}: not JSON, perhaps torn ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path.name}: not a JSON object")
    return value


def last_step(folder: Path) -> int:
    """The last update that a run has recorded, read from the end of its metrics; 0 when that says none."""
    try:
        with (folder / METRICS).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            whole = file.read().rpartition(b"\n")[0].rstrip()
            step = json.loads(whole.rpartition(b"\n")[2])["step"]
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        return 0  # Damaged curves are for train to refuse; here they only say how far a run came.
    return step if isinstance(step, int) else 0


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a `metrics.jsonl`, none where it is missing. StorageError names the first line that is damaged."""
    rows = []
    numbered = enumerate(storage.read_lines(path), 1)
    for number, line in (pair for pair in numbered if pair[1].strip()):
        try:
            row = json.loads(line)
            counts = ("seconds", "source_tokens", "target_tokens") if "train/loss" in row else ()
            whole = isinstance(row["step"], int) and all(key in row for key in counts)
            if not whole or not all(type(value) in (int, float) and math.isfinite(value) for value in row.values()):
                raise ValueError(line)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            raise storage.StorageError(
                f"{path}: line {number} is damaged; restore the file, or delete its folder to start this run anew"
            ) from error
        rows.append(row)
    return rows


def place_in_result(key: str) -> str:
    """Where a result holds a hash, or a key of the configuration."""
    return key if key.startswith("sha256.") else f"config.{key}"
