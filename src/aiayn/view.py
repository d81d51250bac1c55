"""Weights & Biases: a view of `metrics.jsonl`, in a thread of its own: nothing it does changes or stops a run."""

import dataclasses
import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aiayn import config, jobs
from aiayn.schema import Config

# How long a run waits for W&B once it has ended, and how many rows it keeps for it until then.
PATIENCE_SECONDS = 60.0
ROWS_KEPT = 10_000


@contextmanager
def view(run: Config, folder: Path, rank: int) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A function that shows rows in W&B; silent when disabled. When W&B is out of order one line says so, once."""
    if run.wandb.mode == "disabled" or rank > 0:
        yield lambda row: None
        return
    shown = View(run, folder)
    try:
        yield shown.show
    finally:
        shown.close()


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

    def close(self) -> None:
        """Waits until W&B has everything, for a bounded time."""
        self.show(None)
        self.thread.join(PATIENCE_SECONDS)
        if self.thread.is_alive():
            self._give_up("it does not answer")

    def _give_up(self, cause: str) -> None:
        if not self.given_up:
            self.given_up = True
            line = " ".join(jobs.without_secrets(cause).split())[:300]
            print(f"W&B is not to be had, the run goes on without it: {line}", flush=True)

    def _pass_on(self) -> None:
        try:
            self._show_all()
        except BaseException as error:  # W&B raises SystemExit and KeyboardInterrupt too
            self._give_up(f"{type(error).__name__}: {error}")

    def _show_all(self) -> None:
        import wandb

        run = self.run
        os.environ.setdefault("WANDB_SILENT", "true")
        row = run.experiment + config.variation(run)
        logged = wandb.init(
            project=run.wandb.project,
            entity=run.wandb.entity,
            mode="online" if run.wandb.mode == "online" else "offline",
            dir=self.folder,
            id=f"{config.corpus_name(run)}-{run.scale.name}-{row}-seed{run.seed}".replace("+", "-"),
            name=f"{row} seed {run.seed}",
            group=f"{config.corpus_name(run)}-{run.scale.name}",
            tags=[run.experiment, run.scale.name, config.corpus_name(run)],
            config=dataclasses.asdict(run),
            resume="allow",
            settings=wandb.Settings(init_timeout=60, console="off"),
        )
        logged.define_metric("*", step_metric="step")
        while (found := self.rows.get()) is not None:
            logged.log(found)
        logged.finish()
        if run.wandb.mode == "offline":
            print(f"W&B: kept offline; to show it: wandb sync {self.folder}/wandb/offline-run-*", flush=True)
