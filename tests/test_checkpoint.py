"""Checkpoints: found again, verified, rotated; damage is passed over and named."""

import pickle
import subprocess

import pytest
import torch

from aiayn import checkpoint
from aiayn.storage import StorageError

IO = checkpoint.VerifiedCheckpointIO()


def save(folder, step, value=None):
    weights = {"transformer.w": torch.full((2, 3), float(step if value is None else value))}
    path = checkpoint.path_of(folder, step)
    IO.save_checkpoint({"state_dict": weights, "updates_done": step}, path)
    return path


def test_the_newest_is_found_and_comes_back_as_it_was(tmp_path):
    for step in (5, 1000, 70):
        save(tmp_path, step)
    (path,) = checkpoint.newest(tmp_path)
    loaded = IO.load_checkpoint(path)
    assert loaded["updates_done"] == 1000
    assert torch.equal(loaded["state_dict"]["transformer.w"], torch.full((2, 3), 1000.0))
    assert checkpoint.newest(tmp_path / "empty") == []


def test_the_hash_beside_it_is_what_sha256sum_checks(tmp_path):
    path = save(tmp_path, 7)
    subprocess.run(["sha256sum", "--check", path.name + ".sha256"], cwd=tmp_path, check=True, capture_output=True)


@pytest.mark.parametrize("damage", ["flip", "cut", "no hash"])
def test_a_damaged_newest_is_named_and_the_one_before_is_used(tmp_path, damage):
    good, bad = save(tmp_path, 3), save(tmp_path, 5)
    data = bytearray(bad.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
        bad.write_bytes(data)
    elif damage == "cut":
        bad.write_bytes(data[:-11])
    else:
        (tmp_path / f"{bad.name}.sha256").unlink()
    with pytest.warns(UserWarning, match=bad.name):
        assert checkpoint.newest(tmp_path) == [good]
    with pytest.raises(StorageError, match=bad.name):
        IO.load_checkpoint(bad)


def test_no_intact_checkpoint_is_an_error_and_never_a_fresh_start(tmp_path):
    save(tmp_path, 3).write_bytes(b"")
    with pytest.warns(UserWarning, match="damaged"), pytest.raises(StorageError, match="no checkpoint"):
        checkpoint.newest(tmp_path)


def test_rotation_keeps_the_newest_and_waits_while_the_newest_is_damaged(tmp_path):
    paths = [save(tmp_path, step) for step in (1, 2, 3, 4)]
    checkpoint.rotate(tmp_path, 2)
    assert sorted(tmp_path.glob("*.ckpt")) == paths[2:]
    assert len(list(tmp_path.iterdir())) == 4
    paths[3].write_bytes(b"torn")
    checkpoint.rotate(tmp_path, 1)
    assert paths[2].exists()


def test_weights_that_are_not_finite_are_never_written(tmp_path):
    with pytest.raises(StorageError, match=r"transformer\.w is not finite"):
        save(tmp_path, 3, float("nan"))
    assert list(tmp_path.iterdir()) == []


def test_the_average_is_the_mean(tmp_path):
    paths = [save(tmp_path, step) for step in (2, 3, 7)]
    assert torch.equal(checkpoint.average(paths)["transformer.w"], torch.full((2, 3), 4.0))


class Payload:
    def __reduce__(self):
        return (print, ("executed",))


def test_a_pickle_payload_is_refused_and_not_executed(tmp_path, capsys):
    path = checkpoint.path_of(tmp_path, 1)
    torch.save({"state_dict": {}, "evil": Payload()}, path)
    path.with_name(path.name + ".sha256").write_text(f"{checkpoint.storage.sha256(path)}  {path.name}\n")
    with pytest.raises(pickle.UnpicklingError):
        IO.load_checkpoint(path)
    assert "executed" not in capsys.readouterr().out
    torch.load(path, weights_only=False)  # control: the payload would run
    assert "executed" in capsys.readouterr().out
