"""Checkpoints: found again, verified, rotated; damage is passed over and named."""

import errno
import itertools
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from aiayn.config import compose
from aiayn.core import storage
from aiayn.core.storage import StorageError
from aiayn.runs import checkpoint
from aiayn.training import train


def save(folder, step, value=None):
    weights = {"transformer.w": torch.full((2, 3), float(step if value is None else value))}
    path = checkpoint.path_of(folder, step)
    checkpoint.save({"state_dict": weights, "updates_done": step}, path)
    return path


def test_the_newest_is_found_and_comes_back_as_it_was(tmp_path, monkeypatch, capsys):
    for step in (5, 1000, 70):
        save(tmp_path, step)
    (path,) = checkpoint.newest(tmp_path)
    loaded = checkpoint.load(path)
    assert loaded["updates_done"] == 1000
    assert torch.equal(loaded["state_dict"]["transformer.w"], torch.full((2, 3), 1000.0))
    assert checkpoint.newest(tmp_path / "empty") == []
    subprocess.run(["sha256sum", "--check", path.name + ".sha256"], cwd=tmp_path, check=True, capture_output=True)
    # One that a run which trains has removed since it was listed is no damage
    monkeypatch.setattr(checkpoint.storage, "listed", lambda folder, pattern: [path, checkpoint.path_of(folder, 2000)])
    assert (checkpoint.newest(tmp_path), capsys.readouterr().err) == ([path], "")


@pytest.mark.parametrize("damage", ["flip", "cut", "no hash"])
def test_a_damaged_newest_is_named_and_the_one_before_is_used(tmp_path, damage, capsys):
    good, bad = save(tmp_path, 3), save(tmp_path, 5)
    data = bytearray(bad.read_bytes())
    data[len(data) // 2] ^= 1
    if damage != "no hash":
        bad.write_bytes(data if damage == "flip" else bad.read_bytes()[:-11])
    else:
        (tmp_path / f"{bad.name}.sha256").unlink()
    assert checkpoint.newest(tmp_path) == [good]
    assert capsys.readouterr().err == f"aiayn: {bad} is damaged and passed over: the one before it is used\n"
    with pytest.raises(StorageError, match=bad.name):
        checkpoint.load(bad)


def test_no_intact_checkpoint_is_an_error_not_a_fresh_start(tmp_path, capsys):
    for step in (3, 5):
        save(tmp_path, step).write_bytes(b"")
    with pytest.raises(StorageError, match=rf"no checkpoint in {tmp_path} is intact \(2, newest step-000000005\."):
        checkpoint.newest(tmp_path)
    (tmp_path / "loop").symlink_to("loop")  # as unreadable for root as for anyone
    with pytest.raises(StorageError, match=rf"cannot read {tmp_path}/loop"):
        checkpoint.newest(tmp_path / "loop")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("every", "last"), [(3, [6, 9, 12]), (1, [9, 10, 12])])  # 1: control
def test_a_checkpoint_on_a_signal_goes_with_the_next(tmp_path, every, last):
    """So the mean of the last ones is that of a run that was never stopped."""
    for step in (3, 6, 9, 10, 12):
        save(tmp_path, step)
        checkpoint.rotate(tmp_path, 3, every)
        assert checkpoint.step_of(checkpoint.newest(tmp_path)[0]) == step
    assert sorted(map(checkpoint.step_of, tmp_path.glob("*.ckpt"))) == last
    assert len(list(tmp_path.iterdir())) == 6  # the hash of each, and nothing else


def test_no_checkpoint_goes_before_its_successor_is_verified(tmp_path):
    path = [save(tmp_path, step) for step in (1, 2, 3)][-1]
    whole = path.read_bytes()
    for content, left in ((whole[:-7], 3), (whole, 1)):  # the second is the control
        path.write_bytes(content)
        checkpoint.rotate(tmp_path, 1, 1)
        assert len(list(tmp_path.glob("*.ckpt"))) == left


def test_weights_that_are_not_finite_are_never_written(tmp_path):
    with pytest.raises(StorageError, match=r"transformer\.w is not finite"):
        save(tmp_path, 3, float("nan"))
    assert list(tmp_path.iterdir()) == []


def test_the_average_is_the_mean_in_the_precision_of_the_weights(tmp_path):
    kinds = {"half": torch.bfloat16, "single": torch.float32, "double": torch.float64}
    paths = [checkpoint.path_of(tmp_path, step) for step in range(1, 8)]
    for path in paths:
        checkpoint.save({"state_dict": {name: torch.randn(5, 3).to(kind) for name, kind in kinds.items()}}, path)
    states = [checkpoint.load(path)["state_dict"] for path in paths]
    for name, weight in checkpoint.average(paths).items():
        assert torch.equal(weight, (sum(state[name].double() for state in states) / 7).to(kinds[name]))


