"""Beside the updates: each recorded once, dev and checkpoints at the right ones, no noise in a log."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

from aiayn.core import progress, storage
from aiayn.core.signals import StopFlag
from aiayn.runs import checkpoint
from aiayn.training import callbacks
from aiayn.training.callbacks import Bar, Dev, Record, Save
from aiayn.training.lightning_data import Update
from aiayn.training.lightning_model import NonFinite

LAST = 7
STATE = {"state_dict": {"w": torch.ones(3)}}
MODULE = SimpleNamespace(wait_for_step=lambda: None, one_wants_to_stop=False, ranks=1, saved=lambda: STATE)


def update(number: int) -> Update:
    return Update(number, 11, 13, [])


def outputs(number: int) -> dict:
    sums = {"loss": torch.tensor(26.0 + number, dtype=torch.float64), "nats": torch.tensor(13.0)}
    return sums | {"gradient_norm": torch.tensor(0.5), "learning_rate": 0.25}


@pytest.fixture
def trainer(monkeypatch):
    """What the callbacks are given of a trainer, which they ask nothing; it notes where they saved."""
    saved, save = [], checkpoint.save
    monkeypatch.setattr(checkpoint, "save", lambda state, path: saved.append(path) or save(state, path))
    return SimpleNamespace(saved=saved)


def run(trainer, parts, numbers, starts: bool = True) -> None:
    for part in parts if starts else ():
        part.on_train_start(trainer, MODULE)
    for number in numbers:
        for part in parts:
            part.on_train_batch_end(trainer, MODULE, outputs(number), update(number), number)


@pytest.fixture
def record(tmp_path) -> Record:
    return Record(tmp_path / "metrics.jsonl", 0, lambda row: None, writes=True)


def rows(path) -> list[dict]:
    return [json.loads(line) for line in storage.read_lines(path)]


def test_each_update_is_recorded_and_shown_once_in_order(trainer, tmp_path):
    shown: list[dict] = []
    record = Record(tmp_path / "metrics.jsonl", 0, shown.append, writes=True)
    run(trainer, [record], range(LAST))
    record.flush()
    found = rows(record.path)
    assert found == shown
    assert [row["step"] for row in found] == list(range(1, LAST + 1))
    for number, row in enumerate(found):
        assert row["train/loss"] == pytest.approx((26 + number) / 13)
        assert (row["train/nats"], row["train/gradient_norm"], row["train/learning_rate"]) == (1.0, 0.5, 0.25)
        assert (row["source_tokens"], row["target_tokens"]) == (11, 13)
    assert [row["seconds"] for row in found] == sorted(row["seconds"] for row in found)
    assert (record.source_tokens, record.target_tokens) == (11 * LAST, 13 * LAST)


def test_seconds_add_up_and_a_log_has_the_sessions_pace(trainer, tmp_path, monkeypatch, capsys):
    path, now = tmp_path / "metrics.jsonl", [1000.0]
    monkeypatch.setattr(callbacks, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(progress, "LOG_SECONDS", -1.0)
    for numbers, seconds_each in ((range(3), 5.0), (range(3, 5), 7.0), (range(5, LAST), 11.0)):
        record = Record(path, numbers.start, lambda row: None, writes=True)
        bar = Bar(record, "base", LAST)
        record.on_train_start(trainer, MODULE)
        for number in numbers:
            now[0] += seconds_each
            run(trainer, [record, bar], [number], starts=False)
            pace = f"{13 / seconds_each:.0f} target tokens/s, {(6 - number) * seconds_each:.0f} s left"
            assert capsys.readouterr().out == f"base: update {number + 1} of 7, {pace}\n"
        run(trainer, [record], [numbers.stop], starts=False)  # an update that no checkpoint has: it is made again
        record.flush()
        now[0] += 13.0  # until the next session
    last = Record(path, LAST, lambda row: None, writes=True)
    assert last.seconds == 3 * 5.0 + 2 * 7.0 + 2 * 11.0


@pytest.mark.parametrize("nats", [17 * 1e4, math.nan])
def test_a_non_finite_dev_perplexity_ends_the_run_as_diverged(record, trainer, tmp_path, nats):
    with pytest.raises(NonFinite, match=r"after update 2 the dev perplexity is (inf|nan): the run has diverged"):
        run(trainer, [record, Dev(record, lambda: (nats, 17), 2, LAST)], range(LAST))


@pytest.mark.parametrize(
    ("every", "measured", "kept"), [(1, [1, 2, 3, 4, 5, 6, 7], [5, 6, 7]), (3, [3, 6, 7], [3, 6, 7]), (100, [7], [7])]
)
def test_dev_and_checkpoints_come_at_their_interval(record, trainer, tmp_path, every, measured, kept):
    """And at the last update; the newest checkpoints stay."""
    save = Save(record, tmp_path / "checkpoints", every, 3, LAST, StopFlag())
    run(trainer, [record, Dev(record, lambda: (34.0, 17), every, LAST), save], range(LAST))
    found = [row for row in rows(record.path) if "dev/ppl" in row]
    assert [row["step"] for row in found] == measured
    assert all(row["dev/nats"] == 2.0 and row["dev/ppl"] == pytest.approx(math.e**2) for row in found)
    assert trainer.saved == [checkpoint.path_of(save.folder, step) for step in measured]
    assert sorted(save.folder.glob("*.ckpt")) == [checkpoint.path_of(save.folder, step) for step in kept]


def test_only_rank_0_writes_measures_and_saves(trainer, tmp_path, monkeypatch):
    """The others wait until a checkpoint is whole."""
    barriers, agreed = list[int](), list[int]()  # how many checkpoints there were at each; after which updates
    monkeypatch.setattr(MODULE, "ranks", 2)
    monkeypatch.setattr(torch.distributed, "barrier", lambda: barriers.append(len(trainer.saved)))
    monkeypatch.setattr(callbacks, "agree", lambda module, step: agreed.append(step))
    for writes, measure in ((False, pytest.fail), (True, lambda: (34.0, 17))):
        record = Record(tmp_path / "metrics.jsonl", 0, lambda row: None, writes=writes)
        parts = [record, Dev(record, measure, 1, LAST), Save(record, tmp_path / "run", 3, 3, LAST, StopFlag())]
        run(trainer, parts, range(LAST))
        assert record.path.exists() == writes
        assert record.waiting == []
    assert barriers == [0, 0, 0, 1, 2, 3]
    assert agreed == [3, 6, 7] * 2


def test_rows_are_flushed_now_and_then_but_the_pending_one(record, trainer, monkeypatch):
    run(trainer, [record], range(2))
    assert rows(record.path) == []
    monkeypatch.setattr(callbacks, "FLUSH_SECONDS", 0.0)
    run(trainer, [record], range(2, 4))
    assert [row["step"] for row in rows(record.path)] == [1, 2, 3]  # the last may still prove not to be finite


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda lines: [], "update 1 is missing"),
        (lambda lines: [*lines[:2], *lines[3:]], "update 3 is missing"),
        (lambda lines: [*lines[:2], b'{"step": 3, "train/loss": 3.0, "seconds": null}\n', *lines[3:]], "is damaged"),
    ],
)
def test_a_record_that_lacks_updates_is_refused_and_not_cut(record, trainer, damage, words):
    run(trainer, [record], range(5))
    record.flush()
    Record(record.path, 5, lambda row: None, writes=True)  # control: the whole one is taken
    damaged = b"".join(damage(record.path.read_bytes().splitlines(keepends=True)))
    record.path.write_bytes(damaged)
    with pytest.raises(storage.StorageError, match=rf"metrics\.jsonl.*{words}.*delete its folder"):
        Record(record.path, 5, lambda row: None, writes=True)
    assert record.path.read_bytes() == damaged


def test_ranks_that_hold_different_weights_are_refused(monkeypatch):
    """One bit of one weight of another rank is enough."""
    module, digests = torch.nn.Linear(3, 5), []

    def gather(into, digest):
        digests.append(digest)
        into[:] = digests[-2:]

    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    for step in (1, 2):  # control: equal weights
        callbacks.agree(module, step)
    with torch.no_grad():
        module.weight[2, 1] = torch.nextafter(module.weight[2, 1], torch.tensor(9.0))
    with pytest.raises(RuntimeError, match="after update 3 the ranks hold"):
        callbacks.agree(module, 3)
