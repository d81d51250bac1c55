"""Files from the web: resumed where they broke off, and known by size and SHA-256 before they get their name."""

import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from aiayn.core import storage
from aiayn.data.parallel_text import DataError

ATTEMPTS = 8  # of one command; each goes on where the last broke off
FIRST_PAUSE_SECONDS = 1.0  # before the second attempt; twice as long before each further one
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


def fetch(remote: Remote, folder: Path, received: Callable[[int], None], report: Callable[[str], None]) -> Path:
    """The file in `folder`, whole; `received` is called with how many bytes there are, `report` with what failed.

    Raises DataError with both sizes and SHA-256 when something else came, Unavailable when the server does not give it.
    """
    path, partial = folder / remote.name, _partial(remote, folder)
    for attempt in range(1, ATTEMPTS + 1):
        try:
            _receive(remote, partial, received)
            break
        except _BrokenOff as error:
            if attempt == ATTEMPTS:
                again = "what came is kept, and the same command goes on from there"
                raise Unavailable(f"{remote.url} failed {ATTEMPTS} times, at last with: {error}; {again}") from error
            pause = FIRST_PAUSE_SECONDS * 2 ** (attempt - 1)
            report(f"attempt {attempt + 1} of {ATTEMPTS} in {pause:.0f} s: {remote.url}: {error}")
            time.sleep(pause)
    if wrong := difference(remote, partial):
        storage.remove(partial)
        raise DataError(f"{remote.url}: {wrong}")
    storage.adopt(partial, path)
    return path


def missing_bytes(remote: Remote, folder: Path) -> int:
    """What is still to be asked for."""
    return 0 if (folder / remote.name).exists() else remote.size - _bytes_of(_partial(remote, folder))


def _partial(remote: Remote, folder: Path) -> Path:
    return folder / f".{remote.name}.part"


def _bytes_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _receive(remote: Remote, partial: Path, received: Callable[[int], None]) -> None:
    """Asks once for what is missing and appends it; _BrokenOff when less came than was promised."""
    start = _bytes_of(partial)
    if start >= remote.size:
        return
    wanted = {"Range": f"bytes={start}-"} if start else {}
    request = urllib.request.Request(remote.url, headers={"User-Agent": "aiayn", **wanted})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
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


def _append(
    remote: Remote, partial: Path, start: int, answer: http.client.HTTPResponse, received: Callable[[int], None]
) -> None:
    if answer.status == 206:
        first, _, total = answer.headers.get("Content-Range", "").removeprefix("bytes ").partition("/")
        if first.partition("-")[0] != str(start):
            storage.remove(partial)
            raise _BrokenOff(f"asked for the bytes from {start}, the server sends {first or 'others'}")
    else:
        start, total = 0, answer.headers.get("Content-Length", "*")
    if total not in ("*", str(remote.size)):
        # Something else, an error page perhaps: what came before stays as it is
        raise DataError(f"{remote.url}: {total} bytes of {answer.headers.get_content_type()}; {_expected(remote)}")
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
    if arrived < remote.size:
        raise _BrokenOff(f"the connection ended after {arrived} of {remote.size} bytes")


def difference(remote: Remote, path: Path) -> str:
    """What tells a file from the one on the server: both sizes and SHA-256; empty where it is the same."""
    size, sha256 = path.stat().st_size, storage.sha256(path)
    same = (size, sha256) == (remote.size, remote.sha256)
    return "" if same else f"{size} bytes with SHA-256 {sha256}; {_expected(remote)}"


def _expected(remote: Remote) -> str:
    return f"expected {remote.size} bytes with SHA-256 {remote.sha256}"
