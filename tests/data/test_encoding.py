import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest

from aiayn.core.signals import Interrupted, interrupting
from aiayn.data import parallel_text
from aiayn.data.dataset import SIDES, SPLITS, Dataset
from aiayn.data.parallel_text import DataError
from aiayn.data.sentencepiece_bpe import EOS
from tests.data.small_corpus import MAX_LENGTH, prepare_here, selecting

# What `python -c` runs in another process: folder, source folder, and the write at which it dies, if any
PREPARE = """
import os, signal, sys
from pathlib import Path
from aiayn.core import storage
from tests.data.small_corpus import prepare_here
writes = 0
def die(point, path):
    global writes
    writes += point == "synced"
    if writes == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
storage.fault = die
print(prepare_here(Path(sys.argv[1]), Path(sys.argv[2]), progress=print).sha256)
"""


def prepare_elsewhere(folder: Path, text: Path, dies_at: int = -1, **environment: str) -> tuple[int, str]:
    """Exit status and output of another process."""
    command, root = [sys.executable, "-c", PREPARE, folder, text, str(dies_at)], Path(__file__).parents[2]
    finished = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, env=os.environ | environment)
    return finished.returncode, finished.stdout


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def decoded(dataset: Dataset, split, side) -> list[str]:
    pairs = dataset.pairs(split)
    ids, offsets = getattr(pairs, f"{side}_ids"), getattr(pairs, f"{side}_offsets")
    sentences = [ids[start:end] for start, end in pairwise(offsets)]
    assert all(sentence[-1] == EOS and EOS not in sentence[:-1] for sentence in sentences)
    return dataset.tokenizer.decode(sentences)


def test_the_encoded_splits_are_the_text(prepared, text) -> None:
    for split in SPLITS:
        for side, language in zip(SIDES, ("en", "de"), strict=True):
            assert decoded(prepared, split, side) == (text / f"{split}.{language}").read_text().splitlines()


def test_training_lines_are_dropped_by_reason_and_dev_lines_kept(tmp_path, text) -> None:
    folder = Path(shutil.copytree(text, tmp_path / "text"))
    more = b"\n" + b"new low " * MAX_LENGTH + "\nnew\rest \u2028\x85\f\n".encode()
    for name, last in (("train.en", b"low\xff\n"), ("train.de", b"low\n"), ("dev.en", b""), ("dev.de", b"")):
        (folder / name).write_bytes((folder / name).read_bytes() + more + last)
    dataset = prepare_here(tmp_path / "small", folder)
    train, dev = (dataset.manifest["splits"][split] for split in ("train", "dev"))
    assert train["lines"] == 97 + 4
    unselected = {"over max_words": 0, "beyond pairs": 0}
    assert train["dropped"] == {"empty": 1, "invalid UTF-8": 1, "too long": 1, **unselected}
    assert train["kept"] == len(dataset.pairs("train")) == 98
    assert dev["lines"] == dev["kept"] == len(dataset.pairs("dev")) == 13 + 3
    assert decoded(dataset, "dev", "target") == dataset.texts("dev", "target")
    assert dataset.texts("dev", "source")[-3:] == ["", "new low " * MAX_LENGTH, "new\rest \u2028\x85\f"]


@pytest.mark.parametrize(("bad", "said"), [(10, "train: 10 of 107"), (11, "warning: train: 11 of 108")])
def test_dropped_pairs_are_told_and_a_tenth_is_a_warning(tmp_path, text, bad, said) -> None:
    folder, told = Path(shutil.copytree(text, tmp_path / "text")), []
    for name in ("train.en", "train.de"):
        (folder / name).write_bytes((folder / name).read_bytes() + b"\n" + b"low\0\n" * 2 + b"low\xff\n" * (bad - 3))
    prepare_here(tmp_path / "small", folder, progress=told.append, scale=selecting(pairs=53))
    reasons = f"{bad - 3} invalid UTF-8, 2 NUL byte, 1 empty; `iconv -f CP1252"
    assert [line for line in told if "dropped" in line and line.startswith(said) and reasons in line]
    told.clear()
    prepare_here(tmp_path / "clean", text, progress=told.append, scale=selecting(pairs=53))
    assert not any("dropped" in line for line in told)  # what a selection leaves out is no damage


def test_a_selection_drops_long_pairs_and_keeps_the_first(tmp_path, text) -> None:
    dataset = prepare_here(tmp_path / "small", text, scale=selecting(max_words=3, pairs=17))
    short = {s: [line for line in (text / f"{s}.en").read_text().splitlines() if line.count(" ") < 3] for s in SPLITS}
    assert decoded(dataset, "train", "source") == short["train"][:17]
    assert dataset.manifest["splits"]["train"]["dropped"]["beyond pairs"] == len(short["train"]) - 17 > 0
    assert dataset.texts("dev", "source") == decoded(dataset, "dev", "source") == short["dev"]


def test_a_training_pair_of_exactly_the_maximum_length_is_kept(tmp_path, text, prepared) -> None:
    longest = int(max(prepared.pairs("train").source_lengths.max(), prepared.pairs("train").target_lengths.max()))
    for max_length, complete in ((longest, True), (longest - 1, False)):
        train = prepare_here(tmp_path / str(max_length), text, max_length=max_length).pairs("train")
        assert (len(train) == 97) == complete


