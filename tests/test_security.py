"""Hostile checkpoints, configurations and corpora execute nothing through any command; names stay in their folder."""

import dataclasses
import json
import re
import shutil
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from aiayn import cli
from aiayn.config import compose, folders
from aiayn.config.schema import ConfigError, vary
from aiayn.core import exit_codes, storage
from aiayn.data import dataset
from aiayn.data.parallel_text import DataError
from aiayn.runs import checkpoint, jobs, records
from aiayn.runs.models import trained
from aiayn.training import train
from tests.test_cli import run_main

SOURCE = Path(__file__).parents[1] / "src" / "aiayn"


class Touch:
    """Unpickled without care, it makes a file."""

    def __init__(self, canary: Path) -> None:
        self.canary = str(canary)

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (Path(self.canary),)


def pickled(path: Path, canary: Path, good: dict, **options: bool) -> None:
    torch.save({**good, "evil": Touch(canary)}, path, **options)


def instantiator(path: Path, canary: Path, good: dict) -> None:
    """Lightning's own way to run code: `load_from_checkpoint` calls what this key names."""
    parameters = {"_instantiator": "pathlib.Path.touch", "evil": Touch(canary)}
    torch.save({**good, "hyper_parameters": parameters, "datamodule_hyper_parameters": parameters}, path)


def entries_of(path: Path) -> list[tuple[str, bytes]]:
    with zipfile.ZipFile(path) as archive:
        return [(entry.filename, archive.read(entry)) for entry in archive.infolist()]


def zip_bomb(path: Path, canary: Path, good: dict) -> None:
    """A file that unpacks to a thousand times its size."""
    torch.save(good, path)
    entries = entries_of(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in entries:
            archive.writestr(name, bytes(2**27) if name.endswith("data/0") else data)


def claims_too_much(path: Path, canary: Path, good: dict) -> None:
    """One entry of a zip file, listed many times."""
    torch.save(good, path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("more", b"")
        archive.filelist.extend(archive.filelist[:4] * 999)


def no_weights(path: Path, canary: Path, good: dict) -> None:
    torch.save({"state_dict": [1, 2, 3]}, path)


EXECUTING = (pickled, partial(pickled, _use_new_zipfile_serialization=False), instantiator)
HOSTILE = (*EXECUTING, zip_bomb, claims_too_much, no_weights)


def worker(run: compose.Config) -> None:
    """Trains in this process."""
    jobs.check(run)
    code = train.main(folders.run_folder(run))
    cli.fail(records.read_json(folders.run_folder(run) / records.FAILURE)["cause"], code)


@pytest.fixture
def copy(finished: list[str], tmp_path: Path) -> list[str]:
    """Overrides of a finished run that a test may spoil, without its result."""
    run = compose.compose_row(*finished)
    overrides = [*finished, f"output={tmp_path}/runs"]
    folder = folders.run_folder(compose.compose_row(*overrides))
    shutil.copytree(folders.run_folder(run), folder)
    storage.write_text(folder / "config.yaml", compose.to_yaml(compose.compose_row(*overrides)))
    (folder / "result.json").unlink()
    return overrides


def plant(hostile: Callable[[Path, Path, dict], None], run: compose.Config, canary: Path) -> Path:
    """Puts a hostile file in the place of the newest checkpoint, with a hash that agrees."""
    (path,) = checkpoint.newest(folders.run_folder(run) / "checkpoints")
    hostile(path, canary, checkpoint.load(path))
    storage.write_text(path.with_name(path.name + ".sha256"), f"{storage.sha256(path)}  {path.name}\n")
    return path


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize("hostile", HOSTILE)
def test_a_hostile_checkpoint_executes_nothing_and_is_named(copy, tmp_path, hostile):
    run, canary = compose.compose_row(*copy), tmp_path / "canary"
    path = plant(hostile, run, canary)
    with pytest.raises(storage.StorageError, match="nothing is loaded: it ") as refused:
        trained(run)
    assert train.main(folders.run_folder(run)) == exit_codes.STORAGE
    for line in (str(refused.value), records.read_json(folders.run_folder(run) / records.FAILURE)["cause"]):
        assert str(path) in line
        assert "\n" not in line
        assert "weights_only" not in line  # torch's advice to load it all the same
    assert not canary.exists()


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize("kind", ["checkpoint", "config"])
def test_a_hostile_file_is_one_line_through_any_command(copy, tmp_path, monkeypatch, kind):
    run = compose.compose_row(*copy)
    if kind == "checkpoint":
        path, expected = plant(pickled, run, tmp_path / "canary"), exit_codes.STORAGE
    else:
        path, expected = folders.run_folder(run) / "config.yaml", exit_codes.WRONG_CONFIGURATION
        path.write_text(f"!!python/object/apply:os.mkdir [{tmp_path}/canary]")
    for command in ("train", "evaluate", "translate"):
        code, error = run_main(command, *copy, worker=worker)
        assert (code, error.count("\n")) == (expected, 0), command
        assert str(path) in error
    assert train.main(folders.run_folder(run)) == expected
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("hostile", EXECUTING)
def test_the_payloads_work(tmp_path, hostile):  # control
    hostile(tmp_path / "x.ckpt", tmp_path / "canary", {})
    with open(tmp_path / "x.ckpt", "rb") as file:
        torch.load(file, weights_only=False)
    assert (tmp_path / "canary").exists()


LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 40)
)
TAGS = ("!!python/object/apply:os.mkdir [CANARY]", "!!python/name:os.system")


