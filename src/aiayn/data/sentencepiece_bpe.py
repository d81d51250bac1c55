"""One vocabulary for both languages (section 5.1): byte-pair encoding, learned and applied by SentencePiece."""

import io
import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt
import sentencepiece

from aiayn.config.schema import ConfigError
from aiayn.core import storage
from aiayn.core.process_pool import in_order
from aiayn.data.parallel_text import Side

PAD, UNK, BOS, EOS = 0, 1, 2, 3
MAX_WORDS = 3_000_000
"""Different words that are counted; beyond it the rarer half is forgotten."""
MAX_COUNTED_LETTERS = 2**26
"""Letters of those words, for in text without spaces a word is a line; up to twice as many are in memory."""
MAX_LETTERS = 20_000_000
"""Letters of the words that it is trained on, the most frequent ones: SentencePiece takes 50 bytes for each."""

WORDS_AT_ONCE = 10_000
"""Words that are trained on in this process: a second's work. More go to one that a signal's end can kill."""

# SentencePiece writes a space as U+2581, learns nothing from lines with U+2585 or NUL, takes a count after a tab, and
# splits lines where the name of a special token stands: so those characters travel as escapes, the special tokens have
# names that no escaped line can hold, and everything in a line is text
_ESCAPE = "\ue000"
_ESCAPED = {
    character: f"{_ESCAPE}{number}" for number, character in enumerate((_ESCAPE, "\u2581", "\u2585", "\0", "\t"))
}
_ESCAPES = str.maketrans(_ESCAPED)
_UNESCAPED = {escaped: character for character, escaped in _ESCAPED.items()}


class Tokenizer:
    """A learned vocabulary: lines to token ids and back, exactly, as long as every character was seen in learning."""

    def __init__(self, model: Path) -> None:
        self.path = model
        self._processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
        self.vocab_size: int = self._processor.get_piece_size()

    @property
    def subwords(self) -> list[str]:
        """The subword of each token id, as SentencePiece writes it."""
        return [self._processor.id_to_piece(number) for number in range(self.vocab_size)]

    def encode(self, lines: Sequence[str], side: Side = "source") -> list[npt.NDArray[np.int32]]:
        """The token ids of each line, on either side the same; a character never seen in learning becomes UNK."""
        ids: list[npt.NDArray[np.int32]] = self._processor.encode(
            [line.translate(_ESCAPES) for line in lines], out_type="numpy"
        )
        return ids

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """The text of each sequence of token ids; PAD, BOS and EOS are silent, UNK appears as U+2047 between spaces.

        Ids that are no subword are silent too: a model may have more embedding rows than there are subwords.
        """
        known = ([int(token) for token in sentence if token < self.vocab_size] for sentence in ids)
        texts = (self._processor.decode(sentence) for sentence in known)
        return [re.sub(_ESCAPE + "[0-4]", lambda escape: _UNESCAPED[escape.group()], text) for text in texts]


def learn(lines: Iterable[str], vocab_size: int, model: Path) -> None:
    """Learns `vocab_size` subwords from lines of any length into the file `model`; the same lines give the same bytes.

    Raises ConfigError naming data.vocab_size when it is too large or too small for the text.
    """
    words, alphabet = count_words(lines)
    keep_most_frequent(words, MAX_WORDS, MAX_LETTERS)

    def counted() -> Iterator[tuple[list[str], bool]]:
        is_last = False
        while not is_last:
            popped = [words.popitem() for _ in range(min(WORDS_AT_ONCE, len(words)))]
            is_last = not words
            yield [f"{word}\t{count}" for word, count in popped], is_last

    *_, written = in_order(partial(_Training, vocab_size, "".join(sorted(alphabet))), counted(), 1, apart=True)
    storage.write_bytes(model, written)


