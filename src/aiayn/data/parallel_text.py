"""Parallel text, one sentence a line: in files or inside archives, read byte by byte and paired strictly."""

import bz2
import codecs
import gzip
import html
import lzma
import re
import tarfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib import resources
from itertools import chain, zip_longest
from pathlib import Path, PurePath
from typing import Any, Literal

from aiayn.config.schema import Scale
from aiayn.core import storage
from aiayn.core.exit_codes import BAD_DATA, ExplainedError
from aiayn.core.process_pool import Answer, in_order

Pair = tuple[str, str]  # a source sentence and its translation


class DataError(ExplainedError, ValueError):
    """Text or prepared data is not what it has to be: the message names the file, what is wrong and the remedy."""

    exit_code = BAD_DATA


@dataclass(frozen=True)
class Member:
    """A file inside a tar archive, read as a stream where it lies: nothing is extracted, no name becomes a path."""

    archive: Path
    name: str

    def __str__(self) -> str:
        return f"{self.archive}: {self.name}"


@dataclass(frozen=True)
class Files:
    """Two sides: line n of `target` translates line n of `source`; plain or compressed, or segments of an .sgm."""

    source: Path | Member
    target: Path | Member


Split = Literal["train", "dev", "test"]
SPLITS: tuple[Split, ...] = ("train", "dev", "test")
Side = Literal["source", "target"]
Text = Mapping[Split, Sequence[Files]]  # each split, its parts one after the other

LONGEST_LINE = 2**24  # bytes, its end included: a small compressed file can hold a line that no memory does
PAIRS_AT_ONCE, CHARACTERS_AT_ONCE = 16_384, 2**23  # of a chunk that is in memory together
MAX_PROCESSES = 8  # each holds about 75 MB, and one process that reads cannot feed more

# What files are by their first bytes, whatever their names say
_UNPACK: dict[bytes, Any] = {b"\x1f\x8b": gzip.open, b"\xfd7zXZ\0": lzma.open, b"BZh": bz2.open}
_NO_TEXT = re.compile(
    rb"(?s)(?P<zstd>\x28\xb5\x2f\xfd)|(?P<zip>PK\x03\x04)|(?P<sevenzip>7z\xbc\xaf)|(?P<rar>Rar!\x1a)|(?P<tar>.{257}ustar)"
    rb"|(?P<gzip>\x1f\x8b)|(?P<lzma>\x5d\0\0)|(?P<SQLite>SQLite format 3\0)|(?P<Parquet>PAR1\x15)|(?P<PDF>%PDF-)"
)
_REMEDIES = {
    "over max_words": "scale.name=all scale.max_words=0 scale.max_train_words=0 takes pairs of any length",
    "too long": "a larger data.max_length takes longer ones",
    "NUL byte": "`tr -d '\\0' < FILE > NEW` leaves such bytes out",
    "invalid UTF-8": "`iconv -f CP1252 -t UTF-8 FILE > NEW` converts Latin-1 and CP1252",
}

_PACKAGE = Path(str(resources.files("aiayn.data")))

EMBEDDED: dict[str, dict[Split, Files]] = {
    name: {split: Files(_PACKAGE / name / f"{split}.en.xz", _PACKAGE / name / f"{split}.de.xz") for split in SPLITS}
    for name in ("tiny", "bible")
}
"""English to German corpora that are part of the package, by `data.name`: each folder has a notice."""


def read_lines(path: Path | Member) -> Iterator[bytes]:
    """The lines of a file, without their ends, LF or CRLF alone, and without a UTF-8 byte order mark.

    Those of an .sgm are its segments as sacrebleu cleans them. Raises DataError: missing, damaged, UTF-16 or no text.
    """
    lines = _raw_lines(path)
    return _segments(lines) if re.search(r"(?i)\.sgm(\.(gz|xz|bz2))?$", str(path)) else lines


def _raw_lines(path: Path | Member) -> Iterator[bytes]:
    try:
        with _open(path) as file:
            for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), b"")):
                if len(line) > LONGEST_LINE:
                    raise DataError(f"{path}, line {number + 1}: more than {LONGEST_LINE} bytes, which is no sentence")
                if number == 0:
                    if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or line[:4].count(0) in (2, 3):
                        width, order = 32 if b"\0\0" in line[:4] else 16, "BE" if line[0] in b"\0\xfe" else "LE"
                        command = f"iconv -f UTF-{width}{order} -t UTF-8 FILE > NEW"
                        raise DataError(f"{path} is UTF-{width}: unpack it if it is compressed, then `{command}`")
                    line = line.removeprefix(codecs.BOM_UTF8)
                yield line[:-2] if line.endswith(b"\r\n") else line.removesuffix(b"\n")
    except (OSError, EOFError, lzma.LZMAError, zlib.error, tarfile.TarError) as error:
        raise DataError(f"cannot read {path}: {error}") from error


