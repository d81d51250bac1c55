"""A worker is bound to its parent before it imports anything that takes time, and ends with the code of its run."""

import os
import signal
import subprocess
import sys

import pytest

from aiayn.config import compose
from aiayn.core import exit_codes, storage
from aiayn.runs import records
from aiayn.training import worker


@pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")
def test_a_worker_without_parent_ends_before_it_imports_torch(tmp_path):
    command = [sys.executable, "-X", "importtime", "-m", "aiayn.training.worker", str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, "AIAYN_PARENT": "1"}, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL
    assert "aiayn.core.signals" in done.stderr  # control: imports are told
    assert "torch" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_folder_whose_config_is_damaged_is_one_line_and_code_2(toy_run, tmp_path, monkeypatch):
    monkeypatch.delenv("AIAYN_PARENT", raising=False)
    storage.write_text(tmp_path / "config.yaml", compose.to_yaml(toy_run)[:99])
    assert worker.main(tmp_path) == exit_codes.WRONG_CONFIGURATION
    assert "config.yaml is damaged: " in records.failure(tmp_path)["cause"]
