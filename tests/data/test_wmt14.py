"""WMT14 from a server of this machine: made-up archives with the members of the real ones."""

import dataclasses
import gzip
import hashlib
import html
import io
import itertools
import re
import shutil
import tarfile
from pathlib import Path

import pytest

from aiayn.config import compose
from aiayn.core import storage
from aiayn.data import download, prepare, wmt14
from aiayn.data.download import Remote
from aiayn.data.parallel_text import EMBEDDED, DataError, read_pairs

PAIRS = [pair for pair in read_pairs(EMBEDDED["tiny"]["train"], None) if max(map(len, pair)) < 200][:2003]
DEV = [('R&D <one> & "two"', 'F&E «eins» & "zwei"'), ("  spaces\tand\u00a0more ", "x"), *PAIRS[:41]]
TEST = [("test", "Prüfung"), *PAIRS[41:83]]


def lines(pairs, side: int) -> bytes:
    return "".join(pair[side] + "\n" for pair in pairs).encode()


def sgm(pairs, side: int) -> bytes:
    segments = (f'<seg id="{i}">{html.escape(pair[side])}</seg>\n' for i, pair in enumerate(pairs, 1))
    return ("<refset>\n<doc>\n<p>\n" + "".join(segments) + "</p>\n</doc>\n</refset>\n").encode()


def archive(name: str, members: dict[str, bytes]) -> bytes:
    memory = io.BytesIO()
    with tarfile.open(fileobj=memory, mode="w:gz" if name.endswith(".tgz") else "w") as tar:
        for member, content in members.items():
            info = tarfile.TarInfo(member)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return memory.getvalue()


def parts_of(corpus: wmt14.Corpus) -> list[tuple[wmt14.Part, list[tuple[str, str]]]]:
    """Every part of a corpus with the pairs that it holds here: training text dealt out, one line of each damaged."""
    count = len(corpus.train)
    train = [(part, [("", "empty"), *PAIRS[number::count]]) for number, part in enumerate(corpus.train)]
    return [*train, (corpus.dev, DEV), (corpus.test, TEST)]


def archives_of(corpus: wmt14.Corpus) -> dict[str, bytes]:
    """Archives with the names and members of a corpus of WMT, and members of other languages around them."""
    members: dict[str, dict[str, bytes]] = {
        remote.name: {"training/europarl-v7.cs-en.en": b"other\n" * 997} for remote in corpus.archives
    }
    for part, pairs in parts_of(corpus):
        for side, name in enumerate((part.source, part.target)):
            content = sgm(pairs, side) if name.endswith(".sgm") else lines(pairs, side)
            members[part.archive.name][name] = gzip.compress(content) if name.endswith(".gz") else content
    return {name: archive(name, held) for name, held in members.items()}


def served(corpus: wmt14.Corpus, server) -> wmt14.Corpus:
    """The same corpus, from this machine."""
    server.files = archives_of(corpus)

    def moved(part: wmt14.Part) -> wmt14.Part:
        content = server.files[part.archive.name]
        remote = Remote(server.url(part.archive.name), len(content), hashlib.sha256(content).hexdigest())
        return dataclasses.replace(part, archive=remote)

    train = tuple(moved(part) for part in corpus.train)
    return dataclasses.replace(corpus, pairs=2003, train=train, dev=moved(corpus.dev), test=moved(corpus.test))


@pytest.fixture
def name() -> str:
    return "wmt14_en_de"


@pytest.fixture
def run(name, server, tmp_path, monkeypatch) -> compose.Config:
    monkeypatch.setattr(download, "FIRST_PAUSE_SECONDS", 0.0)
    monkeypatch.setenv("SACREBLEU", str(tmp_path / "sacrebleu"))
    monkeypatch.setitem(wmt14.CORPORA, name, served(wmt14.CORPORA[name], server))
    return compose.compose_row(f"data={name}", "scale=paper", "data.vocab_size=300", f"prepared={tmp_path}/prepared")


def offline(run: compose.Config, source: Path | str, prepared: str) -> compose.Config:
    data = dataclasses.replace(run.data, source=str(source))
    return dataclasses.replace(run, data=data, prepared=str(Path(run.prepared).with_name(prepared)))


def write_archives(folder: Path, server) -> Path:
    folder.mkdir()
    for name, content in server.files.items():
        (folder / name).write_bytes(content)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# From the server to the prepared corpus


