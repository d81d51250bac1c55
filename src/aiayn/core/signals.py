"""How a process is stopped: by a signal, by the end of its parent, by a reader that leaves."""

import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from traceback import walk_stack
from types import FrameType
from typing import Self

from aiayn.core.exit_codes import INTERRUPTED

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
# A terminal sends Ctrl-C to a worker, and its parent sends it again
SAME_REQUEST_SECONDS = 1.0


class Interrupted(BaseException):
    """A signal asks this process to stop. Not an Exception: a library that survives errors must not survive this."""


@contextmanager
def interrupting() -> Iterator[None]:
    """Inside, a signal to stop raises Interrupted in the main thread; in imports and in Hydra it ends the process."""
    raised = -SAME_REQUEST_SECONDS

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal raised
        now = time.monotonic()
        if now - raised < SAME_REQUEST_SECONDS:
            return
        raised = now
        request = interrupted(signal.Signals(number).name)
        modules = [str(entered.f_globals.get("__name__")) for entered, _ in walk_stack(frame)]
        ours = next((name for name in modules if name.startswith("aiayn.")), "")
        # numpy and torch survive any exception in their imports, C code that Hydra calls loses it, and all go on
        if "importlib._bootstrap" in modules or ours == "aiayn.cli":
            with suppress(Exception):  # such as of a reader that has left: it would be survived too
                print(f"aiayn: {request}", file=sys.stderr, flush=True)
            os._exit(INTERRUPTED)
        raise request

    with StopFlag(interrupt):
        yield


@contextmanager
def reported() -> Iterator[None]:
    """Inside, Interrupted ends the process with code 75 and one line, and a reader that leaves ends it silently."""
    try:
        yield
    except Interrupted as interrupted:
        print(f"aiayn: {interrupted}", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        if not reader_has_left():
            raise
        # As the shell expects of a process whose reader has left: killed by SIGPIPE, without a word
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGPIPE)


class StopFlag:
    """Inside its block, a signal of STOPPING only leaves its name in `asked`, or calls another handler."""

    def __init__(self, handler: Callable[[int, FrameType | None], None] | None = None) -> None:
        self.asked, self.handler = "", handler or self._note

    def __enter__(self) -> Self:
        self.before = {number: signal.getsignal(number) for number in STOPPING}
        self.listen()
        return self

    def __exit__(self, *error: object) -> None:
        self.restore()

    def listen(self) -> None:
        """Sets the handlers, again when a library has put its own in their place."""
        for number in STOPPING:
            signal.signal(number, self.handler)

    def restore(self) -> None:
        """Sets the handlers that stood before the block."""
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raises Interrupted when a signal has come."""
        if self.asked:
            raise interrupted(self.asked)

    def _note(self, number: int, frame: object) -> None:
        self.asked = signal.Signals(number).name


def interrupted(name: str) -> Interrupted:
    return Interrupted(f"stopped by {name}; repeat the command to go on from here")


def reader_has_left() -> bool:
    """True when the standard output is a pipe that its reader has closed, as `head` does."""
    output = select.poll()
    output.register(1, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in output.poll(0))


def die_with_parent(parent: int = 0) -> None:
    """Asks the kernel to kill this process when its parent dies; the workers of a sweep find that in AIAYN_PARENT."""
    parent = parent or int(os.environ.get("AIAYN_PARENT", 0))
    # macOS has none: there a worker ends at the end of its work
    if parent and (prctl := getattr(ctypes.CDLL(None), "prctl", None)):
        kill_when_parent_dies = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>
        prctl(kill_when_parent_dies, signal.SIGKILL)
        if os.getppid() != parent:  # it is dead already
            os.kill(os.getpid(), signal.SIGKILL)
