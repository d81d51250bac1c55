import errno
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aiayn.core import storage
from aiayn.core.signals import Interrupted, interrupting
from aiayn.data import encoding
from aiayn.data.encoded import SIDES, SPLITS, Dataset
from aiayn.data.encoding import Origin, _packed, encode_corpus
from aiayn.data.parallel_text import DataError, Files, Selection, read_pairs
from aiayn.data.sentencepiece_bpe import EOS
from tests.data.small_corpus import MAX_LENGTH, VOCAB_SIZE, prepare_here

# What `python -c` runs in another process: folder, source folder, and the write at which it dies, if any
PREPARE = """
import os, signal, sys
from pathlib import Path
from aiayn.core import storage
from aiayn.data.parallel_text import Files, fingerprints
from aiayn.data.encoding import Origin, encode_corpus
writes = 0
def die(point, path):
    global writes
    writes += point == "synced"
    if writes == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
storage.fault = die if sys.argv[3] != "0" else storage.fault
splits = {s: [Files(Path(sys.argv[2], f"{s}.en"), Path(sys.argv[2], f"{s}.de"))] for s in ("train", "dev", "test")}
origin = Origin(fingerprints(splits), lambda: splits)
print(encode_corpus(Path(sys.argv[1]), origin, vocab_size=41, max_length=23, progress=print).sha256)
"""


def prepare_elsewhere(folder: Path, text: Path, dies_at: int = 0, **environment: str) -> tuple[int, str]:
    """Exit status and output of another process."""
    command = [sys.executable, "-c", PREPARE, folder, text, str(dies_at)]
    finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=os.environ | environment)
    return finished.returncode, finished.stdout


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def decoded(dataset: Dataset, split, side) -> list[str]:
    pairs = dataset.pairs(split)
    ids, offsets = getattr(pairs, f"{side}_ids"), getattr(pairs, f"{side}_offsets")
    sentences = [ids[start:end] for start, end in pairwise(offsets)]
    assert all(sentence[-1] == EOS and EOS not in sentence[:-1] for sentence in sentences)
    return dataset.tokenizer.decode(sentences)


# What is refused before anything is learned from it


@pytest.mark.parametrize("split", SPLITS)
def test_unequal_files_are_refused_before_a_vocabulary_is_trained_on_them(split, text, tmp_path, monkeypatch) -> None:
    trained = []
    train = sentencepiece.SentencePieceTrainer.train

    def watched(**options: Any) -> None:
        trained.append(options["vocab_size"])
        train(**options)

    monkeypatch.setattr(sentencepiece.SentencePieceTrainer, "train", watched)
    unequal = Path(shutil.copytree(text, tmp_path / "text"))
    with (unequal / f"{split}.de").open("a") as file:
        file.write("one more\n")
    with pytest.raises(DataError, match=rf"{split}\.en has \d+ lines, .*{split}\.de has \d+"):
        prepare_here(tmp_path / "small", unequal)
    assert trained == []
    prepare_here(tmp_path / "small", text)  # control: with equal files it is trained, and that is seen here
    assert trained == [VOCAB_SIZE]


# What is prepared


def test_the_encoded_splits_are_the_text(prepared, text) -> None:
    for split in SPLITS:
        for side, language in zip(SIDES, ("en", "de"), strict=True):
            assert decoded(prepared, split, side) == (text / f"{split}.{language}").read_text().splitlines()


def test_ids_take_two_bytes_as_long_as_they_fit(prepared) -> None:
    assert prepared.pairs("train").source_ids.dtype == np.uint16
    packed, lengths = _packed([np.array([65_536], dtype=np.int32)], np.dtype(np.int32))
    assert packed.tolist() == [65_536, EOS]
    assert lengths.tolist() == [2]


def test_training_lines_are_kept_or_dropped_by_reason_and_dev_lines_are_all_kept(tmp_path, text) -> None:
    folder = Path(shutil.copytree(text, tmp_path / "text"))
    for split in ("train", "dev"):
        for language in ("en", "de"):
            with (folder / f"{split}.{language}").open("ab") as file:
                file.write(b"\n" + b"new low " * MAX_LENGTH + b"\nnew\rest\n")
    with (folder / "train.en").open("ab") as english, (folder / "train.de").open("ab") as german:
        english.write(b"low\xff\n")
        german.write(b"low\n")
    dataset = prepare_here(tmp_path / "small", folder)
    train, dev = (dataset.manifest["splits"][split] for split in ("train", "dev"))
    assert train["lines"] == 97 + 4
    unselected = {"over max_words": 0, "beyond pairs": 0}
    assert train["dropped"] == {"empty": 1, "invalid UTF-8": 1, "too long": 1, **unselected}
    assert train["kept"] == len(dataset.pairs("train")) == 98
    assert dev["lines"] == dev["kept"] == len(dataset.pairs("dev")) == 13 + 3
    assert decoded(dataset, "dev", "target") == dataset.texts("dev", "target")
    assert dataset.texts("dev", "source")[-3:] == ["", "new low " * MAX_LENGTH, "new\rest"]