@pytest.mark.parametrize("name", ["wmt14_en_de", "wmt14_en_fr"])
def test_the_corpus_is_downloaded_and_prepared_once(run, name, server, tmp_path, capsys):
    prepare.main(run)
    printed, bars = capsys.readouterr()
    assert bars == ""  # in a log
    corpus = wmt14.CORPORA[name]
    assert [asked for asked, _ in server.asked] == [remote.name for remote in corpus.archives]
    assert re.search(r"\d MB to download, about 0.3 MB prepared; .* are free\n", printed)
    for remote in corpus.archives:
        assert f"downloading {remote.url} (" in printed
    uncompared = r"dev: 43 lines, not compared with sacrebleu's wmt13, which is not in \S+: `sacrebleu -t "
    assert re.search(uncompared, printed)
    parts = len(corpus.train)
    assert f"train: {2003 + parts} lines, 2003 pairs kept, dropped: {parts} empty; " in printed
    dataset = prepare.prepare(run, pytest.fail)
    assert dataset.texts("dev", "source")[:2] == ['R&D <one> & "two"', "spaces and more"]
    assert dataset.texts("dev", "target")[0] == 'F&E «eins» & "zwei"'
    assert dataset.texts("test", "target") == [target.strip() for _, target in TEST]
    train = dataset.pairs("train")
    sources = dataset.tokenizer.decode(
        [train.source_ids[start:end] for start, end in itertools.pairwise(train.source_offsets)]
    )
    assert sources == [pair[0] for number in range(parts) for pair in PAIRS[number::parts]]
    folder = tmp_path / "prepared"
    assert {path.name for path in (folder / "downloads").iterdir()} == {*server.files, ".lock"}
    assert not [path for path in folder.rglob("*") if path.suffix in (".en", ".de", ".fr", ".sgm")]
    assert len(server.asked) == len(server.files)  # again: nothing to do
    shutil.rmtree(folder / "downloads")
    assert prepare.prepare(run, pytest.fail).sha256 == dataset.sha256  # what is prepared needs no archive


def test_a_folder_of_archives_gives_the_same_corpus_offline(run, server, tmp_path):
    folder = write_archives(tmp_path / "archives", server)
    before = contents(folder)
    dataset = prepare.prepare(offline(run, folder, "offline"), lambda message: None)
    assert server.asked == []
    assert contents(folder) == before
    assert prepare.prepare(run, lambda message: None).sha256 == dataset.sha256


def test_a_folder_without_an_archive_is_refused(run, server, tmp_path):
    folder = write_archives(tmp_path / "archives", server)
    (folder / "dev.tgz").rename(folder / "dev.tgz.part")
    with pytest.raises(compose.ConfigError, match=r"data\.source=.*archives: holds no dev\.tgz; data\.source='' downl"):
        prepare.check(offline(run, folder, "offline"))
    with pytest.raises(compose.ConfigError, match=r"holds no training-parallel-europarl-v7\.tgz, training-"):
        prepare.check(offline(run, tmp_path / "nowhere", "offline"))
    assert not (tmp_path / "offline").exists()


def test_a_server_that_refuses_names_every_file_to_bring(run, server, tmp_path):
    server.faults = [lambda answer, content: answer.send_error(404)]
    with pytest.raises(DataError, match=r"or bring all 4 files into one folder .* data\.source=FOLDER: ") as refused:
        prepare.prepare(run, lambda message: None)
    named = str(refused.value).partition("FOLDER: ")[2].split()
    assert sorted(server.url(name) for name in server.files) == sorted(named)
    prepare.check(offline(run, write_archives(tmp_path / "archives", server), "offline"))  # it needs no more than these


def test_a_disk_too_small_is_refused_before_the_first_byte(run, server, monkeypatch):
    monkeypatch.setattr(storage, "free_bytes", lambda folder: 10_007)
    refusal = r"MB to download, about 0\.3 MB prepared, but only 0\.0 MB are free"
    with pytest.raises(storage.StorageError, match=refusal):
        prepare.prepare(run, lambda message: None)
    assert server.asked == []


# sacrebleu's own files


def as_sacrebleu_keeps_them(home: Path, name: str, pairs: list[tuple[str, str]]) -> None:
    """What it makes of the raw SGML, by its own code."""
    from sacrebleu.dataset.fake_sgml import FakeSGMLDataset

    folder = home / name
    folder.mkdir(parents=True)
    for side, field in enumerate(("src", "ref")):
        raw = folder / "raw.sgm"
        raw.write_bytes(sgm(pairs, side))
        path = folder / f"{name.replace('/', '_')}.en-de.{field}"
        FakeSGMLDataset(name, langpairs={})._convert_format(str(raw), str(path))


def test_dev_and_test_are_compared_with_sacrebleus_own_files(run, tmp_path, capsys):
    as_sacrebleu_keeps_them(tmp_path / "sacrebleu", "wmt13", DEV)
    as_sacrebleu_keeps_them(tmp_path / "sacrebleu", "wmt14/full", TEST)
    prepare.main(run)
    printed = capsys.readouterr().out
    assert "dev: 43 lines, equal to sacrebleu's wmt13\n" in printed
    assert "test: 43 lines, equal to sacrebleu's wmt14/full\n" in printed


@pytest.mark.parametrize("other", [[*DEV[:7], ("no", "nein"), *DEV[8:]], DEV[:-1]], ids=["line", "length"])
def test_a_set_that_is_not_sacrebleus_is_refused(run, tmp_path, other):
    as_sacrebleu_keeps_them(tmp_path / "sacrebleu", "wmt13", other)
    with pytest.raises(DataError, match=r"line 8 is .*sacrebleu's wmt13|43 lines, but sacrebleu's wmt13 has 42"):
        prepare.prepare(run, lambda message: None)
