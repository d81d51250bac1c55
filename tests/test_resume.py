"""Exact under failure: wherever a run is cut, the same command again ends with the bits of a run that was not.

By induction: the checkpoint of update k and one more update give the checkpoint of update k + 1, for every k. And by
cutting: in every place where a run can be cut an exception is thrown that no code of ours expects.
"""

import dataclasses
import json
import shutil
import signal
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY
from trained_runs import at_call, equal, rows, trained

from aiayn.config import compose, schema
from aiayn.core import exit_codes, storage
from aiayn.evaluation import evaluate, search
from aiayn.runs import checkpoint, records
from aiayn.training import callbacks, train
from aiayn.training.lightning_model import LightningTransformer

LAST = 11


class Cut(BaseException):
    """As abrupt as a process can end from the inside: no `except Exception` sees it."""


def load(folder: Path, step: int) -> dict[str, Any]:
    return checkpoint.load(checkpoint.path_of(folder / "checkpoints", step))


def result(folder: Path) -> dict[str, Any]:
    """The result without the times and the config, whose runtime keys may differ."""
    found = json.loads((folder / "result.json").read_text())
    for key in ("train_seconds", "target_tokens_per_second", "finished_at", "config"):
        del found[key]
    return found


def same(one: Path, other: Path) -> bool:
    """Equal weights, moments, metric rows, translations and result."""
    states = [load(folder, LAST) for folder in (one, other)]
    texts = [(folder / "translations.txt").read_bytes() for folder in (one, other)]
    return equal(*states) and rows(one) == rows(other) and texts[0] == texts[1] and result(one) == result(other)


@pytest.fixture(scope="module")
def longer(digits: list[str], tmp_path_factory: pytest.TempPathFactory) -> schema.Config:
    """Eleven updates over two epochs of a small corpus, with dropout, in two or three micro-batches each."""
    return compose.compose_row(
        *(*digits, "data.name=short", "scale.pairs=127"),
        *TINY,
        *(f"training.max_steps={LAST}", "training.warmup_steps=4", "training.tokens_per_update=93"),
        *("training.checkpoint_every=1", "training.keep_checkpoints=30", "training.dev_every=3"),
        *("hardware.tokens_per_micro_batch=41", f"output={tmp_path_factory.mktemp('short')}"),
    )


