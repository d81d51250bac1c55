"""The one place that writes files: each appears whole or not at all, and survives a power cut once a call returns."""

import codecs
import errno
import fcntl
import hashlib
import io
import json
import os
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import Any, BinaryIO

from aiayn.core.exit_codes import STORAGE, ExplainedError

# Where a process can die, a disk refuse or time pass, in the order in which a file goes through them
POINTS = ("locked", "opened", "written", "synced", "renamed", "appending", "appended", "removing", "removed")

# Between two tries for a lock: how late a free one is noticed, at most
LOCK_SECONDS = 0.1
# Another host's temporary file is abandoned after so long: only that host knows whether its process lives
ABANDONED_SECONDS = 86_400.0


class StorageError(ExplainedError):
    """A file could not be written or read back: the message names the path and the cause."""

    exit_code = STORAGE


class InUse(StorageError):
    """Another process has the folder: the message names it."""


def fault(point: str, path: Path) -> None:
    """Nothing; a test puts a kill, an error or a delay at one of POINTS in its place."""
    assert point in POINTS


@contextmanager
def errors(attempt: str = "") -> Iterator[None]:
    """Inside, the system's error over a file becomes a StorageError that says what was attempted: `write a/path`."""
    try:
        yield
    except OSError as error:
        if not attempt and error.filename is None:  # of no file, such as a pipe
            raise
        raise StorageError(description(error, attempt and f"cannot {attempt}")) from error


def description(error: OSError, attempt: str = "") -> str:
    """What was attempted, or the path, and why not; where permission is denied, what denies it, with its mode."""
    cause = error.strerror or str(error)
    if isinstance(error, PermissionError) and isinstance(error.filename, str):
        denies = _existing(Path(error.filename))
        cause += f" ({denies} has mode {stat.filemode(denies.stat().st_mode)})"
    return f"{attempt or error.filename}: {cause}"


def open_standard_streams(reads: bool = False) -> None:
    """Makes the standard streams safe to use; StorageError where the output is closed, or the input of what reads."""
    # Else the next file would take the number of a closed stream, and get what is printed
    while (unused := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(unused, True)
    os.close(unused)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    if sys.stdout is None:
        raise StorageError("standard output is closed: `> /dev/null` does without it")
    if sys.stdin is None and reads:
        raise StorageError("standard input is closed: give text behind `<`, as in `< FILE`")


@contextmanager
def atomic(path: Path) -> Iterator[BinaryIO]:
    """Yields a binary file that becomes `path` when the block ends, and vanishes when it raises or the disk refuses."""
    temporary = _temporary(path)
    try:
        _make_folder(path.parent)
        with temporary.open("wb") as file:
            fault("opened", path)
            yield file
            fault("written", path)
            file.flush()
            os.fsync(file.fileno())
        _give_name(temporary, path)
    except BrokenPipeError:  # of a message that is printed meanwhile: no file gives it
        raise
    except OSError as error:
        reached = f" after {temporary.stat().st_size} bytes" if temporary.exists() else ""
        raise StorageError(description(error, f"cannot write {path}") + reached) from error
    finally:
        with suppress(OSError):  # the error that says more is on its way
            temporary.unlink()


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """Yields an empty folder for a library that writes its own files; when the block ends, each moves into `folder`."""
    staging = _temporary(folder)
    try:
        with errors(f"write {folder}"):
            _make_folder(staging)
            yield staging
            for file in sorted(staging.iterdir()):
                # Copied, so that it has the mode of any file of this user, whatever the library gave it
                with file.open("rb") as written, atomic(folder / file.name) as whole:
                    shutil.copyfileobj(written, whole)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def write_bytes(path: Path, data: bytes | memoryview) -> None:
    """Writes `data` to `path` atomically."""
    with atomic(path) as file:
        file.write(data)


def write_text(path: Path, text: str) -> None:
    """Writes `text` as UTF-8 to `path` atomically, line ends as they are."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    """Writes `value` as JSON to `path` atomically; NaN and infinity are refused, since no other reader accepts them."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def append_lines(path: Path, lines: Iterable[str]) -> None:
    """Appends lines to `path` and flushes them to the disk; a crash can tear only the last line."""
    data = "".join(line + "\n" for line in lines).encode()
    with errors(f"append to {path}"), appending(path) as file:
        fault("appending", path)
        append_bytes(file, path, data)
        fault("appended", path)
        os.fsync(file.fileno())


def appending(path: Path) -> BinaryIO:
    """`path`, open for appending without a buffer: the log of another process."""
    with errors(f"append to {path}"):
        _make_folder(path.parent)
        file = path.open("ab", buffering=0)
    return file


def append_bytes(file: BinaryIO, path: Path, data: bytes) -> None:
    """Appends all of `data` to `file`, which `appending` has opened as `path`; StorageError when the disk refuses."""
    with errors(f"append to {path}"):
        while data:  # a disk that is nearly full takes a part and says so only when asked again
            data = data[file.write(data) :]


def adopt(partial: Path, path: Path) -> None:
    """Gives what was appended to `partial` block by block its name, once it is known to be whole."""
    with errors(f"write {path}"):
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        _give_name(partial, path)


def free_bytes(folder: Path) -> int:
    """What the disk that holds `folder`, or will hold it, has left for us."""
    return shutil.disk_usage(_existing(folder)).free


def disk_of(folder: Path) -> int:
    """The number of the disk that holds `folder`, or will hold it."""
    return _existing(folder).stat().st_dev


def listed(folder: Path, pattern: str) -> list[Path]:
    """What a folder holds of such names, in order; none when it is missing. Unlike glob, it hides no error."""
    with errors(f"read {folder}"), suppress(FileNotFoundError, NotADirectoryError):
        return [path for path in sorted(map(folder.joinpath, os.listdir(folder))) if path.match(pattern)]
    return []


def read_lines(path: Path) -> list[bytes]:
    """The lines of a file written by `append_lines`, without a torn last one; none when the file is missing."""
    with errors(f"read {path}"), suppress(FileNotFoundError):
        *whole, _torn = path.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n")
        return whole
    return []


def remove(path: Path) -> None:
    """Removes a file, or a folder with what is in it; a missing one is no error."""
    with errors(f"remove {path}"):
        fault("removing", path)
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)  # another process may remove it as well
        else:
            path.unlink(missing_ok=True)
        fault("removed", path)