@pytest.mark.parametrize("text", [LAUGHS, "&a [*a]", "_target_: os.mkdir", *TAGS, "{", "\0"])
def test_a_hostile_config_executes_nothing_and_is_named(tmp_path, text):
    path, canary = tmp_path / "config.yaml", tmp_path / "canary"
    good = compose.to_yaml(compose.rows()["base"])
    inside = good.replace("wandb:", f"wandb: {text}\nx:") if "\n" not in text else good + text
    for whole in (text, inside, good.replace("output: runs", "output: ${oc.env:HOME}")):
        path.write_text(whole.replace("CANARY", str(canary)))
        with pytest.raises(ConfigError, match=f"{path} is damaged: ") as refused:
            compose.read(path)
        assert "\n" not in str(refused.value)
        assert not canary.exists()


def test_yaml_alone_would_execute_the_tags_and_laugh(tmp_path):  # control
    canary = tmp_path / "canary"
    yaml.unsafe_load(f"!!python/object/apply:os.mkdir [{canary}]")
    assert canary.exists()
    # Each further line takes nine times as long
    assert len(OmegaConf.to_yaml(OmegaConf.create(LAUGHS[: LAUGHS.index("a4:")]))) > 20 * len(LAUGHS)


def outside(folder: Path, canary: Path) -> None:
    """Configurations with which Hydra alone would make the canary."""
    handler = f"{{_target_: numpy.savetxt, fname: {canary}, X: [1]}}"
    (folder / "data").mkdir(parents=True)
    (folder / "evil.yaml").write_text(f"defaults: [config, _self_]\nhydra: {{callbacks: {{x: {handler}}}}}\n")
    (folder / "data" / "evil.yaml").write_text(f"# @package _global_\nhydra: {{callbacks: {{x: {handler}}}}}\n")


