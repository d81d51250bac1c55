"""Sweeps through other people's launchers, for real: what the local one would have trained, bit for bit."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from lightning_fabric.plugins.environments import SLURMEnvironment
from omegaconf import DictConfig, OmegaConf
from one_node_slurm import PROGRAMS, is_installed, one_node_slurm

from aiayn import cli
from aiayn.config import compose, folders
from aiayn.config.schema import Config
from aiayn.core import storage
from aiayn.core.signals import Interrupted
from aiayn.runs import jobs
from aiayn.sweep import other_launchers
from aiayn.training import train

# Two hundred updates, of which each can be the one at which a worker is killed
ROWS = ("base", "a_h1", "b_dk16", "c_n2", "c_dff1024", "d_dropout02")
KILLED = "b_dk16"
POINTS = [(row, seed) for row in ("base", "a_h1") for seed in (1, 2)]
WORDS = ("scale=smoke", "scale.steps=0.002", "training.checkpoint_every=500", "wandb.mode=disabled")


def option(name: str, package: str, *options: str) -> object:
    """A launcher with options of its own; skipped before anything is trained where it is not installed."""
    there = not package or (find_spec("hydra_plugins") and find_spec(f"hydra_plugins.{package}"))
    skip = pytest.mark.skipif(not there, reason=f"needs hydra_plugins.{package}: pip install -e '.[launchers,ray]'")
    return pytest.param(name, options, id=name, marks=skip)


LAUNCHERS = [
    option("side_by_side", ""),
    option("joblib", "hydra_joblib_launcher", "hydra.launcher.n_jobs=2"),
    option("submitit_local", "hydra_submitit_launcher", "hydra.launcher.timeout_min=20"),
    option("slurm", "hydra_submitit_launcher", "hydra.launcher.timeout_min=20"),
    option("on_ray", "hydra_ray_launcher"),
]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory) -> Iterator[dict[str, str]]:
    """The environment in which this machine is a SLURM cluster."""
    if not is_installed():
        pytest.skip(f"needs root and {', '.join(PROGRAMS)}: apt-get install slurm-wlm munge")
    with one_node_slurm(tmp_path_factory.mktemp("slurm")) as conf:
        yield {"SLURM_CONF": str(conf)}


@pytest.fixture
def cluster(request, name, monkeypatch, tmp_path) -> Iterator[None]:
    """SLURM where the launcher asks for it; Ray stays on this machine's loopback. Neither leaves a process behind."""
    if name == "slurm":
        for key, value in request.getfixturevalue("slurm").items():
            monkeypatch.setenv(key, value)
    with tempfile.TemporaryDirectory(prefix="ray") as folder:  # the paths of its sockets have to be short
        monkeypatch.setenv("RAY_TMPDIR", folder)
        monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)  # else it writes one into the home
        yield
        assert left_in(tmp_path) == []


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


@pytest.fixture(scope="module")
def words(digits) -> tuple[str, ...]:
    """A sweep of six rows over the digits."""
    return (*digits, *WORDS, f"experiment={','.join(ROWS)}")