def remove_unfinished(folder: Path) -> None:
    """Removes what killed processes of this host were writing into `folder`, and of any host what is a day old."""
    for path in listed(folder, ".*.tmp"):
        if _is_abandoned(path):
            remove(path)


def sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def lock(path: Path, *, wait: bool, report: Callable[[str], None] = lambda message: None) -> Iterator[None]:
    """Holds `path`, which the kernel drops with the process; waits for its owner, reported once, or raises InUse."""
    with errors(f"lock {path}"):
        _make_folder(path.parent)
        file = path.open("a+b", buffering=0)  # or closing it on a full disk would write again, and fail again
    with file:
        if not _locked(file):
            file.seek(0)
            in_use = f"{path.parent} is in use by {file.read().decode(errors='replace') or 'another process'}"
            if not wait:
                raise InUse(f"{in_use}: wait for it or stop it")
            report(f"waiting: {in_use}")
            while not _locked(file):
                time.sleep(LOCK_SECONDS)
        with errors(f"lock {path}"):
            file.truncate(0)
            file.write(f"process {os.getpid()} on {os.uname().nodename}".encode())
            fault("locked", path)
        try:
            yield
        finally:
            file.truncate(0)


def _locked(file: BinaryIO) -> bool:
    with errors(f"lock {file.name}"), suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _give_name(written: Path, path: Path) -> None:
    fault("synced", path)
    written.replace(path)
    fault("renamed", path)
    _flush_folder(path.parent)


def _temporary(path: Path) -> Path:
    """A name beside `path` that no other process has, on any host; `_is_abandoned` reads it back."""
    return path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}.{token_hex(4)}.tmp")


def _is_abandoned(temporary: Path) -> bool:
    *written, process, _, _ = temporary.name.split(".")
    try:
        if time.time() - temporary.stat().st_mtime > ABANDONED_SECONDS:
            return True
        if ".".join(written).endswith(f".{os.uname().nodename}"):
            os.kill(int(process), 0)
    except ProcessLookupError:
        return True
    except OSError:  # it has its name by now, or its process is another user's
        pass
    return False


def _existing(path: Path) -> Path:
    return next(place for place in (path, *path.absolute().parents) if os.path.exists(place))


def _make_folder(folder: Path) -> None:
    """Makes a folder and those above it, each on the disk before anything is put into it."""
    if not folder.is_dir():
        _make_folder(folder.parent)
        if folder.exists() and not folder.is_dir():  # another process may make the folder meanwhile
            raise NotADirectoryError(errno.ENOTDIR, f"{folder} is a file, not a folder")
        folder.mkdir(exist_ok=True)
        _flush_folder(folder.parent)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot do it to a folder
            raise
    finally:
        os.close(descriptor)
