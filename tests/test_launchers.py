"""Sweeps through other people's launchers, for real: what the local one would have trained, bit for bit."""

import json
import os
import shutil
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest
from lightning_fabric.plugins.environments import SLURMEnvironment
from omegaconf import DictConfig, OmegaConf

from aiayn import cli, config, jobs, storage, train

SWEEP = ("scale=smoke", "experiment=c_n2,b_dk16", "wandb.mode=disabled")


def launcher(name: str, package: str, option: str, program: str = "sh") -> object:
    """A launcher with an option of its own; skipped before anything is trained where it is not installed."""
    there = find_spec("hydra_plugins") and find_spec(f"hydra_plugins.{package}") and shutil.which(program)
    reason = f"needs {program} and pip install -e '.[launchers]'"
    return pytest.param(name, option, id=name, marks=pytest.mark.skipif(not there, reason=reason))


LAUNCHERS = [
    launcher("joblib", "hydra_joblib_launcher", "hydra.launcher.n_jobs=2"),
    launcher("submitit_local", "hydra_submitit_launcher", "hydra.launcher.timeout_min=20"),
    launcher("slurm", "hydra_submitit_launcher", "hydra.launcher.timeout_min=20", "sbatch"),
]


def weights(folder: Path) -> dict[str, str]:
    """The SHA-256 of the last checkpoint of each row."""
    results = folder.glob("runs/*/*/*/result.json")
    return {found["experiment"]: found["sha256"]["checkpoint"] for found in map(_load, results)}


def _load(path: Path) -> dict:
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def local(aiayn_in, tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("local")
    aiayn_in(folder, "train", "-m", *SWEEP)
    return weights(folder)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "option"), LAUNCHERS)
def test_a_sweep_gives_the_bits_of_the_local_launcher_and_a_wrong_row_stops_no_other(
    name, option, local, aiayn_in, tmp_path
) -> None:
    words = ("train", "-m", f"hydra/launcher={name}", option, *SWEEP)
    aiayn_in(tmp_path, *words)
    assert weights(tmp_path) == local
    assert len(set(local.values())) == 2  # control: rows differ
    printed = aiayn_in(tmp_path, *words[:-2], "experiment=c_n2", "model.dropout=1.5,0.1", *SWEEP[2:], code=1)
    if name == "joblib":  # the others write that into files of the job
        assert "model.dropout=1.5: must be at least 0 and below 1" in printed.stderr
        assert "is finished: nothing to do" in printed.stdout


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


@pytest.mark.parametrize(("mode", "code"), [("MULTIRUN", jobs.BAD_DATA), ("RUN", None)])
def test_inside_a_sweep_the_task_returns_its_code_and_alone_it_exits_with_it(mode, code, monkeypatch) -> None:
    monkeypatch.setattr(cli.HydraConfig, "get", lambda: OmegaConf.create({"mode": mode}))
    monkeypatch.setattr(cli, "RunMode", type("RunMode", (), {"MULTIRUN": "MULTIRUN"}))
    monkeypatch.setattr(jobs, "run_here", lambda run: jobs.BAD_DATA)
    monkeypatch.setattr(config, "convert", lambda composed: None)
    task = cli.task("train")
    if code is None:
        with pytest.raises(SystemExit) as ended:
            task(DictConfig({}))
        assert ended.value.code == jobs.BAD_DATA
    else:
        assert task(DictConfig({})) == code
