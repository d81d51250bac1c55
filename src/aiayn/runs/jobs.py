"""The worker processes of one run, one a device: how they are started, watched and stopped, and failures recorded."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiayn.config import compose, folders
from aiayn.config.schema import Config, ConfigError, meaning
from aiayn.core import signals, storage
from aiayn.data import prepare
from aiayn.runs import devices, records

DONE, FAILED, WRONG_CONFIGURATION, NON_FINITE, BAD_DATA, STORAGE, INTERRUPTED = 0, 1, 2, 3, 4, 5, signals.EXIT_CODE

# Left by a launcher or by torchrun, these would make a worker believe that it is a rank of another group.
FOREIGN = (
    *("LOCAL_RANK", "RANK", "WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
)
# How long the ranks that are left may take to notice that one has failed: enough to end on their own, and no longer.
GRACE_SECONDS = 15.0
POLL_SECONDS = 0.1


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
        """True when every rank has ended; when one has failed, those that are left soon end too, or are killed."""
        codes = [rank.poll() for rank in self.ranks]
        if not self.first and any(code not in (None, DONE, INTERRUPTED) for code in codes):
            self.first = codes
            self.deadline = min(self.deadline, time.monotonic() + GRACE_SECONDS)
        if time.monotonic() > self.deadline:
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
    """ConfigError, naming key, old and new value, for a folder that holds another run.

    One that failed before its training holds nothing that a corrected command could spoil.
    """
    folder = folders.run_folder(run)
    if not (folder / "config.yaml").exists():
        return
    before = meaning(compose.read(folder / "config.yaml"))
    if not any(
        (folder / name).exists() for name in ("data.sha256", records.METRICS, records.CHECKPOINTS, "result.json")
    ):
        return
    for key, value in meaning(run).items():
        if before[key] != value:
            name = "data.name" if key.startswith("data") else "scale.name" if key.startswith("scale") else "output"
            raise ConfigError(
                f"{key}={value}: {folder} holds a run with {key}={before[key]};"
                f" give another {name}, or delete that folder"
            )


def check_data(folder: Path, sha256: str) -> None:
    """ConfigError when a run folder was begun on other text; the first time, notes on which it is."""
    path = folder / "data.sha256"
    try:
        before = path.read_text("utf-8").strip() if path.exists() else sha256
    except UnicodeDecodeError as error:
        raise storage.StorageError(f"{path} is damaged: {error}; restore it, or delete its folder") from error
    if before != sha256:
        raise ConfigError(
            f"data.name: {folder} was begun on data with SHA-256 {before[:12]}, now it is {sha256[:12]};"
            " put the text back, give another data.name, or delete that folder"
        )
    if not path.exists():
        storage.write_text(path, sha256 + "\n")


def is_finished(run: Config) -> bool:
    """True when the run folder holds a whole result of this very run, wherever it was trained.

    A torn or foreign one is made again, and so is one on other text than is prepared here.
    """
    found = records.read_run(folders.run_folder(run))
    here = prepare.sha256(run)
    claims = meaning(run) | ({"sha256.data": here} if here else {})
    return found is not None and found.result is not None and not records.changed(claims, found.result)


def claim(run: Config) -> contextlib.ExitStack:
    """The run's folder, held for this command until closed; StorageError names the process that has it already."""
    held = contextlib.ExitStack()
    held.enter_context(storage.lock(folders.run_folder(run) / ".claim", wait=False))
    return held


