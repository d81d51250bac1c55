"""Downloads against a server of this machine: whole, broken off, resumed, wrong; never half a file under its name."""

import errno
import hashlib
import os
import random
import re
import signal
import socket
import struct
import threading
import time
import urllib.error
from contextlib import nullcontext

import pytest

from aiayn.core import storage
from aiayn.core.signals import Interrupted, StopFlag, interrupting
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


def html(answer, content) -> None:
    answer.start(200, len(HTML), ("Content-Type", "text/html"))
    answer.wfile.write(HTML)


def ends_after(count: int):
    """Promises all that is left, sends so many bytes and closes the connection."""

    def fault(answer, content) -> None:
        start = int((answer.headers["Range"] or "bytes=0-")[6:-1])
        total = len(content)
        answer.start(206 if start else 200, total - start, ("Content-Range", f"bytes {start}-{total - 1}/{total}"))
        answer.wfile.write(content[start : start + count])

    return fault


def reset_after(count: int):
    """The same, and the connection is torn down hard."""

    def fault(answer, content) -> None:
        ends_after(count)(answer, content)
        answer.wfile.flush()
        answer.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        answer.connection.close()

    return fault


RESET = reset_after(300_007)


def knows_no_ranges(answer, content) -> None:
    answer.start(200, len(content))
    answer.wfile.write(content)


def without_length(answer, content) -> None:
    answer.send_response(200)
    answer.end_headers()
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


@pytest.mark.parametrize("broken", [ends_after(300_007), RESET], ids=["ends", "reset"])
def test_a_connection_that_breaks_off_is_resumed_where_it_broke(server, remote, tmp_path, broken):
    server.faults = [broken]
    assert fetch(remote, tmp_path, received).read_bytes() == CONTENT
    (_, first), (_, second) = server.asked
    assert first is None
    if broken is not RESET:  # which may also lose what the kernel had for us
        assert second == "bytes=300007-"


