"""Work that takes long, for processes that a test stops; it imports nothing that takes time itself."""

import os
import time
from collections.abc import Callable
from functools import partial


def patient() -> Callable[[int], int]:
    """What a worker process is made of."""
    return partial(stay, 99)


def stay(seconds: float, number: int) -> int:
    """The number, after so many seconds; says at once which process has it."""
    os.write(1, b"%d\n" % os.getpid())  # at once: two processes share the pipe
    time.sleep(seconds)
    return number
