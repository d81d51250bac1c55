"""A prepared corpus: its lengths, and damage, which is refused by name with the remedy."""

import pytest
import sentencepiece

from aiayn.data.dataset import Dataset
from aiayn.data.parallel_text import DataError
from aiayn.data.sentencepiece_bpe import Tokenizer
from tests.data.small_corpus import prepare_here


def test_a_foreign_tokenizer_never_reaches_sentencepiece(copy, text, monkeypatch) -> None:
    read: list[object] = []
    monkeypatch.setattr(sentencepiece, "SentencePieceProcessor", lambda **what: read.append(what))
    (copy / "tokenizer.model").write_bytes(b"\xff" * 4099)
    with pytest.raises(DataError, match=r"tokenizer\.model is damaged, its 4099 bytes are not those that "):
        assert prepare_here(copy, text).tokenizer
    assert read == []
    with pytest.raises(AttributeError):  # control: what would have been read
        Tokenizer(copy / "tokenizer.model")
    assert len(read) == 1


def test_every_damaged_file_is_refused_with_the_repair(copy, text) -> None:
    for path in sorted(copy.iterdir()):
        if path.name == ".lock":
            continue
        whole = path.read_bytes()
        middle = len(whole) // 2
        for damaged in (whole[:middle], whole[:middle] + bytes([whole[middle] ^ 4]) + whole[middle + 1 :], b""):
            path.write_bytes(damaged)
            with pytest.raises(DataError, match=rf"{path.name}.*`rm -r .*small` and the same command again"):
                prepare_here(copy, text)
        path.unlink()
        with pytest.raises(DataError, match=f"{path.name} is missing|holds no prepared data"):
            Dataset(copy)
        path.write_bytes(whole)
    assert Dataset(copy)