@pytest.fixture(scope="module")
def whole(longer: schema.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing disturbed, with a checkpoint of every update."""
    return trained(longer, tmp_path_factory.mktemp("whole") / "run")


def upto(whole: Path, step: int, folder: Path) -> Path:
    """A copy of the run as `kill -9` leaves it after `step`, without what comes later."""
    shutil.copytree(whole, folder, ignore=shutil.ignore_patterns("result.json", "translations.txt"))
    for path in (folder / "checkpoints").iterdir():
        if int(path.name[5:14]) > step:
            path.unlink()
    return folder


def go_until(run: schema.Config, folder: Path, owner: Any, name: str, call: int, *, before: bool = True) -> None:
    """Cuts the run in a call of a function, before it does anything or when it has."""

    def cut() -> None:
        raise Cut

    with pytest.MonkeyPatch.context() as patch:
        at_call(patch, owner, name, call, cut, before=before)
        trained(run, folder)


def one_more(whole: Path, run: schema.Config, step: int, folder: Path) -> dict[str, Any]:
    """The state after one update from the checkpoint of `step`."""
    upto(whole, step, folder)
    with pytest.raises(Cut):
        go_until(run, folder, callbacks.Save, "on_train_batch_end", 1, before=False)
    return load(folder, step + 1)


def test_the_run_covers_several_epochs_and_micro_batches(longer, whole):
    tokens = [row["target_tokens"] for row in rows(whole) if "train/loss" in row]
    dataset = train.prepare(longer, lambda message: None)
    assert len(tokens) == LAST
    assert sum(tokens) > 1.2 * len(dataset.pairs("train").target_ids)
    assert max(tokens) > 41


@pytest.mark.parametrize("step", range(1, LAST - 1))
def test_a_checkpoint_and_one_update_are_the_next_checkpoint(longer, whole, tmp_path, step):
    assert equal(one_more(whole, longer, step, tmp_path / "run"), load(whole, step + 1))


@pytest.mark.parametrize("forgotten", ["exp_avg", "exp_avg_sq", "step"])
def test_the_induction_shows_what_is_forgotten(longer, whole, tmp_path, monkeypatch, forgotten):  # control
    restore = LightningTransformer.restore

    def forgetful(self: LightningTransformer, saved: dict[str, Any]) -> None:
        for state in saved["optimizer_states"][0]["state"].values():
            state[forgotten].zero_()
        restore(self, saved)

    monkeypatch.setattr(LightningTransformer, "restore", forgetful)
    assert not equal(one_more(whole, longer, 5, tmp_path / "run"), load(whole, 6))


PLACES = {
    "before an update": (LightningTransformer, "training_step", True),
    "after an update, before anything is written": (LightningTransformer, "training_step", False),
    "in validation": (train, "teacher_forced_nats", False),
    "before a metric row": (storage, "append_lines", True),
    "after a metric row": (storage, "append_lines", False),
    "before any file is written": (storage, "write_bytes", True),
    "after any file is written": (storage, "write_bytes", False),
    "before old checkpoints go": (checkpoint, "rotate", True),
    "in decoding": (search, "beam_search", True),
    "before the translations": (train, "finish", True),
    "between the translations and the result": (evaluate.metrics, "bleu", False),
    "before the result": (storage, "write_json", True),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_run_that_is_cut_anywhere_ends_like_one_that_is_not(longer, whole, tmp_path, place):
    """With few checkpoints, so that a cut loses updates; each attempt gets a little further than the one before."""
    run = schema.vary(longer, training={"checkpoint_every": 4, "keep_checkpoints": 2})
    owner, name, before = PLACES[place]
    with pytest.raises(Cut):
        go_until(run, tmp_path / "run", owner, name, 1, before=before)
    for attempt in range(2, 8):
        if not (tmp_path / "run" / "result.json").exists():
            with suppress(Cut):
                go_until(run, tmp_path / "run", owner, name, attempt, before=before)
    if not (tmp_path / "run" / "result.json").exists():
        trained(run, tmp_path / "run")
    assert same(tmp_path / "run", whole)


SIGNALLED = {
    "in preparation": (train, "prepare", 1, 0),
    "in an update": (LightningTransformer, "training_step", 5, 5),
    "in validation": (train, "teacher_forced_nats", 2, 6),
    "in the last validation": (train, "teacher_forced_nats", 4, LAST),
    "in a checkpoint": (checkpoint, "save", 1, 5),
    "in decoding": (search, "beam_search", 1, LAST),
}


@pytest.mark.parametrize(
    ("place", "name"),
    [*((place, "SIGTERM") for place in SIGNALLED), ("in an update", "SIGINT"), ("in an update", "SIGUSR1")],
)
def test_a_signal_anywhere_saves_and_a_resume_has_the_same_bits(longer, whole, tmp_path, monkeypatch, place, name):
    folder = tmp_path / "run"
    run = schema.vary(longer, training={"checkpoint_every": 4}, hardware={"tokens_per_search": 31})
    storage.write_text(folder / "config.yaml", compose.to_yaml(run))
    owner, function, when, saved = SIGNALLED[place]
    at_call(monkeypatch, owner, function, when, partial(signal.raise_signal, getattr(signal, name)))
    assert train.main(folder) == exit_codes.INTERRUPTED
    found = checkpoint.newest(folder / "checkpoints")
    assert found == ([checkpoint.path_of(folder / "checkpoints", saved)] if saved else [])
    assert not (folder / "failure.json").exists()
    assert train.main(folder) == exit_codes.DONE
    assert same(folder, whole)


def test_runtime_keys_may_change_under_a_run_and_no_bit_does(longer, whole, tmp_path):
    folder = upto(whole, 5, tmp_path / "run")
    other = schema.vary(
        dataclasses.replace(longer, output=str(tmp_path), split="test", average=3, format="md"),
        training={"checkpoint_every": 2, "keep_checkpoints": 7},
        hardware={"tokens_per_search": 29},
        wandb={"project": "other", "entity": "me"},
        paper={"ppl": 2.0, "bleu": 3.0},
    )
    trained(other, folder)
    assert same(folder, whole)


@pytest.mark.parametrize(
    "name",
    [
        # A row of each kind of part; tests/alternatives has the others' computations
        name if name in ("f_relative_positions", "f_additive") else pytest.param(name, marks=pytest.mark.slow)
        for name in schema.BEYOND
    ],
)
def test_a_row_beyond_table_3_resumes_with_the_same_bits(name, digits, tmp_path):
    """At the scale that the suite trains every row at, on text that takes a second."""
    words = [*digits, f"experiment={name}", "scale=smoke", "wandb.mode=disabled", f"output={tmp_path}/runs"]
    run = compose.compose_row(*words, "scale.max_words=0", "scale.pairs=0")
    whole, folder = trained(run, tmp_path / "whole"), tmp_path / "run"
    last = run.training.max_steps
    with pytest.raises(Cut):
        go_until(run, folder, LightningTransformer, "training_step", last)
    assert not equal(load(folder, last - 1), load(whole, last))  # control: the update that is missing changes it
    trained(run, folder)
    assert equal(load(folder, last), load(whole, last))
    assert rows(folder) == rows(whole)
    assert result(folder) == result(whole)


def test_a_resume_on_other_text_under_the_same_name_is_refused(whole, tmp_path):
    folder = upto(whole, 5, tmp_path / "run")
    (folder / "data.sha256").write_text("0" * 64 + "\n")
    assert train.main(folder) == exit_codes.WRONG_CONFIGURATION
    assert "was begun on data with SHA-256 000000000000" in records.read_json(folder / records.FAILURE)["cause"]
