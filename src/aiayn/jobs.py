"""One run, one worker process: how it is started, stopped, watched, and what is left when it fails."""

import contextlib
import ctypes
import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiayn import config, results, storage
from aiayn.prepare import sources

DONE, FAILED, WRONG_CONFIGURATION, NON_FINITE, BAD_DATA, STORAGE, INTERRUPTED = 0, 1, 2, 3, 4, 5, 75

# What a run's numbers depend on: a folder that holds other values is another run.
MEANING = ("experiment", "seed", "model", "training", "data", "scale", "decoding")
# Left by a launcher or by torchrun, these would make a worker believe that it is a rank of somebody else's group.
FOREIGN = (
    "LOCAL_RANK",
    "RANK",
    "WORLD_SIZE",
    "NODE_RANK",
    "GROUP_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


@dataclass
class Job:
    """A worker process at work on a run folder."""

    run: config.Config
    folder: Path
    process: subprocess.Popen[bytes]


def check(run: config.Config) -> None:
    """Refuses, before anything is written, text that is not there and a folder that holds another run."""
    sources(run.data)
    stored = config.run_folder(run) / "config.yaml"
    if not stored.exists():
        return
    before, now = (_meaning(dataclasses.asdict(value)) for value in (config.read(stored), run))
    for key, value in now.items():
        if before.get(key) != value:
            name = "data.name" if key.startswith("data") else "scale.name" if key.startswith("scale") else "output"
            raise config.ConfigError(
                f"{key}={value}: {stored.parent} holds a run with {key}={before.get(key)};"
                f" give another {name}, or delete that folder"
            )


def is_finished(run: config.Config) -> bool:
    """True when the run folder holds a whole result; a torn one is made again."""
    try:
        results.read_result(config.run_folder(run) / results.RESULT)
    except (OSError, ValueError):
        return False
    return True


def start(run: config.Config, log: Path | None) -> Job:
    """A worker for this run, its output in `log` or on this terminal; torchrun starts it for several devices."""
    folder = config.run_folder(run)
    storage.remove(folder / "failure.json")
    storage.write_text(folder / "config.yaml", config.to_yaml(run))
    python = [sys.executable, "-m"]
    if run.hardware.devices > 1:
        python += ["torch.distributed.run", "--standalone", f"--nproc-per-node={run.hardware.devices}", "-m"]
    environment = {key: value for key, value in os.environ.items() if key not in FOREIGN}
    environment |= {key: str(run.hardware.threads) for key in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    environment["AIAYN_PARENT"] = str(os.getpid())
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(storage.appending(log)) if log else None
        process = subprocess.Popen(
            [*python, "aiayn.train", str(folder)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if log else None,
        )
    return Job(run, folder, process)


def close(job: Job) -> int:
    """The exit code of a worker that has ended; leaves `failure.json` when it could not write that itself."""
    code = job.process.wait()
    if code in (-signal.SIGTERM, -signal.SIGINT):  # asked to stop while it was still importing, with nothing to save
        return INTERRUPTED
    if code < 0:
        fail(job.folder, 128 - code, f"killed by {signal.Signals(-code).name}")
        return 128 - code
    if code not in (DONE, INTERRUPTED) and not (job.folder / "failure.json").exists():
        fail(job.folder, code, f"the worker ended with exit code {code}")
    return code if code in (DONE, INTERRUPTED) else int(failure(job.folder)["exit_code"])


def run_here(run: config.Config) -> int:
    """Trains one run in a worker on this terminal and returns its exit code; signals are handed on to the worker."""
    check(run)
    if is_finished(run):
        print(f"{config.run_folder(run)} is finished: nothing to do; delete it to train again")
        return DONE
    job = start(run, None)
    with handing_on({"": job}):
        code = close(job)
    if code not in (DONE, INTERRUPTED):
        print(f"aiayn: {failure(job.folder)['cause']}", file=sys.stderr)
    return code


class Stop:
    """Whether a signal has asked this process to stop."""

    asked = False


@contextlib.contextmanager
def handing_on(jobs: Mapping[str, Job]) -> Iterator[Stop]:
    """While the block runs, SIGINT and SIGTERM are handed on to the workers, which finish their update and save."""
    stop = Stop()

    def hand_on(number: int, frame: object) -> None:
        stop.asked = True
        for job in jobs.values():
            job.process.send_signal(signal.SIGTERM)

    before = {number: signal.signal(number, hand_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def fail(folder: Path, code: int, cause: str) -> None:
    """Leaves `failure.json`: the exit code, the cause in one line, and where the log is."""
    line = " ".join(cause.split())[:1000]
    storage.write_json(folder / "failure.json", {"exit_code": code, "cause": line, "log": str(folder / "worker.log")})


def failure(folder: Path) -> dict[str, Any]:
    """What `fail` left."""
    return dict(json.loads((folder / "failure.json").read_text()))


def die_with_parent() -> None:
    """Asks the kernel to kill this worker when the process that started it dies, so that no sweep leaves orphans."""
    parent = os.environ.get("AIAYN_PARENT")
    if parent and sys.platform == "linux" and "RANK" not in os.environ:
        kill_when_parent_dies = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>
        ctypes.CDLL(None).prctl(kill_when_parent_dies, signal.SIGKILL)
        if os.getppid() != int(parent):
            os.kill(os.getpid(), signal.SIGKILL)


def _meaning(tree: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key in MEANING:
        value = tree[key]
        flat |= {f"{key}.{name}": item for name, item in value.items()} if isinstance(value, dict) else {key: value}
    return {key: value for key, value in flat.items() if key not in config.HARMLESS}
