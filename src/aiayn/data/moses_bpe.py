"""The released code's own kind of vocabulary: Moses tokens of both languages, split by one list of byte-pair merges."""

import contextlib
import io
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from subword_nmt.apply_bpe import BPE
from subword_nmt.learn_bpe import learn_bpe

from aiayn.config.schema import ConfigError
from aiayn.core import storage
from aiayn.data.parallel_text import Pair, Side, by_chunks
from aiayn.data.sentencepiece_bpe import UNK, Tokenizer, forget_rarest

# Paper: "about 37000 tokens" are 32K merges and the characters of the released code's corpus
MERGES = 32_000
MAX_LETTERS = 7_000_000  # of the words that merges are trained on, the most frequent first: half a million words or so
SPECIAL = ("<pad>", "<unk>", "<s>", "</s>")  # by their ids; Moses escapes the angle brackets of text
_CONTINUED = "@@"
_MAX_CACHED_WORDS = 2**17


class MosesBpe:
    """A trained vocabulary: lines of either language to token ids, and ids to detokenised text of the target language.

    Text comes back as Moses puts it together: not exactly. A literal `@@` at a word's end is taken for a split word.
    """

    def __init__(self, model: Path) -> None:
        self.path = model
        read: dict[str, Any] = json.loads(model.read_bytes())
        self._languages: dict[Side, str] = read["languages"]
        self._bpe = _bpe(read["merges"])
        self.subwords: list[str] = [*SPECIAL, *read["pieces"]]  # by id; one that ends with `@@` goes on in the next
        self._ids = {subword: number for number, subword in enumerate(self.subwords)}
        self.vocab_size = len(self.subwords)

    def encode(self, lines: Sequence[str], side: Side = "source") -> list[npt.NDArray[np.int32]]:
        """The token ids of each line, without special tokens; a subword never seen in training becomes UNK."""
        tokenizer = moses("Tokenizer", self._languages[side])
        words = (_segmented(self._bpe, tokenizer.tokenize(line)) for line in lines)
        return [np.array([self._ids.get(subword, UNK) for subword in line], np.int32) for line in words]

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """The text of each sequence of token ids; UNK appears as U+2047, what is no subword is silent."""
        detokenizer = moses("Detokenizer", self._languages["target"])
        return [detokenizer.detokenize(self._words(sentence)) for sentence in ids]

    def _words(self, ids: Sequence[int]) -> list[str]:
        known = (token for token in ids if token == UNK or len(SPECIAL) <= token < self.vocab_size)
        subwords = ("\u2047" if token == UNK else self.subwords[token] for token in known)
        return " ".join(subwords).replace(f"{_CONTINUED} ", "").removesuffix(_CONTINUED).split()


def load(model: Path) -> Tokenizer | MosesBpe:
    """The tokenizer in a file, of whichever kind."""
    with model.open("rb") as file:
        return MosesBpe(model) if file.read(1) == b"{" else Tokenizer(model)


def train(pairs: Iterator[Pair], languages: tuple[str, str], model: Path) -> None:
    """Trains up to MERGES merges on both sides into `model`, the same bytes for the same pairs; or ConfigError."""
    words: Counter[str] = Counter()
    for counted in by_chunks(partial(partial, _count, languages), pairs):
        words.update(counted)
        forget_rarest(words)
    # In an order of our own: subword-nmt breaks ties by it
    counts = sorted(words.items(), key=lambda word: (-word[1], word[0]))
    del words
    # subword-nmt's tables take 140 bytes a letter, and its time grows with them
    letters = accumulate(len(word) for word, _ in counts)
    frequent = [word for word, total in zip(counts, letters, strict=True) if total <= MAX_LETTERS]
    written = io.StringIO(newline="\n")
    if any(len(word) > 1 for word, _ in frequent):
        text = io.StringIO("".join(f"{word} {count}\n" for word, count in frequent), newline="\n")
        with contextlib.redirect_stderr(io.StringIO()):  # its progress
            learn_bpe(text, written, MERGES, is_dict=True)
    merges = written.getvalue().split("\n")[1:-1]
    if not merges:
        raise ConfigError("tokenizer=paper: no two letters stand together twice: use tokenizer=sentencepiece")
    bpe = _bpe(merges)
    subwords: Counter[str] = Counter()
    for word, count in counts:
        for subword in _segmented(bpe, [word]):
            subwords[subword] += count
    pieces = sorted(subwords, key=lambda subword: (-subwords[subword], subword))
    sides = dict(zip(("source", "target"), languages, strict=True))
    storage.write_json(model, {"languages": sides, "merges": merges, "pieces": pieces})


def _bpe(merges: list[str]) -> BPE:
    return BPE(io.StringIO("\n".join(["#version: 0.2", *merges]), newline="\n"))


def _segmented(bpe: BPE, words: list[str]) -> Any:
    if len(bpe.cache) > _MAX_CACHED_WORDS:
        bpe.cache.clear()
    return bpe.segment_tokens(words)


def _count(languages: tuple[str, str], pairs: list[Pair]) -> Counter[str]:
    return Counter(
        word
        for side, language in enumerate(languages)
        for pair in pairs
        for word in moses("Tokenizer", language).tokenize(pair[side])
    )


@cache
def moses(kind: Literal["Tokenizer", "Detokenizer"], language: str) -> Any:
    """Moses' tokenizer or detokenizer of a language, made once."""
    import sacremoses  # takes half a second, which every command would wait for

    return getattr(sacremoses, f"Moses{kind}")(lang=language)