def test_a_selection_drops_long_pairs_of_every_split_and_keeps_the_first_training_pairs(tmp_path, text) -> None:
    counts = []
    for selection in (Selection(), Selection(max_words=3), Selection(max_words=3, pairs=17)):
        dataset = prepare_here(tmp_path / f"{len(counts)}", text, selection=selection)
        counts.append(dataset.manifest["splits"])
        for split in SPLITS:
            part = dataset.manifest["splits"][split]
            assert part["lines"] == part["kept"] + sum(part["dropped"].values())
            assert part["kept"] == len(dataset.pairs(split))
        for split in ("dev", "test"):
            lines = list(read_pairs(Files(text / f"{split}.en", text / f"{split}.de"), None))
            chosen = [pair for pair in lines if not selection.max_words or max(len(s.split()) for s in pair) <= 3]
            assert [*zip(*(dataset.texts(split, side) for side in SIDES), strict=True)] == chosen
            assert decoded(dataset, split, "target") == dataset.texts(split, "target")
    everything, short, few = counts
    assert everything["train"]["dropped"]["over max_words"] == 0 < short["train"]["dropped"]["over max_words"]
    assert few["train"]["kept"] == 17 < short["train"]["kept"]
    assert few["train"]["dropped"]["beyond pairs"] == short["train"]["kept"] - 17
    assert (few["dev"]["kept"], few["test"]["kept"]) == (short["dev"]["kept"], short["test"]["kept"])


def test_a_limit_of_training_alone_leaves_dev_and_test_as_they_are(tmp_path, text) -> None:
    datasets = {
        name: prepare_here(tmp_path / name, text, selection=selection)
        for name, selection in (
            ("whole", Selection(max_words=7)),
            ("limited", Selection(max_words=7, max_train_words=3)),
            ("short", Selection(max_words=3)),
        )
    }
    for split in ("dev", "test"):
        whole, limited, short = (dataset.texts(split, "source") for dataset in datasets.values())
        assert limited == whole
        assert len(short) < len(whole)  # control
    whole, limited, short = (dataset.manifest["splits"]["train"] for dataset in datasets.values())
    assert limited == short
    assert limited["kept"] < whole["kept"]
    # What is prepared already keeps its hash: its manifest does not have the key
    assert "max_train_words" not in datasets["whole"].manifest["settings"]
    assert datasets["limited"].manifest["settings"]["max_train_words"] == 3


def test_a_folder_prepared_from_another_selection_is_refused(tmp_path, text) -> None:
    prepare_here(tmp_path / "once", text, selection=Selection(pairs=19))
    with pytest.raises(DataError, match="pairs was 19, is 23"):
        prepare_here(tmp_path / "once", text, selection=Selection(pairs=23))


def test_a_training_pair_of_exactly_the_maximum_length_is_kept(tmp_path, text, prepared) -> None:
    longest = int(max(prepared.pairs("train").source_lengths[:].max(), prepared.pairs("train").target_lengths[:].max()))
    at_limit = prepare_here(tmp_path / "at", text, max_length=longest).manifest["splits"]["train"]
    below = prepare_here(tmp_path / "below", text, max_length=longest - 1).manifest["splits"]["train"]
    assert at_limit["dropped"]["too long"] == 0
    assert below["dropped"]["too long"] > 0


def test_unseen_characters_are_counted(tmp_path, text) -> None:
    folder = Path(shutil.copytree(text, tmp_path / "text"))
    (folder / "test.de").write_text((folder / "test.de").read_text().replace("new", "ж", 1).replace("low", "жж", 1))
    counts = prepare_here(tmp_path / "small", folder).manifest["splits"]
    assert counts["test"]["target_unknown"] == 2  # a run of unseen characters is one unknown token
    assert counts["test"]["source_unknown"] == counts["train"]["target_unknown"] == 0


