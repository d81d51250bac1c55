"""The files of `sweeps/`: those for Hydra start by name; those for W&B make commands that all compose."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import initialize_config_module
from hydra.core.config_store import ConfigStore

from aiayn.config import compose, folders
from aiayn.config.schema import ROWS
from aiayn.training import wandb_log

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


def read(path: Path) -> dict[str, Any]:
    return dict(yaml.safe_load(path.read_text()))


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=pytest.mark.slow) if path.stem == "table3" else path for path in FOR_WANDB],
    ids=[path.stem for path in FOR_WANDB],
)
def test_every_point_of_a_wandb_sweep_is_a_run_shown_online(path: Path) -> None:
    sweep = read(path)
    found = commands(sweep)
    assert all(words[:3] == ["/usr/bin/env", "aiayn", "train"] for words in found)
    with initialize_config_module("aiayn.conf", version_base="1.3"):
        runs = [compose.compose_row(*words[3:]) for words in found]
    assert len({folders.run_folder(run) for run in runs}) == len(runs) > 1
    assert {run.wandb.mode for run in runs} == {"online"}
    assert {wandb_log.resolved(run).wandb.project for run in runs} == {sweep["project"]}
    assert sweep["metric"]["name"] == "dev/bleu"  # a summary that every finished run has


def test_the_wandb_sweep_of_table_3_has_its_rows_and_three_seeds() -> None:
    sweep = read(FOLDER / "wandb" / "table3.yaml")
    assert sweep["parameters"] == {"seed": {"values": [1, 2, 3]}, "experiment": {"values": [*ROWS]}}
    assert [word for word in sweep["command"] if "=" in word] == ["wandb.mode=online"]


def test_a_file_for_wandb_is_no_configuration_of_ours() -> None:
    compose.register()
    ours = {path.stem for path in FOLDER.glob("*.yaml")}
    stored = {name.removesuffix(".yaml"): found for name, found in ConfigStore.instance().repo.items()}
    assert ours == {"table3", "beyond", "seeds", "lengths"} <= stored.keys()
    assert "command" not in stored["table3"].node  # the one of that name in sweeps/wandb has it
    others = {path.stem for path in FOR_WANDB} - ours
    assert others
    assert not (others | {"wandb"}) & stored.keys()
