"""The one place that writes files: each appears whole or not at all, and survives a power cut once a call returns."""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO


class StorageError(Exception):
    """A file could not be written or read back: the message names the path and the cause."""


class InUse(StorageError):
    """Another process has the folder: the message names it."""


@contextmanager
def atomic(path: Path) -> Iterator[BinaryIO]:
    """Yields a binary file that becomes `path` when the block ends, and vanishes when it raises.

    Written beside its destination, never in $TMPDIR, which may be another file system; flushed to the disk, renamed,
    and the folder flushed too. Raises StorageError with the path when the disk is full or the folder cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _flush_folder(path.parent)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def write_bytes(path: Path, data: bytes) -> None:
    """Writes `data` to `path` atomically."""
    with atomic(path) as file:
        file.write(data)


def write_text(path: Path, text: str) -> None:
    """Writes `text` as UTF-8 to `path` atomically, line ends as they are."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    """Writes `value` as JSON to `path` atomically; NaN and infinity are refused, since no other reader accepts them."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def append_line(path: Path, line: str) -> None:
    """Appends one line to `path` in a single write, so that a crash can tear only the last line."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab", buffering=0) as file:
            file.write(line.encode() + b"\n")
    except OSError as error:
        raise StorageError(f"cannot append to {path}: {error.strerror or error}") from error


def read_lines(path: Path) -> list[str]:
    """The lines of a file written by `append_line`, without a torn last one; none when the file is missing."""
    if not path.exists():
        return []
    *whole, _torn = path.read_bytes().split(b"\n")
    return [line.decode() for line in whole]


def sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def lock(path: Path, *, wait: bool) -> Iterator[None]:
    """Holds `path` for this process; the kernel drops it with the process, so a dead owner never blocks anyone.

    Waits for the owner when `wait`; otherwise raises InUse with the owner's process and host.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as error:
            file.seek(0)
            owner = file.read().decode() or "another process"
            raise InUse(f"{path.parent} is in use by {owner}: wait for it or stop it") from error
        file.truncate(0)
        file.write(f"process {os.getpid()} on {os.uname().nodename}".encode())
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
