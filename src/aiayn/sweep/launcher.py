"""A sweep, here or by another launcher; here, longest first, as many runs side by side as there are devices for.

What is done stands in the run folders alone: `result.json`, `failure.json`, and `.claim`, whose lock the owner holds.
"""

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from aiayn.config import folders
from aiayn.config.schema import Config, ConfigError, vary
from aiayn.core import progress, signals
from aiayn.core.exit_codes import DONE, FAILED, INTERRUPTED
from aiayn.core.storage import InUse, StorageError
from aiayn.cost import device_schedule, flops
from aiayn.data import prepare
from aiayn.data.parallel_text import DataError
from aiayn.runs import devices, jobs, records
from aiayn.sweep import slurm

POLL_SECONDS = 0.2
LOG_SECONDS = 60.0  # between two lines on the runs at work, where there is no terminal


def work(run: Config) -> float:
    """The operations of a run's training, its sentences as long as WMT14's: order, devices and time left rest on it."""
    return flops.planned(run.model, run.training, run.fidelity.rows(run.data.vocab_size))


def assign_devices(runs: list[Config], max_devices_per_run: int, available: int) -> list[Config]:
    """The runs, longest first, with devices as `aiayn plan` gives them, for sentences as long as WMT14's."""
    fewest = max((run.hardware.devices for run in runs), default=1)
    named = {str(folders.run_folder(run)): run for run in runs}  # no two runs of a sweep have the same folder
    operations = {name: work(run) for name, run in named.items()}
    turns = device_schedule.best_schedule(operations, fewest, max_devices_per_run, available)
    return [vary(named[turn.name], hardware={"devices": len(turn.devices)}) for turn in turns]


def prepare_once(runs: list[Config]) -> None:
    """Prepares the corpora of the unfinished runs once; raises only where none could be: else those rows fail alone."""
    corpora = {folders.prepared_folder(run): run for run in runs if not jobs.is_finished(run)}
    failures: list[Exception] = []
    with progress.stages("prepare") as report:
        for run in corpora.values():
            try:
                prepare.prepare(run, report)
            except (ConfigError, DataError, StorageError) as error:
                failures.append(error)
                report(str(error))
    if failures and len(failures) == len(corpora):
        raise failures[-1]


class _Output(Console):
    def on_broken_pipe(self) -> None:
        """Leaves it to the command what a reader that has left means: rich itself would exit with 1."""
        raise BrokenPipeError


