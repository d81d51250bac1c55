"""WMT14 from a server of this machine: made-up archives with the members of the real ones."""

import dataclasses
import gzip
import hashlib
import html
import io
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
from contextlib import ExitStack
from pathlib import Path

import pytest

from aiayn.config import compose
from aiayn.core import storage
from aiayn.core.signals import Interrupted, interrupting
from aiayn.data import download, prepare, wmt14
from aiayn.data.download import Remote
from aiayn.data.parallel_text import EMBEDDED, DataError, Files, read_pairs

DATA = Path(__file__).parents[3] / "shared" / "data"
PAIRS = [pair for pair in read_pairs(EMBEDDED["train"], None) if max(map(len, pair)) < 200][:2003]
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


@pytest.fixture(params=["wmt14_en_de"])
def name(request) -> str:
    return request.param


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


# The table


def test_the_files_are_those_that_another_project_has_published_with_their_sums():
    """Sizes and SHA-256 of wmt14_translate.txt and wmt15_translate.txt of TensorFlow Datasets' url_checksums."""
    known = {remote for corpus in wmt14.CORPORA.values() for remote in corpus.archives}
    assert {(remote.url, remote.size, remote.sha256) for remote in known} == {
        (
            "http://www.statmt.org/wmt13/training-parallel-europarl-v7.tgz",
            657632379,
            "0224c7c710c8a063dfd893b0cc0830202d61f4c75c17eb8e31836103d27d96e7",
        ),
        (
            "http://www.statmt.org/wmt13/training-parallel-commoncrawl.tgz",
            918311367,
            "c7a74e2ea01ac6c920123108627e35278d4ccb5701e15428ffa34de86fa3a9e5",
        ),
        (
            "http://www.statmt.org/wmt14/training-parallel-nc-v9.tgz",
            80418416,
            "cb8953f292298e6877ae433c98912b927cb0766b303f4540512ddd286c748485",
        ),
        (
            "http://www.statmt.org/wmt13/training-parallel-un.tgz",
            2365634246,
            "29141b5c1eba149a94f7a59d3b1a834b2e47fe0f8758d68dcd77a3d3f497ee47",
        ),
        (
            "http://www.statmt.org/wmt10/training-giga-fren.tar",
            2595102720,
            "3ff8319f6919393520559bfbc7ad6a747ec81b3abc7be9993b338d4b017b4d9a",
        ),
        (
            "http://data.statmt.org/wmt19/translation-task/dev.tgz",
            38654961,
            "7a7deccf82ebb05ba508dba5eb21356492224e8f630ec4f992132b029b4b25e7",
        ),
    }


def test_both_corpora_have_the_papers_vocabulary_and_their_own_configuration():
    sizes = {name: compose.compose_row(f"data={name}", "scale=paper").data.vocab_size for name in wmt14.CORPORA}
    assert sizes == {"wmt14_en_de": 37_000, "wmt14_en_fr": 32_000}


def test_a_corpus_is_known_by_its_archives_and_members_before_anything_is_there():
    identity = wmt14.identity(wmt14.CORPORA["wmt14_en_de"])
    assert identity["training-parallel-nc-v9.tgz"] == wmt14.NEWS_COMMENTARY.sha256
    assert identity["train.source"].split(", ")[1] == "commoncrawl.de-en.en"
    assert identity != wmt14.identity(wmt14.CORPORA["wmt14_en_fr"])


# From the server to the prepared corpus


@pytest.mark.parametrize("name", ["wmt14_en_de", "wmt14_en_fr"], indirect=True)
def test_the_corpus_is_downloaded_and_prepared_once(run, name, server, tmp_path, capsys):
    prepare.main(run)
    printed, bars = capsys.readouterr()
    assert bars == ""  # in a log
    corpus = wmt14.CORPORA[name]
    assert [asked for asked, _ in server.asked] == [remote.name for remote in corpus.archives]
    assert re.search(r"\d MB to download, about 0.3 MB prepared; .* are free\n", printed)
    for remote in corpus.archives:
        assert f"downloading {remote.url} (" in printed
    assert re.search(
        r"dev: 43 lines, not compared with sacrebleu's wmt13, which is not in \S+: `sacrebleu -t ", printed
    )
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


def test_a_terminal_sees_how_much_of_each_file_is_there(run, terminal):
    screen = terminal()
    prepare.main(run)
    assert "dev.tgz" in screen.read()


def test_the_same_corpus_comes_from_a_folder_without_asking_any_server(run, server, tmp_path):
    folder = write_archives(tmp_path / "archives", server)
    before = contents(folder)
    dataset = prepare.prepare(offline(run, folder, "offline"), lambda message: None)
    assert server.asked == []
    assert contents(folder) == before
    assert prepare.prepare(run, lambda message: None).sha256 == dataset.sha256


def test_a_folder_without_an_archive_is_refused_before_anything_is_written(run, server, tmp_path):
    folder = write_archives(tmp_path / "archives", server)
    (folder / "dev.tgz").rename(folder / "dev.tgz.part")
    with pytest.raises(compose.ConfigError, match=r"data\.source=.*archives: holds no dev\.tgz; data\.source='' downl"):
        prepare.check(offline(run, folder, "offline"))
    with pytest.raises(compose.ConfigError, match=r"holds no training-parallel-europarl-v7\.tgz, training-"):
        prepare.check(offline(run, tmp_path / "nowhere", "offline"))
    assert not (tmp_path / "offline").exists()


