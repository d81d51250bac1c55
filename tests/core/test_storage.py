"""Files appear whole or not at all."""

import errno
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from unittest.mock import Mock

import pytest

from aiayn.core import storage
from aiayn.core.signals import Interrupted, interrupting


@pytest.mark.parametrize("opened", [storage.atomic, lambda path: path.open("wb")])
def test_a_block_that_fails_leaves_the_file_as_it_was(tmp_path, opened):
    path = tmp_path / "deep" / "file"
    storage.write_text(path, "first")

    def tear() -> None:
        with opened(path) as file:
            file.write(b"half of the sec")
            raise RuntimeError("crash")

    with pytest.raises(RuntimeError, match="crash"):
        tear()
    assert (path.read_text() == "first") == (opened is storage.atomic)  # control: a plain write tears the file
    assert [entry.name for entry in path.parent.iterdir()] == ["file"]


# What another process does: everything that this module can do to a folder, in which it dies at the point it is given
PROCESS = """
import os, signal, sys
from pathlib import Path
from aiayn.core import storage
folder = Path(sys.argv[1])
def kill(point, path):
    if point == sys.argv[2]:
        os.kill(os.getpid(), signal.SIGKILL)
storage.fault = kill
with storage.lock(folder / "lock", wait=False):
    storage.remove_unfinished(folder)
    storage.write_bytes(folder / "file", b"new" * 33333)
    storage.append_lines(folder / "lines", ["new line"])
    storage.remove(folder / "old")
"""
OLD, NEW = b"old", b"new" * 33333
# What lies in the folder after a kill at each point: the file, the lines, and whether `old` is still there
CRASHES = {
    **dict.fromkeys(("locked", "opened", "written", "synced"), (OLD, [b"old line"], True)),
    "renamed": (NEW, [b"old line"], True),
    "appending": (NEW, [b"old line"], True),
    "appended": (NEW, [b"old line", b"new line"], True),
    "removing": (NEW, [b"old line", b"new line"], True),
    "removed": (NEW, [b"old line", b"new line"], False),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in (("file", OLD), ("lines", b"old line\n"), ("old", b"x")):
        (tmp_path / name).write_bytes(content)
    return tmp_path


def found(folder: Path) -> tuple[bytes, list[bytes], bool]:
    return (folder / "file").read_bytes(), storage.read_lines(folder / "lines"), (folder / "old").exists()


@pytest.mark.parametrize("point", storage.POINTS)
def test_a_kill_at_any_point_leaves_the_old_or_the_new(folder, point):
    command = [sys.executable, "-c", PROCESS, folder]
    assert subprocess.run([*command, point], check=False).returncode == -signal.SIGKILL
    assert found(folder) == CRASHES[point]
    subprocess.run([*command, "none"], check=True)  # the dead owner's lock is free
    assert sorted(path.name for path in folder.iterdir()) == ["file", "lines", "lock"]
    assert (folder / "file").read_bytes() == NEW


@pytest.mark.parametrize("point", storage.POINTS)
def test_a_disk_that_refuses_leaves_the_old_or_the_new(folder, monkeypatch, point):
    def refuse(reached: str, path: Path) -> None:
        if reached == point:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def work() -> None:
        with storage.lock(folder / "lock", wait=False):
            storage.write_bytes(folder / "file", NEW)
            storage.append_lines(folder / "lines", ["new line"])
            storage.remove(folder / "old")

    monkeypatch.setattr(storage, "fault", refuse)
    with pytest.raises(storage.StorageError, match=rf"{folder}/\w+: No space left on device") as refused:
        work()
    if point in ("written", "synced"):
        assert f"after {len(NEW)} bytes" in str(refused.value)
    assert found(folder) == CRASHES[point]
    assert {path.name for path in folder.iterdir()} - {"old"} == {"file", "lines", "lock"}  # nothing half-made
    monkeypatch.undo()
    work()


@contextmanager
def file_size_limit(limit: int) -> Iterator[None]:
    """Stands for a disk that has so many bytes left."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_is_full_is_named_with_how_far_it_went(tmp_path):
    path = tmp_path / "file"
    storage.write_text(path, "first")
    cause = rf"cannot write {path}: File too large after 70001 bytes"
    with pytest.raises(storage.StorageError, match=cause), file_size_limit(70_001):
        storage.write_bytes(path, bytes(90_001))
    assert path.read_text() == "first"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
    with pytest.raises(storage.StorageError, match="cannot append to /dev/full: No space left on device"):
        storage.append_lines(Path("/dev/full"), ["x"])
    lock = storage.lock(tmp_path / "lock", wait=False)
    with pytest.raises(storage.StorageError, match=r"cannot lock .*/lock: File too large"), file_size_limit(0), lock:
        pass


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    inside = tmp_path / "file" / "deeper" / "x"
    with pytest.raises(storage.StorageError, match=rf"cannot \w+( to)? {inside}.*: {tmp_path}/file is a file, not"):
        storage.write_text(inside, "x")
    for action in (lambda: storage.remove(inside.parent), lambda: storage.lock(inside, wait=False).__enter__()):
        with pytest.raises(storage.StorageError, match=rf"cannot \w+ {tmp_path}/file/deeper.*: \S"):
            action()


def test_bytes_are_on_the_disk_before_the_name_and_the_return(tmp_path, monkeypatch):
    done = []
    fsync = os.fsync
    monkeypatch.setattr(storage, "fault", lambda point, path: done.append(point))

    def flush(descriptor: int) -> None:
        done.append(f"flush {Path(os.readlink(f'/proc/self/fd/{descriptor}')).relative_to(tmp_path)}")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", flush)
    storage.write_text(tmp_path / "a" / "b" / "file", "x")
    temporary = done.pop(4)
    assert re.fullmatch(rf"flush a/b/\.file\.{os.uname().nodename}\.{os.getpid()}\.[0-9a-f]{{8}}\.tmp", temporary)
    assert done == ["flush .", "flush a", "opened", "written", "synced", "renamed", "flush a/b"]
    done.clear()
    storage.append_lines(tmp_path / "lines", ["x", "y"])
    assert done == ["appending", "appended", "flush lines"]


def test_a_file_system_may_lack_folder_flushes_but_not_locks(tmp_path, monkeypatch):
    fsync, causes = os.fsync, iter((errno.EINVAL, errno.EIO))

    def flush(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(next(causes), "refused")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", flush)
    storage.write_text(tmp_path / "file", "x")
    with pytest.raises(storage.StorageError, match=rf"cannot write {tmp_path}/file: refused"):  # control
        storage.write_text(tmp_path / "file", "x")
    monkeypatch.setattr(storage.fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    with pytest.raises(storage.StorageError, match=rf"cannot lock {tmp_path}/lock: No locks available"):
        storage.lock(tmp_path / "lock", wait=False).__enter__()


def test_a_torn_last_line_is_dropped(tmp_path):
    path = tmp_path / "lines"
    assert storage.read_lines(path) == []
    for lines in (["a"], [], ["b\u2028c", "d"]):
        storage.append_lines(path, lines)
    with path.open("ab") as file:
        file.write(b'{"step": 3, "tr')
    assert storage.read_lines(path) == [b"a", "b\u2028c".encode(), b"d"]


def test_only_what_no_living_process_writes_is_removed(tmp_path):
    here, dead = os.uname().nodename, subprocess.Popen([sys.executable, "-S", "-c", ""])
    dead.wait()
    for host, process, hours, stays in (
        (here, dead.pid, 0, False),
        (here, os.getpid(), 0, True),
        ("elsewhere", 3, 25, False),  # of another host, whose processes are not seen here: a day
        ("elsewhere.org", dead.pid, 23, True),
    ):
        path = tmp_path / f".file.{host}.{process}.{'0' * 8}.tmp"
        path.write_bytes(b"half")
        os.utime(path, times=(then := time.time() - hours * 3600, then))
        storage.remove_unfinished(tmp_path)
        assert path.exists() == stays
    folder = tmp_path / f".export.{here}.{dead.pid}.{'0' * 8}.tmp"
    (folder / "part").mkdir(parents=True)
    storage.remove_unfinished(tmp_path)
    assert not folder.exists()


def test_what_a_library_writes_is_staged_and_then_moved(tmp_path):
    with storage.staged(tmp_path / "export") as staging:
        assert staging.parent == tmp_path
        (staging / "model.bin").write_bytes(b"weights")
        (staging / "model.bin").chmod(0o600)  # as safetensors leaves it
        (staging / "other").touch()
        assert not (tmp_path / "export").exists()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["export", "model.bin", "other"]
    assert len({path.stat().st_mode for path in (tmp_path / "export").iterdir()}) == 1
    with suppress(LookupError), storage.staged(tmp_path / "export") as staging:  # a failure leaves the old ones
        (staging / "model.bin").write_bytes(b"half")
        raise LookupError
    assert (tmp_path / "export" / "model.bin").read_bytes() == b"weights"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(("closed", "said"), [("<&-", "standard input"), (">&-", "standard output"), ("2>&-", "")])
def test_no_file_takes_the_number_of_a_closed_stream(tmp_path, closed, said):
    code = (
        "from aiayn.core import storage\n"
        "try: storage.open_standard_streams(reads=True)\n"
        "except storage.StorageError as error: print(error, file=storage.sys.stderr)\n"
        "with open('file', 'w') as file: file.write(str(file.fileno())); print('x', file=storage.sys.stderr)"
    )
    command = f"{sys.executable} -c {shlex.quote(code)} {closed}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert int((tmp_path / "file").read_text()) > 2
    assert re.fullmatch(f"{said} is closed: .*\nx\n" if said else "", done.stderr)


def test_an_error_names_whose_mode_denies_permission(tmp_path):
    """Root may read all files: the errors are made up."""
    (tmp_path / "shut").mkdir(mode=0o500)
    (tmp_path / "shut" / "file").touch(0o640)
    for name, denies in (("shut/new/deep", "shut has mode dr-x------"), ("shut/file", "shut/file has mode -rw-r-----")):
        with pytest.raises(storage.StorageError) as refused, storage.errors():
            raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path / name))
        assert str(refused.value) == f"{tmp_path / name}: Permission denied ({tmp_path / denies})"


def test_a_reader_that_leaves_is_no_error_of_storage(tmp_path):
    with pytest.raises(BrokenPipeError), storage.atomic(tmp_path / "file"):
        raise BrokenPipeError
    assert list(tmp_path.iterdir()) == []


def test_who_waits_for_a_lock_says_once_for_whom_and_gets_it(tmp_path, monkeypatch):
    path, told, turns = tmp_path / "lock", [], []
    with ExitStack() as owner:
        owner.enter_context(storage.lock(path, wait=False))

        def pause(seconds: float) -> None:
            assert seconds == storage.LOCK_SECONDS
            turns.append(path.read_text())
            if len(turns) == 7:
                owner.close()

        monkeypatch.setattr(storage.time, "sleep", pause)
        with storage.lock(path, wait=True, report=told.append):
            assert turns == [mine := f"process {os.getpid()} on {os.uname().nodename}"] * 7
    assert told == [f"waiting: {tmp_path} is in use by {mine}"]
    with storage.lock(path, wait=True, report=pytest.fail):  # control: nobody to wait for
        pass


def test_a_signal_ends_the_wait_for_a_lock(tmp_path):
    path = tmp_path / "lock"
    with ExitStack() as owner, interrupting():
        owner.enter_context(storage.lock(path, wait=False))

        def signalled(message: str) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            owner.close()  # whoever goes on gets the lock, and fails the test

        with pytest.raises(Interrupted, match="stopped by SIGTERM"):
            storage.lock(path, wait=True, report=signalled).__enter__()
        owner.close()
        with storage.lock(path, wait=False):  # it has taken nothing
            pass