@pytest.mark.parametrize(
    ("split", "lines", "changed", "refusal"),
    [
        ("train", "\n\n", {}, "on the target side: dropped are 2 empty$"),
        ("train", "", {}, "on the target side: no line of it holds text$"),
        ("dev", " \n\n\n", {}, "on the target side: no line of it holds text$"),
        ("test", "", {}, "on the target side: no line of it holds text$"),
        ("train", "\udcff\n" * 3, {}, "dropped are 3 invalid UTF-8; `iconv -f CP1252 -t UTF-8 FILE > NEW`"),
        ("dev", "low wide\n" * 5, {"scale": selecting(max_words=1)}, "dropped are 5 over max_words; .*max_words=0"),
        ("train", "low wide newest\n" * 9, {"max_length": 1}, r"has only data\.max_length=1 tokens; raise it"),
    ],
)
def test_text_that_leaves_nothing_is_refused(tmp_path, text, split, lines, changed, refusal) -> None:
    folder, said = Path(shutil.copytree(text, tmp_path / "text")), []
    for language in ("en", "de"):
        (folder / f"{split}.{language}").write_text(lines, errors="surrogateescape")
    with pytest.raises(DataError, match=rf"{split}\.de.* no {split} pair .*{refusal}"):
        prepare_here(tmp_path / "small", folder, progress=said.append, **changed)
    assert "max_length" in changed or said == []  # dev is looked at before anything is learned


@pytest.mark.parametrize("write", [1, 2, 9, 22])
def test_a_kill_at_any_write_then_again_gives_the_same_files(tmp_path, text, prepared, write) -> None:
    assert prepare_elsewhere(tmp_path / "small", text, dies_at=write)[0] == -signal.SIGKILL
    with pytest.raises(DataError, match="holds no prepared data: `aiayn prepare` with the same arguments"):
        Dataset(tmp_path / "small")
    prepare_here(tmp_path / "small", text)
    assert contents(tmp_path / "small") == contents(prepared.folder)


def test_of_several_processes_one_works_in_any_environment(tmp_path, text, prepared) -> None:
    environment = {"PYTHONHASHSEED": "3", "LC_ALL": "C", "PYTHONUTF8": "0", "OMP_NUM_THREADS": "3"}
    with ThreadPoolExecutor() as pool:
        asked = [pool.submit(prepare_elsewhere, tmp_path / "small", text, **environment) for _ in range(3)]
    outputs = [answer.result()[1] for answer in asked]
    assert sum("training a" in output for output in outputs) == 1
    assert {output.split()[-1] for output in outputs} == {prepared.sha256}
    assert contents(tmp_path / "small") == contents(prepared.folder)


STAGES = ("training a", "train: 97 pairs", "dev: 13 pairs", "test: 11 pairs")


def interrupted(folder: Path, text: Path, stage: str, **settings: int) -> None:
    """A preparation that a signal ends at a stage; a split's message comes before its files have their names."""

    def report(message: str) -> None:
        if message.startswith(stage):
            os.kill(os.getpid(), signal.SIGTERM)

    with interrupting(), pytest.raises(Interrupted, match="stopped by SIGTERM"):
        prepare_here(folder, text, progress=report, **settings)


@pytest.mark.parametrize("stage", STAGES)
def test_a_signal_ends_every_stage_and_complete_ones_are_reused(tmp_path, text, prepared, stage) -> None:
    folder, told = tmp_path / "small", []
    interrupted(folder, text, stage)
    assert {path.name for path in folder.iterdir()} <= {*contents(prepared.folder), ".manifest.part"}
    prepare_here(folder, text, progress=told.append)
    assert contents(folder) == contents(prepared.folder)
    before = ["tokenizer", "train", "dev"][: STAGES.index(stage)]
    assert [message for message in told if "complete before" in message] == [f"{s}: complete before" for s in before]
    assert [message.split()[0] for message in told[len(before) :]] == [s.split()[0] for s in STAGES[len(before) :]]


@pytest.mark.parametrize(("damage", "reused"), [("file", ["tokenizer"]), ("record", []), ("settings", [])])
def test_a_stage_is_only_reused_with_its_files_and_settings(tmp_path, text, prepared, damage, reused) -> None:
    folder, told = tmp_path / "small", []
    interrupted(folder, text, "dev: 13 pairs", max_length=4 if damage == "settings" else MAX_LENGTH)
    ids, record = folder / "train.target.ids.npy", folder / ".manifest.part"
    if damage == "file":
        ids.write_bytes(b"x" + ids.read_bytes()[1:])
    if damage == "record":
        record.write_bytes(record.read_bytes().replace(b'"kept": 97', b'"kept": 9'))
    prepare_here(folder, text, progress=told.append)
    assert contents(folder) == contents(prepared.folder)
    assert [message.split(":")[0] for message in told if "complete before" in message] == reused


def test_a_folder_of_another_corpus_is_refused_with_both_values(copy, text) -> None:
    with pytest.raises(DataError, match=r"vocab_size was 41, is 37.*another data.name, or .*rm -r .*small"):
        prepare_here(copy, text, vocab_size=37)


def test_chunks_and_processes_change_no_byte(tmp_path, text, monkeypatch) -> None:
    whole = prepare_here(tmp_path / "whole", text, max_length=4)
    assert whole.manifest["splits"]["train"]["dropped"]["too long"] > 0  # so chunks lose pairs
    monkeypatch.setattr(parallel_text, "PAIRS_AT_ONCE", 7)
    monkeypatch.setattr(parallel_text, "MAX_PROCESSES", 2)
    assert prepare_here(tmp_path / "chunks", text, max_length=4).sha256 == whole.sha256
    assert prepare_here(tmp_path / "other", text, max_length=3).sha256 != whole.sha256  # control
