"""`aiayn prepare`: the corpus that the configuration names, plain or compressed, once."""

import contextlib
import dataclasses
import gzip
import lzma
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from aiayn.config import compose, folders
from aiayn.config.schema import ConfigError
from aiayn.data import moses_bpe, parallel_text, prepare
from aiayn.data.moses_bpe import MosesBpe
from aiayn.runs import jobs

SIDES = [(split, side) for split in ("train", "dev", "test") for side in ("source", "target")]


@pytest.fixture
def run(digits, tmp_path) -> compose.Config:
    """The digits, to be prepared in a folder of its own."""
    return compose.compose_row(*digits, "scale=paper", f"prepared={tmp_path}/prepared", f"output={tmp_path}/runs")


def with_files(run: compose.Config, **paths: str) -> compose.Config:
    return dataclasses.replace(run, data=dataclasses.replace(run.data, **paths))


def state(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_your_own_text_is_prepared_and_what_was_kept_is_printed(run, tmp_path, capsys):
    prepare.main(run)
    printed = capsys.readouterr().out
    assert "train: 4001 lines, 4001 pairs kept, dropped: none" in printed
    assert "dev: 41 lines, 41 pairs kept, dropped: none" in printed
    assert "test: 43 lines, 43 pairs kept, dropped: none" in printed
    assert re.search(r"25 subwords, SHA-256 [0-9a-f]{64}\n", printed)
    assert [path.name for path in tmp_path.iterdir()] == ["prepared"]


def test_preparing_again_writes_nothing_and_learns_nothing(run, tmp_path):
    first = prepare.prepare(run, lambda message: None)
    before = state(tmp_path)
    again = prepare.prepare(run, pytest.fail)
    assert again.sha256 == first.sha256
    assert state(tmp_path) == before


@pytest.mark.parametrize(("suffix", "compress"), [(".gz", gzip.compress), (".xz", lzma.compress)])
def test_compressed_text_gives_the_same_corpus(run, tmp_path, suffix, compress):
    plain = prepare.prepare(run, lambda message: None)
    paths = {}
    for split, side in SIDES:
        path = tmp_path / f"{split}.{side}{suffix}"
        path.write_bytes(compress(Path(getattr(run.data, f"{split}_{side}")).read_bytes()))
        paths[f"{split}_{side}"] = str(path)
    other = dataclasses.replace(with_files(run, **paths), prepared=f"{tmp_path}/other")
    packed = prepare.prepare(other, lambda message: None)
    assert packed.folder != plain.folder
    for name in ("files", "splits"):
        assert packed.manifest[name] == plain.manifest[name]


def test_two_selections_share_no_folder_and_each_is_prepared_once(run, tmp_path, capsys):
    folders_of = {
        (0, 0, 0): "digits",
        (5, 3, 0): "digits-5words-3trainwords",
        (5, 0, 0): "digits-5words",
        (5, 0, 1009): "digits-5words-1009pairs",
    }
    for (words, train, pairs), name in folders_of.items():
        scale = dataclasses.replace(run.scale, max_words=words, max_train_words=train, pairs=pairs)
        chosen = dataclasses.replace(run, scale=scale)
        first = prepare.prepare(chosen, lambda message: None)
        assert first.folder == tmp_path / "prepared" / name
        before = state(first.folder)
        assert prepare.prepare(chosen, pytest.fail).sha256 == first.sha256
        assert state(first.folder) == before
    prepare.main(chosen)
    printed = capsys.readouterr().out
    over, beyond = re.search(r"1009 pairs kept, dropped: (\d+) beyond pairs, (\d+) over max_words", printed).groups()
    assert int(over) + int(beyond) + 1009 == 4001
    assert re.search(r"dev: 41 lines, \d+ pairs kept, dropped: \d+ over max_words", printed)


def test_a_run_of_another_selection_is_not_resumed(run):
    folder = folders.run_folder(run)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(compose.to_yaml(run))
    (folder / "data.sha256").write_text("0" * 64 + "\n")
    jobs.check(run)
    for key, value in (("max_words", 5), ("max_train_words", 3), ("pairs", 1009)):
        with pytest.raises(ConfigError, match=rf"scale\.{key}={value}: .* holds a run with scale\.{key}="):
            jobs.check(dataclasses.replace(run, scale=dataclasses.replace(run.scale, **{key: value})))


def test_pairs_that_cannot_be_learned_from_are_dropped_and_counted_by_reason(run, tmp_path, capsys):
    lines = Path(run.data.train_source).read_bytes().splitlines(keepends=True)
    lines[3], lines[5], lines[7] = b"\n", b"\xff\n", b"1 2 3 4 5 6 7 8 9 1 2 3 4 5 6 7 8 9 1 2 3 4 5 6 7 8 9\n"
    path = tmp_path / "train.source"
    path.write_bytes(b"".join(lines))
    prepare.main(with_files(run, train_source=str(path)))
    printed = capsys.readouterr().out
    assert "train: 4001 lines, 3998 pairs kept, dropped: 1 empty, 1 invalid UTF-8, 1 too long" in printed


def test_what_the_dev_set_has_that_training_had_not_is_counted_and_printed(run, tmp_path, capsys):
    path = tmp_path / "dev.source"
    path.write_text(Path(run.data.dev_source).read_text().replace("1", "ж", 3))
    prepare.main(with_files(run, dev_source=str(path)))
    printed = capsys.readouterr().out
    assert "dev: 41 lines, 41 pairs kept, dropped: none; unseen characters: 3 source, 0 target\n" in printed
    assert "test: 43 lines, 43 pairs kept, dropped: none; unseen characters: 0 source, 0 target\n" in printed


@pytest.mark.parametrize(("split", "side"), SIDES)
def test_a_missing_file_is_named_with_its_key(run, tmp_path, split, side):
    key = f"{split}_{side}"
    for path in ("", str(tmp_path / "gone"), str(tmp_path)):
        with pytest.raises(compose.ConfigError, match=rf"data\.{key}='{re.escape(path)}': no such file"):
            prepare.sources(with_files(run, **{key: path}).data)


def test_the_embedded_corpus_needs_no_file():
    text = prepare.sources(compose.compose_row("data=tiny").data)
    assert text == {split: [files] for split, files in parallel_text.EMBEDDED.items()}


@pytest.mark.parametrize("name", ["wmt14_en_de", "wmt14_en_fr"])
def test_text_of_your_own_under_the_name_of_a_downloaded_corpus_is_taken(run, name):
    prepare.check(with_files(run, name=name))
    prepare.check(compose.compose_row(f"data={name}"))  # to be downloaded
    with pytest.raises(compose.ConfigError, match=r"data\.train_source='nowhere': no such file"):
        prepare.check(with_files(run, name=name, train_source="nowhere"))


@pytest.mark.slow
def test_the_papers_tokenizer_makes_a_corpus_of_its_own_beside_the_other(tmp_path, capsys, monkeypatch):
    assert moses_bpe.MERGES == 32_000
    monkeypatch.setattr(moses_bpe, "MERGES", 307)
    files = {f"{split}_{side}": getattr(parallel_text.EMBEDDED["dev"], side) for split, side in SIDES}
    words = [
        "data=files",
        "data.name=news",
        "scale=paper",
        f"prepared={tmp_path}",
        *(f"data.{key}={path}" for key, path in files.items()),
    ]
    usual = compose.compose_row(*words, "data.vocab_size=500")
    papers = compose.compose_row(*words, "tokenizer=paper")
    assert prepare.prepare(usual, lambda message: None).tokenizer.vocab_size == 500
    prepare.main(papers)
    assert "prepare: learning 307 merges of Moses tokens\n" in capsys.readouterr().out
    dataset = prepare.prepare(papers, pytest.fail)
    assert isinstance(dataset.tokenizer, MosesBpe)
    assert {path.name for path in tmp_path.iterdir()} == {"news", "news.paper"}
    settings = dataset.manifest["settings"]
    assert (settings["moses"], settings["merges"]) == ("en-de", 307)
    assert "vocab_size" not in settings
    pairs, texts = dataset.pairs("dev"), dataset.texts("dev", "target")
    ids = dataset.tokenizer.encode(texts, "target")
    assert pairs.target_lengths[:].tolist() == [len(sentence) + 1 for sentence in ids]
    assert pairs.target_ids[: len(ids[0])].tolist() == ids[0].tolist()
    french = dataclasses.replace(papers, data=dataclasses.replace(papers.data, target_language="fr"))
    with pytest.raises(parallel_text.DataError, match="moses was en-de, is en-fr"):
        prepare.prepare(french, pytest.fail)


def test_other_text_under_the_same_name_is_refused_with_the_remedy(run, tmp_path):
    prepare.prepare(run, lambda message: None)
    before = state(tmp_path)
    with pytest.raises(parallel_text.DataError, match=r"was prepared from something else.*dev.source.*rm -r"):
        prepare.prepare(with_files(run, dev_source=run.data.dev_target), lambda message: None)
    assert state(tmp_path) == before


def test_text_edited_since_it_was_prepared_is_refused(run, tmp_path):
    text = tmp_path / "test.text"
    text.write_bytes(Path(run.data.test_source).read_bytes())
    run = with_files(run, test_source=str(text))
    prepare.prepare(run, lambda message: None)
    prepare.check(run)
    text.write_text(text.read_text().replace("1", "2"))
    with pytest.raises(parallel_text.DataError, match=r"was prepared from something else \(test.source was"):
        prepare.check(run)


@pytest.mark.parametrize("manifest", ["", "[]", "{}", '{"settings": ', '{"settings": []}'])
def test_a_damaged_manifest_is_left_to_the_preparation_that_needs_it(run, manifest):
    folder = folders.prepared_folder(run)
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(manifest)
    prepare.check(run)
    assert prepare.sha256(run) is None


def test_two_commands_at_once_prepare_once(digits, tmp_path):
    command = [sys.executable, "-m", "aiayn", "prepare", *digits, f"prepared={tmp_path}/prepared"]
    both = [subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sum("training a 25-subword vocabulary" in text for text in printed) == 1
    assert printed[0].splitlines()[-4:] == printed[1].splitlines()[-4:]


def command_at_work(words: list[str], folder: Path, until: str) -> subprocess.Popen[str]:
    """A command that leads a group of its own, once it has printed a line that contains `until`."""
    command = [sys.executable, "-m", "aiayn", *words]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=folder, stdout=pipe, stderr=pipe, text=True, process_group=0)
    assert process.stdout is not None
    while until not in (line := process.stdout.readline()):
        assert line, process.communicate()
    return process


def descendants(process: int) -> set[int]:
    """Every process below one, by the Linux kernel's own list."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = {process}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {process}


def living(processes: set[int]) -> set[int]:
    found = set()
    for process in processes:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found.add(process)
    return found


needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc of Linux")
LONG = (
    "data.vocab_size=8000",
    "data.max_length=64",
    "scale.max_words=0",
    "scale.pairs=0",
)  # so that SentencePiece trains for seconds


@needs_proc
@pytest.mark.parametrize("stage", ["training a", "train: "])
def test_no_process_outlives_a_preparation_that_is_killed(tmp_path, stage):
    process = command_at_work(["prepare", f"prepared={tmp_path}/prepared", *LONG], tmp_path, stage)
    deadline = time.monotonic() + 30
    while not (workers := descendants(process.pid)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 20
    while living(workers):
        assert time.monotonic() < deadline, living(workers)
        time.sleep(0.02)


@needs_proc
@pytest.mark.parametrize(
    ("words", "stage", "number"),
    [
        (["prepare"], "training a", signal.SIGINT),
        pytest.param(["prepare"], "train: ", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(["train", "-m", "seed=1,2"], "training a", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(["train", "-m", "seed=1,2"], "train: ", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(["train"], "training a", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(["train"], "train: ", signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_a_preparation_with_one_line_and_the_same_command_goes_on(tmp_path, words, stage, number):
    """To all processes of the group at once, as a terminal and a cluster send it."""
    words = [*words, f"prepared={tmp_path}/prepared", *LONG, f"output={tmp_path}/runs", "wandb.mode=disabled"]
    process = command_at_work(words, tmp_path, stage)
    workers = descendants(process.pid)
    began = time.monotonic()
    os.killpg(process.pid, number)
    out, err = process.communicate(timeout=60)
    took = time.monotonic() - began
    assert process.returncode == 75, out + err
    lines = [line for line in (out + err).splitlines() if not line.startswith("prepare: ")]
    assert len(lines) == 1
    assert f"stopped by {number.name}; repeat the command to go on from here" in lines[0]
    assert took < 10  # 0.5 s on two idle cores; alone, the stage takes longer
    deadline = time.monotonic() + 5  # each got the signal by itself, and may be a moment later
    while living(workers) - {process.pid}:
        assert time.monotonic() < deadline, living(workers)
        time.sleep(0.02)
    assert not list((tmp_path / "prepared").rglob(".*.tmp"))
    assert not list(tmp_path.rglob("failure.json"))
    folder = next((tmp_path / "prepared").iterdir())
    assert not (folder / "manifest.json").exists()
    if words[0] == "prepare":
        again = command_at_work(words, tmp_path, "SHA-256")
        out, err = again.communicate()
        assert (again.returncode, err) == (0, "")
