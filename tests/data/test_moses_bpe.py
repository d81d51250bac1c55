"""The released code's vocabulary: as subword-nmt and Moses make it, text in the same words back."""

import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import sacremoses
from hypothesis import given
from hypothesis import strategies as st
from subword_nmt.apply_bpe import BPE
from subword_nmt.learn_bpe import learn_bpe

from aiayn.data import moses_bpe
from aiayn.data.moses_bpe import MosesBpe, learn, load
from aiayn.data.parallel_text import EMBEDDED, Files, read_pairs
from aiayn.data.sentencepiece_bpe import BOS, EOS, PAD, UNK, Tokenizer
from aiayn.data.sentencepiece_bpe import learn as learn_subwords

PAIRS = list(read_pairs(EMBEDDED["train"], None))[:3001]
MERGES = 307
NEWS = Path(__file__).parents[3] / "shared" / "data" / "newstest2013"


@pytest.fixture(scope="module", autouse=True)
def few_merges():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moses_bpe, "MERGES", MERGES)
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory, few_merges) -> Path:
    path = tmp_path_factory.mktemp("moses") / "tokenizer.model"
    learn(iter(PAIRS), ("en", "de"), path)
    return path


@pytest.fixture(scope="module")
def tokenizer(model) -> MosesBpe:
    return MosesBpe(model)


def moses(line: str, language: str) -> list[str]:
    return sacremoses.MosesTokenizer(lang=language).tokenize(line)


def subwords(tokenizer: MosesBpe, ids) -> list[str]:
    return [tokenizer.subwords[token] for token in ids]


def test_the_merges_are_subword_nmts_own_on_the_tokenised_text(model):
    """As the recipe pipes it: both tokenised sides, one after the other, into learn_bpe."""
    sides = [[moses(pair[side], language) for pair in PAIRS] for side, language in enumerate(("en", "de"))]
    text = "".join(" ".join(tokens) + "\n" for side in sides for tokens in side)
    written = io.StringIO()
    learn_bpe(io.StringIO(text, newline="\n"), written, MERGES)
    theirs = written.getvalue().split("\n")[1:-1]
    ours = json.loads(model.read_bytes())["merges"]
    assert ours == theirs
    assert len(ours) == MERGES


@pytest.mark.parametrize(("side", "language"), [("source", "en"), ("target", "de")])
def test_a_line_is_split_as_subword_nmt_splits_its_moses_tokens(tokenizer, model, side, language):
    bpe = BPE(io.StringIO("\n".join(["#version: 0.2", *json.loads(model.read_bytes())["merges"]])))
    lines = [pair[side == "target"] for pair in PAIRS[:211]]
    for line, ids in zip(lines, tokenizer.encode(lines, side), strict=True):
        assert subwords(tokenizer, ids) == bpe.segment_tokens(moses(line, language))


def test_each_side_is_tokenised_in_its_own_language(tokenizer):
    line = "ca. 5 of the e.g. settings"  # each language keeps the points of its own abbreviations
    assert moses(line, "en") != moses(line, "de")
    one, other = (tokenizer.encode([line], side)[0].tolist() for side in ("source", "target"))
    assert one != other


def test_every_subword_of_the_text_is_known_and_ids_go_by_frequency(tokenizer):
    counts = np.zeros(tokenizer.vocab_size, int)
    for side in ("source", "target"):
        ids = tokenizer.encode([pair[side == "target"] for pair in PAIRS], side)
        np.add.at(counts, np.concatenate(ids), 1)
    assert counts[UNK] == 0
    assert list(counts[4:]) == sorted(counts[4:], reverse=True)
    assert counts[-1] > 0
    assert len(set(tokenizer.subwords)) == tokenizer.vocab_size


def test_translations_come_back_as_moses_puts_them_together(tokenizer):
    lines = [target for _, target in PAIRS[:499]]
    back = tokenizer.decode([ids.tolist() for ids in tokenizer.encode(lines, "target")])
    detokenizer = sacremoses.MosesDetokenizer(lang="de")
    assert back == [detokenizer.detokenize(moses(line, "de")) for line in lines]
    assert sum(one == other for one, other in zip(back, lines, strict=True)) > 0.8 * len(lines)


def test_special_tokens_are_silent_and_an_unseen_character_is_unknown(tokenizer):
    (ids,) = tokenizer.encode(["Ж settings"])
    assert ids.tolist()[0] == UNK
    assert ids.tolist().count(UNK) == 1
    assert tokenizer.decode([[BOS, *ids.tolist(), EOS, PAD], [EOS], []]) == ["⁇ settings", "", ""]
    assert [len(ids) for ids in tokenizer.encode(["", " \t"])] == [0, 0]
    (names,) = tokenizer.encode(["<s> </s> <pad> <unk>"])
    assert not {PAD, BOS, EOS} & set(names.tolist())


@given(lines=st.lists(st.text() | st.sampled_from(["@@", "a@@ b", "</w>", "&lt;", "\x85\u2028\r"]), max_size=5))
def test_any_text_keeps_its_number_of_lines(tokenizer, lines):
    ids = tokenizer.encode(lines)
    assert all(array.dtype == np.int32 and not {PAD, BOS, EOS} & set(array.tolist()) for array in ids)
    back = tokenizer.decode(ids)
    assert len(back) == len(lines)
    assert not any("\n" in line for line in back)