def test_text_without_a_pair_to_learn_from_is_refused(tmp_path, text) -> None:
    folder = Path(shutil.copytree(text, tmp_path / "text"))
    (folder / "train.en").write_text("\n\n")
    (folder / "train.de").write_text("a\n\n")
    with pytest.raises(DataError, match="hold no sentence pair to learn from"):
        prepare_here(tmp_path / "small", folder)
    with pytest.raises(DataError, match=r"train\.de leave no sentence pair \(data\.max_length is 1, scale\.max_words"):
        prepare_here(tmp_path / "other", text, max_length=1)


@pytest.mark.parametrize("lines", ["", "\n\n\n"])
def test_a_dev_set_without_references_is_refused_before_anything_is_learned(tmp_path, text, lines) -> None:
    folder = Path(shutil.copytree(text, tmp_path / "text"))
    for side in ("en", "de"):
        (folder / f"dev.{side}").write_text(lines)
    said = []
    with pytest.raises(DataError, match=r"dev\.de leave no dev pair with text on the target side"):
        prepare_here(tmp_path / "small", folder, progress=said.append)
    assert said == []


def test_missing_text_is_named_before_anything_is_written(tmp_path, text) -> None:
    with pytest.raises(DataError, match=r"cannot read .*nowhere/train\.en"):
        prepare_here(tmp_path / "small", tmp_path / "nowhere")
    assert not (tmp_path / "small").exists()


LINES = st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]), max_size=9)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(LINES, LINES), min_size=1, max_size=7))
def test_any_text_keeps_its_lines_from_the_files_to_the_ids_and_back(tmp_path_factory, text, rows) -> None:
    folder = Path(shutil.copytree(text, tmp_path_factory.mktemp("any") / "text"))
    rows = [("low", "low"), *rows]
    for language, lines in zip(("en", "de"), zip(*rows, strict=True), strict=True):
        (folder / f"dev.{language}").write_bytes("".join(line + "\n" for line in lines).encode())
    dataset = prepare_here(folder.parent / "small", folder)
    for side, lines in zip(SIDES, zip(*rows, strict=True), strict=True):
        as_read = [line.removesuffix("\r") for line in lines]
        assert dataset.texts("dev", side) == as_read
        assert len(decoded(dataset, "dev", side)) == len(rows)
        assert not any("\n" in line for line in decoded(dataset, "dev", side))
    assert dataset.manifest["splits"]["dev"]["lines"] == len(rows)


def test_a_split_of_several_parts_is_one_split_in_their_order(tmp_path, text, prepared) -> None:
    for language in ("en", "de"):
        lines = (text / f"train.{language}").read_bytes().splitlines(keepends=True)
        for name, part in (("a", lines[:31]), ("b", lines[31:])):
            (tmp_path / f"{name}.{language}").write_bytes(b"".join(part))
    splits = {split: [Files(text / f"{split}.en", text / f"{split}.de")] for split in SPLITS}
    splits["train"] = [Files(tmp_path / f"{name}.en", tmp_path / f"{name}.de") for name in ("a", "b")]
    parted = encode_corpus(
        tmp_path / "parted", Origin({}, lambda: splits), VOCAB_SIZE, MAX_LENGTH, lambda message: None
    )
    for part in ("files", "splits"):
        assert parted.manifest[part] == prepared.manifest[part]


# Again, elsewhere, at once, after a crash


def test_preparing_twice_writes_nothing_the_second_time(prepared, text) -> None:
    def stamps() -> dict[str, tuple[int, int]]:
        return {path.name: (path.stat().st_mtime_ns, path.stat().st_ino) for path in prepared.folder.iterdir()}

    before = stamps()
    assert prepare_here(prepared.folder, text).sha256 == prepared.sha256
    assert stamps() == before


def test_bytes_do_not_depend_on_hash_seed_locale_threads_or_folder(tmp_path, text, prepared) -> None:
    environment = {"PYTHONHASHSEED": "3", "LC_ALL": "C", "PYTHONUTF8": "0", "OMP_NUM_THREADS": "3"}
    assert prepare_elsewhere(tmp_path / "small", text, **environment)[0] == 0
    assert contents(tmp_path / "small") == contents(prepared.folder)


@pytest.mark.parametrize("write", [1, 2, 9, 18, 22])
def test_a_kill_at_any_write_then_again_gives_the_same_files(tmp_path, text, prepared, write) -> None:
    assert prepare_elsewhere(tmp_path / "small", text, dies_at=write)[0] == -signal.SIGKILL
    with pytest.raises(DataError, match="holds no prepared data: `aiayn prepare` with the same arguments"):
        Dataset.open(tmp_path / "small")
    prepare_here(tmp_path / "small", text)
    assert contents(tmp_path / "small") == contents(prepared.folder)


