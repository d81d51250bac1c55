import io
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from aiayn.data import sentencepiece_bpe
from aiayn.data.parallel_text import EMBEDDED, read_pairs
from aiayn.data.sentencepiece_bpe import BOS, EOS, PAD, UNK, Tokenizer, count_words, keep_most_frequent, learn

HOSTILE = [
    "<s> <pad> </s> <unk> ##AT##",
    "\u2581 \u2585 \ue000 \ue0001 \0",
    "\t \r \v \f \x1c \x85 \u2028 \u00a0 \u200b \ufeff",
    "⁇ \U0001f600 \u0130 \ufb01 e\u0301 \u00e9",
]
REAL = sorted((Path(__file__).parents[3] / "shared" / "data").glob("newstest2013/*.xz"))

hostile_text = st.text(alphabet=sorted(set("".join(HOSTILE)))) | st.lists(
    st.sampled_from([*HOSTILE, *" ".join(HOSTILE).split(" "), " ", "  "])
).map("".join)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory) -> Tokenizer:
    model = tmp_path_factory.mktemp("hostile") / "tokenizer.model"
    learn(HOSTILE, 67, model)
    return Tokenizer(model)


@pytest.fixture(scope="module")
def embedded(tmp_path_factory) -> Tokenizer:
    model = tmp_path_factory.mktemp("embedded") / "tokenizer.model"
    learn((line for pair in read_pairs(EMBEDDED["train"], None) for line in pair), 1009, model)
    return Tokenizer(model)


def round_trip(tokenizer: Tokenizer, lines: list[str]) -> list[str]:
    return tokenizer.decode([ids.tolist() for ids in tokenizer.encode(lines)])


@given(lines=st.lists(hostile_text, max_size=5))
def test_every_text_of_learned_characters_comes_back_exactly(hostile, lines) -> None:
    assert round_trip(hostile, lines) == lines
    assert not any(set(ids.tolist()) & {PAD, UNK, BOS, EOS} for ids in hostile.encode(lines))


def by_sentencepiece_alone(
    lines: Iterable[str], vocab_size: int, **special: int
) -> sentencepiece.SentencePieceProcessor:
    """The BPE that SentencePiece learns from whole lines."""
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=written,
        model_type="bpe",
        vocab_size=vocab_size,
        character_coverage=1.0,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        max_sentence_length=2**30,
        minloglevel=2,
        **special,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())


def test_sentencepiece_alone_would_lose_special_names_and_its_own_space() -> None:
    plain = by_sentencepiece_alone(HOSTILE, 47)
    assert plain.decode(plain.encode("<s>")) != "<s>"
    assert plain.decode(plain.encode("\u2581")) != "\u2581"


@given(lines=st.lists(st.text().map(lambda text: text.replace("\n", "")), max_size=7))
def test_any_text_keeps_its_number_of_lines(hostile, lines) -> None:
    decoded = round_trip(hostile, lines)
    assert len(decoded) == len(lines)
    assert not any("\n" in line for line in decoded)


def test_an_unseen_character_is_unknown_and_only_that(hostile) -> None:
    (ids,) = hostile.encode(["pad Ж pad"])
    assert ids.tolist().count(UNK) == 1
    assert hostile.decode([ids.tolist()]) == ["pad  ⁇  pad"]


def test_special_tokens_are_silent_and_nothing_gives_nothing(hostile) -> None:
    (ids,) = hostile.encode(["pad"])
    assert hostile.decode([[BOS, *ids.tolist(), EOS, PAD], [EOS], []]) == ["pad", "", ""]
    assert [len(ids) for ids in hostile.encode(["", "s"])] == [0, 2]
    assert hostile.encode([]) == []


def test_a_line_beyond_sentencepieces_default_limit_is_learned_from(tmp_path) -> None:
    long = "a" * 70_001 + "ж"
    learn([long, "ab ab ba"], 9, tmp_path / "tokenizer.model")
    assert round_trip(Tokenizer(tmp_path / "tokenizer.model"), ["ж", long]) == ["ж", long]


@pytest.mark.slow
def test_a_character_seen_once_in_a_large_text_is_learned(tmp_path) -> None:
    # Control: without required_chars, 1 character in more than 2**25 is unknown
    learn(["abab" * 2**18] * 34 + ["ж"], 9, tmp_path / "tokenizer.model")
    assert round_trip(Tokenizer(tmp_path / "tokenizer.model"), ["ж"]) == ["ж"]


