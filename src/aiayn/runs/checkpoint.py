"""Checkpoints: written whole, hashed, found newest first; the oldest goes only when a newer one is verified."""

import hashlib
import io
import sys
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from aiayn.core import storage

PATTERN = "step-*.ckpt"
HASH = ".sha256"


def save(checkpoint: dict[str, Any], path: Path) -> None:
    """Writes the checkpoint and its `.sha256` as sha256sum prints it. StorageError for weights that are not finite."""
    for name, weight in checkpoint["state_dict"].items():
        if not torch.isfinite(weight).all():
            raise storage.StorageError(f"{path} is not written: {name} is not finite")
    buffer = io.BytesIO()
    torch.save(checkpoint, buffer)
    data = buffer.getbuffer()
    # The hash is that of the bytes in memory, and first: with the checkpoint's renaming it is whole, not before
    storage.write_text(_hash_file(path), f"{hashlib.sha256(data).hexdigest()}  {path.name}\n")
    storage.write_bytes(path, data)


def load(path: Path) -> dict[str, Any]:
    """The checkpoint's dictionary, on the CPU. StorageError when it is damaged or holds more than tensors."""
    if not is_intact(path):
        raise storage.StorageError(f"{path} is damaged or gone: its SHA-256 is not the one that was written with it")
    try:
        _refuse_compressed(path)
        with warnings.catch_warnings(action="ignore"):  # torch warns of TorchScript before it refuses it
            checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        weights = checkpoint.get("state_dict") if isinstance(checkpoint, dict) else None
        if not isinstance(weights, dict) or not all(isinstance(weight, torch.Tensor) for weight in weights.values()):
            raise ValueError("it holds no named weights")
    except Exception as error:
        # torch's own words advise to load it all the same
        reason = str(error) if isinstance(error, ValueError) else "it holds more than tensors and plain values"
        raise storage.StorageError(f"{path} is no checkpoint of this program, nothing is loaded: {reason}") from error
    return checkpoint


def path_of(folder: Path, step: int) -> Path:
    """Where the checkpoint of an update lies."""
    return folder / f"step-{step:09d}.ckpt"


def is_intact(path: Path) -> bool:
    """True when the file is there and has the SHA-256 written beside it."""
    hash_file = _hash_file(path)
    there = path.is_file() and hash_file.is_file()
    return there and hash_file.read_text("utf-8-sig", "replace").split()[:1] == [storage.sha256(path)]


def newest(folder: Path, count: int = 1) -> list[Path]:
    """The newest `count` intact checkpoints, newest first; none when training has saved none. Names damaged files."""
    intact, damaged = list[Path](), list[Path]()
    for path in storage.listed(folder, PATTERN)[::-1]:
        if len(intact) < count and ((whole := is_intact(path)) or path.exists()):  # training removes the oldest
            (intact if whole else damaged).append(path)
    if damaged and not intact:  # a silent fresh start would lose the run
        raise storage.StorageError(
            f"no checkpoint in {folder} is intact ({len(damaged)}, newest {damaged[0].name}):"
            " put one back, or delete the run's folder to start it anew"
        )
    for path in damaged:
        print(f"aiayn: {path} is damaged and passed over: the one before it is used", file=sys.stderr, flush=True)
    return intact


def step_of(path: Path) -> int:
    """The update after which a checkpoint was saved."""
    return int(path.stem.removeprefix("step-"))


def rotate(folder: Path, keep: int, every: int) -> None:
    """Keeps `keep`: the newest, once verified, and before it multiples of `every`. Removes what killed writers left."""
    files = storage.listed(folder, PATTERN)[::-1]
    if files and is_intact(files[0]):
        # One that a signal asked for goes too: then the mean is that of a run that was never stopped
        kept = [path for path in files if path == files[0] or step_of(path) % every == 0][:keep]
        for path in files:
            if path not in kept:
                storage.remove(path)
        for hash_file in storage.listed(folder, PATTERN + HASH):
            if not hash_file.with_suffix("").exists():
                storage.remove(hash_file)
        storage.remove_unfinished(folder)


def average(paths: list[Path]) -> dict[str, torch.Tensor]:
    """The mean of several checkpoints' weights (section 6.1), summed in float64, one loaded at a time."""
    total: dict[str, torch.Tensor] = load(paths[0])["state_dict"]
    kinds = {name: weight.dtype for name, weight in total.items()}
    for name in total:
        total[name] = total[name].double()
    for path in paths[1:]:
        for name, weight in load(path)["state_dict"].items():
            total[name] += weight
    return {name: (total.pop(name) / len(paths)).to(kind) for name, kind in kinds.items()}


@contextmanager
def fitting(path: Path) -> Iterator[None]:
    """Raises StorageError naming `path` when what it holds does not fit the model in the block."""
    try:
        yield
    except (RuntimeError, KeyError, TypeError) as error:
        cause = " ".join(str(error).split())[:300]
        raise storage.StorageError(f"{path} holds another model than this run's: {cause}") from error


def _hash_file(path: Path) -> Path:
    return path.with_name(path.name + HASH)


def _refuse_compressed(path: Path) -> None:
    """ValueError unless `path` is a zip file that is as large as what it holds, as torch writes them."""
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise ValueError("it is compressed")
    if sum(entry.file_size for entry in entries) > path.stat().st_size:
        raise ValueError("it claims to hold more than its own size")
