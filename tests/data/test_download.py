"""Downloads against a server of this machine: whole, broken off, resumed, wrong; never half a file under its name."""

import errno
import hashlib
import os
import random
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from aiayn.core import storage
from aiayn.core.signals import Interrupted, interrupting
from aiayn.data import download
from aiayn.data.download import Remote
from aiayn.data.parallel_text import DataError

CONTENT = random.Random(11).randbytes(700_001)
NAME = "corpus.tgz"
ALTERED = CONTENT[:350_000] + bytes([CONTENT[350_000] ^ 4]) + CONTENT[350_001:]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture(autouse=True)
def pauses(monkeypatch) -> list[float]:
    """The seconds between the attempts, which no test waits for."""
    monkeypatch.setattr(download, "time", SimpleNamespace(sleep=(slept := list[float]()).append))
    return slept


@pytest.fixture
def remote(server) -> Remote:
    server.files[NAME] = CONTENT
    return Remote(server.url(NAME), len(CONTENT), sha256(CONTENT))


def fetch(remote: Remote, folder: Path, received=lambda there: None) -> Path:
    return download.fetch(remote, folder, received, report=lambda message: None)


def status(code: int):
    return lambda answer, content: answer.send_error(code)


def sends(other: bytes, status: int = 200, *headers: tuple[str, str]):
    def fault(answer, content) -> None:
        answer.start(status, len(other), *headers)
        answer.wfile.write(other)

    return fault


def ends_early(answer, content) -> None:
    """Promises all, sends 50 021 bytes and closes the connection."""
    answer.start(200, len(content))
    answer.wfile.write(content[:50_021])


WRONG_RANGE = sends(CONTENT[7:12], 206, ("Content-Range", f"bytes 7-11/{len(CONTENT)}"))


def test_a_file_comes_whole_under_its_name(server, remote, tmp_path):
    heard: list[int] = []
    path = fetch(remote, tmp_path, heard.append)
    assert path.read_bytes() == CONTENT
    assert heard[-1] == len(CONTENT)
    assert server.asked == [(NAME, None)]
    assert os.listdir(tmp_path) == [NAME]


def test_the_next_command_resumes_what_one_left(server, remote, tmp_path, pauses):
    server.faults = [ends_early, status(429)] + [status(503)] * (download.ATTEMPTS - 2)
    with pytest.raises(download.Unavailable, match=r"failed 8 times, at last with: 503 .*what came is kept"):
        fetch(remote, tmp_path)
    assert download.missing_bytes(remote, tmp_path) == len(CONTENT) - 50_021
    assert len(server.asked) == download.ATTEMPTS
    assert pauses == [1, 2, 4, 8, 16, 32, 64]
    assert fetch(remote, tmp_path).read_bytes() == CONTENT
    assert server.asked[-1] == (NAME, "bytes=50021-")
    assert download.missing_bytes(remote, tmp_path) == 0


def test_a_signal_ends_a_download_while_the_server_is_silent(server, remote, tmp_path):
    kept, goes_on = threading.Event(), threading.Event()

    def fault(answer, content) -> None:
        ends_early(answer, content)
        kept.wait(20)
        time.sleep(0.01)  # until the next block is waited for
        os.kill(os.getpid(), signal.SIGTERM)
        goes_on.wait(20)

    server.faults = [fault]
    with interrupting(), pytest.raises(Interrupted, match="stopped by SIGTERM"):
        fetch(remote, tmp_path, lambda there: kept.set() if there == 50_021 else None)
    goes_on.set()
    assert os.listdir(tmp_path) == [f".{NAME}.part"]
    assert fetch(remote, tmp_path).read_bytes() == CONTENT
    assert server.asked == [(NAME, None), (NAME, "bytes=50021-")]


@pytest.mark.parametrize(
    ("other", "found"),
    [(ALTERED, f"700001 bytes with SHA-256 {sha256(ALTERED)}"), (b"<html>404</html>", "16 bytes of text")],
    ids=["altered", "html"],
)
def test_another_file_is_refused_with_both_sizes_and_sums(server, remote, tmp_path, other, found):
    server.faults = [sends(other)]
    with pytest.raises(DataError, match=f"{found}.*; expected 700001 bytes with SHA-256 {remote.sha256}"):
        fetch(remote, tmp_path)
    assert os.listdir(tmp_path) == []
    assert len(server.asked) == 1
    assert fetch(remote, tmp_path).read_bytes() == CONTENT  # the file itself is still to be had


@pytest.mark.parametrize("answer", [sends(CONTENT), WRONG_RANGE, status(416)], ids=["ignored", "others", "416"])
def test_a_server_that_does_not_resume_is_asked_for_everything(server, remote, tmp_path, answer):
    server.faults = [ends_early, answer]
    assert fetch(remote, tmp_path).read_bytes() == CONTENT
    assert [wanted for _, wanted in server.asked][:2] == [None, "bytes=50021-"]


def test_a_disk_that_refuses_is_no_fault_of_the_network(server, remote, tmp_path, monkeypatch):
    def refuse(point: str, path) -> None:
        if point == "synced":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(storage, "fault", refuse)
    with pytest.raises(storage.StorageError, match=rf"cannot write .*{NAME}: No space left"):
        fetch(remote, tmp_path)
    assert len(server.asked) == 1
    monkeypatch.undo()
    assert fetch(remote, tmp_path).read_bytes() == CONTENT  # all of it is there: it only gets its name
    assert len(server.asked) == 1
