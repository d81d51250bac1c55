"""Sweeps through other people's launchers, as a test starts and watches them."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import pytest

# Two hundred updates, of which each can be the one at which a worker is killed
ROWS = ("base", "a_h1", "b_dk16")
KILLED = "b_dk16"
WORDS = ("scale=smoke", "scale.steps=0.002", "training.checkpoint_every=500", "wandb.mode=disabled")


def needs(package: str, extra: str) -> pytest.MarkDecorator:
    """Skips, before anything is trained, where a launcher is not installed."""
    there = find_spec("hydra_plugins") and find_spec(f"hydra_plugins.{package}")
    return pytest.mark.skipif(not there, reason=f"needs pip install -e '.[{extra}]'")


def at_work_in(folder: Path) -> list[str]:
    """The command lines of the processes whose folder this is."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # ended meanwhile, or the kernel's own
            if (process / "cwd").readlink() == folder:
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


def left_in(folder: Path) -> list[str]:
    """The same, when those that are about to end have had some seconds to do so."""
    deadline = time.monotonic() + 20
    while (found := at_work_in(folder)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return found


def weights(folder: Path) -> dict[str, str]:
    """The SHA-256 of the last checkpoint of each row."""
    results = folder.glob("runs/*/*/*/result.json")
    return {found["experiment"]: found["sha256"]["checkpoint"] for found in map(_load, results)}


def _load(path: Path) -> dict:
    return json.loads(path.read_text())


@contextmanager
def begun(folder: Path, name: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A sweep at work."""
    command = [sys.executable, "-m", "aiayn", "train", "-m", f"hydra/launcher={name}", *words]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as sweep:
        try:
            yield sweep
        finally:
            sweep.kill()


def worker_of(sweep: subprocess.Popen[str], folder: Path, row: str) -> int:
    """The process that trains a row, once it has recorded an update."""
    while sweep.poll() is None:
        for metrics in folder.glob(f"runs/*/{row}/*/metrics.jsonl"):
            owner = (metrics.parent / ".lock").read_text().split()
            if owner and metrics.stat().st_size:
                return int(owner[1])
        time.sleep(0.005)
    raise AssertionError(f"{row} was not begun: {sweep.communicate()[0]}")