def read_pairs(files: Files, dropped: Counter[str] | None) -> Iterator[Pair]:
    """The sentence pairs of two files, in order; lines read = pairs given + pairs counted in `dropped` by reason.

    Pairs with an empty side, invalid UTF-8 or a NUL are dropped; where nothing may be dropped (`dropped` is None: dev
    and test), empty sentences stay and the others raise DataError. Different numbers of lines always do, at the end.
    """
    source_lines = target_lines = 0
    for source, target in zip_longest(read_lines(files.source), read_lines(files.target)):
        source_lines += source is not None
        target_lines += target is not None
        if source is None or target is None:
            continue
        try:
            pair = source.decode(), target.decode()
            if any("\0" in side for side in pair):
                raise ValueError("a NUL byte, which no text has")
        except ValueError as error:
            reason = "invalid UTF-8" if isinstance(error, UnicodeDecodeError) else "NUL byte"
            if dropped is None:
                where = f"{files.source} or {files.target}, line {source_lines}"
                raise DataError(f"{where}: {error}; {_REMEDIES[reason]}") from error
            dropped[reason] += 1
        else:
            if dropped is None or all(side.strip() for side in pair):
                yield pair
            else:
                dropped["empty"] += 1
    if source_lines != target_lines:
        raise DataError(
            f"{files.source} has {source_lines} lines, {files.target} has {target_lines}: line n must translate line n"
        )


def listed(dropped: Counter[str]) -> str:
    """How many pairs are dropped, by reason, and a remedy."""
    remedies = (f"; {_REMEDIES[reason]}" for reason, _ in dropped.most_common() if reason in _REMEDIES)
    return ", ".join(f"{count} {reason}" for reason, count in dropped.most_common()) + next(remedies, "")


def read(split: Split, parts: Sequence[Files], scale: Scale, dropped: Counter[str]) -> Iterator[Pair]:
    """The pairs of a split that the scale selects; the others are read, too, and counted in `dropped` by reason."""
    train, kept = split == "train", 0
    max_words = (train and scale.max_train_words) or scale.max_words
    for pair in chain.from_iterable(read_pairs(files, dropped if train else None) for files in parts):
        if max_words and max(len(side.split()) for side in pair) > max_words:
            dropped["over max_words"] += 1
        elif train and kept == scale.pairs > 0:
            dropped["beyond pairs"] += 1
        else:
            kept += 1
            yield pair


def by_chunks(make: Callable[[], Callable[[list[Pair]], Answer]], pairs: Iterator[Pair]) -> Iterator[Answer]:
    """What the function that `make` makes, once in each process, gives for each chunk of pairs, in order."""
    return in_order(make, in_chunks(pairs), MAX_PROCESSES)


def in_chunks(pairs: Iterator[Pair]) -> Iterator[list[Pair]]:
    """The pairs in lists of at most PAIRS_AT_ONCE pairs or about CHARACTERS_AT_ONCE characters."""
    chunk: list[Pair] = []
    characters = 0
    for pair in pairs:
        chunk.append(pair)
        characters += len(pair[0]) + len(pair[1])
        if len(chunk) == PAIRS_AT_ONCE or characters >= CHARACTERS_AT_ONCE:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def fingerprints(splits: Text) -> dict[str, str]:
    """The SHA-256 of each side of each split, by its name."""
    return {
        f"{split}.{side}": storage.sha256(path)
        for split, (files,) in splits.items()
        for side, path in vars(files).items()
    }


def _segments(lines: Iterator[bytes]) -> Iterator[bytes]:
    for line in lines:
        if line.startswith(b"<seg "):
            text = line.decode(errors="surrogateescape")  # what is no UTF-8 stays so
            # As sacrebleu reads these files; it leaves the entities
            text = re.sub(r"\s+", " ", re.sub(r"<seg.*?>(.*)</seg>.*?", "\\1", text).strip())
            yield html.unescape(text).replace("\n", " ").encode(errors="surrogateescape")


@contextmanager
def _open(path: Path | Member) -> Iterator[Any]:
    with _member(path) if isinstance(path, Member) else path.open("rb") as stored:
        unpack = next((unpack for magic, unpack in _UNPACK.items() if stored.peek().startswith(magic)), nullcontext)
        with unpack(stored) as file:
            if kind := _NO_TEXT.match(file.peek(512)):
                raise DataError(f"{path} is a {kind.lastgroup} file, not text: unpack or export it to plain text")
            if unpack is nullcontext and PurePath(str(path)).suffix.lower() in (".gz", ".xz", ".bz2"):
                raise OSError("it is not compressed, as its name says: rename it")
            yield file


@contextmanager
def _member(member: Member) -> Iterator[Any]:
    unpack = gzip.open if member.archive.suffix == ".tgz" else open
    with unpack(member.archive, "rb") as file, tarfile.open(fileobj=file, mode="r|", bufsize=2**20) as archive:
        for entry in archive:
            if entry.name.removeprefix("./") == member.name and entry.isreg():
                stream = archive.extractfile(entry)
                assert stream is not None  # of a regular file
                yield stream
                return
    raise DataError(f"{member.archive} holds no file {member.name}")
