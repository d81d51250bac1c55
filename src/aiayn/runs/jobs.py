"""One run's folder, claimed and checked, and its worker processes, one per device: started, watched, stopped."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from aiayn.config import compose, folders
from aiayn.config.schema import PATHS, Config, ConfigError, leaves, result_affecting
from aiayn.core import signals, storage
from aiayn.core.exit_codes import DONE, FAILED, INTERRUPTED, OUTPUT_CLOSED
from aiayn.data import prepare
from aiayn.runs import devices, records

# Left by a launcher or by torchrun, these would make a worker believe that it is a rank of another group.
FOREIGN = (
    *("LOCAL_RANK", "RANK", "WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
)
# How long the ranks that are left may take to notice that one has failed: enough to end on their own, and no longer.
GRACE_SECONDS = 15.0


@dataclass
class Job:
    """The workers at work on a run folder: one process for each device."""

    run: Config
    folder: Path
    ranks: list[subprocess.Popen[bytes]]
    claim: contextlib.ExitStack
    asked: bool = False
    cause: str = ""  # why this command has killed them
    first: list[int | None] = field(default_factory=list)  # the exit codes when the first failure was seen
    deadline: float = float("inf")

    def ended(self) -> bool:
        """True when every rank has ended; if one has before it was done, the others soon end too, or are killed."""
        codes = [rank.poll() for rank in self.ranks]
        if not self.first and any(code not in (None, DONE, INTERRUPTED) for code in codes):
            self.first = codes
        # Also when one was interrupted: torch hears no signal while it waits for a rank that has yet to begin
        if any(code not in (None, DONE) for code in codes):
            self.deadline = min(self.deadline, time.monotonic() + GRACE_SECONDS)
        if time.monotonic() > self.deadline:
            self.first = self.first or codes  # what is killed here has not failed
            self.send(signal.SIGKILL)
        return None not in codes

    def stop(self, name: str) -> None:
        """Hands on a signal, once: the workers finish their update and save."""
        if not self.asked:
            self.asked = True
            self.send(signal.Signals[name])

    def abort(self, cause: str) -> None:
        """Ends workers that no longer answer; each leaves the place where it hangs in its log."""
        if not self.cause:
            self.cause = cause
            self.deadline = time.monotonic() + GRACE_SECONDS
            self.send(signal.SIGABRT)

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to every rank that is left."""
        for rank in self.ranks:
            if rank.poll() is None:
                rank.send_signal(number)


def check(run: Config) -> None:
    """Refuses, before anything is written, text that is not there and a folder that holds another run."""
    prepare.check(run)
    check_folder(run)


def check_folder(run: Config) -> None:
    """ConfigError naming key and both values for a folder of another run; StorageError if unreadable."""
    folder = folders.run_folder(run)
    records.refuse_unreadable(records.read_run(folder))
    left = ("data.sha256", records.METRICS, records.CHECKPOINTS, records.RESULT)
    before = result_affecting(compose.read(path)) if (path := folder / "config.yaml").exists() else None
    if before is None or not any((folder / name).exists() for name in left):
        return
    # A factor of the scale before the values that it multiplies
    for key, value in sorted(result_affecting(run).items(), key=lambda item: not item[0].startswith("scale.")):
        if before[key] != value:
            theirs = f"{key}={value}: {folder} holds a run with {key}={before[key]}; delete that folder"
            other = ", give that value, or for another run give another scale.name or output=FOLDER"
            raise ConfigError(theirs + other * (key not in ("experiment", "seed")))  # which name the folder


def check_data(folder: Path, sha256: str) -> None:
    """ConfigError when a run folder was begun on other text; the first time, notes on which it is."""
    path = folder / "data.sha256"
    before = path.read_text("utf-8-sig", "replace").strip() if path.exists() else sha256
    if before != sha256:
        raise ConfigError(
            f"data.name: {folder} was begun on data with SHA-256 {before[:12]}, now it is {sha256[:12]};"
            " put the text back, give another data.name, or delete that folder"
        )
    if not path.exists():
        storage.write_text(path, sha256 + "\n")


