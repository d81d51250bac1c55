"""Files appear whole or not at all."""

import errno
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO

import pytest

from aiayn.core import storage
from aiayn.core.signals import Interrupted, interrupting


def test_a_block_that_fails_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "deep" / "file"
    storage.write_text(path, "first")

    def tear() -> None:
        with storage.atomic(path) as file:
            file.write(b"half of the sec")
            raise RuntimeError("crash")

    with pytest.raises(RuntimeError, match="crash"):
        tear()
    assert path.read_text() == "first"
    assert [entry.name for entry in path.parent.iterdir()] == ["file"]


def test_a_plain_write_would_have_torn_the_file(tmp_path):  # control of the test above
    path = tmp_path / "file"
    path.write_text("first")

    def tear() -> None:
        with path.open("wb") as file:
            file.write(b"half of the sec")
            raise RuntimeError("crash")

    with pytest.raises(RuntimeError, match="crash"):
        tear()
    assert path.read_text() != "first"


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
    "locked": (OLD, ["old line"], True),
    "opened": (OLD, ["old line"], True),
    "written": (OLD, ["old line"], True),
    "synced": (OLD, ["old line"], True),
    "renamed": (NEW, ["old line"], True),
    "appending": (NEW, ["old line"], True),
    "appended": (NEW, ["old line", "new line"], True),
    "removing": (NEW, ["old line", "new line"], True),
    "removed": (NEW, ["old line", "new line"], False),
}


def test_every_point_has_its_crash_test():
    assert set(CRASHES) == set(storage.POINTS)
    calls = re.findall(r'fault\("(\w+)", path\)', Path(storage.__file__).read_text())
    assert sorted(calls) == sorted(storage.POINTS)


def old_folder(folder: Path) -> Path:
    for name, content in (("file", OLD), ("lines", b"old line\n"), ("old", b"x")):
        (folder / name).write_bytes(content)
    return folder


def process(folder: Path, point: str) -> int:
    return subprocess.run([sys.executable, "-c", PROCESS, folder, point], check=False).returncode


@pytest.mark.parametrize("point", storage.POINTS)
def test_a_kill_at_any_point_leaves_the_old_or_the_new(tmp_path, point):
    folder = old_folder(tmp_path)
    assert process(folder, point) == -signal.SIGKILL
    found = (folder / "file").read_bytes(), storage.read_lines(folder / "lines"), (folder / "old").exists()
    assert found == CRASHES[point]
    assert process(folder, "none") == 0  # the dead owner's lock is free
    assert sorted(path.name for path in folder.iterdir()) == ["file", "lines", "lock"]
    assert (folder / "file").read_bytes() == NEW


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("point", storage.POINTS)
def test_a_disk_that_refuses_leaves_the_old_or_the_new(tmp_path, monkeypatch, point, code):
    folder = old_folder(tmp_path)

    def refuse(reached: str, path: Path) -> None:
        if reached == point:
            raise OSError(code, os.strerror(code))

    def work() -> None:
        with storage.lock(folder / "lock", wait=False):
            storage.write_bytes(folder / "file", NEW)
            storage.append_lines(folder / "lines", ["new line"])
            storage.remove(folder / "old")

    monkeypatch.setattr(storage, "fault", refuse)
    with pytest.raises(storage.StorageError, match=rf"{folder}/\w+: {os.strerror(code)}") as refused:
        work()
    if point in ("written", "synced"):
        assert f"after {len(NEW)} bytes" in str(refused.value)
    found = (folder / "file").read_bytes(), storage.read_lines(folder / "lines"), (folder / "old").exists()
    assert found == CRASHES[point]
    assert {path.name for path in folder.iterdir()} - {"old"} == {"file", "lines", "lock"}  # nothing half-made
    monkeypatch.undo()
    work()


def test_a_disk_that_is_full_is_named_with_how_far_it_went(tmp_path):
    path = tmp_path / "file"
    storage.write_text(path, "first")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (70_001, limit[1]))
    try:
        with pytest.raises(storage.StorageError, match=rf"cannot write {path}: File too large after 70001 bytes"):
            storage.write_bytes(path, bytes(90_001))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert path.read_text() == "first"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
    with pytest.raises(storage.StorageError, match="cannot append to /dev/full: No space left on device"):
        storage.append_lines(Path("/dev/full"), ["x"])


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    inside = tmp_path / "file" / "deeper" / "x"
    for action in (
        lambda: storage.write_text(inside, "x"),
        lambda: storage.append_lines(inside, ["x"]),
        lambda: storage.remove(inside.parent),
        lambda: storage.lock(inside, wait=False).__enter__(),
    ):
        with pytest.raises(storage.StorageError, match=rf"cannot \w+( to)? {tmp_path}/file/deeper.*: \S"):
            action()
    with pytest.raises(storage.StorageError, match=f": {tmp_path}/file is a file, not a folder"):
        storage.write_text(inside, "x")


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


