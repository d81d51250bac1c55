"""Sweeps through other people's launchers, for real: what the local one would have trained, bit for bit."""

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from lightning_fabric.plugins.environments import SLURMEnvironment
from omegaconf import DictConfig, OmegaConf
from one_node_slurm import PROGRAMS, is_installed, one_node_slurm

from aiayn import cli, config, jobs, storage, train

# Two hundred updates, of which each can be the one at which a worker is killed
ROWS = ("base", "a_h1", "b_dk16", "c_n2", "c_dff1024", "d_dropout02")
KILLED = "b_dk16"
POINTS = [(row, seed) for row in ("base", "a_h1") for seed in (1, 2)]
WORDS = ("scale=smoke", "scale.steps=0.002", "training.checkpoint_every=500", "wandb.mode=disabled")


def launcher(name: str, package: str, *options: str) -> object:
    """A launcher with options of its own; skipped before anything is trained where it is not installed."""
    there = not package or (find_spec("hydra_plugins") and find_spec(f"hydra_plugins.{package}"))
    skip = pytest.mark.skipif(not there, reason=f"needs hydra_plugins.{package}: pip install -e '.[launchers,ray]'")
    return pytest.param(name, options, id=name, marks=skip)


LAUNCHERS = [
    launcher("side_by_side", ""),
    launcher("joblib", "hydra_joblib_launcher", "hydra.launcher.n_jobs=2"),
    launcher("submitit_local", "hydra_submitit_launcher", "hydra.launcher.timeout_min=20"),
    launcher("slurm", "hydra_submitit_launcher", "hydra.launcher.timeout_min=20"),
    launcher("on_ray", "hydra_ray_launcher"),
]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory) -> Iterator[dict[str, str]]:
    """The environment in which this machine is a SLURM cluster."""
    if not is_installed():
        pytest.skip(f"needs root and {', '.join(PROGRAMS)}: apt-get install slurm-wlm munge")
    with one_node_slurm(tmp_path_factory.mktemp("slurm")) as conf:
        yield {"SLURM_CONF": str(conf)}


@pytest.fixture
def cluster(request, name, monkeypatch) -> None:
    """SLURM where the launcher asks for it."""
    if name == "slurm":
        for key, value in request.getfixturevalue("slurm").items():
            monkeypatch.setenv(key, value)


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


def worker_of(folder: Path, row: str) -> int:
    """The process that trains a row, once it has recorded an update."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        for metrics in folder.glob(f"runs/*/{row}/*/metrics.jsonl"):
            owner = (metrics.parent / ".lock").read_text().split()
            if owner and metrics.stat().st_size:
                return int(owner[1])
        time.sleep(0.005)
    raise AssertionError(f"{row} was not begun")


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(("name", "options"), LAUNCHERS)
def test_a_sweep_of_six_rows_of_which_one_is_killed_finishes_and_has_the_bits_of_the_local_launcher(
    name, options, words, local, tmp_path
) -> None:
    command = [sys.executable, "-m", "aiayn", "train", "-m", f"hydra/launcher={name}", *options, *words]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as sweep:
        os.kill(worker_of(tmp_path, KILLED), signal.SIGKILL)
        printed, _ = sweep.communicate()
    assert sweep.returncode == jobs.FAILED, printed
    assert weights(tmp_path) == {row: sha256 for row, sha256 in local.items() if row != KILLED}
    (failure,) = map(_load, tmp_path.glob("runs/*/*/*/failure.json"))
    assert failure["cause"] == "killed by SIGKILL"
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert again.returncode == jobs.DONE, again.stdout + again.stderr
    assert weights(tmp_path) == local
    assert len(set(local.values())) == len(ROWS)  # control: rows differ


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), LAUNCHERS[1:2])
def test_a_wrong_row_stops_no_other(name, options, words, aiayn_in, tmp_path) -> None:
    launched = ("train", "-m", f"hydra/launcher={name}", *options, *words[:-1])
    printed = aiayn_in(tmp_path, *launched, "experiment=c_n2", "model.dropout=1.5,0.1", code=1)
    assert "model.dropout=1.5: must be at least 0 and below 1" in printed.stderr
    assert list(weights(tmp_path)) == ["c_n2"]


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
    command = [sys.executable, "-m", "aiayn", "train", "-m", "hydra/launcher=slurm", "hydra.launcher.timeout_min=20"]
    with subprocess.Popen([*command, *row], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as sweep:
        worker_of(tmp_path, KILLED)
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


@pytest.mark.skipif(not find_spec("submitit"), reason="needs pip install -e '.[launchers]'")
def test_a_dry_run_prints_the_very_file_that_sbatch_would_get_and_leaves_nothing(
    tmp_path, aiayn_in, monkeypatch
) -> None:
    """An sbatch that keeps what it is given and takes no job."""
    here, bin = tmp_path / "here", tmp_path / "bin"
    here.mkdir()
    for program in ("srun", "sbatch"):
        storage.write_text(bin / program, f'#!/bin/sh\ncp "$1" {tmp_path}/given\nexit 1\n')
        (bin / program).chmod(0o755)
    words = ("hydra.launcher.partition=gpu", "hydra.launcher.array_parallelism=3", "experiment=base,a_h1", "seed=1,2")
    dry = aiayn_in(here, "train", "-m", "hydra/launcher=slurm_dry_run", *words).stdout
    assert list(here.iterdir()) == []
    monkeypatch.setenv("PATH", str(bin), prepend=os.pathsep)
    command = [sys.executable, "-m", "aiayn", "train", "-m", "hydra/launcher=slurm", *words]
    assert subprocess.run(command, cwd=here, capture_output=True, check=False).returncode != 0
    given = (tmp_path / "given").read_text()
    assert dry.startswith(given)
    assert dry.removeprefix(given).split("\n")[1:] == [
        *(f"# {number}: aiayn train experiment={row} seed={seed}" for number, (row, seed) in enumerate(POINTS)),
        "",
    ]
    assert {"#SBATCH --array=0-3%3", "#SBATCH --partition=gpu", "#SBATCH --signal=USR2@300"} <= set(given.split("\n"))


@pytest.mark.usefixtures("signals")
def test_where_slurm_is_installed_lightning_s_advice_to_use_srun_is_not_passed_on(toy, tmp_path, monkeypatch) -> None:
    program = tmp_path / "bin" / "srun"
    storage.write_text(program, "#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    run = config.compose_row(*toy, "training.max_steps=1")
    storage.write_text(config.run_folder(run) / "config.yaml", config.to_yaml(run))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        SLURMEnvironment.detect()
        assert [str(warning.message)[:18] for warning in caught] == ["The `srun` command"]  # control
        caught.clear()
        assert train.main(config.run_folder(run)) == jobs.DONE
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
    monkeypatch.setattr(config, "convert", lambda composed: None)
    task = cli.task("train")
    if exits:
        with pytest.raises(SystemExit) as left:
            task(DictConfig({}))
        assert left.value.code == ended
    else:
        assert task(DictConfig({})) == ended