@pytest.fixture(scope="module")
def local(words, aiayn_in, tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("local")
    aiayn_in(folder, "train", "-m", *words)
    return weights(folder)


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


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(("name", "options"), LAUNCHERS)
def test_a_sweep_of_six_rows_of_which_one_is_killed_finishes_and_has_the_bits_of_the_local_launcher(
    name, options, words, local, tmp_path
) -> None:
    before = tasks_of_arrays() if name == "slurm" else set()
    with begun(tmp_path, name, *options, *words) as sweep:
        os.kill(worker_of(sweep, tmp_path, KILLED), signal.SIGKILL)
        printed, _ = sweep.communicate()
    assert sweep.returncode == jobs.FAILED, printed
    assert f"{KILLED:<19} seed 1  failed  killed by SIGKILL" in printed
    assert "1 of 6 runs failed; repeat the command to try them again" in printed
    assert weights(tmp_path) == {row: sha256 for row, sha256 in local.items() if row != KILLED}
    (failure,) = map(_load, tmp_path.glob("runs/*/*/*/failure.json"))
    assert failure["cause"] == "killed by SIGKILL"
    if name == "slurm":
        number, *others = {task.partition("_")[0] for task in tasks_of_arrays() - before}
        assert others == []
        assert tasks_of_arrays() - before == {f"{number}_{task}" for task in range(len(ROWS))}
    with begun(tmp_path, name, *options, *words) as again:
        printed, _ = again.communicate()
    assert again.returncode == jobs.DONE, printed
    assert "6 runs, 5 finished before" in printed
    assert weights(tmp_path) == local
    if name == "slurm":
        assert len(tasks_of_arrays() - before) == len(ROWS) + 1
    assert len(set(local.values())) == len(ROWS)  # control: rows differ


def tasks_of_arrays() -> set[str]:
    """What SLURM has ever been given, each as the number of an array and a place in it."""
    return set(asked("squeue", "--array", "--states=all", "--noheader", "--format=%F_%K"))


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(("name", "options"), LAUNCHERS[1:2])
def test_a_row_that_cannot_begin_stops_no_other(name, options, words, aiayn_in, tmp_path) -> None:
    """One folder holds another run, one is in use: the first is known before anything is launched."""
    free, other, used = (
        compose.compose_row(*words[:-1], f"experiment={row}", f"output={tmp_path}/runs") for row in ROWS[:3]
    )
    storage.write_text(folders.run_folder(other) / "config.yaml", compose.to_yaml(free))
    launched = ("train", "-m", f"hydra/launcher={name}", *options, *words[:-1])
    with jobs.claim(used):
        printed = aiayn_in(tmp_path, *launched, f"experiment={','.join(ROWS[:3])}", code=jobs.FAILED)
    assert f"{other.experiment} seed 1  failed  experiment={other.experiment}: " in printed.stdout
    assert f"{used.experiment} seed 1  failed  exit code {jobs.STORAGE}; its own output says why" in printed.stdout
    assert f"{used.experiment}/seed1 is in use by process {os.getpid()}" in printed.stderr
    assert "2 of 3 runs failed; repeat the command to try them again" in printed.stdout
    assert list(weights(tmp_path)) == [free.experiment]


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(("name", "options"), [LAUNCHERS[1], LAUNCHERS[4]])
def test_a_launched_sweep_that_is_stopped_or_killed_leaves_nobody_behind(name, options, words, tmp_path) -> None:
    with begun(tmp_path, name, *options, *words) as sweep:
        worker_of(sweep, tmp_path, ROWS[0])
        assert len(at_work_in(tmp_path)) > 3  # control: the command, its launcher's workers and ours
        sweep.send_signal(signal.SIGINT)
        printed, _ = sweep.communicate()
    assert sweep.returncode == jobs.INTERRUPTED, printed
    assert "aiayn: stopped; repeat the command to go on from here" in printed.split("\n")
    assert left_in(tmp_path) == []
    with begun(tmp_path, name, *options, *words) as sweep:
        worker_of(sweep, tmp_path, ROWS[0])
        sweep.kill()
    assert left_in(tmp_path) == []


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(("name", "options"), LAUNCHERS[4:])
@pytest.mark.parametrize("retries", [1, 0])
def test_a_run_whose_ray_worker_is_lost_goes_on_as_often_as_max_retries_says(
    retries, name, options, words, local, tmp_path
) -> None:
    row = [*options, f"hydra.launcher.ray.remote.max_retries={retries}", *words[:-1], f"experiment={KILLED}"]
    with begun(tmp_path, name, *row) as sweep:
        worker = worker_of(sweep, tmp_path, KILLED)
        os.kill(int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)
        printed, _ = sweep.communicate()
    if retries:
        assert sweep.returncode == jobs.DONE, printed
        assert weights(tmp_path) == {KILLED: local[KILLED]}
    else:
        assert sweep.returncode == jobs.FAILED
        assert "\naiayn: hydra/launcher=on_ray: WorkerCrashedError: " in printed
        assert "; repeat the command to go on from here\n" in printed
        assert weights(tmp_path) == {}


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(("name", "options"), LAUNCHERS[4:])
def test_the_runs_of_a_ray_cluster_land_in_the_folder_of_the_command(name, options, words, local, tmp_path) -> None:
    """A cluster that was started in another folder; its workers are there."""
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    ray = Path(sys.executable).with_name("ray")
    start = ("start", "--head", "--num-cpus=1", "--port=9979", "--include-dashboard=false", "--disable-usage-stats")
    subprocess.run([ray, *start], cwd=there, capture_output=True, check=True)
    try:
        row = [*options, "hydra.launcher.ray.init.address=auto", *words[:-1], f"experiment={KILLED}"]
        with begun(here, name, *row) as sweep:
            printed, _ = sweep.communicate()
    finally:
        subprocess.run([ray, "stop"], capture_output=True, check=True)
    assert sweep.returncode == jobs.DONE, printed
    assert weights(here) == {KILLED: local[KILLED]}
    assert list(there.iterdir()) == []
    assert left_in(there) == []


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("submitit"), reason="needs pip install -e '.[launchers]'")
@pytest.mark.parametrize("name", ["slurm"])
@pytest.mark.parametrize("how", ["warned", "preempted"])
@pytest.mark.usefixtures("cluster")
def test_a_slurm_job_that_is_warned_or_preempted_saves_goes_back_into_the_queue_and_ends_with_the_same_bits(
    how, words, local, tmp_path
) -> None:
    """The command waits all the while; the job keeps its number and its place in the array."""
    row = [*words[:-1], f"experiment={KILLED}"]
    with begun(tmp_path, "slurm", "hydra.launcher.timeout_min=20", *row) as sweep:
        worker_of(sweep, tmp_path, KILLED)
        (job,) = asked("squeue", "--noheader", "--format=%A", "--states=RUNNING")
        if how == "warned":
            asked("scancel", "--signal=USR2", job)
        else:
            asked("sbatch", "--partition=high", "--cpus-per-task=2", "--output=/dev/null", "--wrap=sleep 3")
        while not {"Restarts=1", "JobState=PENDING"} <= set(asked("scontrol", "show", "job", job)):
            assert sweep.poll() is None
            time.sleep(0.5)
        asked("scontrol", "update", f"JobId={job}", "StartTime=now")  # SLURM itself would wait two minutes
        printed, _ = sweep.communicate()
    assert sweep.returncode == jobs.DONE, printed
    assert weights(tmp_path) == {KILLED: local[KILLED]}
    (steps,) = (
        list(map(json.loads, path.read_text().splitlines())) for path in tmp_path.glob("runs/*/*/*/metrics.jsonl")
    )
    assert [line["step"] for line in steps if "train/loss" in line] == list(range(1, 201))


