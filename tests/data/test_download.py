"""Downloads against a server of this machine: whole, broken off, resumed, wrong; never half a file under its name."""

import errno
import hashlib
import os
import random
import re
import signal
import threading
import time

import pytest

from aiayn.core import storage
from aiayn.core.signals import Interrupted, interrupting
from aiayn.data import download
from aiayn.data.download import Remote, fetch
from aiayn.data.parallel_text import DataError

CONTENT = random.Random(11).randbytes(700_001)
NAME = "corpus.tgz"
HTML = b"<html>404 not found</html>\n"


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(download, "FIRST_PAUSE_SECONDS", 0.0)


@pytest.fixture
def remote(server) -> Remote:
    server.files[NAME] = CONTENT
    return Remote(server.url(NAME), len(CONTENT), hashlib.sha256(CONTENT).hexdigest())


def received(there: int) -> None:
    pass


def status(code: int):
    return lambda answer, content: answer.send_error(code)


def ends_after(count: int):
    """Promises all that is left, sends so many bytes and closes the connection."""

    def fault(answer, content) -> None:
        start = int((answer.headers["Range"] or "bytes=0-")[6:-1])
        total = len(content)
        answer.start(206 if start else 200, total - start, ("Content-Range", f"bytes {start}-{total - 1}/{total}"))
        answer.wfile.write(content[start : start + count])

    return fault


def knows_no_ranges(answer, content) -> None:
    answer.start(200, len(content))
    answer.wfile.write(content)


def wrong_range(answer, content) -> None:
    answer.start(206, 5, ("Content-Range", f"bytes 7-11/{len(content)}"))
    answer.wfile.write(content[7:12])


def sends(other: bytes):
    def fault(answer, content) -> None:
        answer.start(200, len(other))
        answer.wfile.write(other)

    return fault


def test_a_file_comes_whole_under_its_name_and_is_asked_for_once(server, remote, tmp_path):
    heard: list[int] = []
    path = fetch(remote, tmp_path, heard.append)
    assert path.read_bytes() == CONTENT
    assert heard == sorted(heard)
    assert heard[-1] == len(CONTENT)
    assert fetch(remote, tmp_path, pytest.fail) == path
    assert server.asked == [(NAME, None)]
    assert os.listdir(tmp_path) == [NAME]


def test_a_connection_that_breaks_off_is_resumed_where_it_broke(server, remote, tmp_path):
    server.faults = [ends_after(300_007)]
    assert fetch(remote, tmp_path, received).read_bytes() == CONTENT
    assert server.asked == [(NAME, None), (NAME, "bytes=300007-")]


def test_the_next_command_resumes_what_one_left(server, remote, tmp_path):
    server.faults = [ends_after(50_021)] + [status(503)] * (download.ATTEMPTS - 1)
    with pytest.raises(
        download.Unavailable, match=r"failed 8 times, the last time with: 503 .*what came is kept, and the same "
    ):
        fetch(remote, tmp_path, received)
    assert not (tmp_path / NAME).exists()
    assert download.missing_bytes(remote, tmp_path) == len(CONTENT) - 50_021
    assert len(server.asked) == download.ATTEMPTS
    assert fetch(remote, tmp_path, received).read_bytes() == CONTENT
    assert server.asked[-1] == (NAME, "bytes=50021-")
    assert download.missing_bytes(remote, tmp_path) == 0


@pytest.mark.parametrize("code", [503, 500, 429])
def test_a_server_that_is_busy_is_asked_again(server, remote, tmp_path, code):
    server.faults = [status(code), status(code)]
    assert fetch(remote, tmp_path, received).read_bytes() == CONTENT
    assert len(server.asked) == 3


@pytest.mark.parametrize("code", [404, 403])
def test_a_file_that_is_not_there_is_asked_for_once(server, remote, tmp_path, code):
    server.faults = [status(code)] * 2
    with pytest.raises(download.Unavailable, match=f"{re.escape(remote.url)}: the server answers {code}"):
        fetch(remote, tmp_path, received)
    assert len(server.asked) == 1


