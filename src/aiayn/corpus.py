"""Parallel text, one sentence a line: the embedded corpus or your own files, read byte by byte and paired strictly."""

import codecs
import gzip
import lzma
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from itertools import zip_longest
from pathlib import Path
from typing import BinaryIO

Pair = tuple[str, str]
"""A source sentence and its translation."""


class DataError(ValueError):
    """Text or prepared data is not what it has to be: the message names the file, what is wrong and the remedy."""


@dataclass(frozen=True)
class Files:
    """The two sides of one split: line n of `target` translates line n of `source`; plain, .gz or .xz."""

    source: Path
    target: Path


LONGEST_LINE = 2**24
"""Bytes of a line, its end included: a small compressed file can hold one that no memory does."""

_TINY = Path(str(resources.files("aiayn"))) / "tiny"

EMBEDDED = {split: Files(_TINY / f"{split}.en.xz", _TINY / f"{split}.de.xz") for split in ("train", "dev", "test")}
"""English to German sentences of the Home Assistant user interface, part of the package."""


def read_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, without their ends: only a line feed ends a line, or both bytes of a CRLF.

    A UTF-8 byte order mark is left out. Raises DataError for a file that is missing, damaged, UTF-16 or no text.
    """
    try:
        with _open(path) as file:
            for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), b"")):
                if len(line) > LONGEST_LINE:
                    raise DataError(f"{path}, line {number + 1}: more than {LONGEST_LINE} bytes, which is no sentence")
                if number == 0:
                    if _is_utf_16(line):
                        raise DataError(f"{path} is UTF-16: convert it, for example with `iconv -f UTF-16 -t UTF-8`")
                    line = line.removeprefix(codecs.BOM_UTF8)
                yield line[:-2] if line.endswith(b"\r\n") else line.removesuffix(b"\n")
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise DataError(f"cannot read {path}: {error}") from error


def read_pairs(files: Files, dropped: Counter[str] | None) -> Iterator[Pair]:
    """The sentence pairs of two files, in order; lines read = pairs given + pairs counted in `dropped` by reason.

    Pairs with an empty side or with invalid UTF-8 are dropped; where nothing may be dropped (`dropped` is None: dev and
    test), empty sentences stay and invalid UTF-8 raises DataError. Different numbers of lines always do, at the end.
    """
    source_lines = target_lines = 0
    for source, target in zip_longest(read_lines(files.source), read_lines(files.target)):
        source_lines += source is not None
        target_lines += target is not None
        if source is None or target is None:
            continue
        try:
            pair = source.decode(), target.decode()
        except UnicodeDecodeError as error:
            if dropped is None:
                raise DataError(f"{files.source} or {files.target}, line {source_lines}: {error}") from error
            dropped["invalid UTF-8"] += 1
            continue
        if dropped is not None and not (pair[0].strip() and pair[1].strip()):
            dropped["empty"] += 1
            continue
        yield pair
    if source_lines != target_lines:
        raise DataError(
            f"{files.source} has {source_lines} lines, {files.target} has {target_lines}: line n must translate line n"
        )


def _is_utf_16(line: bytes) -> bool:
    """True for a byte order mark of UTF-16, or for ASCII text in it: two characters or more, every second byte zero."""
    text = line.removesuffix(b"\n")
    ascii_in_utf_16 = len(text) >= 4 and any(text) and not (any(text[::2]) and any(text[1::2]))
    return line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or ascii_in_utf_16


def _open(path: Path) -> BinaryIO | gzip.GzipFile | lzma.LZMAFile:
    match path.suffix:
        case ".gz":
            return gzip.open(path)
        case ".xz":
            return lzma.open(path)
        case _:
            return path.open("rb")
