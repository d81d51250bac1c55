"""A worker is bound to its parent before it imports anything that takes time."""

import os
import signal
import subprocess
import sys

import pytest


@pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")
def test_a_worker_without_parent_ends_before_it_imports_torch(tmp_path):
    command = [sys.executable, "-X", "importtime", "-m", "aiayn.training.worker", str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, "AIAYN_PARENT": "1"}, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL
    assert "aiayn.core.signals" in done.stderr  # control: imports are told
    assert "torch" not in done.stderr
    assert list(tmp_path.iterdir()) == []
