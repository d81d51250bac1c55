"""SLURM: a job is requeued once when everything is on the disk."""

import os
import signal
from pathlib import Path

import pytest

from aiayn.config import folders
from aiayn.core import exit_codes, signals
from aiayn.runs import jobs
from aiayn.sweep import one_run, slurm


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A SLURM job whose scontrol writes down what it is asked, and whether a checkpoint is durable by then."""
    script = tmp_path / "bin" / "scontrol"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\necho "$@" $(cat {tmp_path}/durable 2>/dev/null) >> {tmp_path}/asked\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    for name in ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "asked").touch()
    return tmp_path / "asked"


@pytest.mark.parametrize(
    ("asked", "environment", "expected"),
    [
        ("SIGUSR1", {}, "17"),
        ("SIGUSR1", {"SLURM_ARRAY_JOB_ID": "11", "SLURM_ARRAY_TASK_ID": "3", "SLURM_PROCID": "0"}, "11_3"),
        ("SIGUSR1", {"SLURM_PROCID": "1"}, ""),
        ("SIGTERM", {}, ""),  # scancel, or a preemption that SLURM itself requeues
    ],
)
def test_only_the_warning_requeues_and_only_the_first_task(scontrol, monkeypatch, capsys, asked, environment, expected):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    slurm.requeue_after(asked)
    assert capsys.readouterr().out == (f"SLURM job {expected} is requeued\n" if expected else "")
    assert scontrol.read_text() == (f"requeue {expected}\n" if expected else "")
    monkeypatch.delenv("SLURM_JOB_ID")
    slurm.requeue_after(asked)
    assert capsys.readouterr().out == ""


@pytest.mark.usefixtures("scontrol")
def test_a_requeue_that_does_not_work_says_so(monkeypatch, tmp_path, capsys):
    (tmp_path / "bin" / "scontrol").write_text("#!/bin/sh\necho no such job >&2\nexit 1\n")
    slurm.requeue_after("SIGUSR1")
    monkeypatch.setenv("PATH", str(tmp_path))
    slurm.requeue_after("SIGUSR1")
    failed, absent = capsys.readouterr().out.splitlines()
    assert failed == "SLURM job 17 is not requeued: no such job; submit it again"
    assert "scontrol is not on the PATH" in absent


@pytest.fixture
def submitit(signals, monkeypatch) -> None:
    """The signal of a job that submitit began, whose own handler requeues it."""
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    signal.signal(signal.SIGUSR2, lambda *_: slurm.requeue_after("SIGUSR1"))


@pytest.mark.usefixtures("submitit")
@pytest.mark.parametrize("name", ["USR1", "USR2"])
def test_the_command_requeues_once_after_the_worker_has_saved(toy_run, scontrol, tmp_path, monkeypatch, name):
    """The worker saves when it gets the signal; the job that SLURM starts again finds the same folder."""
    python = tmp_path / "python"
    python.write_text(
        f"#!/bin/sh\ntrap 'echo durable > {tmp_path}/durable; exit 75' {name}\n"
        f"echo $3 >> {tmp_path}/folders\nkill -{name} $PPID\nwhile true; do sleep 0.05; done\n"
    )
    python.chmod(0o755)
    monkeypatch.setattr(jobs.sys, "executable", str(python))
    assert one_run.run_here(toy_run) == exit_codes.INTERRUPTED
    assert scontrol.read_text().splitlines() == ["requeue 17 durable"]
    assert one_run.run_here(toy_run) == exit_codes.INTERRUPTED
    assert set((tmp_path / "folders").read_text().split()) == {str(folders.run_folder(toy_run))}


@pytest.mark.usefixtures("submitit")
@pytest.mark.parametrize(("sent", "requeued"), [(signal.SIGUSR1, 1), (signal.SIGUSR2, 1), (signal.SIGTERM, 0)])
def test_a_run_that_waits_for_its_gpu_is_requeued_too(toy_run, scontrol, monkeypatch, sent, requeued):
    monkeypatch.setattr(jobs.devices.Pool, "take", lambda *_: os.kill(os.getpid(), sent))  # None: no GPU is free
    monkeypatch.setattr(jobs, "start", lambda *_: pytest.fail("a worker was started"))
    with pytest.raises(signals.Interrupted, match=sent.name):
        one_run.run_here(toy_run)
    assert scontrol.read_text().count("requeue 17") == requeued