def test_whatever_point_it_dies_at_the_next_process_ends_with_the_same_files(
    tmp_path, text, prepared, monkeypatch
) -> None:
    """Every state that the disk passes through is what a kill at that moment leaves."""
    states: list[Path] = []

    def keep(point: str, path: Path) -> None:
        states.append(Path(shutil.copytree(path.parent, tmp_path / f"{len(states)}-{point}" / "small")))
        for written in states[-1].glob(".*.tmp"):  # by this process, which lives; above every number of a process
            written.rename(written.with_name(written.name.replace(f".{os.getpid()}.", f".{2**22 + 1}.")))

    monkeypatch.setattr(storage, "fault", keep)
    prepare_here(tmp_path / "small", text)
    monkeypatch.undo()
    files = len(contents(prepared.folder)) - 2  # but the lock, and the manifest, which is written after each stage
    assert len(states) == 1 + 4 * (files + 4) + 2
    for state in states:
        whole = contents(state).keys() >= contents(prepared.folder).keys()
        assert whole == (state == states[-1])  # the manifest's name comes last
    for state in [*states[::7], states[-1]]:  # every point, a third of the files
        prepare_here(state, text)
        assert {**contents(state), ".lock": b""} == contents(prepared.folder)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES])
def test_a_disk_that_refuses_is_named_and_again_gives_the_same_files(
    tmp_path, text, prepared, monkeypatch, code
) -> None:
    def refuse(point: str, path: Path) -> None:
        if path.name == "dev.source.ids.npy":
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(storage, "fault", refuse)
    with pytest.raises(storage.StorageError, match=rf"small/dev\.source\.ids\.npy: {os.strerror(code)}"):
        prepare_here(tmp_path / "small", text)
    monkeypatch.undo()
    prepare_here(tmp_path / "small", text)
    assert contents(tmp_path / "small") == contents(prepared.folder)


def test_of_several_processes_at_once_one_works_and_the_others_wait(tmp_path, text, prepared) -> None:
    with ThreadPoolExecutor() as pool:
        outputs = [output for _, output in pool.map(lambda _: prepare_elsewhere(tmp_path / "small", text), range(3))]
    assert sum("training a" in output for output in outputs) == 1
    assert {output.split()[-1] for output in outputs} == {prepared.sha256}


def test_who_waits_for_another_process_says_so_and_a_signal_ends_the_wait(tmp_path) -> None:
    origin, folder, told = Origin({}, pytest.fail), tmp_path / "small", []
    with ExitStack() as owner, interrupting():
        owner.enter_context(storage.lock(folder / ".lock", wait=False))

        def report(message: str) -> None:
            told.append(message)
            os.kill(os.getpid(), signal.SIGTERM)
            owner.close()  # whoever goes on gets the lock

        with pytest.raises(Interrupted):
            encode_corpus(folder, origin, VOCAB_SIZE, MAX_LENGTH, report)
    assert told == [f"waiting: {folder} is in use by process {os.getpid()} on {os.uname().nodename}"]


STAGES = ("training a", "train: 97 pairs", "dev: 13 pairs", "test: 11 pairs")


@pytest.mark.parametrize("stage", STAGES)
def test_a_signal_ends_every_stage_and_the_same_call_goes_on_after_the_last_complete_one(
    tmp_path, text, prepared, stage
) -> None:
    """A split's message comes before its files have their names."""
    told: list[str] = []

    def report(message: str) -> None:
        told.append(message)
        if message.startswith(stage):
            os.kill(os.getpid(), signal.SIGTERM)

    with interrupting(), pytest.raises(Interrupted, match="stopped by SIGTERM"):
        prepare_here(tmp_path / "small", text, progress=report)
    assert told[-1].startswith(stage)
    assert {path.name for path in (tmp_path / "small").iterdir()} <= {*contents(prepared.folder), ".manifest.part"}
    told.clear()
    assert prepare_here(tmp_path / "small", text, progress=told.append).sha256 == prepared.sha256
    assert contents(tmp_path / "small") == contents(prepared.folder)
    before = ["tokenizer", "train", "dev"][: STAGES.index(stage)]
    assert [message for message in told if "complete before" in message] == [f"{s}: complete before" for s in before]
    assert [message.split()[0] for message in told[len(before) :]] == [s.split()[0] for s in STAGES[len(before) :]]


