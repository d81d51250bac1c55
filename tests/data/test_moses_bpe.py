"""The released code's vocabulary: as subword-nmt and Moses make it, text in the same words back."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
import sacremoses
from subword_nmt.apply_bpe import BPE
from subword_nmt.learn_bpe import learn_bpe

from aiayn.data import moses_bpe, parallel_text
from aiayn.data.moses_bpe import MosesBpe, train
from aiayn.data.parallel_text import EMBEDDED, read_pairs
from aiayn.data.sentencepiece_bpe import BOS, EOS, PAD, UNK

PAIRS = list(read_pairs(EMBEDDED["tiny"]["train"], None))[:3001]
MERGES = 307


@pytest.fixture(scope="module", autouse=True)
def few_merges():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moses_bpe, "MERGES", MERGES)
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory, few_merges) -> Path:
    path = tmp_path_factory.mktemp("moses") / "tokenizer.model"
    train(iter(PAIRS), ("en", "de"), path)
    return path


@pytest.fixture(scope="module")
def tokenizer(model) -> MosesBpe:
    return MosesBpe(model)


def moses(line: str, language: str) -> list[str]:
    return sacremoses.MosesTokenizer(lang=language).tokenize(line)


def test_the_merges_are_subword_nmts_own_on_the_tokenised_text(model):
    """As the recipe pipes it: both tokenised sides, one after the other, into learn_bpe."""
    lines = [moses(pair[side], language) for side, language in enumerate(("en", "de")) for pair in PAIRS]
    written = io.StringIO()
    learn_bpe(io.StringIO("".join(" ".join(tokens) + "\n" for tokens in lines), newline="\n"), written, MERGES)
    merges = json.loads(model.read_bytes())["merges"]
    assert merges == written.getvalue().split("\n")[1:-1]
    assert len(merges) == MERGES


@pytest.mark.parametrize(("side", "language"), [("source", "en"), ("target", "de")])
def test_a_line_is_split_as_subword_nmt_splits_its_moses_tokens(tokenizer, model, side, language):
    bpe = BPE(io.StringIO("\n".join(["#version: 0.2", *json.loads(model.read_bytes())["merges"]])))
    lines = [pair[side == "target"] for pair in PAIRS[:211]]
    for line, ids in zip(lines, tokenizer.encode(lines, side), strict=True):
        assert [tokenizer.subwords[token] for token in ids] == bpe.segment_tokens(moses(line, language))


def test_every_subword_is_known_and_ids_go_by_frequency(tokenizer):
    sides = zip(zip(*PAIRS, strict=True), ("source", "target"), strict=True)
    ids = [ids for lines, side in sides for ids in tokenizer.encode(lines, side)]
    counts = np.bincount(np.concatenate(ids), minlength=tokenizer.vocab_size)
    assert counts[UNK] == 0
    assert list(counts[4:]) == sorted(counts[4:], reverse=True)
    assert counts[-1] > 0
    assert len(set(tokenizer.subwords)) == tokenizer.vocab_size


def test_special_tokens_are_silent_an_unseen_character_unknown(tokenizer):
    (ids,) = tokenizer.encode(["Ж settings"])
    assert ids.tolist()[0] == UNK
    assert ids.tolist().count(UNK) == 1
    assert tokenizer.decode([[BOS, *ids.tolist(), EOS, PAD], [EOS], [], [30_000]]) == ["⁇ settings", "", "", ""]
    assert [len(ids) for ids in tokenizer.encode(["", " \t"])] == [0, 0]
    (names,) = tokenizer.encode(["<s> </s> <pad> <unk>"])
    assert not {PAD, BOS, EOS} & set(names.tolist())


def test_chunks_and_processes_change_no_byte_of_the_merges(model, tmp_path, monkeypatch):
    monkeypatch.setattr(parallel_text, "PAIRS_AT_ONCE", 1009)
    monkeypatch.setattr(parallel_text, "MAX_PROCESSES", 2)
    train(iter(PAIRS), ("en", "de"), tmp_path / "other")
    assert (tmp_path / "other").read_bytes() == model.read_bytes()


def test_text_with_nothing_to_merge_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer=paper: no two letters .* use tokenizer=sentencepiece"):
        train(iter([("ab", "cd")]), ("en", "de"), tmp_path / "m")
    assert not (tmp_path / "m").exists()