def is_finished(run: Config) -> bool:
    """True when the folder holds a whole result of this run and text: by its hash or, unprepared, by its paths."""
    record, here = records.read_run(folders.run_folder(run)), prepare.sha256(run)
    paths = {key: path for key, path, _ in leaves(run) if key in PATHS}
    claims = result_affecting(run) | ({"sha256.data": here} if here else paths)
    return record.result is not None and not records.changed(claims, record.result)


def says_finished(run: Config) -> bool:
    """The same, and if so one line that says it, and whether this source code made it."""
    if finished := is_finished(run):
        folder = folders.run_folder(run)
        other = records.changed({"sha256.code": records.code()}, records.read_result(folder / records.RESULT))
        by = ", by other source code than this" if other else ""
        print(f"{folder} is finished{by}: nothing to do; delete it to train again, or give output=FOLDER")
    return finished


def claim(run: Config) -> contextlib.ExitStack:
    """The run's folder, held for this command until closed; StorageError names the process that has it already."""
    held = contextlib.ExitStack()
    held.enter_context(storage.lock(folders.run_folder(run) / ".claim", wait=False))
    return held


def begin(run: Config, folder: Path) -> None:
    """Leaves in the run's folder its configuration, and nothing of attempts that failed."""
    storage.remove(folder / records.FAILURE)
    storage.remove_unfinished(folder)
    storage.write_text(folder / "config.yaml", compose.to_yaml(run))


def start(run: Config, log: Path | None, held: contextlib.ExitStack, seeing: dict[str, str]) -> Job:
    """The workers for this run, their output in `log` or on this terminal; `seeing` is what `devices.Pool` gave."""
    folder = folders.run_folder(run)
    begin(run, folder)
    environment = {key: value for key, value in os.environ.items() if key not in FOREIGN}
    environment |= {key: str(run.hardware.threads) for key in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    # Else `python -m` would import a user's own secrets.py from the folder of the command
    environment |= {"AIAYN_PARENT": str(os.getpid()), "PYTHONSAFEPATH": "1", **seeing}
    ranks = run.hardware.devices
    if ranks > 1:
        environment |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(devices.port(held))}
    job = Job(run, folder, [], held)
    command = [sys.executable, "-m", "aiayn.training.worker", str(folder)]
    with storage.appending(log) if log else contextlib.nullcontext() as output:
        error = subprocess.STDOUT if log else None
        try:
            for rank in range(ranks):
                env = environment | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {})
                started = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=error)
                job.ranks.append(started)
        except OSError:  # no memory or no process is left: those that are there would wait for it
            job.send(signal.SIGKILL)
            raise
    return job


def close(job: Job) -> int:
    """The exit code of workers that have ended; leaves `failure.json` when they could not write that themselves."""
    with job.claim:  # given up only when the folder says how it ended, so that no other command begins it again
        return _outcome(job, [rank.wait() for rank in job.ranks])


def _outcome(job: Job, codes: list[int]) -> int:
    if job.cause:
        return records.record_failure(job.folder, FAILED, job.cause)
    if -signal.SIGPIPE in codes:
        return OUTPUT_CLOSED
    # Only what had ended when the first failure was seen says why: the other ranks lost their peer, or were killed.
    # A signal that came while they were still importing found nothing to save
    good = (DONE, INTERRUPTED, *(-number for number in signals.STOPPING))
    bad = [(rank, code) for rank, code in enumerate(job.first or codes) if code is not None and code not in good]
    if not bad:
        return DONE if set(codes) == {DONE} else INTERRUPTED
    for rank, code in bad:
        if code < 0:
            which = f"rank {rank} was " if len(codes) > 1 else ""
            return records.record_failure(job.folder, 128 - code, f"{which}killed by {signal.Signals(-code).name}")
    if (job.folder / records.FAILURE).exists():
        return int(records.read_json(job.folder / records.FAILURE)["exit_code"])
    return records.record_failure(job.folder, bad[0][1], f"the worker ended with exit code {bad[0][1]}")
