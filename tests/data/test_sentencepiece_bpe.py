import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiayn.data import sentencepiece_bpe
from aiayn.data.sentencepiece_bpe import BOS, EOS, PAD, UNK, Tokenizer, count_words, keep_most_frequent, train

HOSTILE = [
    "<s> <pad> </s> <unk> ##AT##",
    "\u2581 \u2585 \ue000 \ue0001 \0",
    "\t \r \v \f \x1c \x85 \u2028 \u00a0 \u200b \ufeff",
    "⁇ \U0001f600 \u0130 \ufb01 e\u0301 \u00e9",
]

hostile_text = st.text(alphabet=sorted(set("".join(HOSTILE)))) | st.lists(
    st.sampled_from([*HOSTILE, *" ".join(HOSTILE).split(" "), " ", "  "])
).map("".join)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory) -> Tokenizer:
    model = tmp_path_factory.mktemp("hostile") / "tokenizer.model"
    train(HOSTILE, 67, model)
    return Tokenizer(model)


def round_trip(tokenizer: Tokenizer, lines: list[str]) -> list[str]:
    return tokenizer.decode([ids.tolist() for ids in tokenizer.encode(lines)])


@given(lines=st.lists(hostile_text, max_size=5))
def test_every_text_of_learned_characters_comes_back_exactly(hostile, lines) -> None:
    assert round_trip(hostile, lines) == lines
    assert not any(set(ids.tolist()) & {PAD, UNK, BOS, EOS} for ids in hostile.encode(lines))


def test_an_unseen_character_is_unknown_and_only_that(hostile) -> None:
    (ids,) = hostile.encode(["pad Ж pad"])
    assert ids.tolist().count(UNK) == 1
    assert hostile.decode([ids.tolist()]) == ["pad  ⁇  pad"]


@given(lines=st.lists(hostile_text, max_size=3), unseen=st.text("Жשхл💡", max_size=9), at=st.integers(0, 9))
def test_unseen_characters_are_counted_one_by_one(hostile, lines, unseen, at) -> None:
    text = "".join(line[:at] + unseen + line[at:] for line in lines)
    assert hostile.unseen(Counter(text)) == len(lines) * len(unseen)


def test_a_line_beyond_sentencepieces_limit_is_trained_on(tmp_path) -> None:
    long = "a" * 70_001 + "ж"
    train([long, "ab ab ba"], 9, tmp_path / "tokenizer.model")
    assert round_trip(Tokenizer(tmp_path / "tokenizer.model"), ["ж", long]) == ["ж", long]


@pytest.mark.parametrize(("size", "limit", "beyond"), [(1000, "at most", 1), (5, "at least", -1)])
def test_a_vocabulary_of_no_possible_size_is_refused(tmp_path, size, limit, beyond) -> None:
    lines, model = ["low lower lowest new newer newest"], tmp_path / "tokenizer.model"
    with pytest.raises(ValueError, match=rf"data\.vocab_size is {size}, but .* {limit} \d+") as refused:
        train(lines, size, model)
    possible = int(re.findall(rf"{limit} (\d+)", str(refused.value))[0])
    with pytest.raises(ValueError, match=f"{limit} {possible}"):
        train(lines, possible + beyond, model)
    assert not model.exists()
    train(lines, possible, model)


def test_the_rarest_words_are_forgotten_but_no_character(monkeypatch) -> None:
    lines = ["a b c d"] * 3 + ["ж e f g h", "e f"] + [f"rare{number}" for number in range(997)]
    every, alphabet = count_words(lines)
    assert len(every) == 4 + 5 + 997
    monkeypatch.setattr(sentencepiece_bpe, "MAX_WORDS", 11)
    some, same_alphabet = count_words(lines)
    assert len(some) <= 11
    assert {word: some[word] for word in "abcd"} == dict.fromkeys("abcd", 3)
    assert same_alphabet == alphabet
    assert "ж" in alphabet
    assert "ж" not in some


def test_training_takes_the_most_frequent_words_first() -> None:
    words = Counter({"seldom": 1, "often": 7, "first": 2, "other": 2, "a": 1})
    assert keep_most_frequent(words, max_words=5, max_letters=12) == ["other", "seldom", "a"]
    assert words == {"often": 7, "first": 2}
    assert keep_most_frequent(words, max_words=5, max_letters=10) == []
    assert keep_most_frequent(words, max_words=1, max_letters=10) == ["first"]
