import bz2
import gzip
import hashlib
import html
import lzma
import random
import re
import subprocess
import tracemalloc
from collections import Counter
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aiayn.data import parallel_text
from aiayn.data.parallel_text import EMBEDDED, DataError, Files, Member, read_lines, read_pairs
from tests.data.small_corpus import packed, selecting


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path / "text.en", tmp_path / "text.de")


def lines_of(path: Path, data: bytes) -> list[bytes]:
    path.write_bytes(data)
    return list(read_lines(path))


def test_line_feeds_alone_end_lines_and_a_bom_is_no_text(tmp_path) -> None:
    text = "one\rstill\u2028one\x85or\fone"
    assert len(text.splitlines()) == 5  # what a careless reader would see
    for file in (f"{text}\ntwo", f"{text}\r\ntwo\r\n", f"\ufeff{text}\ntwo\n"):
        assert lines_of(tmp_path / "text", file.encode()) == [text.encode(), b"two"]


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".xz", lzma.compress), (".bz2", bz2.compress)])
def test_a_compressed_file_reads_as_a_plain_one_unless_torn(tmp_path, suffix, pack) -> None:
    data = b"".join(b"%d\n" % i for i in range(10_007))
    plain, packed = lines_of(tmp_path / "text", data), tmp_path / f"text{suffix}"
    assert all(lines_of(tmp_path / name, pack(data)) == plain for name in (packed.name, "text", "a.GZ"))
    for damaged in (pack(data)[:-7], b"<html>404</html>\n", pack(data)[:50] + b"\0\0\0\0\0" + pack(data)[55:]):
        with pytest.raises(DataError, match=f"cannot read .*text{suffix}"):
            lines_of(packed, damaged)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])
def test_another_unicode_encoding_is_refused_by_its_name(tmp_path, encoding) -> None:
    with pytest.raises(DataError, match=rf"text is {encoding[:6].upper()}: unpack .*`iconv ") as refused:
        lines_of(tmp_path / "text", "one two\r\nthree\n".encode(encoding))
    command = str(refused.value).split("`")[1].replace("FILE", "text").replace("NEW", "text.utf8")
    subprocess.run(command, shell=True, check=True, cwd=tmp_path)
    assert list(read_lines(tmp_path / "text.utf8")) == [b"one two", b"three"]


OTHERS = {"zip": b"PK\3\4\x14", "sevenzip": b"7z\xbc\xaf\x27\x1c", "zstd": b"\x28\xb5\x2f\xfd\4", "rar": b"Rar!\x1a\7"}
OTHERS |= {
    "SQLite": b"SQLite format 3\0\x10",
    "Parquet": b"PAR1\x15\4",
    "PDF": b"%PDF-1.7",
    "tar": bytes(257) + b"ustar\0",
}


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize("kind", OTHERS)
def test_what_is_no_text_is_refused_whatever_its_name(tmp_path, kind, pack) -> None:
    with pytest.raises(DataError, match=f"text is a {kind} file, not text: unpack or export it"):
        lines_of(tmp_path / "text", pack(OTHERS[kind] + b"\none\n"))


def test_an_endless_line_is_refused_before_it_fills_the_memory(tmp_path) -> None:
    bomb = lzma.compress(b"one\n" + bytes(2**27))
    tracemalloc.start()
    with pytest.raises(DataError, match=r"text\.xz, line 2: more than 16777216 bytes"):
        lines_of(tmp_path / "text.xz", bomb)
    assert tracemalloc.get_traced_memory()[1] < 2**26
    tracemalloc.stop()


def test_different_numbers_of_lines_are_refused_with_both(files) -> None:
    files.source.write_text("a\nb\nc\n")
    files.target.write_text("x\ny\n")
    with pytest.raises(DataError, match=r"text\.en has 3 lines, .*text\.de has 2"):
        list(read_pairs(files, Counter()))


def test_without_cleaning_every_line_stays_or_is_named(files) -> None:
    files.source.write_text("a\n\n \nd\n")
    files.target.write_text("\nB\n\n\n")
    assert list(read_pairs(files, None)) == [("a", ""), ("", "B"), (" ", ""), ("d", "")]
    files.target.write_bytes(b"A\n\xff\n\n\n")
    with pytest.raises(DataError, match=r"text\.de, line 2: .*invalid start byte; `iconv -f CP1252 -t UTF-8"):
        list(read_pairs(files, None))
    files.target.write_bytes(b"\0A\nB\n\n\n")  # no UTF-16
    with pytest.raises(DataError, match=r"text\.de, line 1: a NUL byte.*; `tr -d '\\0' < FILE"):
        list(read_pairs(files, None))


def fill(files: Files, pairs: list[tuple[bytes, bytes]]) -> None:
    for side, path in enumerate((files.source, files.target)):
        path.write_bytes(b"".join(pair[side] + b"\n" for pair in pairs))


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5))), st.integers(0, 5), st.integers(0, 5))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_pairs_are_selected_by_the_longer_side_then_by_number(files, words, max_words, count):
    pairs = [("ein\u2003Wort " * source, "word\t" * target) for source, target in words]
    fill(files, [(source.encode(), target.encode()) for source, target in pairs])
    dropped: Counter[str] = Counter()
    kept = list(parallel_text.read("train", [files], selecting(max_words, count), dropped))
    short = [pair for pair, sides in zip(pairs, words, strict=True) if max(2 * sides[0], sides[1]) <= max_words]
    expected = pairs if max_words == 0 else short
    assert kept == (expected if count == 0 else expected[:count])
    assert dropped["over max_words"] == len(pairs) - len(expected)
    assert len(kept) + dropped.total() == len(pairs)


