"""Weights & Biases: a view of `metrics.jsonl`, in a thread of its own: nothing it does changes or stops a run."""

import dataclasses
import os
import queue
import secrets
import shlex
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aiayn.config import folders
from aiayn.config.schema import Config, ConfigError, vary
from aiayn.core import exit_codes, signals, storage
from aiayn.data import prepare
from aiayn.runs import records
from aiayn.runs.records import row_group

HANG_TIMEOUT, LEAVING_TIMEOUT = 60.0, 10.0  # seconds that a run waits for W&B once it has ended, or is to leave
TRANSLATIONS, SAMPLES = "dev/translations", 20  # the key of sample translations in a row, and of how many sentences
STEP, ROW_GROUP = "step", "row_group"  # what rows of figures are counted by; the paper's letter, beside the run's keys
Rows = queue.SimpleQueue[dict[str, Any] | int]  # on their way to W&B; the exit code is the end


def dev_row(figures: dict[str, Any]) -> dict[str, float]:
    """The dev figures of a `result.json` as they are shown: `dev/bleu` is the one of the table."""
    return {
        "dev/ppl": figures["ppl"],
        "dev/bits_per_character": figures["bits_per_character"],
        "dev/bleu": figures["bleu"].get("paper", figures["bleu"]["sacrebleu"]),
        "dev/bleu_sacrebleu": figures["bleu"]["sacrebleu"],
        "dev/bleu_intl": figures["bleu"]["intl"],
    }


def variable(name: str, default: str) -> str:
    """The value of W&B's own environment variable, `WANDB_<name>`; `default` where it is missing or empty."""
    return os.environ.get(f"WANDB_{name}") or default


def resolved(run: Config) -> Config:
    """The run with what its section `wandb` leaves open as W&B's own variables have it, or else as ours."""
    mode = variable("MODE", "offline") if variable("DISABLED", "0").lower() in ("0", "false", "no") else "disabled"
    mode = run.wandb.mode or {"dryrun": "offline", "run": "online"}.get(mode, mode)
    project, entity = run.wandb.project or variable("PROJECT", "aiayn"), run.wandb.entity or variable("ENTITY", "")
    return vary(run, wandb={"mode": mode, "project": project, "entity": entity or None})


def group(run: Config) -> str:
    """The W&B group of all runs of one table: those on the text and the vocabulary prepared here. Or ConfigError."""
    if asked := variable("RUN_GROUP", ""):
        return asked
    sha256 = prepare.sha256(run)
    if sha256 is None:
        raise ConfigError(f"prepared={run.prepared}: holds no corpus for these runs; `aiayn prepare` makes it")
    return f"{folders.setting(run)}-{run.scale.name}-{sha256[:8]}"


def samples(*sides: list[str]) -> list[list[str]]:
    """Sentences from all over the dev set, each with its source, its reference and our translation."""
    return [list(row) for row in zip(*sides, strict=True)][:: max(1, len(sides[0]) // SAMPLES)][:SAMPLES]


def identity(folder: Path) -> str:
    """The run's id in W&B: an agent's, or drawn, when it is first shown; a run made anew in the folder has another."""
    path = folder / "wandb.id"
    if not path.exists():
        storage.write_text(path, ((variable("SWEEP_ID", "") and variable("RUN_ID", "")) or secrets.token_hex(8)) + "\n")
    return path.read_text("utf-8-sig").strip()


@contextmanager
def view(run: Config, folder: Path, rank: int) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A function that shows rows in W&B; silent when disabled. When W&B is out of order one line says so, once."""
    run = resolved(run)
    if run.wandb.mode == "disabled" or rank > 0:
        yield lambda row: None
        return
    rows: Rows = queue.SimpleQueue()
    thread = threading.Thread(target=_show, args=(run, folder, rows), name="wandb", daemon=True)
    thread.start()
    timeout, code = LEAVING_TIMEOUT, exit_codes.FAILED
    try:
        yield lambda row: rows.put(row) if thread.is_alive() else None
        timeout, code = HANG_TIMEOUT, exit_codes.DONE
    except signals.Interrupted:
        code = exit_codes.INTERRUPTED
        raise
    finally:
        rows.put(code)
        thread.join(timeout)
        if thread.is_alive():
            _report(f"it has not answered for {timeout:g} s")


def _report(cause: str) -> None:
    line = " ".join(records.without_secrets(cause).split())[:300]
    print(f"W&B is out of order, the run does not wait for it: {line}", flush=True)


def _show(run: Config, folder: Path, rows: Rows) -> None:
    try:
        os.environ.setdefault("WANDB_SILENT", "true")
        own_id, agents = identity(folder), bool(variable("SWEEP_ID", ""))
        if unused := [f"WANDB_{name}" for name in ("RESUME", "CONSOLE", "RUN_ID")[: 3 - agents] if variable(name, "")]:
            print(f"W&B: {', '.join(unused)}: not used, each run has an id of its own and is resumed", flush=True)
        earlier = storage.listed(Path(variable("DIR", str(folder)), "wandb"), f"*run-*-{own_id}")
        if run.wandb.mode == "offline":
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # or it would send its own telemetry even then
            # `wandb sync` would append what is shown again to what W&B has
            if not agents and any(path.name.startswith("run-") or [*path.glob("*.synced")] for path in earlier):
                storage.remove(folder / "wandb.id")
                print(f"W&B: delete run {own_id}, which lacks the end; a new run gets all updates", flush=True)
        import wandb

        name = run.experiment + folders.variation(run)
        tags = {run.experiment, row_group(run.experiment), run.scale.name, folders.setting(run)}
        logged = wandb.init(
            project=run.wandb.project,
            entity=run.wandb.entity,
            mode=run.wandb.mode,  # type: ignore[arg-type]
            dir=Path(variable("DIR", str(folder))),
            # An agent of `wandb sweep` waits for the run that it has named: W&B takes WANDB_RUN_ID
            id=None if agents else identity(folder),
            name=variable("NAME", f"{name} seed {run.seed}"),
            group=group(run),
            job_type=variable("JOB_TYPE", "train"),
            tags=[tag[:64] for tag in variable("TAGS", ",".join(sorted(tags))).split(",")],  # W&B refuses longer ones
            # With what differs from the row in its name: the dashboard takes means over what has one name
            config=dataclasses.asdict(run) | {"experiment": name, ROW_GROUP: row_group(run.experiment)},
            resume="allow",
            settings=wandb.Settings(init_timeout=float(variable("INIT_TIMEOUT", "60")), console="off"),
        )
        for path in earlier:
            storage.remove(path)  # all that it has is shown again
        logged.define_metric("*", step_metric=STEP)
        while isinstance(row := rows.get(), dict):
            # Numbers that rise and that no cut changes: an update, what dev was after it, its translations
            number = 2 * row[STEP] + ("train/loss" not in row) + (TRANSLATIONS in row)
            if TRANSLATIONS in row:
                row[TRANSLATIONS] = wandb.Table(columns=["source", "reference", "ours"], data=row[TRANSLATIONS])
            if number >= logged.starting_step:  # else the server has it from before
                logged.log(row, step=number)
        if row == exit_codes.INTERRUPTED:
            logged.mark_preempting()  # an agent of `wandb sweep` gets it again
        logged.finish(exit_code=row)
        if run.wandb.mode == "offline":
            print(f"W&B: kept offline; to show it: wandb sync {shlex.quote(str(Path(logged.dir).parent))}", flush=True)
    except BaseException as error:  # W&B raises SystemExit and KeyboardInterrupt too
        _report(f"{type(error).__name__}: {error}")
