"""SLURM: what is unfinished is submitted, and a job is requeued once when everything is on the disk."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from run_results import result_of

from aiayn import cli
from aiayn.config import compose, folders
from aiayn.config.schema import Config
from aiayn.core import exit_codes, signals, storage
from aiayn.runs import jobs, records
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


def test_the_command_requeues_once_after_the_worker_has_saved(toy_run, scontrol, tmp_path, monkeypatch):
    """The worker saves when it gets the signal; the job that SLURM starts again finds the same folder."""
    python = tmp_path / "python"
    python.write_text(
        f"#!/bin/sh\ntrap 'echo durable > {tmp_path}/durable; exit 75' USR1\n"
        f"echo $3 >> {tmp_path}/folders\nkill -USR1 $PPID\nwhile true; do sleep 0.05; done\n"
    )
    python.chmod(0o755)
    monkeypatch.setattr(jobs.sys, "executable", str(python))
    assert one_run.run_here(toy_run) == exit_codes.INTERRUPTED
    assert scontrol.read_text().splitlines() == ["requeue 17 durable"]
    assert one_run.run_here(toy_run) == exit_codes.INTERRUPTED
    assert set((tmp_path / "folders").read_text().split()) == {str(folders.run_folder(toy_run))}


@pytest.mark.parametrize(("sent", "requeued"), [(signal.SIGUSR1, 1), (signal.SIGTERM, 0)])
def test_a_run_that_waits_for_its_gpu_is_requeued_too(toy_run, scontrol, monkeypatch, sent, requeued):
    monkeypatch.setattr(jobs.devices.Pool, "take", lambda *_: os.kill(os.getpid(), sent))  # None: no GPU is free
    monkeypatch.setattr(jobs, "start", lambda *_: pytest.fail("a worker was started"))
    with pytest.raises(signals.Interrupted, match=sent.name):
        one_run.run_here(toy_run)
    assert scontrol.read_text().count("requeue 17") == requeued


@pytest.mark.parametrize(
    ("mode", "ended", "exits"),
    [
        (RunMode.MULTIRUN, exit_codes.BAD_DATA, False),
        (RunMode.RUN, exit_codes.BAD_DATA, True),
        (RunMode.MULTIRUN, -1, True),
    ],
)
def test_a_task_of_a_sweep_gives_its_code_and_goes_on(mode, ended, exits, monkeypatch):
    monkeypatch.setattr(cli.HydraConfig, "get", lambda: OmegaConf.create({"mode": mode}))
    monkeypatch.setattr(compose, "convert", lambda composed: Config())
    monkeypatch.setattr(one_run, "run_here", lambda run: ended)
    if exits:
        with pytest.raises(SystemExit) as left:
            cli.task("train")(DictConfig({}))
        assert left.value.code == ended
    else:
        assert cli.task("train")(DictConfig({})) == ended


@pytest.fixture
def four(toy_run) -> list[Config]:
    """Finished before, in a folder of another run, and two to do, of which the last is there twice."""
    rows = ("base", "a_h1", "b_dk16", "c_n2", "c_n2")
    done, other, *_ = runs = [dataclasses.replace(toy_run, experiment=row) for row in rows]
    storage.write_json(folders.run_folder(done) / "result.json", result_of(done))
    storage.write_text(folders.run_folder(other) / "config.yaml", compose.to_yaml(done))
    storage.write_text(folders.run_folder(other) / "data.sha256", "0" * 64 + "\n")
    return runs


def test_a_launcher_gets_what_is_unfinished_and_can_begin(four, capsys):
    given = []

    def launch(numbers: list[int]) -> list[int]:
        given.extend(numbers)
        records.record_failure(folders.run_folder(four[2]), exit_codes.NON_FINITE, "not finite")
        storage.write_json(folders.run_folder(four[4]) / "result.json", result_of(four[4]))
        return [exit_codes.NON_FINITE, exit_codes.DONE]

    assert slurm.hand_over(four, launch) == exit_codes.FAILED
    assert given == [2, 4]
    first, *lines, last = capsys.readouterr().out.splitlines()
    assert first == "4 runs, 1 finished before"
    assert [line.startswith(f"[{n}/4] {four[n - 1].experiment}+") for n, line in enumerate(lines, 2)] == [True] * 3
    expected = ["failed  experiment", "failed  not finite", "finished  PPL 2.00"]
    assert [line.partition("seed 1  ")[2][:18] for line in lines] == expected
    assert last == "2 of 4 runs failed; repeat the command to try them again"
    assert slurm.hand_over(four[:1], lambda numbers: pytest.fail("asked")) == exit_codes.DONE


@pytest.mark.parametrize(("told", "remedy"), [("are you indeed on a slurm cluster?", "start it"), ("lost", "squeue")])
def test_a_launcher_s_error_says_what_to_do_about_it(monkeypatch, capsys, told, remedy):
    monkeypatch.syspath_prepend(str(Path(slurm.__file__).parent / "plugins"))
    rows = import_module("hydra_plugins.aiayn").Rows(max_batch_size=None)
    rows.launcher = SimpleNamespace(launch=Mock(side_effect=RuntimeError(told)))
    with pytest.raises(SystemExit) as exit:
        rows.codes([["seed=1"]])
    printed = capsys.readouterr().err
    assert (exit.value.code, printed.count("\n"), told in printed) == (exit_codes.FAILED, 1, True)
    assert [remedy in printed, "squeue" in printed] == [True, remedy == "squeue"]


def weights(folder: Path) -> dict[str, str]:
    """The SHA-256 of the last checkpoint of each row."""
    results = [json.loads(path.read_text()) for path in folder.glob("runs/*/*/*/result.json")]
    return {found["experiment"]: found["sha256"]["checkpoint"] for found in results}


def worker_of(sweep: subprocess.Popen[str], folder: Path, row: str) -> int:
    """The process that trains a row, once it has recorded an update."""
    while sweep.poll() is None:
        for metrics in folder.glob(f"runs/*/{row}/*/metrics.jsonl"):
            owner = (metrics.parent / ".lock").read_text().split()
            if owner and metrics.stat().st_size:
                return int(owner[1])
        time.sleep(0.005)
    raise AssertionError(f"{row} was not begun: {sweep.communicate()[0]}")


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("submitit"), reason="needs pip install -e '.[launchers]'")
def test_a_sweep_with_a_killed_row_ends_as_side_by_side(digits, aiayn_in, tmp_path):
    """The bits of the others are the same; the same command again begins the killed row alone."""
    rows, killed = ("base", "a_h1", "b_dk16"), "b_dk16"
    words = (*digits, "scale=smoke", "scale.steps=0.002", "training.checkpoint_every=500", "wandb.mode=disabled")
    words = ("train", "-m", *words, f"experiment={','.join(rows)}")
    local, here = tmp_path / "local", tmp_path / "here"
    local.mkdir()
    here.mkdir()
    aiayn_in(local, *words)
    expected = weights(local)
    words += ("hydra/launcher=submitit_local", "hydra.launcher.timeout_min=20")
    command = [sys.executable, "-m", "aiayn", *words]
    with subprocess.Popen(command, cwd=here, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as sweep:
        os.kill(worker_of(sweep, here, killed), signal.SIGKILL)
        printed, _ = sweep.communicate()
    assert sweep.returncode == exit_codes.FAILED, printed
    assert f"{killed:<19} seed 1  failed  killed by SIGKILL" in printed
    assert "1 of 3 runs failed; repeat the command to try them again" in printed
    assert weights(here) == {row: sha256 for row, sha256 in expected.items() if row != killed}
    assert "3 runs, 2 finished before" in aiayn_in(here, *words).stdout
    assert weights(here) == expected
    assert len(set(expected.values())) == len(rows)  # control: rows differ