def test_the_same_lines_give_the_same_bytes_and_exactly_the_subwords_asked_for(tmp_path, hostile) -> None:
    for name in ("a", "b"):
        learn(iter(HOSTILE), 67, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert hostile.vocab_size == 67


def test_a_vocabulary_the_text_cannot_fill_is_refused_with_the_largest_that_works(tmp_path) -> None:
    lines = ["low lower lowest new newer newest"]
    with pytest.raises(ValueError, match=r"data\.vocab_size is 1000, but .* at most \d+ subwords") as refused:
        learn(lines, 1000, tmp_path / "tokenizer.model")
    assert not (tmp_path / "tokenizer.model").exists()
    largest = int(str(refused.value).split("at most ")[1].split()[0])
    with pytest.raises(ValueError, match=f"at most {largest} subwords"):
        learn(lines, largest + 1, tmp_path / "tokenizer.model")
    learn(lines, largest, tmp_path / "tokenizer.model")


def test_a_vocabulary_smaller_than_the_alphabet_is_refused_with_the_smallest_that_works(tmp_path) -> None:
    lines = ["low lower lowest new newer newest"]
    with pytest.raises(ValueError, match=r"data\.vocab_size is 5, but .* at least \d+") as refused:
        learn(lines, 5, tmp_path / "tokenizer.model")
    learn(lines, int(str(refused.value).split("at least ")[1].split(":")[0]), tmp_path / "tokenizer.model")


def test_an_error_in_reading_the_text_arrives_as_itself(tmp_path) -> None:
    def lines():
        yield "some text"
        raise LookupError("the disk is gone")

    with pytest.raises(LookupError, match="the disk is gone"):
        learn(lines(), 15, tmp_path / "tokenizer.model")


def test_counted_words_teach_the_subwords_that_whole_lines_teach(tmp_path) -> None:
    lines = [line for pair in read_pairs(EMBEDDED["train"], None) for line in pair][:7001]
    lines += ["two  spaces", "  first", "last  "]
    learn(lines, 1009, tmp_path / "tokenizer.model")
    whole = by_sentencepiece_alone(lines, 1009, pad_id=PAD, unk_id=UNK, bos_id=BOS, eos_id=EOS)
    expected = [whole.id_to_piece(number) for number in range(EOS + 1, 1009)]
    assert Tokenizer(tmp_path / "tokenizer.model").subwords[EOS + 1 :] == expected
    learn(lines[::2], 1009, tmp_path / "half.model")  # control: other counts teach other subwords
    assert Tokenizer(tmp_path / "half.model").subwords[EOS + 1 :] != expected


def test_beyond_a_number_of_words_the_rarest_are_forgotten_but_no_character() -> None:
    lines = ["a b c d"] * 3 + ["ж e f g h", "e f"] + [f"rare{number}" for number in range(997)]
    every, alphabet = count_words(lines)
    assert len(every) == 4 + 5 + 997
    some, same_alphabet = count_words(lines, max_words=11)
    assert len(some) <= 11
    assert {word: some[word] for word in "abcd"} == dict.fromkeys("abcd", 3)
    assert same_alphabet == alphabet
    assert "ж" in alphabet
    assert "ж" not in some


def test_the_letters_of_counted_words_are_bounded_where_a_line_is_a_word() -> None:
    lines = ["new"] * 3 + [chr(0x4E00 + number) * 53 for number in range(97)]
    every, alphabet = count_words(lines)
    assert sum(map(len, every)) == 3 + 97 * 53  # control
    some, same_alphabet = count_words(lines, max_letters=997)
    assert sum(map(len, some)) <= 2 * 997
    assert some["new"] == 3
    assert same_alphabet == alphabet


def test_where_no_word_is_seen_twice_half_of_them_are_kept() -> None:
    some, _ = count_words([str(number) for number in range(1000)], max_words=99)
    assert 99 // 2 < len(some) <= 99


def test_subwords_are_learned_from_the_most_frequent_words_and_of_equals_from_the_first() -> None:
    words = Counter({"seldom": 1, "often": 7, "first": 2, "other": 2, "a": 1})
    assert keep_most_frequent(words, max_words=5, max_letters=12) == ["other", "seldom", "a"]
    assert words == {"often": 7, "first": 2}
    assert keep_most_frequent(words, max_words=5, max_letters=10) == []
    assert keep_most_frequent(words, max_words=1, max_letters=10) == ["first"]


def test_more_letters_than_subwords_are_learned_from_change_subwords_but_no_character(tmp_path, monkeypatch) -> None:
    lines = ["low lower lowest"] * 7 + ["newer newest"] * 2 + ["wider ж"]
    learn(lines, 23, tmp_path / "all.model")
    monkeypatch.setattr(sentencepiece_bpe, "MAX_LETTERS", 14)
    learn(lines, 23, tmp_path / "some.model")
    subwords = Tokenizer(tmp_path / "some.model").subwords
    assert "ж" in subwords
    assert subwords != Tokenizer(tmp_path / "all.model").subwords


def test_the_embedded_corpus_comes_back_exactly(embedded) -> None:
    lines = [line for pair in read_pairs(EMBEDDED["train"], None) for line in pair][:5003]
    assert round_trip(embedded, lines) == lines


@pytest.mark.skipif(len(REAL) < 2, reason="needs newstest2013 beside the repository")
def test_news_comes_back_exactly(tmp_path) -> None:
    from aiayn.data.parallel_text import read_lines

    lines = [line.decode() for path in REAL for line in read_lines(path)]
    learn(lines, 1009, tmp_path / "tokenizer.model")
    assert round_trip(Tokenizer(tmp_path / "tokenizer.model"), lines) == lines
