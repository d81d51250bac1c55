"""The process computes with as many threads as asked for, and its results take memory that it already has."""

import subprocess
import sys

import pytest

# In a process of its own: the settings of malloc and of the garbage collector cannot be undone
MEASURE = """
import ctypes, gc, sys
import torch
from aiayn.runs.models import compute_with

LARGEST_REUSED = 2**25 - 2**12  # bytes of the largest tensor whose memory glibc keeps

class Malloc(ctypes.Structure):  # as malloc.h declares it
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    _fields_ = [(name, ctypes.c_size_t) for name in names]

malloc = ctypes.CDLL(None).mallinfo2
malloc.restype = Malloc
if sys.argv[1] == "set":
    compute_with(3)
before = malloc().hblks  # blocks outside the heap, whose memory goes back to the system when they are freed
reused = torch.empty(LARGEST_REUSED // 4)
after_reused = malloc().hblks
larger = torch.empty(LARGEST_REUSED // 4 + 2048)
print(torch.get_num_threads(), gc.get_freeze_count() > 0, after_reused - before, malloc().hblks - after_reused)
"""


def measured(setting: str) -> list[str]:
    """Threads, whether the collector skips what was imported, and blocks outside the heap."""
    command = [sys.executable, "-c", MEASURE, setting]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="asks glibc")
def test_threads_are_those_asked_for_and_freed_memory_is_reused() -> None:
    assert measured("set") == ["3", "True", "0", "1"]
    assert measured("not set") == ["1", "False", "1", "1"]  # control
