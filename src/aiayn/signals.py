"""How a process is asked to stop: a signal sets a flag, and no worker outlives the command that started it."""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from types import TracebackType
from typing import Self

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Interrupted(Exception):
    """A signal asked the run to stop; everything it needs to go on is on the disk."""


class StopFlag:
    """Inside its block, SIGTERM, SIGINT and SIGUSR1 only leave their name in `asked`."""

    def __init__(self) -> None:
        self.asked = ""

    def __enter__(self) -> Self:
        self.before = {number: signal.getsignal(number) for number in STOPPING}
        self.listen()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def listen(self) -> None:
        """Sets the handlers, again when a library has put its own in their place."""
        for number in STOPPING:
            signal.signal(number, self._note)

    def heed(self, remedy: str = "repeat the command to go on from here") -> None:
        """Raises Interrupted when a signal has come; call only where everything is on the disk."""
        if self.asked:
            raise Interrupted(f"stopped by {self.asked}; {remedy}")

    def _note(self, number: int, frame: object) -> None:
        self.asked = signal.Signals(number).name


def requeue() -> str:
    """Puts this SLURM job back into the queue, once everything is on the disk; what came of it, in one line."""
    job = os.environ["SLURM_JOB_ID"]
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    scontrol = shutil.which("scontrol")
    if not scontrol:
        return f"SLURM job {job} is not requeued: scontrol is not on the PATH; submit it again"
    done = subprocess.run([scontrol, "requeue", job], capture_output=True, text=True, check=False)
    if done.returncode:
        return f"SLURM job {job} is not requeued: {' '.join(done.stderr.split())[:200]}; submit it again"
    return f"SLURM job {job} is requeued"


def requeues(asked: str) -> bool:
    """True when this is SLURM's warning before its time limit, in the job's first task: the one that requeues."""
    in_slurm = "SLURM_JOB_ID" in os.environ and os.environ.get("SLURM_PROCID", "0") == "0"
    return asked == "SIGUSR1" and in_slurm


def die_with_parent() -> None:
    """Asks the kernel to kill this worker when the process that started it dies, so that no sweep leaves orphans."""
    if parent := os.environ.get("AIAYN_PARENT"):
        die_with(int(parent))


def die_with(parent: int) -> None:
    """Asks the kernel to kill this process when its parent dies, and it is dead already if it is another one."""
    if sys.platform == "linux":
        kill_when_parent_dies = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>
        ctypes.CDLL(None).prctl(kill_when_parent_dies, signal.SIGKILL)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
