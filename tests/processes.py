"""Whether processes that a test has started still run."""

import time
from collections.abc import Iterable
from pathlib import Path


def is_alive(process: int) -> bool:
    """A zombie that nobody has waited for is dead."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def all_end(processes: Iterable[int], seconds: float = 10) -> bool:
    """Whether all end within so many seconds."""
    deadline = time.monotonic() + seconds
    while any(map(is_alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(is_alive, processes))