def test_a_reader_never_sees_half_a_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    storage.write_bytes(path, OLD)
    monkeypatch.setattr(storage, "fault", lambda point, path: time.sleep(0.01))

    def half(file: BinaryIO) -> None:
        file.write(NEW[:7])
        file.flush()
        time.sleep(0.02)
        file.write(NEW[7:])

    def seen(write: Callable[[], None]) -> set[bytes]:
        found = set()
        writer = threading.Thread(target=write)
        writer.start()
        while writer.is_alive():
            found.add(path.read_bytes())
        writer.join()
        return found

    def careful() -> None:
        with storage.atomic(path) as file:
            half(file)

    def careless() -> None:
        with path.open("wb") as file:
            half(file)

    assert seen(careful) <= {OLD, NEW}
    assert seen(careless) - {OLD, NEW}  # control
    assert path.read_bytes() == NEW


def test_a_torn_last_line_is_dropped(tmp_path):
    path = tmp_path / "lines"
    assert storage.read_lines(path) == []
    for lines in (["a"], [], ["b\u2028c", "d"]):
        storage.append_lines(path, lines)
    with path.open("ab") as file:
        file.write(b'{"step": 3, "tr')
    assert storage.read_lines(path) == ["a", "b\u2028c", "d"]


def test_a_line_that_is_not_utf_8_is_named_with_its_path(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n\xff\n')
    with pytest.raises(storage.StorageError, match=rf"{path} is damaged, it is not UTF-8"):
        storage.read_lines(path)


def temporary_of(folder: Path, host: str, process: int) -> Path:
    path = folder / f".file.{host}.{process}.{'0' * 8}.tmp"
    path.write_bytes(b"half")
    return path


def test_only_what_no_living_process_writes_is_removed(tmp_path):
    here, dead = os.uname().nodename, subprocess.Popen([sys.executable, "-S", "-c", ""])
    dead.wait()
    gone = [temporary_of(tmp_path, here, dead.pid), temporary_of(tmp_path, "elsewhere", 3)]
    stays = [temporary_of(tmp_path, here, os.getpid()), temporary_of(tmp_path, "elsewhere.org", dead.pid)]
    for path, hours in ((gone[1], 25), (stays[1], 23)):  # of another host, whose processes are not seen here: a day
        os.utime(path, times=(then := time.time() - hours * 3600, then))
    folder = tmp_path / f".export.{here}.{dead.pid}.{'0' * 8}.tmp"
    (folder / "part").mkdir(parents=True)
    storage.remove_unfinished(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted(stays)


def test_what_a_library_writes_is_staged_and_then_moved(tmp_path):
    with storage.staged(tmp_path / "export") as staging:
        assert staging.parent == tmp_path
        (staging / "model.bin").write_bytes(b"weights")
        assert not (tmp_path / "export").exists()
    assert [path.name for path in tmp_path.rglob("*")] == ["export", "model.bin"]
    with suppress(LookupError), storage.staged(tmp_path / "export") as staging:  # a failure leaves the old ones
        (staging / "model.bin").write_bytes(b"half")
        raise LookupError
    assert (tmp_path / "export" / "model.bin").read_bytes() == b"weights"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_held_lock_is_refused_and_a_dead_owners_taken_over(tmp_path):
    path = tmp_path / "lock"
    program = (
        "import sys, pathlib, time; from aiayn.core import storage\n"
        f"with storage.lock(pathlib.Path({str(path)!r}), wait=False):\n    print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"held\n"
        with pytest.raises(storage.StorageError, match=f"process {owner.pid} on"), storage.lock(path, wait=False):
            pass
        owner.kill()
        owner.wait()
    with storage.lock(path, wait=False):
        pass


def test_a_lock_that_the_disk_refuses_is_an_error_of_storage(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # stands for a full disk: the lock is made, not written
    try:
        with (
            pytest.raises(storage.StorageError, match=r"cannot lock .*/lock: File too large"),
            storage.lock(tmp_path / "lock", wait=False),
        ):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_reader_that_leaves_is_no_error_of_storage(tmp_path):
    with pytest.raises(BrokenPipeError), storage.atomic(tmp_path / "file"):
        raise BrokenPipeError
    assert list(tmp_path.iterdir()) == []


def test_who_waits_for_a_lock_says_once_for_whom_and_gets_it(tmp_path, monkeypatch):
    path, told, turns, pauses = tmp_path / "lock", [], [], []
    with ExitStack() as owner:
        owner.enter_context(storage.lock(path, wait=False))

        def pause(seconds: float) -> None:
            pauses.append(seconds)
            turns.append(path.read_text())
            if len(turns) == 7:
                owner.close()

        monkeypatch.setattr(storage.time, "sleep", pause)
        with storage.lock(path, wait=True, report=told.append):
            assert pauses == [storage.LOCK_SECONDS] * 7
    mine = f"process {os.getpid()} on {os.uname().nodename}"
    assert turns == [mine] * 7
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

        waits = storage.lock(path, wait=True, report=signalled)
        with pytest.raises(Interrupted, match="stopped by SIGTERM"):
            waits.__enter__()
        owner.close()
        with storage.lock(path, wait=False):  # it has taken nothing
            pass