def test_an_archive_that_is_not_wmts_is_refused_and_left_alone(run, server, tmp_path):
    folder = write_archives(tmp_path / "archives", server)
    path = folder / "training-parallel-nc-v9.tgz"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"nc-v9\.tgz: \d+ bytes with SHA-256 \w{64}; expected .*; replace it by http:"):
        prepare.prepare(offline(run, folder, "offline"), lambda message: None)
    assert path.exists()
    assert not (tmp_path / "offline" / run.data.name / "manifest.json").exists()


def test_an_archive_of_ours_that_was_altered_is_refused_with_the_command_after_which_it_comes_again(run, server):
    """Control of the test above, whose archive does not come again."""
    downloads = prepare.archives(run)
    wmt14.fetch(wmt14.CORPORA[run.data.name], downloads, lambda message: None)
    path = downloads / "training-parallel-nc-v9.tgz"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(
        DataError, match=r"remove it with `rm \S+nc-v9\.tgz` and give the same command again"
    ) as refused:
        prepare.prepare(run, lambda message: None)
    subprocess.run(re.findall("`(.*)`", str(refused.value))[0], shell=True, check=True)
    prepare.prepare(run, lambda message: None)


@pytest.mark.parametrize("refusal", [404, 503])
def test_when_a_server_does_not_give_its_file_all_are_named_that_must_be_brought(run, server, tmp_path, refusal):
    server.faults = [lambda answer, content: answer.send_error(refusal)] * download.ATTEMPTS
    with pytest.raises(DataError, match=r"or bring all 4 files into one folder .* data\.source=FOLDER: ") as refused:
        prepare.prepare(run, lambda message: None)
    named = str(refused.value).partition("FOLDER: ")[2].split()
    assert sorted(server.url(name) for name in server.files) == sorted(named)
    prepare.check(offline(run, write_archives(tmp_path / "archives", server), "offline"))  # it needs no more than these


def test_who_waits_for_another_process_that_downloads_says_so_and_a_signal_ends_the_wait(run):
    downloads, messages = prepare.archives(run), []
    with ExitStack() as owner, interrupting():
        owner.enter_context(storage.lock(downloads / ".lock", wait=False))

        def report(message: str) -> None:
            messages.append(message)
            os.kill(os.getpid(), signal.SIGTERM)
            owner.close()  # whoever goes on gets the lock

        with pytest.raises(Interrupted):
            wmt14.fetch(wmt14.CORPORA[run.data.name], downloads, report)
    assert messages == [f"waiting: {downloads} is in use by process {os.getpid()} on {os.uname().nodename}"]


def test_a_disk_too_small_is_refused_before_the_first_byte(run, server, monkeypatch):
    monkeypatch.setattr(storage, "free_bytes", lambda folder: 10_007)
    with pytest.raises(
        storage.StorageError, match=r"MB to download, about 0\.3 MB prepared, but only 0\.0 MB are free"
    ):
        prepare.prepare(run, lambda message: None)
    assert server.asked == []


def test_the_estimate_counts_what_is_there(run, server, tmp_path):
    corpus = wmt14.CORPORA[run.data.name]
    folder = write_archives(tmp_path / "archives", server)
    assert wmt14.estimate(corpus, folder, tmp_path, 0).startswith("0.0 MB to download")
    assert wmt14.needed(corpus, folder, 7) == (0, 7 * wmt14.PREPARED_BYTES_A_PAIR)
    assert wmt14.needed(corpus, folder, 10**9) == wmt14.needed(corpus, folder, 0)
    larger = dataclasses.replace(
        corpus, dev=dataclasses.replace(corpus.dev, archive=dataclasses.replace(corpus.dev.archive, size=7_000_000))
    )
    assert wmt14.estimate(larger, tmp_path, tmp_path, 0).startswith("7.")  # control