class _Training:
    """SentencePiece's training, given the counted words in parts; the last part returns the model's bytes."""

    def __init__(self, vocab_size: int, alphabet: str) -> None:
        self.vocab_size, self.alphabet = vocab_size, alphabet
        self.words: deque[str] = deque()

    def __call__(self, part: tuple[list[str], bool]) -> bytes:
        words, is_last = part
        self.words += words
        if not is_last:
            return b""
        written = io.BytesIO()
        try:
            # Paper: byte pairs, or word pieces for English-French (5.1), by programs that it does not name
            sentencepiece.SentencePieceTrainer.train(
                # SentencePiece has copied a word before it asks for the next
                sentence_iterator=(self.words.popleft() for _ in range(len(self.words))),
                input_format="tsv",
                model_writer=written,
                model_type="bpe",
                vocab_size=self.vocab_size,
                # Text comes back exactly: no Unicode normalisation, no squeezing of spaces, no rare character left out
                normalization_rule_name="identity",
                remove_extra_whitespaces=False,
                character_coverage=1.0,
                # SentencePiece counts coverage in float32 and so forgets a character seen once in 34 million
                required_chars=self.alphabet,
                # SentencePiece would silently leave out lines over 4192 bytes
                max_sentence_length=2**30,
                # The count stands in the file's bytes, so it must not follow the machine
                num_threads=4,
                pad_id=PAD,
                unk_id=UNK,
                bos_id=BOS,
                eos_id=EOS,
                pad_piece=_ESCAPE + "pad",
                unk_piece=_ESCAPE + "unk",
                bos_piece=_ESCAPE + "bos",
                eos_piece=_ESCAPE + "eos",
                minloglevel=2,
            )
        except RuntimeError as error:
            raise _explained(error, self.vocab_size) from error
        return written.getvalue()


def count_words(
    lines: Iterable[str], max_words: int = MAX_WORDS, max_letters: int = MAX_COUNTED_LETTERS
) -> tuple[Counter[str], set[str]]:
    """How often each word stands in the lines, escaped, and every character: all that BPE learns from.

    Beyond `max_words` different words, or `max_letters` in them, the rarer half is forgotten, so that memory is bounded
    for any text.
    """
    words: Counter[str] = Counter()
    alphabet: set[str] = set()
    read = 0
    for line in lines:
        words.update(line.translate(_ESCAPES).split(" "))
        read += len(line)
        # Letters are counted as seldom as they allow
        if len(words) > max_words or read > max_letters:
            alphabet.update(*forget_rarest(words, max_words, max_letters))
            read = 0
    alphabet.update(*words)
    del words[""]  # between two spaces
    return words, alphabet


def forget_rarest(words: Counter[str], max_words: int = MAX_WORDS, max_letters: int = MAX_COUNTED_LETTERS) -> list[str]:
    """Halves `words` where it holds more words or letters than these, and gives back what it took out."""
    if len(words) <= max_words and sum(map(len, words)) <= max_letters:
        return []
    return keep_most_frequent(words, max_words // 2, max_letters // 2)


def keep_most_frequent(words: Counter[str], max_words: int, max_letters: int) -> list[str]:
    """Takes out of `words`, and gives back, the rarest beyond these bounds; of equals, those that came last."""
    by_count = sorted(words, key=words.__getitem__, reverse=True)
    kept = sum(letters <= max_letters for letters in accumulate(map(len, by_count[:max_words])))
    for word in by_count[kept:]:
        del words[word]
    return by_count[kept:]


def _explained(error: RuntimeError, vocab_size: int) -> Exception:
    if match := re.search(r"to a value <= (\d+)", str(error)):
        return ConfigError(
            f"data.vocab_size is {vocab_size}, but this text gives at most {match[1]} subwords: lower it"
        )
    if match := re.search(r"required_chars\. -?\d+ vs (\d+)", str(error)):
        return ConfigError(f"data.vocab_size is {vocab_size}, but this text needs at least {match[1]}: raise it")
    return error
