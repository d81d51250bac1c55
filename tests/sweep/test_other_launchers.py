"""Sweeps through another launcher: what is unfinished is handed over, and every run gets its line."""

import dataclasses
import os
import signal
from pathlib import Path

import pytest
from launched import KILLED, ROWS, WORDS, begun, left_in, needs, weights, worker_of
from omegaconf import DictConfig, OmegaConf

from aiayn import cli
from aiayn.config import compose, folders
from aiayn.config.schema import Config
from aiayn.core import exit_codes, storage
from aiayn.runs import records
from aiayn.sweep import one_run, other_launchers

LAUNCHERS = [
    pytest.param(
        "submitit_local", ("hydra.launcher.timeout_min=20",), marks=needs("hydra_submitit_launcher", "launchers")
    ),
    pytest.param("on_ray", (), marks=needs("hydra_ray_launcher", "ray")),
]


@pytest.mark.slow
@pytest.mark.usefixtures("ray_folder")
@pytest.mark.parametrize(("name", "options"), LAUNCHERS)
def test_a_sweep_with_a_killed_row_ends_as_side_by_side(name, options, digits, aiayn_in, tmp_path) -> None:
    """The bits of the others are the same; the same command again begins the killed row alone."""
    words = (*digits, *WORDS, f"experiment={','.join(ROWS)}")
    local, here = tmp_path / "local", tmp_path / "here"
    local.mkdir()
    here.mkdir()
    aiayn_in(local, "train", "-m", *words)
    expected = weights(local)
    with begun(here, name, *options, *words) as sweep:
        os.kill(worker_of(sweep, here, KILLED), signal.SIGKILL)
        printed, _ = sweep.communicate()
    assert sweep.returncode == exit_codes.FAILED, printed
    assert f"{KILLED:<19} seed 1  failed  killed by SIGKILL" in printed
    assert "1 of 3 runs failed; repeat the command to try them again" in printed
    assert weights(here) == {row: sha256 for row, sha256 in expected.items() if row != KILLED}
    with begun(here, name, *options, *words) as again:
        printed, _ = again.communicate()
    assert again.returncode == exit_codes.DONE, printed
    assert "3 runs, 2 finished before" in printed
    assert weights(here) == expected
    assert len(set(expected.values())) == len(ROWS)  # control: rows differ
    assert left_in(here) == []


@pytest.mark.parametrize(
    ("mode", "ended", "exits"),
    [("MULTIRUN", exit_codes.BAD_DATA, False), ("RUN", exit_codes.BAD_DATA, True), ("MULTIRUN", -1, True)],
)
def test_a_task_works_where_the_command_began_and_gives_its_code(mode, ended, exits, monkeypatch, tmp_path) -> None:
    worked = []
    monkeypatch.setattr(cli.HydraConfig, "get", lambda: OmegaConf.create({"mode": mode}))
    monkeypatch.setattr(cli, "RunMode", type("RunMode", (), {"MULTIRUN": "MULTIRUN"}))
    monkeypatch.setattr(compose, "convert", lambda composed: None)
    monkeypatch.setattr(one_run, "run_here", lambda run: worked.append(Path.cwd()) or ended)
    for name in ("command", "worker"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "command")
    task = cli.task("train")
    monkeypatch.chdir(tmp_path / "worker")
    if exits:
        with pytest.raises(SystemExit) as left:
            task(DictConfig({}))
        assert left.value.code == ended
    else:
        assert task(DictConfig({})) == ended
    assert worked == [tmp_path / "command"]


@pytest.fixture
def four(toy_run, result_of) -> list[Config]:
    """Finished before, in a folder of another run, and two to do, of which the last is there twice."""
    rows = ("base", "a_h1", "b_dk16", "c_n2", "c_n2")
    done, other, *_ = runs = [dataclasses.replace(toy_run, experiment=row) for row in rows]
    storage.write_json(folders.run_folder(done) / "result.json", result_of(done))
    storage.write_text(folders.run_folder(other) / "config.yaml", compose.to_yaml(done))
    storage.write_text(folders.run_folder(other) / "data.sha256", "0" * 64 + "\n")
    return runs


def test_a_launcher_gets_what_is_unfinished_and_can_begin(four, result_of, capsys) -> None:
    given = []

    def launch(numbers: list[int]) -> list[int]:
        given.extend(numbers)
        records.record_failure(folders.run_folder(four[2]), exit_codes.NON_FINITE, "not finite")
        storage.write_json(folders.run_folder(four[4]) / "result.json", result_of(four[4]))
        return [exit_codes.NON_FINITE, exit_codes.DONE]

    assert other_launchers.hand_over(four, launch) == exit_codes.FAILED
    assert given == [2, 4]
    first, *lines, last = capsys.readouterr().out.splitlines()
    assert first == "4 runs, 1 finished before"
    assert [line.startswith(f"[{n}/4] {four[n - 1].experiment}+") for n, line in enumerate(lines, 2)] == [True] * 3
    expected = ["failed  experiment", "failed  not finite", "finished  PPL 2.00"]
    assert [line.partition("seed 1  ")[2][:18] for line in lines] == expected
    assert last == "2 of 4 runs failed; repeat the command to try them again"
    assert other_launchers.unfinished(four) == [1, 2]  # what the next command begins
    assert other_launchers.hand_over(four[:1], lambda numbers: pytest.fail("asked")) == exit_codes.DONE