def test_a_signal_ends_a_download_while_the_server_is_silent(server, remote, tmp_path):
    kept, goes_on, heard = threading.Event(), threading.Event(), []

    def fault(answer, content) -> None:
        answer.start(200, len(content))
        answer.wfile.write(content[:50_021])
        kept.wait(20)
        time.sleep(0.01)  # until the next block is waited for
        os.kill(os.getpid(), signal.SIGTERM)
        goes_on.wait(20)

    def hear(there: int) -> None:
        heard.append(there)
        if there == 50_021:
            kept.set()

    server.faults = [fault]
    with interrupting(), pytest.raises(Interrupted, match="stopped by SIGTERM"):
        fetch(remote, tmp_path, hear)
    goes_on.set()
    assert heard[-1] == 50_021
    assert not (tmp_path / NAME).exists()
    assert fetch(remote, tmp_path, received).read_bytes() == CONTENT
    assert server.asked == [(NAME, None), (NAME, "bytes=50021-")]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


ALTERED = CONTENT[:350_000] + bytes([CONTENT[350_000] ^ 4]) + CONTENT[350_001:]


@pytest.mark.parametrize(
    ("other", "found"),
    [
        (CONTENT[:-3], f"699998 bytes with SHA-256 {sha256(CONTENT[:-3])}"),
        (HTML, f"{len(HTML)} bytes with SHA-256 {sha256(HTML)}"),
        (ALTERED, f"700001 bytes with SHA-256 {sha256(ALTERED)}"),
        (CONTENT + b"more" * 300_000, r"\d+ bytes and more"),
        (b"", f"0 bytes with SHA-256 {sha256(b'')}"),
    ],
    ids=["truncated", "html", "altered", "too large", "empty"],
)
def test_another_file_is_refused_with_both_sizes_and_sums(server, remote, tmp_path, other, found):
    server.faults = [sends(other)]
    with pytest.raises(DataError, match=f"{found}.*; expected 700001 bytes with SHA-256 {remote.sha256}"):
        fetch(remote, tmp_path, received)
    assert os.listdir(tmp_path) == []
    assert len(server.asked) == 1
    assert fetch(remote, tmp_path, received).read_bytes() == CONTENT  # the file itself is still to be had


@pytest.mark.parametrize("answer", [knows_no_ranges, wrong_range, status(416)], ids=["ignored", "others", "416"])
def test_a_server_that_does_not_resume_is_asked_for_everything(server, remote, tmp_path, answer):
    server.faults = [ends_after(50_021), answer]
    assert fetch(remote, tmp_path, received).read_bytes() == CONTENT
    assert [wanted for _, wanted in server.asked][:2] == [None, "bytes=50021-"]


def test_a_disk_that_refuses_is_no_fault_of_the_network(server, remote, tmp_path, monkeypatch):
    def refuse(point: str, path) -> None:
        if point == "synced":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(storage, "fault", refuse)
    with pytest.raises(storage.StorageError, match=rf"cannot write .*{NAME}: No space left"):
        fetch(remote, tmp_path, received)
    assert len(server.asked) == 1
    monkeypatch.undo()
    assert fetch(remote, tmp_path, received).read_bytes() == CONTENT  # all of it is there: it only gets its name
    assert len(server.asked) == 1


@pytest.mark.parametrize(("brought", "remedy"), [(False, "remove it with `rm .*corpus"), (True, "replace it by http:")])
def test_a_file_damaged_later_is_refused_with_the_remedy(server, remote, tmp_path, brought, remedy):
    path = fetch(remote, tmp_path, received)
    download.check(remote, path, brought=brought)
    path.write_bytes(ALTERED)
    with pytest.raises(DataError, match=f"{sha256(ALTERED)}; expected .*{remote.sha256}; {remedy}"):
        download.check(remote, path, brought=brought)
    path.unlink()
    with pytest.raises(DataError, match=r"cannot read .*corpus\.tgz: No such file"):
        download.check(remote, path, brought=brought)