def test_the_same_pairs_give_the_same_bytes_whatever_the_chunks_and_processes(model, tmp_path, monkeypatch):
    monkeypatch.setattr(moses_bpe, "_PAIRS_AT_ONCE", 1009)
    for processes in (1, 2):
        monkeypatch.setattr(moses_bpe, "_MAX_PROCESSES", processes)
        learn(iter(PAIRS), ("en", "de"), tmp_path / "other")
        assert (tmp_path / "other").read_bytes() == model.read_bytes()
    learn(iter(PAIRS[:-7]), ("en", "de"), tmp_path / "other")  # control
    assert (tmp_path / "other").read_bytes() != model.read_bytes()


def test_merges_are_learned_from_the_most_frequent_words_within_a_bound_of_letters_and_subwords_from_all(
    tmp_path, monkeypatch
):
    given: list[list[tuple[str, int]]] = []

    def spied(text: io.StringIO, *arguments: object, **options: object) -> None:
        given.append([(word, int(count)) for word, count in (line.split() for line in text)])
        text.seek(0)
        learn_bpe(text, *arguments, **options)

    monkeypatch.setattr(moses_bpe, "learn_bpe", spied)
    monkeypatch.setattr(moses_bpe, "MERGES", 101)
    pairs, bound = PAIRS[:499], 1009
    learn(iter(pairs), ("en", "de"), tmp_path / "every")
    monkeypatch.setattr(moses_bpe, "MAX_LETTERS", bound)
    learn(iter(pairs), ("en", "de"), tmp_path / "some")
    every, some = given
    counts = [count for _, count in every]
    assert counts == sorted(counts, reverse=True)
    assert some == every[: len(some)]
    letters = [sum(len(word) for word, _ in words) for words in (some, every[: len(some) + 1], every)]
    assert letters[0] <= bound < letters[1]
    assert letters[2] > 3 * bound  # control: without the bound
    tokenizer = MosesBpe(tmp_path / "some")
    for number, side in enumerate(("source", "target")):
        assert not any(UNK in ids for ids in tokenizer.encode([pair[number] for pair in pairs], side))


MUCH_TEXT = """
import random, sys
from pathlib import Path
from aiayn.data import moses_bpe

draw = random.Random(7)
moses_bpe.MERGES = 11
moses_bpe.MAX_LETTERS *= int(sys.argv[2])

def words(count):
    return " ".join("".join(draw.choices("etaoinshrdlcumwfgypbvkjxqz", k=17)) for _ in range(count))

moses_bpe.learn(((words(20), words(20)) for _ in range(29_000)), ("en", "de"), Path(sys.argv[1]))
# Not getrusage: its maximum counts what the process was before it became Python, a copy of pytest
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the Linux kernel's account of memory")
def test_learning_from_a_million_words_stays_below_a_gigabyte(tmp_path):
    def peak(factor: int) -> int:
        command = [sys.executable, "-c", MUCH_TEXT, str(tmp_path / f"{factor}"), str(factor)]
        return int(subprocess.run(command, capture_output=True, check=True, text=True).stdout) * 1024

    # Two million words more, as many as are counted at most, and 997 merges make it 1.6 GB
    assert (bounded := peak(1)) < 1e9
    assert peak(3) > 2 * bounded  # control: with all their letters


def test_bytes_do_not_depend_on_the_hash_seed(model, tmp_path):
    code = (
        "import sys; from pathlib import Path; from aiayn.data import moses_bpe;"
        "from aiayn.data.parallel_text import *;"
        f"moses_bpe.MERGES = {MERGES};"
        "moses_bpe.learn(iter(list(read_pairs(EMBEDDED['train'], None))[:3001]), ('en', 'de'), Path(sys.argv[1]))"
    )
    environment = {"PYTHONHASHSEED": "3", "LC_ALL": "C", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "m"], env=environment, capture_output=True, check=True
    )
    assert done.stderr == b""  # the library's progress is not ours
    assert (tmp_path / "m").read_bytes() == model.read_bytes()


@pytest.mark.parametrize("pairs", [[], [("a", "b")], [("ab", "cd")]])
def test_text_with_nothing_to_merge_is_refused_with_the_remedy(tmp_path, pairs):
    with pytest.raises(ValueError, match=r"tokenizer=paper: no two letters .* use tokenizer=sentencepiece"):
        learn(iter(pairs), ("en", "de"), tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_a_file_says_which_kind_it_is(model, tmp_path):
    learn_subwords(["low lower lowest"], 15, tmp_path / "subwords")
    assert isinstance(load(model), MosesBpe)
    assert isinstance(load(tmp_path / "subwords"), Tokenizer)


@pytest.mark.skipif(not NEWS.is_dir(), reason="needs newstest2013 beside the repository")
def test_real_news_is_tokenized_and_detokenized(tmp_path):
    files = Files(*(NEWS / f"newstest2013.{language}.xz" for language in ("en", "de")))
    pairs = list(read_pairs(files, None))
    learn(iter(pairs[:1009]), ("en", "de"), tmp_path / "m")
    tokenizer = MosesBpe(tmp_path / "m")
    lines = [target for _, target in pairs[1009:1511]]
    ids = tokenizer.encode(lines, "target")
    assert sum(int((array == UNK).sum()) for array in ids) < 0.003 * sum(map(len, ids))
    detokenizer = sacremoses.MosesDetokenizer(lang="de")
    known = [number for number, array in enumerate(ids) if UNK not in array]
    assert len(known) > 450
    expected = [detokenizer.detokenize(moses(lines[number], "de")) for number in known]
    assert tokenizer.decode([ids[number].tolist() for number in known]) == expected