class Sweep:
    """Runs at work, done and to come, and the one display of them all."""

    def __init__(
        self, runs: list[Config], pool: devices.Pool, hang_timeout: float, max_devices_per_run: int = 0
    ) -> None:
        # Points that differ only in what changes no number share a folder: they are one run
        self.runs = list({folders.run_folder(run): run for run in runs}.values())
        self.narrowest, self.pool, self.hang_timeout = self.runs[0].hardware.devices, pool, hang_timeout
        unfinished = [run for run in self.runs if not jobs.is_finished(run)]
        self.failed_before = {folders.run_folder(run): written(run) for run in unfinished}
        most = device_schedule.most_of_one(self.runs[0].hardware, pool.limit)
        self.waiting = assign_devices(unfinished, 1 if pool.shared else max_devices_per_run or most, pool.limit)
        self.blocked = False  # nothing is at work, since other commands have the devices
        self.elsewhere: list[Config] = []  # another command is at work on them
        self.active: dict[Path, jobs.Job] = {}
        self.signs: dict[Path, tuple[float, float]] = {}  # newest file, and when it was seen
        self.ended: list[int] = []
        self.finished_before = len(self.runs) - len(self.waiting)
        self.total = sum(map(work, self.waiting)) or 1.0
        self.console = _Output(soft_wrap=True)
        texts = TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.fields[state]}")
        self.display = Progress(
            *(*texts, TimeElapsedColumn(), TimeRemainingColumn()),
            console=self.console,
            disable=not progress.is_terminal(sys.stdout),
            speed_estimate_period=600.0,
        )
        self.whole = self.display.add_task("sweep", total=1.0, state="")
        self.bars: dict[Path, TaskID] = {}
        self.logged = time.monotonic()

    @property
    def done(self) -> int:
        """How many runs are finished or failed, before this sweep or in it."""
        return self.finished_before + sum(code != INTERRUPTED for code in self.ended)

    def work_through(self) -> int:
        """Works through the runs, longest first, and returns the exit code of the whole."""
        wide = [f", {folders.name(run)} on {n}" for run in self.waiting if (n := run.hardware.devices) > self.narrowest]
        self.console.print(
            f"{len(self.runs)} runs, {self.finished_before} finished before,"
            f" up to {self.pool.limit // self.narrowest} side by side{''.join(wide)}"
        )
        with self.display, signals.StopFlag() as stop:
            while self.active or ((self.waiting or self.elsewhere) and not stop.asked):
                if not stop.asked:
                    self.fill()
                for folder, job in list(self.active.items()):
                    if stop.asked:
                        job.stop(stop.asked)
                    if job.ended():
                        del self.active[folder]
                        self.display.remove_task(self.bars.pop(folder))
                        self.report(job.run, jobs.close(job))
                    elif self.silent_for(job) > self.hang_timeout:
                        job.abort(f"no sign of life for {self.hang_timeout / 60:g} minutes: killed")
                self.show()
                time.sleep(POLL_SECONDS)
        code = conclude([*self.ended, INTERRUPTED if stop.asked else DONE], len(self.runs))
        slurm.requeue_after(stop.asked)
        return code

    def fill(self) -> None:
        """Begins as many runs as there are devices for; those that another command has are tried again each time."""
        others, self.elsewhere = self.elsewhere, []
        for run in others:
            if not self.begin(run):
                self.elsewhere.append(run)
        # The first in the line waits for as many devices as it needs, and the others wait behind it
        while self.waiting and self.begin(self.waiting[0]):
            self.waiting.pop(0)
        self.blocked = bool(self.waiting) and not self.active
        if self.blocked and (count := self.waiting[0].hardware.devices) > self.narrowest:
            self.waiting[0] = vary(self.waiting[0], hardware={"devices": count - 1})  # what is free may do

    def begin(self, run: Config) -> bool:
        """Starts a run's workers, unless another command has it or had it, or it cannot be; False: no devices yet."""
        folder = folders.run_folder(run)
        try:
            with ExitStack() as held:
                environment = self.pool.take(run.hardware.devices, held)
                if environment is None:
                    return False
                held.enter_context(jobs.claim(run))
                if jobs.is_finished(run):
                    self.report(run, DONE)
                elif written(run) not in (None, self.failed_before[folder]):
                    self.report(run, FAILED)
                else:
                    jobs.check_folder(run)
                    job = jobs.start(run, folder / records.LOG, held, environment)
                    job.claim = held.pop_all()  # only now: a run that cannot be started gives up what it held
                    self.active[folder] = job
                    self.bars[folder] = self.display.add_task(folders.name(run), total=1.0, state="starting")
        except InUse:
            self.elsewhere.append(run)
        except (ConfigError, StorageError, OSError) as error:
            self.report(run, FAILED, f"{folders.name(run)}  failed  {error}")
        return True

    def report(self, run: Config, code: int, line: str = "") -> None:
        """Counts a run and prints its line, numbered unless it was interrupted and so is not done."""
        self.ended.append(code)
        number = "" if code == INTERRUPTED else f"[{self.done}/{len(self.runs)}] "
        self.console.print(number + (line or line_of(run, code)), markup=False, highlight=False)

    def silent_for(self, job: jobs.Job) -> float:
        """Seconds since a run last wrote anything."""
        signs = (job.folder / name for name in (records.METRICS, records.LOG, records.CHECKPOINTS))
        newest = max((path.stat().st_mtime for path in signs if path.exists()), default=0.0)
        if self.signs.get(job.folder, (-1.0, 0.0))[0] != newest:
            self.signs[job.folder] = newest, time.monotonic()
        return time.monotonic() - self.signs[job.folder][1]

    def show(self) -> None:
        """Brings the bars up to date."""
        left = sum(map(work, [*self.waiting, *self.elsewhere]))
        for folder, job in self.active.items():
            step = records.last_step(folder)
            left += work(job.run) * (1 - step / job.run.training.max_steps)
            state = f"update {step} of {job.run.training.max_steps}"
            self.display.update(self.bars[folder], completed=step / job.run.training.max_steps, state=state)
        elsewhere = f", {len(self.elsewhere)} at work elsewhere" if self.elsewhere else ""
        blocked = ", waiting for devices that other commands have" * self.blocked
        state = f"{self.done} of {len(self.runs)} done{elsewhere}{blocked}"
        self.display.update(self.whole, completed=1 - left / self.total, state=state)
        if self.display.disable and time.monotonic() - self.logged > LOG_SECONDS:
            self.logged = time.monotonic()
            runs = (f"{bar.description}: {bar.fields['state']}" for bar in self.display.tasks[1:])
            self.console.print("; ".join([state, *runs]), markup=False, highlight=False)


def written(run: Config) -> int | None:
    """When the run's last failure was written, if it has any: a newer one is another command's, during this sweep."""
    with suppress(OSError):
        return (folders.run_folder(run) / records.FAILURE).stat().st_mtime_ns
    return None


def hand_over(runs: list[Config], launch: Callable[[list[int]], list[int]]) -> int:
    """Has a launcher begin the unfinished runs, by number, and says what became of them; the exit code of the whole."""
    numbers = {folders.run_folder(run): number for number, run in enumerate(runs)}.values()  # one of each folder
    waiting, total = [number for number in numbers if not jobs.is_finished(runs[number])], len(numbers)
    print(f"{total} runs, {total - len(waiting)} finished before", flush=True)
    begun, lines, ended = [], [], []
    for number in waiting:
        try:
            jobs.check_folder(runs[number])
            begun.append(number)
        except (ConfigError, StorageError, OSError) as error:
            ended.append(FAILED)
            lines.append(f"{folders.name(runs[number])}  failed  {error}")
    codes = launch(begun) if begun else []
    lines += [line_of(runs[number], code) for number, code in zip(begun, codes, strict=True)]
    for number, line in enumerate(lines, total - len(waiting) + 1):
        print(f"[{number}/{total}] {line}")
    return conclude([*ended, *codes], total)


def line_of(run: Config, code: int) -> str:
    """What became of a run that has ended with this code, in one line."""
    record = records.read_run(folders.run_folder(run))
    if code not in (DONE, INTERRUPTED) and record.status != "failed":
        return f"{folders.name(run)}  failed  exit code {code}; its own output says why"
    return f"{records.row_line(run, record)}{f'  (log: {record.log})' if record.log else ''}"


def conclude(ended: list[int], total: int) -> int:
    """The exit code of a sweep whose runs have ended with these; says how to go on."""
    failed = sum(code != DONE for code in ended)
    if INTERRUPTED in ended:
        print("stopped; repeat the command to go on from here")
    elif failed:
        print(f"{failed} of {total} runs failed; repeat the command to try them again")
    return INTERRUPTED if INTERRUPTED in ended else FAILED if failed else DONE
