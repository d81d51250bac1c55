"""Checkpoints: written whole, hashed, found newest first; the oldest goes only when a newer one is verified."""

import hashlib
import io
import warnings
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning.plugins.io import CheckpointIO

from aiayn import storage

PATTERN = "step-*.ckpt"


class VerifiedCheckpointIO(CheckpointIO):
    """Lightning's door to the disk: SHA-256 beside each file, tensors and plain values only."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Writes the checkpoint and its `.sha256` as sha256sum prints it. Refuses weights that are not finite."""
        path = Path(path)
        for name, weight in checkpoint["state_dict"].items():
            if not torch.isfinite(weight).all():
                raise storage.StorageError(f"{path} is not written: {name} is not finite")
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        data = buffer.getvalue()
        # The hash is that of the bytes in memory, and first: with the checkpoint's renaming it is whole, not before
        storage.write_text(_hash_file(path), f"{hashlib.sha256(data).hexdigest()}  {path.name}\n")
        storage.write_bytes(path, data)

    def load_checkpoint(self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = True) -> Any:
        """The checkpoint's dictionary, on the CPU. Raises StorageError when its bytes are not those written."""
        path = Path(path)
        if not is_intact(path):
            raise storage.StorageError(f"{path} is damaged: its SHA-256 is not the one that was written with it")
        return torch.load(path, map_location=map_location, weights_only=True)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Removes the file and its hash; a missing one is no error."""
        Path(path).unlink(missing_ok=True)
        _hash_file(Path(path)).unlink(missing_ok=True)


def path_of(folder: Path, step: int) -> Path:
    """Where the checkpoint of an update lies."""
    return folder / f"step-{step:09d}.ckpt"


def is_intact(path: Path) -> bool:
    """True when the file is there and has the SHA-256 written beside it."""
    hash_file = _hash_file(path)
    return path.exists() and hash_file.exists() and hash_file.read_text().split()[:1] == [storage.sha256(path)]


def newest(folder: Path, count: int = 1) -> list[Path]:
    """The newest `count` intact checkpoints, newest first; empty when training has not saved any yet.

    Warns of each damaged file that it passes over. Raises StorageError when there are files and none is intact: a
    silent fresh start would throw the run away.
    """
    files = sorted(folder.glob(PATTERN), reverse=True)
    found: list[Path] = []
    for path in files:
        if is_intact(path):
            found.append(path)
            if len(found) == count:
                break
        else:
            warnings.warn(f"{path} is damaged and passed over: the one before it is used", stacklevel=2)
    if files and not found:
        raise storage.StorageError(f"no checkpoint in {folder} is intact: delete the folder to start this run anew")
    return found


def rotate(folder: Path, keep: int) -> None:
    """Removes all but the newest `keep` checkpoints, once the newest is verified."""
    files = sorted(folder.glob(PATTERN), reverse=True)
    if files and is_intact(files[0]):
        for path in files[keep:]:
            VerifiedCheckpointIO().remove_checkpoint(path)


def average(paths: list[Path]) -> dict[str, torch.Tensor]:
    """The mean of the weights of several checkpoints, as Table 2 uses it (section 6.1), summed in float64."""
    states = [VerifiedCheckpointIO().load_checkpoint(path)["state_dict"] for path in paths]
    return {
        name: (sum(state[name].double() for state in states) / len(states)).to(first.dtype)
        for name, first in states[0].items()
    }


def _hash_file(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")
