"""Downloads against a server of this machine: whole, broken off, resumed, wrong; never half a file under its name."""

import errno
import hashlib
import os
import random
import re
import socket
import struct

import pytest

from aiayn import download, storage
from aiayn.corpus import DataError
from aiayn.download import Remote, fetch

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
        DataError, match=r"broke off 8 times, the last time with: 503 .*what came is kept.*data\.source"
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
    with pytest.raises(DataError, match=f"{re.escape(remote.url)}: the server answers {code}"):
        fetch(remote, tmp_path, received)
    assert len(server.asked) == 1


def test_a_server_that_is_gone_is_named(server, remote, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with pytest.raises(DataError, match=f"127.0.0.1:{port}/x.tgz broke off 8 times.*refused"):
        fetch(Remote(f"http://127.0.0.1:{port}/x.tgz", 3, "0" * 64), tmp_path, received)


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


def test_a_file_that_was_damaged_later_is_refused_with_the_command_that_repairs_it(server, remote, tmp_path):
    path = fetch(remote, tmp_path, received)
    download.check(remote, path)
    path.write_bytes(ALTERED)
    with pytest.raises(DataError, match=f"{sha256(ALTERED)}; expected .*{remote.sha256}; remove it with `rm "):
        download.check(remote, path)
    path.unlink()
    with pytest.raises(DataError, match=r"cannot read .*corpus\.tgz: No such file"):
        download.check(remote, path)
