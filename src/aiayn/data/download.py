"""Files from the web: resumed where they broke off, and known by size and SHA-256 before they get their name."""

import hashlib
import http.client
import shlex
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from aiayn.core import storage
from aiayn.data.parallel_text import DataError

ATTEMPTS = 8
"""How often one command asks for a file; what came before stays, so that each goes on where the last broke off."""

FIRST_PAUSE_SECONDS = 1.0
"""Before the second attempt; twice as long before each further one."""

TIMEOUT_SECONDS = 60.0

_BLOCK = 2**18
# Answers that may be another one in a minute; every other error of a server is its last word
_PASSING = {408, 425, 429, *range(500, 600)}


@dataclass(frozen=True)
class Remote:
    """A file on a server: where, how many bytes, and which."""

    url: str
    size: int
    sha256: str

    @property
    def name(self) -> str:
        """Its name in a folder of ours."""
        return self.url.rpartition("/")[2]


class Unavailable(DataError):
    """The server does not give a file: it refuses, is not to be reached, or breaks off again and again."""


class _BrokenOff(Exception):
    """An attempt that failed for a reason that may pass."""


def fetch(
    remote: Remote,
    folder: Path,
    received: Callable[[int], None],
    report: Callable[[str], None] = lambda message: None,
) -> Path:
    """The file in `folder`, whole; `received` is called with how many bytes there are, `report` with what failed.

    Raises DataError with both sizes and SHA-256 when something else came, Unavailable when the server does not give it.
    """
    path, partial = folder / remote.name, _partial(remote, folder)
    if path.exists():
        return path
    for attempt in range(1, ATTEMPTS + 1):
        try:
            _receive(remote, partial, received)
            break
        except _BrokenOff as error:
            if attempt == ATTEMPTS:
                kept = "what came is kept, and the same command goes on from there"
                again = kept if partial.exists() else "try again later"
                raise Unavailable(
                    f"{remote.url} failed {ATTEMPTS} times, the last time with: {error}; {again}"
                ) from error
            pause = FIRST_PAUSE_SECONDS * 2 ** (attempt - 1)
            report(f"attempt {attempt + 1} of {ATTEMPTS} in {pause:.0f} s: {remote.url}: {error}")
            time.sleep(pause)
    try:
        _refuse_other(remote, partial, remote.url, "")
    except DataError:
        storage.remove(partial)
        raise
    storage.adopt(partial, path)
    return path


def check(remote: Remote, path: Path, *, brought: bool) -> None:
    """DataError with both sizes and SHA-256 when `path` is not that file; what was `brought` is to be replaced."""
    again = f"remove it with `rm {shlex.quote(str(path))}` and give the same command again"
    try:
        _refuse_other(remote, path, str(path), f"; replace it by {remote.url}" if brought else f"; {again}")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def missing_bytes(remote: Remote, folder: Path) -> int:
    """What is still to be asked for."""
    return 0 if (folder / remote.name).exists() else remote.size - _bytes_of(_partial(remote, folder))


def _partial(remote: Remote, folder: Path) -> Path:
    """Where a file lies until it is whole."""
    return folder / f".{remote.name}.part"


def _bytes_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _receive(remote: Remote, partial: Path, received: Callable[[int], None]) -> None:
    """Asks once for what is missing and appends it; _BrokenOff when less came than was promised."""
    start = _bytes_of(partial)
    if start >= remote.size:
        return
    headers = {"User-Agent": "aiayn", "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    try:
        with _asked(urllib.request.Request(remote.url, headers=headers)) as answer:
            _append(remote, partial, start, answer, received)
    except urllib.error.HTTPError as error:
        said = f"{error.code} {error.reason}"
        error.close()
        if error.code == 416:  # the server holds less than we have: ours cannot be the beginning of its file
            storage.remove(partial)
        elif error.code not in _PASSING:
            raise Unavailable(f"{remote.url}: the server answers {said}") from error
        raise _BrokenOff(said) from error
    except (OSError, http.client.HTTPException) as error:  # of the network: storage has its own
        cause = getattr(error, "reason", error)  # of a URLError
        raise _BrokenOff(getattr(cause, "strerror", None) or str(cause) or type(cause).__name__) from error


def _asked(request: urllib.request.Request) -> http.client.HTTPResponse:
    """The server's answer, got by a thread: no signal interrupts the lookup of a host's name."""
    answer: Future[http.client.HTTPResponse] = Future()

    def ask() -> None:
        try:
            answer.set_result(urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS))
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=ask, daemon=True).start()
    return answer.result()


def _append(
    remote: Remote, partial: Path, start: int, answer: http.client.HTTPResponse, received: Callable[[int], None]
) -> None:
    length = answer.headers.get("Content-Length")
    if answer.status == 206:
        first, _, total = answer.headers.get("Content-Range", "").removeprefix("bytes ").partition("/")
        if first.partition("-")[0] != str(start):
            storage.remove(partial)
            raise _BrokenOff(f"asked for the bytes from {start}, the server sends {first or 'others'}")
    else:
        start, total = 0, length or "*"
    if total not in ("*", str(remote.size)):
        # Something else, an error page perhaps: what came before stays as it is
        raise _refusal(remote, remote.url, _measured(answer, remote.size))
    if start == 0:
        storage.remove(partial)
    arrived = start
    with storage.appending(partial) as file:
        while block := answer.read1(_BLOCK):
            storage.append_bytes(file, partial, block)
            arrived += len(block)
            received(arrived)
            if arrived > remote.size:
                break
    if arrived < (remote.size if length is None else start + int(length)):
        raise _BrokenOff(f"the connection ended after {arrived} of {remote.size} bytes")


def _measured(answer: http.client.HTTPResponse, limit: int) -> str:
    digest, size = hashlib.sha256(), 0
    while size <= limit and (block := answer.read1(_BLOCK)):
        digest.update(block)
        size += len(block)
    kind = answer.headers.get_content_type()
    return f"{size} bytes" + (f" with SHA-256 {digest.hexdigest()}, {kind}" if size <= limit else " and more")


def _refuse_other(remote: Remote, path: Path, where: str, remedy: str) -> None:
    size, sha256 = path.stat().st_size, storage.sha256(path)
    if (size, sha256) != (remote.size, remote.sha256):
        raise _refusal(remote, where, f"{size} bytes with SHA-256 {sha256}", remedy)


def _refusal(remote: Remote, where: str, measured: str, remedy: str = "") -> DataError:
    return DataError(f"{where}: {measured}; expected {remote.size} bytes with SHA-256 {remote.sha256}{remedy}")
