"""WMT14 from a server of this machine: made-up archives with the members of the real ones."""

import dataclasses
import gzip
import hashlib
import html
import itertools
import re
import shutil
from pathlib import Path

import pytest
from sacrebleu.dataset import DATASETS

from aiayn.config import compose
from aiayn.core import storage
from aiayn.data import download, prepare, wmt14
from aiayn.data.download import Remote
from aiayn.data.parallel_text import EMBEDDED, DataError, read_pairs
from tests.data.small_corpus import packed

PAIRS = [pair for pair in read_pairs(EMBEDDED["tiny"]["train"], None) if max(map(len, pair)) < 200][:2003]
DEV = [('R&D <one> & "two"', 'F&E «eins» & "zwei"'), ("  spaces\tand\u00a0more ", "x"), *PAIRS[:41]]
TEST = [("test", "Prüfung"), *PAIRS[41:83]]


@pytest.mark.parametrize("to", ["de", "fr"])
def test_dev_and_test_are_the_papers_and_no_side_is_swapped(to):
    corpus = wmt14.CORPORA[f"wmt14_en_{to}"]
    assert "newstest2013" in corpus.dev.source
    theirs = DATASETS["wmt14/full"].langpairs[f"en-{to}"]
    assert [Path(name).name for name in (corpus.test.source, corpus.test.target)] == [
        Path(name).name for name in theirs
    ]
    for part in (*corpus.train, corpus.dev, corpus.test):
        sides = [re.sub(r"\.(sgm|gz)$", "", side).rpartition(".")[2] for side in (part.source, part.target)]
        assert sides == ["en", to]


def lines(pairs, side: int) -> bytes:
    return "".join(pair[side] + "\n" for pair in pairs).encode()


def sgm(pairs, side: int) -> bytes:
    return "".join(f'<seg id="{i}">{html.escape(pair[side])}</seg>\n' for i, pair in enumerate(pairs, 1)).encode()


def archives_of(corpus: wmt14.Corpus, folder: Path) -> dict[str, bytes]:
    """Archives with the members of WMT's: training text dealt out, one pair of each part empty, and other members."""
    members = {remote.name: {"training/europarl-v7.cs-en.en": b"other\n" * 997} for remote in corpus.archives}
    parts = {part: [("", "empty"), *PAIRS[number :: len(corpus.train)]] for number, part in enumerate(corpus.train)}
    for part, pairs in (parts | {corpus.dev: DEV, corpus.test: TEST}).items():
        for side, name in enumerate((part.source, part.target)):
            content = sgm(pairs, side) if name.endswith(".sgm") else lines(pairs, side)
            members[part.archive.name][name] = gzip.compress(content) if name.endswith(".gz") else content
    return {name: packed(folder / name, held).read_bytes() for name, held in members.items()}


def served(corpus: wmt14.Corpus, server, folder: Path) -> wmt14.Corpus:
    """The same corpus, from this machine."""
    server.files = archives_of(corpus, folder)

    def moved(part: wmt14.Part) -> wmt14.Part:
        content = server.files[part.archive.name]
        remote = Remote(server.url(part.archive.name), len(content), hashlib.sha256(content).hexdigest())
        return dataclasses.replace(part, archive=remote)

    train = tuple(moved(part) for part in corpus.train)
    return dataclasses.replace(corpus, pairs=2003, train=train, dev=moved(corpus.dev), test=moved(corpus.test))


@pytest.fixture
def run(request, server, tmp_path, monkeypatch) -> compose.Config:
    name = getattr(request, "param", "wmt14_en_de")
    monkeypatch.setattr(download, "FIRST_PAUSE_SECONDS", 0.0)
    monkeypatch.setitem(wmt14.CORPORA, name, served(wmt14.CORPORA[name], server, tmp_path / "archives"))
    return compose.compose_row(f"data={name}", "scale=paper", "data.vocab_size=300", f"prepared={tmp_path}/prepared")


def offline(run: compose.Config, source: Path | str, prepared: str) -> compose.Config:
    data = dataclasses.replace(run.data, source=str(source))
    return dataclasses.replace(run, data=data, prepared=str(Path(run.prepared).with_name(prepared)))


@pytest.mark.parametrize("run", ["wmt14_en_de", "wmt14_en_fr"], indirect=True)
def test_the_corpus_is_downloaded_and_prepared_once(run, server, tmp_path, capsys):
    prepare.main(run)
    printed, bars = capsys.readouterr()
    assert bars == ""  # in a log
    corpus = wmt14.CORPORA[run.data.name]
    assert [asked for asked, _ in server.asked] == [remote.name for remote in corpus.archives]
    assert re.search(r"\d [Mk]B to download, about \d{3}.\d kB prepared; .* are free\n", printed)
    assert all(f"downloading {remote.url} (" in printed for remote in corpus.archives)
    parts = len(corpus.train)
    assert f"train: {2003 + parts} lines, 2003 pairs kept, dropped: {parts} empty; " in printed
    dataset = prepare.prepare(run, pytest.fail)
    assert dataset.texts("dev", "source")[:2] == ['R&D <one> & "two"', "spaces and more"]
    assert dataset.texts("test", "target") == [target.strip() for _, target in TEST]
    train = dataset.pairs("train")
    sources = [train.source_ids[start:end] for start, end in itertools.pairwise(train.source_offsets)]
    expected = [pair[0] for number in range(parts) for pair in PAIRS[number::parts]]
    assert dataset.tokenizer.decode(sources) == expected
    folder = tmp_path / "prepared"
    assert {path.name for path in (folder / "downloads").iterdir()} == {*server.files, ".lock"}
    assert len(server.asked) == len(server.files)  # again: nothing to do
    shutil.rmtree(folder / "downloads")
    assert prepare.prepare(run, pytest.fail).sha256 == dataset.sha256  # what is prepared needs no archive


def test_a_folder_of_archives_gives_the_same_corpus_offline(run, server, tmp_path):
    archives = tmp_path / "archives"
    dataset = prepare.prepare(offline(run, archives, "offline"), lambda message: None)
    assert server.asked == []
    assert {path.name: path.read_bytes() for path in archives.iterdir()} == server.files
    assert prepare.prepare(run, lambda message: None).sha256 == dataset.sha256


def test_a_folder_without_an_archive_is_refused(run, tmp_path):
    archives = tmp_path / "archives"
    (archives / "dev.tgz").rename(archives / "dev.tgz.part")
    with pytest.raises(
        compose.ConfigError, match=r"data\.source=.*archives: lacks http://.*/dev\.tgz; leave it out to downl"
    ):
        prepare.check(offline(run, archives, "offline"))
    assert not (tmp_path / "offline").exists()


def test_a_server_that_refuses_names_every_file_to_bring(run, server, tmp_path):
    server.faults = [lambda answer, content: answer.send_error(404)]
    with pytest.raises(DataError, match=r"or bring all 4 files into one folder .* data\.source=FOLDER: ") as refused:
        prepare.prepare(run, lambda message: None)
    named = str(refused.value).partition("FOLDER: ")[2].split()
    assert sorted(server.url(name) for name in server.files) == sorted(named)
    prepare.check(offline(run, tmp_path / "archives", "offline"))  # it needs no more than these


def test_a_disk_too_small_is_refused_before_the_first_byte(run, server, monkeypatch):
    monkeypatch.setattr(storage, "free_bytes", lambda folder: 10_007)
    refusal = r"B to download, about \d+\.\d kB prepared, but only 10\.0 kB are free"
    with pytest.raises(storage.StorageError, match=refusal):
        prepare.prepare(run, lambda message: None)
    assert server.asked == []
