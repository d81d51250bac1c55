"""What only Linux has, taken away: nothing ends by it."""

import ctypes
import gc
import os
import socket
import sys
from contextlib import ExitStack
from pathlib import Path

from aiayn.bench import bench
from aiayn.config import compose
from aiayn.core import process_pool, signals
from aiayn.runs import devices
from aiayn.runs.models import compute_with


def test_prctl_mallopt_affinity_proc_and_sockets_may_be_missing(toy, tmp_path, monkeypatch):
    exists = Path.exists
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    monkeypatch.setattr(gc, "freeze", list)  # could not be undone
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(Path, "exists", lambda path: str(path) != "/proc/cpuinfo" and exists(path))
    signals.die_with_parent(os.getppid())
    compute_with(1)
    assert process_pool.cores() == os.cpu_count()
    sizes = ("model.d_k=8", "model.d_v=8", "bench.mean_length=5", "bench.updates=1", "bench.rounds=1")
    bench.main(compose.compose_row(*toy, *sizes, f"bench.output={tmp_path}/x.json"))
    assert f"cpu {os.uname().machine}" in (tmp_path / "x.md").read_text()
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delattr(socket, "AF_UNIX")
    with ExitStack() as held:
        assert devices.port(held) in devices.PORTS