@pytest.mark.parametrize("damage", ["file", "record", "settings", "none"])
def test_a_stage_is_only_reused_when_its_files_and_its_settings_are_the_same(
    tmp_path, text, prepared, monkeypatch, damage
) -> None:
    def die(split, *_) -> None:
        raise LookupError

    folder = tmp_path / "small"
    monkeypatch.setattr(encoding, "_save_texts", die)  # of the dev set, after tokenizer and training text
    with pytest.raises(LookupError):
        prepare_here(folder, text, **({"max_length": MAX_LENGTH - 19} if damage == "settings" else {}))
    monkeypatch.undo()
    if damage == "file":
        (folder / "train.target.ids.npy").write_bytes(b"x" + (folder / "train.target.ids.npy").read_bytes()[1:])
    if damage == "record":
        (folder / ".manifest.part").write_text(
            (folder / ".manifest.part").read_text().replace('"kept": 97', '"kept": 9')
        )
    told: list[str] = []
    prepare_here(folder, text, progress=told.append)
    assert contents(folder) == contents(prepared.folder)
    reused = {"file": ["tokenizer"], "none": ["tokenizer", "train"]}.get(damage, [])
    assert [message.split(":")[0] for message in told if "complete before" in message] == reused


# Damage


def test_a_folder_prepared_from_something_else_is_refused_with_both_values(copy, text, tmp_path) -> None:
    with pytest.raises(DataError, match=r"vocab_size was 41, is 37.*another data.name, or .*rm -r .*small"):
        prepare_here(copy, text, vocab_size=37)
    with pytest.raises(DataError, match="max_length was 23, is 29"):
        prepare_here(copy, text, max_length=29)
    other = Path(shutil.copytree(text, tmp_path / "text"))
    with (other / "dev.de").open("a") as file:
        file.write("wide\n")
    with pytest.raises(DataError, match=r"dev\.target was [0-9a-f]{64}, is [0-9a-f]{64}"):
        prepare_here(copy, other)


def test_the_manifest_says_nothing_of_time_or_machine(prepared, text) -> None:
    written = (prepared.folder / "manifest.json").read_text()
    manifest = json.loads(written)
    assert set(manifest) == {"schema", "settings", "splits", "files", "sha256"}
    assert set(manifest["files"]) == {path.name for path in prepared.folder.iterdir()} - {"manifest.json", ".lock"}
    assert str(prepared.folder.parent) not in written
    assert str(text) not in written


def test_chunks_and_processes_change_no_byte(tmp_path, monkeypatch) -> None:
    draw = random.Random(7)
    lines = [" ".join(draw.choice(("low", "new", "est", "er")) for _ in range(draw.randint(0, 9))) for _ in range(101)]
    for name, count in (("train", 101), ("dev", 3)):
        (tmp_path / name).write_text("".join(line + "\n" for line in lines[:count]))
    train, dev = ([Files(tmp_path / name, tmp_path / name)] for name in ("train", "dev"))
    origin = Origin({}, lambda: {"train": train, "dev": dev, "test": dev})
    hashes = []
    for number, (pairs_at_once, processes) in enumerate(((1000, 1), (7, 1), (7, 2))):
        monkeypatch.setattr(encoding, "_PAIRS_AT_ONCE", pairs_at_once)
        monkeypatch.setattr(encoding, "_MAX_PROCESSES", processes)
        prepared = encode_corpus(tmp_path / str(number), origin, 21, 9, lambda message: None)
        hashes.append(prepared.sha256)
        for part in ("ids", "offsets"):
            path = prepared.folder / f"train.source.{part}.npy"
            written = io.BytesIO()
            np.save(written, np.load(path))
            assert path.read_bytes() == written.getvalue()
    assert len(set(hashes)) == 1
    assert prepared.manifest["splits"]["train"]["dropped"]["too long"] > 0  # so chunks lose pairs
    prepared = encode_corpus(tmp_path / "other", origin, 21, 8, lambda message: None)
    assert prepared.sha256 not in hashes  # control


def test_the_memory_of_preparing_does_not_grow_with_the_corpus(tmp_path, text, monkeypatch) -> None:
    monkeypatch.setattr(encoding, "_MAX_PROCESSES", 1)

    def peak(times: int) -> int:
        folder = tmp_path / str(times)
        if not folder.exists():
            shutil.copytree(text, folder)
            for language in ("en", "de"):
                (folder / f"train.{language}").write_text((text / f"train.{language}").read_text() * times)
        tracemalloc.start()
        prepare_here(tmp_path / f"prepared{times}-{encoding._PAIRS_AT_ONCE}", folder)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    monkeypatch.setattr(encoding, "_PAIRS_AT_ONCE", 211)
    assert peak(4 * 11) < 1.2 * peak(11)
    monkeypatch.setattr(encoding, "_PAIRS_AT_ONCE", 10**6)
    assert peak(4 * 11) > 3 * peak(11)  # control: all pairs at once