def test_the_next_command_resumes_what_one_left(server, remote, tmp_path):
    server.faults = [ends_after(50_021)] + [status(503)] * (download.ATTEMPTS - 1)
    with pytest.raises(
        download.Unavailable, match=r"broke off 8 times, the last time with: 503 .*what came is kept, and the same "
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


@pytest.fixture
def gone() -> Remote:
    """A file on a server that is not there."""
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    return Remote(f"http://127.0.0.1:{port}/x.tgz", 3, "0" * 64)


def test_a_server_that_is_gone_is_named_and_every_attempt_is_told_as_it_fails(gone, tmp_path, monkeypatch):
    monkeypatch.setattr(download, "FIRST_PAUSE_SECONDS", 1.0)
    pauses, told = [], []
    monkeypatch.setattr(download.time, "sleep", pauses.append)
    with pytest.raises(download.Unavailable) as refused:
        fetch(gone, tmp_path, received, told.append)
    unreached = (
        f"{gone.url} could not be reached in 8 attempts, the last time with: Connection refused; try again later"
    )
    assert str(refused.value) == unreached
    assert pauses == [2.0**n for n in range(7)]
    assert told == [
        f"attempt {n + 2} of 8 in {pause:.0f} s: {gone.url}: Connection refused" for n, pause in enumerate(pauses)
    ]


def test_without_a_network_it_is_not_said_that_anything_broke_off_but_what_came_before_is_kept(
    gone, tmp_path, monkeypatch
):
    def unknown(*arguments, **options):
        raise urllib.error.URLError(socket.gaierror(socket.EAI_NONAME, "Name or service not known"))

    monkeypatch.setattr(download.urllib.request, "urlopen", unknown)
    words = "could not be reached in 8 attempts, the last time with: Name or service not known; "
    with pytest.raises(download.Unavailable, match=f"x.tgz {words}try again later$"):
        fetch(gone, tmp_path, received)
    download.partial_path(gone, tmp_path).write_bytes(b"x")
    with pytest.raises(download.Unavailable, match=f"x.tgz {words}what came is kept, and the same command goes on"):
        fetch(gone, tmp_path, received)


# Signals


class Silent:
    """A server that asks this process to stop, and then is silent until it may go on."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()

    def __call__(self, *arguments, **options) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        self.goes_on.wait(20)


@pytest.fixture
def silent() -> Silent:
    return Silent()


def test_a_signal_ends_a_download_while_the_server_is_silent_and_what_came_is_kept(server, remote, tmp_path, silent):
    kept, heard = threading.Event(), []

    def fault(answer, content) -> None:
        answer.start(200, len(content))
        answer.wfile.write(content[:50_021])
        kept.wait(20)
        time.sleep(0.01)  # until the next block is waited for
        silent()
        answer.wfile.write(content[50_021:])

    def hear(there: int) -> None:
        heard.append(there)
        if there == 50_021:
            kept.set()

    server.faults = [fault]
    with interrupting(), pytest.raises(Interrupted, match="stopped by SIGTERM"):
        fetch(remote, tmp_path, hear)
    silent.goes_on.set()
    assert heard[-1] == 50_021
    assert not (tmp_path / NAME).exists()
    assert fetch(remote, tmp_path, received).read_bytes() == CONTENT
    assert server.asked == [(NAME, None), (NAME, "bytes=50021-")]


def test_while_signals_are_only_noted_a_download_goes_on(server, remote, tmp_path, silent):
    """Control of the tests beside it: the signal alone stops nothing."""
    silent.goes_on.set()

    def fault(answer, content) -> None:
        silent()
        answer.whole(content)

    server.faults = [fault]
    with StopFlag() as stop:
        assert fetch(remote, tmp_path, received).read_bytes() == CONTENT
        assert stop.asked == "SIGTERM"


def test_a_signal_ends_a_download_before_the_server_is_found(remote, tmp_path, silent, monkeypatch):
    """Names are looked up in a call that no signal ends."""

    def look_up(*arguments, **options):
        silent()
        raise urllib.error.URLError("nowhere")

    monkeypatch.setattr(download.urllib.request, "urlopen", look_up)
    with interrupting(), pytest.raises(Interrupted):
        fetch(remote, tmp_path, received, pytest.fail)
    silent.goes_on.set()


@pytest.mark.parametrize("is_sent", [True, False])  # control: without a signal the pause lasts
def test_a_signal_ends_the_pause_between_two_attempts(server, remote, tmp_path, monkeypatch, is_sent):
    monkeypatch.setattr(download, "FIRST_PAUSE_SECONDS", 20.0 if is_sent else 0.3)
    server.faults = [status(503)]
    timer = threading.Timer(0.1, lambda: is_sent and os.kill(os.getpid(), signal.SIGTERM))
    with interrupting(), pytest.raises(Interrupted) if is_sent else nullcontext():
        fetch(remote, tmp_path, received, lambda message: timer.start())
    timer.join()
    assert len(server.asked) == (1 if is_sent else 2)


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
def test_another_file_is_refused_with_both_sizes_and_both_sums_and_leaves_nothing(
    server, remote, tmp_path, other, found
):
    server.faults = [sends(other)]
    with pytest.raises(DataError, match=f"{found}.*; expected 700001 bytes with SHA-256 {remote.sha256}"):
        fetch(remote, tmp_path, received)
    assert os.listdir(tmp_path) == []
    assert len(server.asked) == 1
    assert fetch(remote, tmp_path, received).read_bytes() == CONTENT  # the file itself is still to be had


def test_an_error_page_in_the_middle_leaves_what_came_before(server, remote, tmp_path):
    server.faults = [ends_after(50_021), html]
    with pytest.raises(DataError, match=rf"{len(HTML)} bytes with SHA-256 {sha256(HTML)}, text/html; expected 700001"):
        fetch(remote, tmp_path, received)
    assert fetch(remote, tmp_path, received).read_bytes() == CONTENT
    assert server.asked[-1] == (NAME, "bytes=50021-")


@pytest.mark.parametrize("answer", [knows_no_ranges, wrong_range, status(416)], ids=["ignored", "others", "416"])
def test_a_server_that_does_not_resume_is_asked_for_everything(server, remote, tmp_path, answer):
    server.faults = [ends_after(50_021), answer]
    assert fetch(remote, tmp_path, received).read_bytes() == CONTENT
    assert [wanted for _, wanted in server.asked][:2] == [None, "bytes=50021-"]


def test_a_server_that_says_no_length_is_believed_only_by_the_sum(server, remote, tmp_path):
    server.faults = [without_length]
    assert fetch(remote, tmp_path, received).read_bytes() == CONTENT


def test_a_changed_beginning_is_found_at_the_end_and_all_of_it_is_asked_for_again(server, remote, tmp_path):
    """Control: without the sum, the splice of two files would have the right size."""
    download.partial_path(remote, tmp_path).write_bytes(b"\0" * 50_021)
    with pytest.raises(DataError, match=r"700001 bytes with SHA-256 .*; expected 700001 bytes"):
        fetch(remote, tmp_path, received)
    assert fetch(remote, tmp_path, received).read_bytes() == CONTENT
    assert server.asked == [(NAME, "bytes=50021-"), (NAME, None)]


def test_a_disk_that_refuses_is_named_and_is_no_fault_of_the_network(server, remote, tmp_path, monkeypatch):
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
def test_a_file_that_was_damaged_later_is_refused_with_what_repairs_it(server, remote, tmp_path, brought, remedy):
    path = fetch(remote, tmp_path, received)
    download.check(remote, path, brought=brought)
    path.write_bytes(ALTERED)
    with pytest.raises(DataError, match=f"{sha256(ALTERED)}; expected .*{remote.sha256}; {remedy}"):
        download.check(remote, path, brought=brought)
    path.unlink()
    with pytest.raises(DataError, match=r"cannot read .*corpus\.tgz: No such file"):
        download.check(remote, path, brought=brought)
