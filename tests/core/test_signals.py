"""A signal sets a flag and nothing else; SLURM's warning puts the job back into the queue, once, by its first task."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from aiayn.config import folders
from aiayn.core import signals
from aiayn.core.signals import Interrupted, StopFlag
from aiayn.runs import jobs


@pytest.mark.parametrize("number", signals.STOPPING)
def test_inside_the_block_a_signal_only_leaves_its_name_and_outside_the_handlers_are_as_before(number):
    before = [signal.getsignal(each) for each in signals.STOPPING]
    with StopFlag() as stop:
        stop.check()
        assert not stop.asked
        os.kill(os.getpid(), number)
        assert stop.asked == number.name
        with pytest.raises(Interrupted, match=f"stopped by {number.name}; repeat the command"):
            stop.check()
    assert [signal.getsignal(each) for each in signals.STOPPING] == before


@pytest.mark.parametrize("number", signals.STOPPING)
def test_a_signal_interrupts_whatever_is_at_work_even_what_survives_every_error(number):
    before = [signal.getsignal(each) for each in signals.STOPPING]
    survived = []

    def work() -> None:
        try:
            os.kill(os.getpid(), number)
            time.sleep(20)
        except Exception as error:
            survived.append(error)

    with pytest.raises(Interrupted, match=f"stopped by {number.name}; repeat the command"), signals.interrupting():
        work()
    assert survived == []
    assert [signal.getsignal(each) for each in signals.STOPPING] == before


def test_the_same_request_a_second_time_does_not_disturb_the_end_but_a_new_one_does(monkeypatch):
    """A terminal sends Ctrl-C to a worker, and so does its parent."""
    with signals.interrupting():
        with pytest.raises(Interrupted):
            os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        monkeypatch.setattr(signals, "SAME_REQUEST_SECONDS", 0.0)
        with pytest.raises(Interrupted):
            os.kill(os.getpid(), signal.SIGINT)


def test_it_listens_again_when_a_library_has_taken_the_signal():
    with StopFlag() as stop:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.kill(os.getpid(), signal.SIGTERM)
        assert not stop.asked  # control
        stop.listen()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.asked == "SIGTERM"


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
    return tmp_path / "asked"


def test_a_job_and_a_task_of_an_array_are_requeued_by_their_own_number(scontrol, monkeypatch):
    assert signals.requeue() == "SLURM job 17 is requeued"
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "11")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert signals.requeue() == "SLURM job 11_3 is requeued"
    assert scontrol.read_text().splitlines() == ["requeue 17", "requeue 11_3"]


def test_a_requeue_that_does_not_work_says_so(scontrol, monkeypatch, tmp_path):
    script = tmp_path / "bin" / "scontrol"
    script.write_text("#!/bin/sh\necho no such job >&2\nexit 1\n")
    assert signals.requeue() == "SLURM job 17 is not requeued: no such job; submit it again"
    monkeypatch.setenv("PATH", "")
    assert "scontrol is not on the PATH" in signals.requeue()


@pytest.mark.parametrize(
    ("asked", "environment", "expected"),
    [
        ("SIGUSR1", {}, True),
        ("SIGUSR1", {"SLURM_PROCID": "0"}, True),
        ("SIGUSR1", {"SLURM_PROCID": "1"}, False),
        ("SIGTERM", {}, False),  # scancel, or a preemption that SLURM itself requeues
        ("", {}, False),
    ],
)
@pytest.mark.usefixtures("scontrol")
def test_only_the_warning_before_the_time_limit_requeues_and_only_the_first_task(
    monkeypatch, asked, environment, expected
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert signals.requeues(asked) == expected
    monkeypatch.delenv("SLURM_JOB_ID")
    assert not signals.requeues(asked)


def test_under_slurm_the_command_requeues_once_after_the_worker_has_saved_and_finds_the_same_folder(
    toy_run, scontrol, tmp_path, monkeypatch
):
    """The worker saves when it gets the signal; by the time of the requeue that has happened."""
    python = tmp_path / "python"
    python.write_text(
        f"#!/bin/sh\ntrap 'echo durable > {tmp_path}/durable; exit 75' USR1\n"
        f"echo $3 >> {tmp_path}/folders\nkill -USR1 $PPID\nwhile true; do sleep 0.05; done\n"
    )
    python.chmod(0o755)
    monkeypatch.setattr(jobs.sys, "executable", str(python))
    assert jobs.run_here(toy_run) == jobs.INTERRUPTED
    assert scontrol.read_text().splitlines() == ["requeue 17 durable"]
    assert jobs.run_here(toy_run) == jobs.INTERRUPTED
    assert set((tmp_path / "folders").read_text().split()) == {str(folders.run_folder(toy_run))}


@pytest.mark.parametrize(("sent", "requeued"), [(signal.SIGUSR1, 1), (signal.SIGTERM, 0)])
def test_under_slurm_the_warning_also_requeues_a_run_that_waits_for_its_gpu(
    toy_run, scontrol, monkeypatch, sent, requeued
):
    monkeypatch.setattr(jobs.devices.Pool, "take", lambda *_: os.kill(os.getpid(), sent))  # None: no GPU is free
    monkeypatch.setattr(jobs, "start", lambda *_: pytest.fail("a worker was started"))
    with pytest.raises(signals.Interrupted, match=sent.name):
        jobs.run_here(toy_run)
    assert (scontrol.read_text().count("requeue 17") if scontrol.exists() else 0) == requeued


def test_a_signal_ends_an_import_that_survives_every_exception(tmp_path):
    swallowing = "import os\ntry:\n    os.kill(os.getpid(), 15)\nexcept BaseException:\n    pass\nprint('goes on')\n"
    (tmp_path / "swallowing.py").write_text(swallowing)
    code = "from aiayn.core import signals\nwith signals.interrupting(), signals.reported():\n    {}"

    def run(body: str) -> tuple[int, str, str]:
        words = [sys.executable, "-c", code.format(body)]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout, done.stderr

    said = "aiayn: stopped by SIGTERM; repeat the command to go on from here\n"
    assert run("import swallowing") == (75, "", said)
    reader, writer = os.pipe()
    os.close(reader)  # as in `2>&1 | head -1`
    unread = subprocess.run(
        [sys.executable, "-c", code.format("import swallowing")], cwd=tmp_path, stderr=writer, check=False
    )
    os.close(writer)
    assert unread.returncode == 75
    assert run("exec(open('swallowing.py').read())") == (0, "goes on\n", "")  # control: raised outside an import