class Killed(BaseException):
    """The process is gone."""


def comes_to_its_end(action: Callable[[], None], folder: Path, number: int, fault: str) -> bool:
    """Whether `action` does, when the process dies, or the disk refuses, at its point of that number."""
    points = itertools.count(1)

    def strike(point: str, path: Path) -> None:
        if next(points) == number:
            if fault == "no space":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            shutil.copytree(folder, folder.with_name("dead"))  # what is on the disk now is all that stays
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "fault", strike)
        try:
            action()
        except Killed:
            shutil.rmtree(folder)
            folder.with_name("dead").rename(folder)
            return False
        except StorageError:
            return False
    return True


def loaded(folder: Path) -> list[int]:
    """The updates of all intact checkpoints, oldest first, each with the weights that it was saved with."""
    states = [checkpoint.load(path) for path in checkpoint.newest(folder, 99)[::-1]]
    assert all(state["state_dict"]["transformer.w"][0, 0] == state["updates_done"] for state in states)
    return [state["updates_done"] for state in states]


def go_on_after_every_fault(root: Path, fault: str, before: int, damaged: bool) -> None:
    """Saves and rotates with a fault at each point, again in the process that goes on, and then without one."""
    for number in itertools.count(1):
        folder = root / str(number)
        folder.mkdir(parents=True)
        for step in range(1, before + 1):
            save(folder, step)
        for path in checkpoint.newest(folder) if damaged else ():
            path.write_bytes(path.read_bytes()[:-7])
        for at in (number, number, 0):
            saved = loaded(folder)

            def one_more(folder: Path = folder, saved: list[int] = saved) -> None:
                save(folder, step := max(saved, default=0) + 1)
                saved.append(step)
                checkpoint.rotate(folder, 2, 1)

            if comes_to_its_end(one_more, folder, at, fault) and at:
                return  # all points are behind us
            assert {*saved[-2:]} <= {*loaded(folder)}


@pytest.mark.parametrize("fault", ["kill", "no space"])
@pytest.mark.parametrize(("before", "damaged"), [(0, False), (1, False), (3, True)])
def test_no_fault_at_any_point_loses_a_saved_checkpoint(tmp_path, fault, before, damaged):
    go_on_after_every_fault(tmp_path, fault, before, damaged)
    assert len(list(tmp_path.iterdir())) > 8  # a checkpoint and its hash have four points each


def hash_last(state: dict, path: Path) -> None:
    torch.save(state, path)
    storage.write_text(path.with_name(path.name + ".sha256"), f"{storage.sha256(path)}  {path.name}\n")


def test_a_careless_store_would_lose_something(tmp_path, monkeypatch):  # control
    monkeypatch.setattr(checkpoint, "save", hash_last)
    with pytest.raises(StorageError, match=r"no checkpoint in .* is intact"):
        go_on_after_every_fault(tmp_path, "kill", 0, False)


@pytest.mark.usefixtures("signals")
def test_crash_at_any_write_then_resume_gives_identical_files(toy_run, tmp_path, monkeypatch):
    """Every state that the disk passes through in training is what a kill at that moment leaves."""
    whole = tmp_path / "whole"
    states: list[Path] = []

    def keep(point: str, path: Path) -> None:
        if path.parent.name == "checkpoints" or path.name == "metrics.jsonl":
            states.append(Path(shutil.copytree(whole, tmp_path / f"{len(states)}-{point}-{path.name}")))

    storage.write_text(whole / "config.yaml", compose.to_yaml(toy_run))
    monkeypatch.setattr(storage, "fault", keep)
    train.train(toy_run, whole)
    monkeypatch.undo()
    last = checkpoint.path_of(Path("checkpoints"), toy_run.training.max_steps)
    expected = (whole / last).read_bytes()
    assert {state.name.split("-")[1] for state in states} >= set(storage.POINTS) - {"locked"}
    torn = [state for state in states if state.name.split("-")[1] == "written" and state.name.endswith(".ckpt")]
    for state in [torn[0], *states[5::19]]:  # the very first checkpoint, and points of every kind
        for unfinished in (state / "checkpoints").glob(".*.tmp"):  # its writer is this process, which lives
            *name, _, random, tmp = unfinished.name.split(".")
            unfinished.rename(unfinished.with_name(".".join([*name, str(2**22 + 1), random, tmp])))
        train.train(toy_run, state)
        assert (state / last).read_bytes() == expected, state.name
        assert not list((state / "checkpoints").glob(".*"))


def test_weights_of_another_model_are_named_and_the_model_stays(tmp_path):
    path = save(tmp_path, 3)
    model = torch.nn.Linear(2, 3)
    with pytest.raises(StorageError, match=rf"{path} holds another model.*: .*Missing key"), checkpoint.fitting(path):
        model.load_state_dict(checkpoint.load(path)["state_dict"])
