"""Commands without a GPU, or on a small one; a process computes with the threads and the memory that it has."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from aiayn import cli
from aiayn.bench import bench
from aiayn.config import compose, folders
from aiayn.config.schema import ConfigError, OutOfMemory
from aiayn.evaluation import translate
from aiayn.evaluation.evaluate import evaluate_trained
from aiayn.report import attention_maps
from aiayn.runs import devices, models, records
from aiayn.sweep import one_run

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


COMMANDS = (evaluate_trained, translate.main, attention_maps.main, bench.main, one_run.run_here)


@pytest.mark.parametrize("command", COMMANDS)
def test_without_a_gpu_every_command_has_torchs_reason(command, finished, monkeypatch) -> None:
    seed = "seed=2" if command is one_run.run_here else "seed=1"
    run = compose.compose_row(*finished, "hardware=gpu", "hardware.precision=32-true", "hardware.threads=1", seed)
    told = SimpleNamespace(returncode=1, stderr="Traceback\nRuntimeError: The driver is too old (found 11040)\n")
    monkeypatch.setattr(devices.subprocess, "run", lambda *_, **__: told)
    with pytest.raises(ConfigError, match=r"^hardware=gpu: .* The driver .*\(found 11040\); give hardware=cpu"):
        command(run)


def test_a_command_takes_one_gpu_and_keeps_it_from_others(monkeypatch) -> None:
    hardware = compose.compose_row("hardware=gpu", "hardware.devices=2").hardware
    names = [f"GPU-{letter}{os.getpid()}" for letter in "pqr"]
    monkeypatch.setattr(devices, "gpus", lambda: names)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with models.HELD:
        models.take_gpu(hardware)
        assert os.environ["CUDA_VISIBLE_DEVICES"] == names[0]
        assert devices.Pool(hardware, names).take(3, models.HELD) is None
    models.take_gpu(hardware)  # control: it was given back
    models.HELD.close()


def test_out_of_memory_names_a_key_and_half_of_what_counts() -> None:
    hardware = compose.compose_row("hardware=gpu", "hardware.tokens_per_search=1000").hardware
    for tokens, least, remedy in ((9999, 1, "=500"), (700, 1, "=350"), (9999, 900, "=900"), (9999, 1000, "larger GPU")):
        memory = models.within_memory(hardware, "tokens_per_search", tokens, least)
        with pytest.raises(OutOfMemory, match=rf"^hardware\.tokens_per_search=1000: .*{remedy}$") as caught, memory:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        assert cli.explained(caught.value) == (1, str(caught.value))


def test_a_failed_run_is_told_with_its_cause(toy_run) -> None:
    records.record_failure(folders.run_folder(toy_run), 4, "some text is bad")
    with pytest.raises(ConfigError, match=r"the training in \S+ failed: some text is bad"):
        models.trained(toy_run)
