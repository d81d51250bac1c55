"""Sweeps on Ray: nobody is left behind, a lost worker is replaced, and runs land in the folder of the command."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launched import KILLED, ROWS, WORDS, at_work_in, begun, left_in, needs, weights, worker_of

from aiayn.core import exit_codes

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_folder"), needs("hydra_ray_launcher", "ray")]


@pytest.mark.parametrize("killed", [False, True])
def test_a_sweep_that_is_stopped_or_killed_leaves_nobody(killed, digits, tmp_path) -> None:
    with begun(tmp_path, "on_ray", *digits, *WORDS, f"experiment={','.join(ROWS)}") as sweep:
        worker_of(sweep, tmp_path, ROWS[0])
        assert len(at_work_in(tmp_path)) > 3  # control: the command, its launcher's workers and ours
        sweep.send_signal(signal.SIGKILL if killed else signal.SIGINT)
        printed, _ = sweep.communicate()
    if not killed:
        assert sweep.returncode == exit_codes.INTERRUPTED, printed
        assert "aiayn: stopped; repeat the command to go on from here" in printed.split("\n")
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("retries", [1, 0])
def test_a_lost_worker_is_replaced_max_retries_times(retries, digits, tmp_path) -> None:
    words = (f"hydra.launcher.ray.remote.max_retries={retries}", *digits, *WORDS, f"experiment={KILLED}")
    with begun(tmp_path, "on_ray", *words) as sweep:
        worker = worker_of(sweep, tmp_path, KILLED)
        os.kill(int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)
        printed, _ = sweep.communicate()
    assert sweep.returncode == (exit_codes.DONE if retries else exit_codes.FAILED), printed
    assert list(weights(tmp_path)) == [KILLED] * retries
    if not retries:
        assert "\naiayn: hydra/launcher=on_ray: WorkerCrashedError: " in printed


def test_the_runs_of_a_cluster_land_in_the_folder_of_the_command(digits, tmp_path) -> None:
    """A cluster that was started in another folder; its workers are there."""
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    ray = Path(sys.executable).with_name("ray")
    start = ("start", "--head", "--num-cpus=1", "--port=9979", "--include-dashboard=false", "--disable-usage-stats")
    subprocess.run([ray, *start], cwd=there, capture_output=True, check=True)
    try:
        row = ["hydra.launcher.ray.init.address=auto", *digits, *WORDS, f"experiment={KILLED}"]
        with begun(here, "on_ray", *row) as sweep:
            printed, _ = sweep.communicate()
    finally:
        subprocess.run([ray, "stop"], capture_output=True, check=True)
    assert sweep.returncode == exit_codes.DONE, printed
    assert list(weights(here)) == [KILLED]
    assert list(there.iterdir()) == []
    assert left_in(there) == []