def cut(answer, content: bytes) -> None:
    answer.start(200, len(content))
    answer.wfile.write(content[: len(content) // 2])


def html_page(answer, content: bytes) -> None:
    answer.start(200, 9, ("Content-Type", "text/html"))
    answer.wfile.write(b"<html>no\n")


def test_whatever_the_server_does_the_same_command_ends_with_the_same_corpus(run, server, tmp_path):
    expected = prepare.prepare(offline(run, write_archives(tmp_path / "archives", server), "x"), lambda message: None)
    server.faults = [cut, None, lambda answer, content: answer.send_error(503), None, html_page]
    messages: list[str] = []
    with pytest.raises(DataError, match=r"9 bytes with SHA-256 .*, text/html; expected"):
        prepare.prepare(run, messages.append)
    assert prepare.prepare(run, messages.append).sha256 == expected.sha256
    assert sum(message.startswith("downloading") for message in messages) == len(server.files) + 1


PREPARE = """
import os, signal, sys
from pathlib import Path
from aiayn.config import compose
from aiayn.core import storage
from aiayn.data import prepare, wmt14
from aiayn.data.download import Remote
import dataclasses, json
served = json.loads(sys.argv[1])
def moved(part):
    return dataclasses.replace(part, archive=Remote(*served[part.archive.name]))
corpus = wmt14.CORPORA["wmt14_en_de"]
parts = dict(train=tuple(map(moved, corpus.train)), dev=moved(corpus.dev), test=moved(corpus.test))
wmt14.CORPORA["wmt14_en_de"] = dataclasses.replace(corpus, pairs=2003, **parts)
seen = 0
def die(point, path):
    global seen
    seen += point == "synced"
    if str(seen) == sys.argv[3]:
        os.kill(os.getpid(), signal.SIGKILL)
storage.fault = die
run = compose.compose_row("data=wmt14_en_de", "scale=paper", "data.vocab_size=300", f"prepared={sys.argv[2]}")
print(prepare.prepare(run, print).sha256)
"""


def test_killed_at_any_stage_the_same_command_goes_on_and_ends_with_the_same_corpus(run, server, tmp_path):
    """Control: the sum of asked files shows that a killed download keeps what was whole."""
    remotes = {r.name: (r.url, r.size, r.sha256) for r in wmt14.CORPORA["wmt14_en_de"].archives}
    command = [sys.executable, "-c", PREPARE, json.dumps(remotes), str(tmp_path / "killed")]
    for dies_at in (2, 7):  # the second archive is there without its name; in the training split
        assert subprocess.run([*command, str(dies_at)], check=False, stdout=subprocess.DEVNULL).returncode == -9
    done = subprocess.run([*command, "none"], check=True, stdout=subprocess.PIPE, text=True).stdout
    assert len(server.asked) == len(server.files)
    assert done.split()[-1] == prepare.prepare(run, lambda message: None).sha256


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


@pytest.mark.parametrize("name", ["wmt13", "wmt14/full"])
def test_the_command_that_is_advised_leaves_the_files_that_are_compared(tmp_path, monkeypatch, name):
    """By sacrebleu's own code, with its download made up."""
    from sacrebleu import sacrebleu
    from sacrebleu.dataset import DATASETS

    home = tmp_path / "home"
    environment = {"SACREBLEU": str(home)}
    advice = wmt14.compared(DEV, name, "en-de", environment)
    assert "not compared" in advice
    command, _, output = re.findall("`(.*)`", advice)[0].partition(" > ")
    assert output == "/dev/null"
    theirs = DATASETS[name]
    monkeypatch.setattr(theirs, "_outdir", str(home / name))
    monkeypatch.setattr(theirs, "_rawdir", str(home / name / "raw"))

    def downloaded() -> None:
        for side, path in enumerate(theirs.langpairs["en-de"]):
            raw = home / name / "raw" / path
            raw.parent.mkdir(parents=True, exist_ok=True)
            raw.write_bytes(sgm(DEV, side))

    monkeypatch.setattr(theirs, "maybe_download", downloaded)
    monkeypatch.setattr(sys, "argv", command.split())
    asked = sacrebleu.parse_args()
    assert asked.echo == ["src"]
    DATASETS[asked.test_set].get_files(asked.langpair)  # what `--echo` gets, before it prints any of them
    squeezed = [tuple(re.sub(r"\s+", " ", side.strip()) for side in pair) for pair in DEV]
    assert wmt14.compared(squeezed, name, "en-de", environment) == f"43 lines, equal to sacrebleu's {name}"


def test_sacrebleu_calls_the_sets_by_those_names():
    from sacrebleu.dataset import DATASETS

    for name in wmt14.SACREBLEU.values():
        for corpus in wmt14.CORPORA.values():
            files = DATASETS[name].langpairs[corpus.languages]
            assert len(files) == 2
            assert Path(files[0]).name == Path((corpus.dev if name == "wmt13" else corpus.test).source).name
            path = Path(DATASETS[name]._get_txt_file_path(corpus.languages, "ref"))
            assert path.parts[-2:] == (name.split("/")[-1], f"{name.replace('/', '_')}.{corpus.languages}.ref")


@pytest.mark.skipif(not (DATA / "newstest2013").is_dir(), reason="needs newstest2013 beside the repository")
def test_real_news_through_an_archive_is_the_text_itself(tmp_path):
    files = Files(*(DATA / "newstest2013" / f"newstest2013.{language}.xz" for language in ("en", "de")))
    pairs = list(read_pairs(files, None))
    corpus = wmt14.CORPORA["wmt14_en_de"]
    content = archive("dev.tgz", {corpus.dev.source: sgm(pairs, 0), corpus.dev.target: sgm(pairs, 1)})
    (tmp_path / "dev.tgz").write_bytes(content)
    members = Files(*(wmt14.Member(tmp_path / "dev.tgz", name) for name in (corpus.dev.source, corpus.dev.target)))
    squeezed = [tuple(re.sub(r"\s+", " ", side.strip()) for side in pair) for pair in pairs]
    assert list(read_pairs(members, None)) == squeezed
    assert len(squeezed) == 3000