def start(run: Config, log: Path | None, held: contextlib.ExitStack, seeing: dict[str, str]) -> Job:
    """The workers for this run, one for each device, their output in `log` or on this terminal.

    `seeing` is what `devices.Pool` gave: the part of the environment that shows them no device but their own.
    """
    folder = folders.run_folder(run)
    storage.remove(folder / "failure.json")
    storage.write_text(folder / "config.yaml", compose.to_yaml(run))
    environment = {key: value for key, value in os.environ.items() if key not in FOREIGN}
    environment |= {key: str(run.hardware.threads) for key in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    # Else `python -m` would import a user's own secrets.py from the folder of the command
    environment |= {"AIAYN_PARENT": str(os.getpid()), "PYTHONSAFEPATH": "1", **seeing}
    ranks = run.hardware.devices
    if ranks > 1:
        environment |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(devices.port(held))}
    job = Job(run, folder, [], held)
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(storage.appending(log)) if log else None
        for rank in range(ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
            job.ranks.append(
                subprocess.Popen(
                    [sys.executable, "-m", "aiayn.training.worker", str(folder)],
                    env=environment | own,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT if log else None,
                )
            )
    return job


def close(job: Job) -> int:
    """The exit code of workers that have ended; leaves `failure.json` when they could not write that themselves."""
    with job.claim:  # given up only when the folder says how it ended, so that no other command begins it again
        return _outcome(job, [rank.wait() for rank in job.ranks])


def _outcome(job: Job, codes: list[int]) -> int:
    if job.cause:
        return record_failure(job.folder, FAILED, job.cause)
    if -signal.SIGPIPE in codes:
        return 128 + signal.SIGPIPE  # as the shell says of a command whose reader has left
    # Only what had ended when the first failure was seen says why: the other ranks lost their peer, or were killed
    for rank, code in enumerate(job.first or codes):
        if code is not None and code < 0 and -code not in signals.STOPPING:
            which = f"rank {rank} was " if len(codes) > 1 else ""
            return record_failure(job.folder, 128 - code, f"{which}killed by {signal.Signals(-code).name}")
    # A signal that came while they were still importing found nothing to save
    if all(code in (DONE, INTERRUPTED) or -code in signals.STOPPING for code in job.first or codes if code is not None):
        return DONE if set(codes) == {DONE} else INTERRUPTED
    if (job.folder / "failure.json").exists():
        return int(failure(job.folder)["exit_code"])
    code = next(code for code in job.first or codes if code not in (None, DONE, INTERRUPTED))
    return record_failure(job.folder, code or FAILED, f"the worker ended with exit code {code}")


def run_here(run: Config) -> int:
    """Trains one run on this terminal and returns its exit code; signals are handed on to the workers."""
    check(run)
    nothing_to_do = f"{folders.run_folder(run)} is finished: nothing to do; delete it to train again"
    if is_finished(run):
        print(nothing_to_do)
        return DONE
    pool = devices.Pool(run.hardware, devices.names(run.hardware))
    with signals.StopFlag() as stop, claim(run) as held:
        # Until it was claimed another command may have begun it, or finished it
        check_folder(run)
        if is_finished(run):
            print(nothing_to_do)
            return DONE
        # Jobs of a launcher that knows nothing of GPUs wait here for theirs
        while (seeing := pool.take(run.hardware.devices, held)) is None:
            if signals.requeues(stop.asked):
                print(signals.requeue())
            stop.check()
            time.sleep(POLL_SECONDS)
        job = start(run, None, held, seeing)
        try:
            while not job.ended():
                if stop.asked:
                    job.stop(stop.asked)
                time.sleep(POLL_SECONDS)
        except BaseException:  # submitit requeues and exits in its own handler of a signal
            job.stop("SIGTERM")
            while not job.ended():
                time.sleep(POLL_SECONDS)
            raise
        code = close(job)
    if code not in (DONE, INTERRUPTED) and (job.folder / "failure.json").exists():
        print(f"aiayn: {failure(job.folder)['cause']}", file=sys.stderr)
    if code == INTERRUPTED and signals.requeues(stop.asked):
        print(signals.requeue())
    return code


def record_failure(folder: Path, code: int, cause: str) -> int:
    """Leaves `failure.json`: the exit code, the cause in one line, and where the log is, if any. Returns the code."""
    log = folder / records.LOG
    line = " ".join(without_secrets(cause).split())[:1000]
    try:
        failed = {"exit_code": code, "cause": line, "log": str(log) if log.exists() else ""}
        storage.write_json(folder / "failure.json", failed)
    except storage.StorageError as error:  # the disk that stopped the run may be too full for its last word
        print(f"aiayn: {line}; {error}", file=sys.stderr)
    return code


def failure(folder: Path) -> dict[str, Any]:
    """What `record_failure` left."""
    return dict(json.loads((folder / "failure.json").read_text()))


def without_secrets(text: str) -> str:
    """The text without the passwords, keys and tokens that this process finds in its environment."""
    for name, value in os.environ.items():
        secrets = [value] if re.search(r"(?i)key$|token|secret|passw", name) else re.findall(r"://([^/@\s]+)@", value)
        for secret in secrets:
            text = text.replace(secret, "***") if len(secret) >= 8 else text
    return text
