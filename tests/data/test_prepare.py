"""`aiayn prepare`: the corpus that the configuration names, plain or compressed, once."""

import dataclasses
import gzip
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from aiayn.config import compose, folders
from aiayn.core import storage
from aiayn.data import moses_bpe, prepare
from aiayn.data.moses_bpe import MosesBpe
from aiayn.data.parallel_text import DataError


@pytest.fixture
def run(digits, tmp_path) -> compose.Config:
    """The digits, to be prepared in a folder of its own."""
    return compose.compose_row(*digits, "scale=paper", f"prepared={tmp_path}/prepared", f"output={tmp_path}/runs")


def with_files(run: compose.Config, **paths: str) -> compose.Config:
    return dataclasses.replace(run, data=dataclasses.replace(run.data, **paths))


def test_your_own_text_is_prepared_and_what_was_kept_is_printed(run, tmp_path, capsys):
    path = tmp_path / "dev.source"
    path.write_bytes(gzip.compress(Path(run.data.dev_source).read_text().replace("1", "жж", 3).encode()))
    prepare.main(with_files(run, dev_source=str(path)))
    printed = capsys.readouterr().out
    assert "train: 4001 lines, 4001 pairs kept, dropped: none" in printed
    assert "dev: 41 lines, 41 pairs kept, dropped: none; unseen characters or subwords: 6 source, 0 target\n" in printed
    assert re.search(r"25 subwords, SHA-256 [0-9a-f]{64}\n", printed)
    assert {path.name for path in tmp_path.iterdir()} == {"dev.source", "prepared"}


@pytest.mark.parametrize("path", ["", "gone", "/", "dev.source"])
def test_a_missing_file_and_one_for_both_sides_are_refused(run, path):
    path = run.data.dev_source if path == "dev.source" else path
    cause = r": is data\.dev_source too; give" if path == run.data.dev_source else ": (no such|is a folder)"
    with pytest.raises(compose.ConfigError, match=rf"data\.dev_target='?{path}'?{cause}"):
        prepare.sources(with_files(run, dev_target=path).data)
    with pytest.raises(compose.ConfigError, match=r"data\.name=tiny: is a corpus of this program"):
        prepare.sources(with_files(run, name="tiny").data)


def test_the_verses_are_prepared_whole_and_to_the_same_bytes(tmp_path):
    run = compose.compose_row("data=bible", "scale=paper", f"prepared={tmp_path}")
    dataset = prepare.prepare(run, lambda message: None)
    assert [counts["kept"] for counts in dataset.manifest["splits"].values()] == [24_490, 2281, 2660]
    assert dataset.tokenizer.vocab_size == 4000
    assert dataset.sha256 == "16e4b9d8871f17ae9186e3be1eb244002df59039c148abedb2e459ef24977b73"


def test_own_text_may_have_the_name_of_wmt_s_but_no_source(run):
    prepare.check(with_files(run, name="wmt14_en_de"))
    with pytest.raises(compose.ConfigError, match=r"data\.source=there: is read only with data=wmt14_en_de or data="):
        prepare.check(with_files(run, source="there"))
    prepare.check(compose.compose_row("data=wmt14_en_de"))  # to be downloaded


@pytest.mark.slow
def test_the_papers_tokenizer_makes_a_corpus_of_its_own(tmp_path, capsys, monkeypatch):
    assert moses_bpe.MERGES == 32_000
    monkeypatch.setattr(moses_bpe, "MERGES", 307)
    region = ("data.source_language=eng", "data.target_language=de_AT")  # which Moses does not know
    papers = compose.compose_row("data=tiny", "scale=mini", f"prepared={tmp_path}", "tokenizer=paper", *region)
    prepare.main(papers)
    assert "prepare: training 307 merges of Moses tokens\n" in capsys.readouterr().out
    dataset = prepare.prepare(papers, pytest.fail)
    assert isinstance(dataset.tokenizer, MosesBpe)
    assert [path.name.partition("-")[0] for path in tmp_path.iterdir()] == ["tiny.paper"]
    assert {"moses": "en-de", "merges": 307}.items() <= dataset.manifest["settings"].items()
    ids = dataset.tokenizer.encode(dataset.texts("dev", "target"), "target")
    assert dataset.pairs("dev").target_lengths[:].tolist() == [len(sentence) + 1 for sentence in ids]


@pytest.mark.parametrize("manifest", ["", "[]", '{"settings": []}', '{"schema": 2}', "[" * 100_000], ids=len)
def test_a_foreign_manifest_is_refused_with_the_repair(run, manifest):
    storage.write_text(folders.prepared_folder(run) / "manifest.json", manifest)
    prepare.check(run)
    assert prepare.sha256(run) is None
    with pytest.raises(DataError, match=r"`rm -r .*digits-25subwords` and the same command again"):
        prepare.prepare(run, pytest.fail)


def command_at_work(words: list[str], folder: Path, until: str) -> subprocess.Popen[str]:
    """A command that leads a group of its own, once it has printed a line that contains `until`."""
    command = [sys.executable, "-m", "aiayn", *words]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=folder, stdout=pipe, stderr=pipe, text=True, process_group=0)
    while until not in (line := process.stdout.readline()):
        assert line, process.communicate()
    return process


# So that SentencePiece trains for seconds
LONG = ("data.vocab_size=8000", "data.max_length=64", "scale.max_words=0", "scale.pairs=0")


@pytest.mark.parametrize(
    ("words", "stage", "number"),
    [
        (["prepare"], "training a", signal.SIGINT),
        pytest.param(["train", "-m", "seed=1,2"], "train: ", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(["train"], "train: ", signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_a_preparation_and_it_goes_on(tmp_path, words, stage, number):
    """To all processes of the group at once, as a terminal and a cluster send it."""
    words = [*words, f"prepared={tmp_path}/prepared", *LONG, f"output={tmp_path}/runs", "wandb.mode=disabled"]
    process = command_at_work(words, tmp_path, stage)
    os.killpg(process.pid, number)
    # Ends with the last process that has our pipes: 0.5 s on two idle cores; alone, the stage takes longer
    out, err = process.communicate(timeout=10)
    assert process.returncode == 75, out + err
    lines = [line for line in (out + err).splitlines() if not line.startswith("prepare: ")]
    assert len(lines) == 1
    assert f"stopped by {number.name}; repeat the command to go on from here" in lines[0]
    assert not list((tmp_path / "prepared").rglob(".*.tmp"))
    assert not list(tmp_path.rglob("failure.json"))
    assert not list((tmp_path / "prepared").rglob("manifest.json"))
    if words[0] == "prepare":
        again = command_at_work(words, tmp_path, "SHA-256")
        out, err = again.communicate()
        assert (again.returncode, err) == (0, "")