SHA256 = "33eda12c7c60702232e19a75190144885c6e49b2a73f6410bbb8b65ac4b7567f"


def words(sentence: str) -> str:
    """What near-duplicates have in common: lower-case words without placeholders, digits and punctuation."""
    without = re.sub(r"\{[^}]*\}|<[^>]*>|%\S+", " ", sentence.lower())
    return " ".join(re.sub(r"[\W\d_]+", " ", without).split())


def test_tiny_is_known_by_its_hash_and_split_by_its_pairs() -> None:
    """In the order of their SHA-256 those are held out of which neither side has a near-duplicate anywhere."""
    paths = [path for files in EMBEDDED["tiny"].values() for path in (files.source, files.target)]
    assert hashlib.sha256(b"".join(b"\n".join(read_lines(path)) for path in paths)).hexdigest() == SHA256
    splits = [list(read_pairs(files, None)) for files in EMBEDDED["tiny"].values()]
    pairs = sorted(chain(*splits), key=lambda pair: hashlib.sha256("\t".join(pair).encode()).digest())
    times = [Counter(words(pair[side]) for pair in pairs) for side in (0, 1)]
    alone = [pair for pair in pairs if all(times[side][words(pair[side])] == 1 for side in (0, 1))]
    held_out = set(alone[:13_000])
    assert splits == [[pair for pair in pairs if pair not in held_out], alone[:10_000], alone[10_000:13_000]]


@pytest.mark.parametrize("suffix", [".tgz", ".tar"])
def test_a_member_of_an_archive_is_read_and_nothing_is_extracted(tmp_path, suffix) -> None:
    text = b"\xef\xbb\xbfone\rstill one\r\n\ntwo"
    members = {"training/other": b"no\n" * 50_021, "x.gz": gzip.compress(text), "training/text": text}
    archive = packed(tmp_path / f"a{suffix}", members)
    expected = lines_of(tmp_path / "text", text)
    assert expected == [b"one\rstill one", b"", b"two"]
    assert list(read_lines(Member(archive, "training/text"))) == expected
    assert list(read_lines(Member(archive, "x.gz"))) == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"a{suffix}", "text"]
    for name in ("text", "link", "/training/text"):
        with pytest.raises(DataError, match=rf"a\{suffix} holds no file {name}$"):
            list(read_lines(Member(archive, name)))


def test_a_damaged_archive_is_refused_by_name(tmp_path) -> None:
    whole = packed(tmp_path / "whole.tgz", {"text": random.Random(3).randbytes(300_007)}).read_bytes()
    damaged = tmp_path / "a.tgz"
    for content in (whole[:-1000], b"<html>404</html>", b"", gzip.compress(b"no tar" * 1009)):
        damaged.write_bytes(content)
        with pytest.raises(DataError, match=r"cannot read .*a\.tgz: text: |a\.tgz holds no file text"):
            list(read_lines(Member(damaged, "text")))


SGM = """<refset setid="newstest2013" srclang="any" trglang="de"><doc docid="a" origlang="en">
<seg id="1"> One  &amp; two &quot;three&quot; </seg>
<p>
<seg id="2">R&amp;D\u2028&lt;b&gt;\u00a0x</seg> <!-- no -->
<seg id="3"></seg>
</p></doc></refset>
"""


def test_the_segments_of_an_sgm_are_sacrebleus_without_entities(tmp_path) -> None:
    from sacrebleu.dataset.fake_sgml import FakeSGMLDataset

    path, packed, theirs = (tmp_path / f"newstest.{end}" for end in ("sgm", "SGM.gz", "txt"))
    path.write_text(SGM)
    packed.write_bytes(gzip.compress(SGM.encode()))
    FakeSGMLDataset("x", langpairs={})._convert_format(str(path), str(theirs))
    ours = [line.decode() for line in read_lines(path)]
    assert ours == ['One & two "three"', "R&D <b> x <!-- no -->", ""] == [line.decode() for line in read_lines(packed)]
    assert ours == [html.unescape(line) for line in theirs.read_text().split("\n")[:-1]]
    assert ours != theirs.read_text().split("\n")[:-1]  # control: theirs keep the entities


def test_pairs_come_in_chunks_of_bounded_number_and_length(monkeypatch) -> None:
    monkeypatch.setattr(parallel_text, "CHARACTERS_AT_ONCE", 37)
    monkeypatch.setattr(parallel_text, "PAIRS_AT_ONCE", 3)
    pairs = [("a" * length, "b" * (length // 2)) for length in (1, 2, 0, 3, 101, 0, 11, 13, 5, 1)]
    chunks = list(parallel_text.in_chunks(iter(pairs)))
    assert [pair for chunk in chunks for pair in chunk] == pairs
    assert [len(chunk) for chunk in chunks] == [3, 2, 3, 2]
    assert list(parallel_text.in_chunks(iter(pairs[:3]))) == [pairs[:3]]


@given(st.lists(st.tuples(st.binary(max_size=5), st.binary(max_size=5)), max_size=17))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_lines_read_are_pairs_kept_plus_pairs_dropped_by_reason(files, rows) -> None:
    fill(
        files,
        [(b"first", b"first"), *((source.replace(b"\n", b""), target.replace(b"\n", b"")) for source, target in rows)],
    )
    dropped: Counter[str] = Counter()
    assert len(list(read_pairs(files, dropped))) + dropped.total() == 1 + len(rows)
    assert set(dropped) <= {"empty", "invalid UTF-8", "NUL byte"}
    assert (dropped["NUL byte"] > 0) <= any(b"\0" in side for row in rows for side in row)
