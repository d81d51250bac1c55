"""A worker is bound to its parent before it imports anything that takes time, and a rank says why it failed."""

import os
import signal
import subprocess
import sys

import pytest

from aiayn.core import exit_codes
from aiayn.training import worker


@pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")
def test_a_worker_without_parent_ends_before_it_imports_torch(tmp_path):
    command = [sys.executable, "-X", "importtime", "-m", "aiayn.training.worker", str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, "AIAYN_PARENT": "1"}, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL
    assert "aiayn.core.signals" in done.stderr  # control: imports are told
    assert "torch" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("signals")
def test_a_rank_without_a_local_rank_says_its_cause(toy_run, monkeypatch, capsys):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "3")):
        monkeypatch.setenv(name, value)
    assert worker.as_rank(toy_run) == exit_codes.WRONG_CONFIGURATION
    assert "aiayn: hardware.devices=1: torchrun started 3 ranks" in capsys.readouterr().err