def foreign_words(folder: Path, canary: Path) -> list[list[str]]:
    up = "../" * 20
    handler = f"{{_target_:numpy.savetxt,fname:'{canary}',X:[1]}}"
    return [
        [f"--config-dir={folder}", "-cn", "evil"],
        [f"-cd={folder}", "-cn=evil"],
        [f"data={up}{folder}/data/evil"],
        [f"+hydra.callbacks.x={handler}"],
        *(["-cn", f"{up}{folder}/evil"], [f"--config-name={up}{folder}/evil"]),
        [f"hydra.searchpath=[file://{folder}]", "data=evil"],
        *([flag, str(folder), "-cn", "evil"] for flag in ("-cd", "--config-d", "-cp")),
        *([f"{key}={up}{folder}/data/evil"] for key in ("hydra/launcher", "+data@hydra")),
        *([f"+ hydra.callbacks.x={handler}"], [f"\t++hydra ={{callbacks:{{x:{handler}}}}}"]),
        ["hydra.launcher._target_=logging.FileHandler", f"+hydra.launcher.filename={canary}", "-m", "seed=1,2"],
        ["+hydra.job.env_set.LD_PRELOAD=/tmp/x.so"],
        ["--experimental-rerun", str(folder / "evil.pickle")],
    ]


@pytest.mark.parametrize("command", ["train", "table"])
def test_a_configuration_from_outside_executes_nothing(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    canary = tmp_path / "canary"
    outside(tmp_path / "evil", canary)
    for words in foreign_words(tmp_path / "evil", canary):
        code, error = run_main(command, *words)
        assert (code, error.count("\n")) == (exit_codes.WRONG_CONFIGURATION, 0), words
        assert not canary.exists(), words
    assert [path.name for path in tmp_path.iterdir()] == ["evil"]


@pytest.mark.parametrize("words", range(4))
def test_hydra_alone_would_execute_it(words, tmp_path, monkeypatch):  # control
    monkeypatch.chdir(tmp_path)
    canary = tmp_path / "canary"
    outside(tmp_path / "evil", canary)
    monkeypatch.setattr(cli.arguments, "for_hydra", lambda command, words: words)
    with pytest.warns(UserWarning, match="Callback"):
        run_main("table", *foreign_words(tmp_path / "evil", canary)[words])
    assert canary.exists()


def test_a_hostile_corpus_executes_nothing(finished, tmp_path):
    run = compose.compose_row(*finished)
    folder = Path(shutil.copytree(folders.prepared_folder(run), tmp_path / "copy"))
    path = folder / "dev.source.ids.npy"
    np.save(path, np.array([Touch(tmp_path / "canary")], dtype=object), allow_pickle=True)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][path.name] = dataset.fingerprint(path)
    storage.write_json(folder / "manifest.json", {**manifest, "sha256": dataset.digest(manifest)})
    with pytest.raises(DataError, match="none of ours"):
        dataset.Dataset(folder).pairs("dev")
    assert not (tmp_path / "canary").exists()
    np.load(path, allow_pickle=True)  # control
    assert (tmp_path / "canary").exists()


NAMES = st.text(min_size=1, max_size=70) | st.text("./\\ ~$-_aZ9\0\n%", min_size=1, max_size=9)


@settings(max_examples=200)
@given(field=st.sampled_from(["experiment", "data", "scale"]), name=NAMES)
def test_no_name_leaves_the_output_root(field, name):
    base = compose.rows()["base"]
    run = dataclasses.replace(base, experiment=name) if field == "experiment" else vary(base, **{field: {"name": name}})
    try:
        compose.checked(run)
    except ConfigError:
        return
    below = folders.run_folder(run).resolve().relative_to(Path(run.output).resolve()).parts
    assert (len(below), below[-1]) == (3, "seed1")
    prepared = Path(run.prepared).resolve()
    assert folders.prepared_folder(run).resolve().parent == prepared


@pytest.mark.parametrize("name", ["..", "/etc", "a/b", "-rf", "", "a\n"])
def test_names_that_would_leave_it_are_refused(name):  # control of the test above: they are what it would find
    base = compose.rows()["base"]
    with pytest.raises(ConfigError, match=r"data\.name="):
        compose.checked(vary(base, data={"name": name}))


def test_the_source_loads_no_checkpoint_or_array_unchecked():
    unchecked = re.compile(r"weights_only=False|allow_pickle=True|load_from_checkpoint|ckpt_path=")  # ruff has no rule
    assert [path for path in SOURCE.rglob("*.py") if unchecked.search(path.read_text())] == []
