"""Files from the web: resumed where they broke off, and known by size and SHA-256 before they get their name."""

import hashlib
import http.client
import shlex
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from aiayn import storage
from aiayn.corpus import DataError

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


class _Interrupted(Exception):
    """An attempt that failed for a reason that may pass."""


def fetch(remote: Remote, folder: Path, received: Callable[[int], None]) -> Path:
    """The file in `folder`, whole; `received` hears how many bytes are there. What is there already is not asked for.

    Raises DataError with both sizes and both SHA-256 when something else came, or when the server gives nothing.
    """
    path, partial = folder / remote.name, partial_path(remote, folder)
    if path.exists():
        return path
    for attempt in range(ATTEMPTS):
        try:
            _receive(remote, partial, received)
            break
        except _Interrupted as error:
            cause = error
            if attempt < ATTEMPTS - 1:
                time.sleep(FIRST_PAUSE_SECONDS * 2**attempt)
    else:
        raise DataError(
            f"{remote.url} broke off {ATTEMPTS} times, the last time with: {cause}; what came is kept, and the same"
            " command goes on from there; or bring the file yourself and give its folder as data.source=..."
        )
    size, sha256 = partial.stat().st_size, storage.sha256(partial)
    if (size, sha256) != (remote.size, remote.sha256):
        storage.remove(partial)
        raise _refusal(remote, remote.url, f"{size} bytes with SHA-256 {sha256}")
    storage.adopt(partial, path)
    return path


def check(remote: Remote, path: Path) -> None:
    """DataError with both sizes and both SHA-256 when `path` is not that file."""
    try:
        size, sha256 = path.stat().st_size, storage.sha256(path)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    if (size, sha256) != (remote.size, remote.sha256):
        remedy = f"; remove it with `rm {shlex.quote(str(path))}` and give the same command again"
        raise _refusal(remote, str(path), f"{size} bytes with SHA-256 {sha256}", remedy)


def missing_bytes(remote: Remote, folder: Path) -> int:
    """What is still to be asked for."""
    if (folder / remote.name).exists():
        return 0
    partial = partial_path(remote, folder)
    return remote.size - (partial.stat().st_size if partial.exists() else 0)


def partial_path(remote: Remote, folder: Path) -> Path:
    """Where a file lies until it is whole."""
    return folder / f".{remote.name}.part"


def _receive(remote: Remote, partial: Path, received: Callable[[int], None]) -> None:
    """Asks once for what is missing and appends it; _Interrupted when less came than was promised."""
    start = partial.stat().st_size if partial.exists() else 0
    if start >= remote.size:
        return
    headers = {"User-Agent": "aiayn", "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    try:
        with urllib.request.urlopen(urllib.request.Request(remote.url, headers=headers), timeout=TIMEOUT_SECONDS) as it:
            _append(remote, partial, start, it, received)
    except urllib.error.HTTPError as error:
        answer = f"{error.code} {error.reason}"
        error.close()
        if error.code == 416:  # the server holds less than we have: ours cannot be the beginning of its file
            storage.remove(partial)
        elif error.code not in _PASSING:
            raise DataError(f"{remote.url}: the server answers {answer}") from error
        raise _Interrupted(answer) from error
    except (OSError, http.client.HTTPException) as error:  # of the network: storage has its own
        raise _Interrupted(str(error) or type(error).__name__) from error


def _append(
    remote: Remote, partial: Path, start: int, answer: http.client.HTTPResponse, received: Callable[[int], None]
) -> None:
    length = answer.headers.get("Content-Length")
    if answer.status == 206:
        first, _, total = answer.headers.get("Content-Range", "").removeprefix("bytes ").partition("/")
        if first.partition("-")[0] != str(start):
            storage.remove(partial)
            raise _Interrupted(f"asked for the bytes from {start}, the server sends {first or 'others'}")
    else:
        start, total = 0, length or "*"
    if total not in ("*", str(remote.size)):
        # Something else, an error page perhaps: what came before stays as it is
        raise _refusal(remote, remote.url, _measured(answer, remote.size))
    if start == 0:
        storage.remove(partial)
    there = start
    with storage.appending(partial) as file:
        while there <= remote.size and (block := answer.read1(_BLOCK)):
            storage.append_bytes(file, partial, block)
            there += len(block)
            received(there)
    if there < (remote.size if length is None else start + int(length)):
        raise _Interrupted(f"the connection ended after {there} of {remote.size} bytes")


def _measured(answer: http.client.HTTPResponse, most: int) -> str:
    digest, size = hashlib.sha256(), 0
    while size <= most and (block := answer.read(_BLOCK)):
        digest.update(block)
        size += len(block)
    kind = answer.headers.get_content_type()
    return f"{size} bytes" + (f" with SHA-256 {digest.hexdigest()}, {kind}" if size <= most else " and more")


def _refusal(remote: Remote, where: str, found: str, remedy: str = "") -> DataError:
    return DataError(f"{where}: {found}; expected {remote.size} bytes with SHA-256 {remote.sha256}{remedy}")
