"""Weights & Biases: a view of `metrics.jsonl`, in a thread of its own: nothing it does changes or stops a run."""

import dataclasses
import os
import queue
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aiayn.config import folders
from aiayn.config.schema import Config, ConfigError
from aiayn.core import storage
from aiayn.data import prepare
from aiayn.runs import records
from aiayn.runs.records import row_group

# How long a run waits for W&B once it has ended, or is to leave, and how many rows it keeps for it until then.
HANG_TIMEOUT = 60.0
LEAVING_TIMEOUT = 10.0
ROWS_KEPT = 10_000
# The key under which a row holds sample translations: of so many sentences, each with its source and reference.
TRANSLATIONS, SAMPLES = "dev/translations", 20
# What every row of figures is counted by, and the key of the paper's letter beside the run's own configuration.
STEP, ROW_GROUP = "step", "row_group"


def dev_row(figures: dict[str, Any]) -> dict[str, float]:
    """The dev figures of a `result.json` as they are shown: `dev/bleu` is the one of the table."""
    return {
        "dev/ppl": figures["ppl"],
        "dev/bits_per_character": figures["bits_per_character"],
        "dev/bleu": figures["bleu"]["paper"],
        "dev/bleu_sacrebleu": figures["bleu"]["sacrebleu"],
        "dev/bleu_intl": figures["bleu"]["intl"],
    }


def group(run: Config) -> str:
    """The W&B group of all runs of one table: those on the text and with the vocabulary that are prepared here.

    Raises ConfigError where none are.
    """
    sha256 = prepare.sha256(run)
    if sha256 is None:
        raise ConfigError(
            f"prepared={run.prepared}: holds no corpus for these runs; `aiayn prepare` with the same words"
        )
    return f"{folders.setting(run)}-{run.scale.name}-{sha256[:8]}"


def samples(*sides: list[str]) -> list[list[str]]:
    """Sentences from all over the dev set, each with its source, its reference and our translation."""
    places = range(0, len(sides[0]), max(1, len(sides[0]) // SAMPLES))[:SAMPLES]
    return [[side[place] for side in sides] for place in places]


def identity(folder: Path) -> str:
    """The run's id in W&B: drawn when it is first shown and kept in its folder, so that a run made anew has another."""
    path = folder / "wandb.id"
    if not path.exists():
        storage.write_text(path, secrets.token_hex(8) + "\n")
    return path.read_text().strip()


@contextmanager
def view(run: Config, folder: Path, rank: int) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A function that shows rows in W&B; silent when disabled. When W&B is out of order one line says so, once."""
    if run.wandb.mode == "disabled" or rank > 0:
        yield lambda row: None
        return
    shown = View(run, folder)
    try:
        yield shown.show
    except BaseException:
        shown.close(LEAVING_TIMEOUT)
        raise
    shown.close(HANG_TIMEOUT)


class View:
    """Rows on their way to W&B."""

    def __init__(self, run: Config, folder: Path) -> None:
        self.run, self.folder = run, folder
        self.rows: queue.Queue[dict[str, Any] | None] = queue.Queue(ROWS_KEPT)
        self.given_up = False
        self.thread = threading.Thread(target=self._pass_on, name="wandb", daemon=True)
        self.thread.start()

    def show(self, row: dict[str, Any] | None) -> None:
        """Hands a row over, without waiting for anything."""
        try:
            if not self.given_up:
                self.rows.put_nowait(row)
        except queue.Full:
            self._give_up("it does not answer")

    def close(self, timeout: float) -> None:
        """Waits until W&B has everything, for so many seconds at most."""
        self.show(None)
        self.thread.join(timeout)
        if self.thread.is_alive():
            self._give_up(f"it has not answered for {timeout:g} s")

    def _give_up(self, cause: str) -> None:
        if not self.given_up:
            self.given_up = True
            line = " ".join(records.without_secrets(cause).split())[:300]
            print(f"W&B is out of order, the run does not wait for it: {line}", flush=True)

    def _pass_on(self) -> None:
        try:
            self._show_all()
        except BaseException as error:  # W&B raises SystemExit and KeyboardInterrupt too
            self._give_up(f"{type(error).__name__}: {error}")

    def _show_all(self) -> None:
        run = self.run
        os.environ.setdefault("WANDB_SILENT", "true")
        if run.wandb.mode == "offline":
            # Or it would send its own telemetry even then
            os.environ["WANDB_ERROR_REPORTING"] = "false"
        import wandb

        name = run.experiment + folders.variation(run)
        logged = wandb.init(
            project=run.wandb.project,
            entity=run.wandb.entity,
            mode="online" if run.wandb.mode == "online" else "offline",
            dir=self.folder,
            # An agent of `wandb sweep` waits for the run that it has named: W&B takes WANDB_RUN_ID
            id=None if os.environ.get("WANDB_SWEEP_ID") else identity(self.folder),
            name=f"{name} seed {run.seed}",
            group=group(run),
            job_type="train",
            tags=sorted({run.experiment, row_group(run.experiment), run.scale.name, folders.setting(run)}),
            # With what differs from the row in its name: the dashboard takes means over what has one name
            config=dataclasses.asdict(run) | {"experiment": name, ROW_GROUP: row_group(run.experiment)},
            resume="allow",
            settings=wandb.Settings(init_timeout=60, console="off"),
        )
        logged.define_metric("*", step_metric=STEP)
        while (row := self.rows.get()) is not None:
            if TRANSLATIONS in row:
                table = wandb.Table(columns=["source", "reference", "ours"], data=row[TRANSLATIONS])
                row = {**row, TRANSLATIONS: table}
            logged.log(row)
        logged.finish()
        if run.wandb.mode == "offline":
            print(f"W&B: kept offline; to show it: wandb sync {self.folder}/wandb/offline-run-*", flush=True)
