"""A sweep on this machine: one worker process per run, as many side by side as there is room for, longest first."""

import json
import os
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from aiayn import config, jobs, report, results

POLL_SECONDS = 1.0
TAIL_BYTES = 4096


def room(hardware: config.Hardware) -> int:
    """How many runs of this kind the machine takes at once: all cores for one-thread CPU runs, a GPU for one run."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // (hardware.threads * hardware.devices)) if hardware.accelerator == "cpu" else 1


def work(run: config.Config) -> float:
    """About how much a run computes, in multiplications: the order of a sweep and its ETA rest on it, nothing else."""
    model, training = run.model, run.training
    attention = 2 * model.d_model * model.num_heads * (model.d_k + model.d_v)
    weights = model.num_layers * (3 * attention + 4 * model.d_model * model.d_ff) + run.data.vocab_size * model.d_model
    return float(weights) * training.tokens_per_update * training.max_steps


class Sweep:
    """Runs at work, done and to come, and the one display of them all."""

    def __init__(self, runs: list[config.Config], at_once: int) -> None:
        # Points that differ only in what changes no number share a folder: they are one run
        self.runs = list({config.run_folder(run): run for run in runs}.values())
        self.at_once = at_once
        self.waiting = sorted((run for run in self.runs if not jobs.is_finished(run)), key=work)
        self.active: dict[str, jobs.Job] = {}
        self.ended: list[int] = []
        self.finished_before = len(self.runs) - len(self.waiting)
        self.total = sum(map(work, self.waiting)) or 1.0
        self.console = Console(soft_wrap=True)
        self.display = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
            speed_estimate_period=600.0,
        )
        self.whole = self.display.add_task("sweep", total=1.0, state="")
        self.bars: dict[str, TaskID] = {}

    def work_through(self) -> int:
        """Works through the runs, longest first, and returns the exit code of the whole."""
        self.console.print(
            f"{len(self.runs)} runs, {self.finished_before} finished before, up to {self.at_once} side by side"
        )
        with self.display, jobs.handing_on(self.active) as stop:
            while (self.waiting and not stop.asked) or self.active:
                while self.waiting and len(self.active) < self.at_once and not stop.asked:
                    self.begin(self.waiting.pop())
                for folder, job in list(self.active.items()):
                    if job.process.poll() is not None:
                        self.end(folder)
                self.show()
                time.sleep(POLL_SECONDS)
        failed = sum(code not in (jobs.DONE, jobs.INTERRUPTED) for code in self.ended)
        if stop.asked or jobs.INTERRUPTED in self.ended:
            self.console.print("stopped; repeat the command to go on from here")
            return jobs.INTERRUPTED
        if failed:
            self.console.print(f"{failed} of {len(self.runs)} runs failed; repeat the command to try them again")
        return jobs.FAILED if failed else jobs.DONE

    def begin(self, run: config.Config) -> None:
        """Starts the worker of a run."""
        folder = config.run_folder(run)
        self.active[str(folder)] = jobs.start(run, folder / "worker.log")
        self.bars[str(folder)] = self.display.add_task(name_of(run), total=1.0, state="starting")

    def end(self, folder: str) -> None:
        """Says what became of a run whose worker has ended."""
        job = self.active.pop(folder)
        self.display.remove_task(self.bars.pop(folder))
        self.ended.append(jobs.close(job))
        (run,) = (found for found in results.read_runs(job.folder.parent.parent) if lies_in(found, job.folder))
        row = self.finished_before + len(self.ended)
        log = f"  (log: {job.folder / 'worker.log'})" if run.status == "failed" else ""
        self.console.print(
            f"[{row}/{len(self.runs)}] {report.row_line(job.run, run)}{log}", markup=False, highlight=False
        )

    def show(self) -> None:
        """Brings the bars up to date."""
        left = sum(map(work, self.waiting))
        for folder, job in self.active.items():
            step = last_step(job.folder)
            left += work(job.run) * (1 - step / job.run.training.max_steps)
            state = f"update {step} of {job.run.training.max_steps}"
            self.display.update(self.bars[folder], completed=step / job.run.training.max_steps, state=state)
        state = f"{self.finished_before + len(self.ended)} of {len(self.runs)} done"
        self.display.update(self.whole, completed=1 - left / self.total, state=state)


def name_of(run: config.Config) -> str:
    """The run as the display names it."""
    return f"{run.experiment}{config.variation(run)} seed {run.seed}"


def lies_in(found: results.Run, folder: Path) -> bool:
    """True when `found` was read from this folder."""
    return (found.experiment, f"seed{found.seed}") == (folder.parent.name, folder.name)


def last_step(folder: Path) -> int:
    """The last update that a run has recorded, read from the end of its metrics; 0 when there is none yet."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return 0
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        lines = file.read().split(b"\n")[:-1]
    return int(json.loads(lines[-1])["step"]) if lines else 0
