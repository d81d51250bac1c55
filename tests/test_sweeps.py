"""The files of `sweeps/`: those for Hydra start by name; those for W&B make commands that all compose."""

import itertools
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import initialize_config_module
from hydra.core.config_store import ConfigStore

from aiayn.config import compose, folders
from aiayn.config.schema import ROWS, Config

FOLDER = Path(__file__).parents[1] / "sweeps"
FOR_WANDB = sorted((FOLDER / "wandb").glob("*.yaml"))


def commands(sweep: dict[str, Any]) -> list[list[str]]:
    """What an agent would start for each point of the grid: W&B's own code fills in the command."""
    utils = pytest.importorskip("wandb.sdk.launch.sweeps.utils")
    assert sweep["method"] == "grid"
    keys = list(sweep["parameters"])
    made = []
    for values in itertools.product(*(sweep["parameters"][key]["values"] for key in keys)):
        point = {"args": {key: {"value": value} for key, value in zip(keys, values, strict=True)}}
        filled = utils.create_sweep_command_args(point) | {"env": ["/usr/bin/env"], "program": [sweep["program"]]}
        words = utils.create_sweep_command(list(sweep["command"]))
        made.append([w for word in words for w in (filled[word[2:-1]] if word.startswith("${") else [word])])
    return made


def composed(words: list[str]) -> Config:
    assert words[:3] == ["/usr/bin/env", "aiayn", "train"]
    return compose.compose_row(*words[3:])


def read(path: Path) -> dict[str, Any]:
    return dict(yaml.safe_load(path.read_text()))


@cache
def runs_of(path: Path) -> list[Config]:
    """What the agents of a sweep would train."""
    with initialize_config_module("aiayn.conf", version_base="1.3"):
        return [composed(words) for words in commands(read(path))]


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=pytest.mark.slow) if path.stem == "table3" else path for path in FOR_WANDB],
    ids=[path.stem for path in FOR_WANDB],
)
def test_every_point_of_a_wandb_sweep_is_a_run_shown_online(path: Path) -> None:
    sweep, runs = read(path), runs_of(path)
    assert len({folders.run_folder(run) for run in runs}) == len(runs) > 1
    assert {run.wandb.mode for run in runs} == {"online"}
    assert {run.wandb.project for run in runs} == {sweep["project"]}
    assert sweep["metric"]["name"] == "dev/bleu"  # a summary that every finished run has


@pytest.mark.slow
def test_the_wandb_sweep_of_table_3_has_its_rows_and_three_seeds() -> None:
    sweep, runs = read(FOLDER / "wandb" / "table3.yaml"), runs_of(FOLDER / "wandb" / "table3.yaml")
    assert {(run.experiment, run.seed) for run in runs} == set(itertools.product(ROWS, (1, 2, 3)))
    assert {folders.variation(run) for run in runs} == {""}
    row = {**sweep, "parameters": {"seed": {"values": [1]}, "model.dropout": {"values": [0.3]}}}  # control
    (varied,) = [composed(words) for words in commands(row)]
    assert folders.variation(varied) != ""


def test_a_file_for_wandb_is_no_configuration_of_ours() -> None:
    compose.register()
    ours = {path.stem for path in FOLDER.glob("*.yaml")}
    stored = {name.removesuffix(".yaml"): found for name, found in ConfigStore.instance().repo.items()}
    assert ours == {"table3", "beyond", "seeds", "lengths"} <= stored.keys()
    assert "command" not in stored["table3"].node  # the one of that name in sweeps/wandb has it
    others = {path.stem for path in FOR_WANDB} - ours
    assert others
    assert not (others | {"wandb"}) & stored.keys()