def asked(*words: str) -> list[str]:
    """The words that a command answers."""
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.usefixtures("signals")
def test_where_slurm_is_installed_lightning_s_advice_to_use_srun_is_not_passed_on(toy, tmp_path, monkeypatch) -> None:
    program = tmp_path / "bin" / "srun"
    storage.write_text(program, "#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    run = compose.compose_row(*toy, "training.max_steps=1")
    storage.write_text(folders.run_folder(run) / "config.yaml", compose.to_yaml(run))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        SLURMEnvironment.detect()
        assert [str(warning.message)[:18] for warning in caught] == ["The `srun` command"]  # control
        caught.clear()
        assert train.main(folders.run_folder(run)) == jobs.DONE
    assert not [warning for warning in caught if "srun" in str(warning.message)]


@pytest.mark.parametrize(
    ("mode", "ended", "exits"),
    [("MULTIRUN", jobs.BAD_DATA, False), ("RUN", jobs.BAD_DATA, True), ("MULTIRUN", -1, True)],
)
def test_inside_a_sweep_the_task_returns_its_code_and_alone_or_requeued_it_exits_with_it(
    mode, ended, exits, monkeypatch
) -> None:
    monkeypatch.setattr(cli.HydraConfig, "get", lambda: OmegaConf.create({"mode": mode}))
    monkeypatch.setattr(cli, "RunMode", type("RunMode", (), {"MULTIRUN": "MULTIRUN"}))
    monkeypatch.setattr(jobs, "run_here", lambda run: ended)
    monkeypatch.setattr(compose, "convert", lambda composed: None)
    task = cli.task("train")
    if exits:
        with pytest.raises(SystemExit) as left:
            task(DictConfig({}))
        assert left.value.code == ended
    else:
        assert task(DictConfig({})) == ended


@pytest.mark.skipif(not find_spec("submitit"), reason="needs pip install -e '.[launchers]'")
def test_a_mistake_in_the_last_point_is_refused_before_another_launcher_is_asked(tmp_path, aiayn_in) -> None:
    words = ("train", "-m", "hydra/launcher=slurm", "model.dropout=0.1,1.5")
    printed = aiayn_in(tmp_path, *words, code=jobs.WRONG_CONFIGURATION)
    assert printed.stdout == ""
    assert printed.stderr.startswith("aiayn: model.dropout=1.5: must be at least 0 and below 1")


@pytest.fixture
def four(toy_run, result_of) -> list[Config]:
    """Finished before, in a folder of another run, and two to do, of which the last is there twice."""
    rows = ("base", "a_h1", "b_dk16", "c_n2", "c_n2")
    done, other, *_ = runs = [dataclasses.replace(toy_run, experiment=row) for row in rows]
    storage.write_json(folders.run_folder(done) / "result.json", result_of(done))
    storage.write_text(folders.run_folder(other) / "config.yaml", compose.to_yaml(done))
    storage.write_text(folders.run_folder(other) / "data.sha256", "0" * 64 + "\n")
    return runs


def test_another_launcher_gets_what_is_unfinished_and_can_begin_and_every_run_its_line(four, result_of, capsys) -> None:
    given = []

    def launch(numbers: list[int]) -> list[int]:
        given.extend(numbers)
        jobs.record_failure(folders.run_folder(four[2]), jobs.NON_FINITE, "not finite")
        storage.write_json(folders.run_folder(four[4]) / "result.json", result_of(four[4]))
        return [jobs.NON_FINITE, jobs.DONE]

    assert other_launchers.hand_over(four, launch) == jobs.FAILED
    assert given == [2, 4]
    first, *lines, last = capsys.readouterr().out.splitlines()
    assert first == "4 runs, 1 finished before"
    assert [line.startswith(f"[{n}/4] {four[n - 1].experiment}+") for n, line in enumerate(lines, 2)] == [True] * 3
    assert [line.partition("seed 1  ")[2][:18] for line in lines] == [
        "failed  experiment",
        "failed  not finite",
        "finished  PPL 2.00",
    ]
    assert last == "2 of 4 runs failed; repeat the command to try them again"
    assert other_launchers.unfinished(four) == [1, 2]  # what the next command begins


def test_when_nothing_is_left_no_launcher_is_asked(four, capsys) -> None:
    assert other_launchers.hand_over(four[:1], lambda numbers: pytest.fail("asked")) == jobs.DONE
    assert capsys.readouterr().out == "1 runs, 1 finished before\n"


@pytest.mark.parametrize(
    ("name", "error", "code", "line"),
    [
        ("joblib", Interrupted("stopped by SIGINT"), 75, "aiayn: stopped; repeat the command to go on from here"),
        ("slurm", KeyboardInterrupt(), 75, "aiayn: stopped; jobs that are submitted go on: squeue --me shows them"),
        ("slurm", RuntimeError("no\nsrun"), 1, "aiayn: hydra/launcher=slurm: RuntimeError: no srun; jobs that are"),
    ],
)
def test_a_launcher_that_is_stopped_or_fails_says_in_one_line_how_to_go_on(
    name, error, code, line, monkeypatch, capsys
) -> None:
    class Failing:
        def launch(self, points: object, initial_job_idx: int) -> None:
            raise error

    monkeypatch.syspath_prepend(Path(cli.__file__).parent / "sweep" / "plugins")
    rows = import_module("hydra_plugins.aiayn").Rows(None)
    rows.launcher = Failing()
    rows.config = OmegaConf.create({"hydra": {"runtime": {"choices": {"hydra/launcher": name}}}})
    with pytest.raises(SystemExit) as left:
        rows.codes([["seed=1"]])
    assert left.value.code == code
    (printed,) = capsys.readouterr().err.splitlines()
    assert printed.startswith(line)


def test_a_task_works_in_the_folder_of_the_command_wherever_its_worker_was_started(tmp_path, monkeypatch) -> None:
    worked = []
    monkeypatch.setattr(cli.HydraConfig, "get", lambda: OmegaConf.create({"mode": "MULTIRUN"}))
    monkeypatch.setattr(cli, "RunMode", type("RunMode", (), {"MULTIRUN": "MULTIRUN"}))
    monkeypatch.setattr(compose, "convert", lambda composed: None)
    monkeypatch.setattr(jobs, "run_here", lambda run: worked.append(Path.cwd()) or jobs.DONE)
    for name in ("command", "worker"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "command")
    task = cli.task("train")
    monkeypatch.chdir(tmp_path / "worker")
    assert task(DictConfig({})) == jobs.DONE
    assert worked == [tmp_path / "command"]
