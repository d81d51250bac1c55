"""One vocabulary for both languages (section 5.1): byte-pair encoding, trained and applied by SentencePiece."""

import io
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt
import sentencepiece

from aiayn.config.schema import ConfigError
from aiayn.core import storage
from aiayn.core.process_pool import apart
from aiayn.data.parallel_text import Side

PAD, UNK, BOS, EOS = 0, 1, 2, 3
MAX_WORDS = 3_000_000  # different ones that are counted; beyond it the rarer half is forgotten
MAX_COUNTED_LETTERS = 2**26  # of those words, for in text without spaces a word is a line; twice as many are in memory
MAX_LETTERS = 20_000_000  # of the words that are trained on, the most frequent ones: each takes SentencePiece 50 bytes
WORDS_AT_ONCE = 10_000  # trained on in this process: a second's work. More go to one that a signal's end can kill

# SentencePiece writes a space as U+2581, ignores lines with U+2585 or NUL, takes a count after a tab, and
# splits lines where the name of a special token stands: so those characters travel as escapes, the special tokens have
# names that no escaped line can hold, and everything in a line is text
_ESCAPE = "\ue000"
_ESCAPED = f"{_ESCAPE}\u2581\u2585\0\t"
_ESCAPES = str.maketrans({character: f"{_ESCAPE}{number}" for number, character in enumerate(_ESCAPED)})


class Tokenizer:
    """A trained vocabulary: lines to token ids and back, exactly, as long as every character was seen in training."""

    def __init__(self, model: Path) -> None:
        self.path = model
        self._processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
        self.vocab_size: int = self._processor.get_piece_size()

    @property
    def subwords(self) -> list[str]:
        """The subword of each token id, as SentencePiece writes it."""
        return [self._processor.id_to_piece(number) for number in range(self.vocab_size)]

    def encode(self, lines: Sequence[str], side: Side = "source") -> list[npt.NDArray[np.int32]]:
        """The token ids of each line, on either side the same; a character never seen in training becomes UNK."""
        escaped = [line.translate(_ESCAPES) for line in lines]
        return self._processor.encode(escaped, out_type="numpy")  # type: ignore[no-any-return]

    def unseen(self, characters: Counter[str]) -> int:
        """How many of these characters were never seen in training."""
        ids = self.encode([*characters])
        return sum(count for count, of_one in zip(characters.values(), ids, strict=True) if UNK in of_one)

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """The text of each sequence of token ids; UNK appears as U+2047 with spaces, what is no subword is silent."""
        # A model may have more embedding rows than there are subwords
        known = ([int(token) for token in sentence if token < self.vocab_size] for sentence in ids)
        texts = (self._processor.decode(sentence) for sentence in known)
        return [re.sub(_ESCAPE + "([0-4])", lambda escape: _ESCAPED[int(escape[1])], text) for text in texts]


def train(lines: Iterable[str], vocab_size: int, model: Path) -> None:
    """Trains subwords into `model`, the same bytes for the same lines; ConfigError for a `vocab_size` that is unfit."""
    words, alphabet = count_words(lines)
    keep_most_frequent(words, MAX_WORDS, MAX_LETTERS)
    counted = [f"{word}\t{count}" for word, count in reversed(words.items())]
    del words
    training = partial(_trained, counted, vocab_size, "".join(sorted(alphabet)))
    storage.write_bytes(model, training() if len(counted) <= WORDS_AT_ONCE else apart(training))


def _trained(counted: list[str], vocab_size: int, alphabet: str) -> bytes:
    written = io.BytesIO()
    try:
        # Paper: byte pairs, or word pieces for English-French (5.1), by programs that it does not name
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(counted),
            input_format="tsv",
            model_writer=written,
            model_type="bpe",
            vocab_size=vocab_size,
            # Text comes back exactly: no Unicode normalisation, no squeezing of spaces, no rare character left out
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            character_coverage=1.0,
            # SentencePiece counts coverage in float32 and so forgets a character seen once in 34 million
            required_chars=alphabet,
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
        size = f"data.vocab_size is {vocab_size}, but this text"
        if match := re.search(r"to a value <= (\d+)", str(error)):
            raise ConfigError(f"{size} gives at most {match[1]} subwords: lower it, or give more text") from error
        if match := re.search(r"required_chars\. -?\d+ vs (\d+)", str(error)):
            raise ConfigError(f"{size} needs at least {match[1]}: raise it") from error
        raise
    return written.getvalue()


def count_words(lines: Iterable[str]) -> tuple[Counter[str], set[str]]:
    """How often each word stands in the lines, escaped, and every character, in bounded memory for any text."""
    words: Counter[str] = Counter()
    alphabet: set[str] = set()
    read = 0
    for line in lines:
        words.update(line.translate(_ESCAPES).split(" "))
        read += len(line)
        # Letters are counted as seldom as they allow
        if len(words) > MAX_WORDS or read > MAX_COUNTED_LETTERS:
            alphabet.update(*forget_rarest(words))
            read = 0
    alphabet.update(*words)
    del words[""]  # between two spaces
    return words, alphabet


def forget_rarest(words: Counter[str]) -> list[str]:
    """Halves `words` where it holds more words or letters than are counted, and gives back what it took out."""
    if len(words) <= MAX_WORDS and sum(map(len, words)) <= MAX_COUNTED_LETTERS:
        return []
    return keep_most_frequent(words, MAX_WORDS // 2, MAX_COUNTED_LETTERS // 2)


def keep_most_frequent(words: Counter[str], max_words: int, max_letters: int) -> list[str]:
    """Takes out of `words`, and gives back, the rarest beyond these bounds; of equals, those that came last."""
    by_count = sorted(words, key=words.__getitem__, reverse=True)
    kept = sum(letters <= max_letters for letters in accumulate(map(len, by_count[:max_words])))
    for word in by_count[kept:]:
        del words[word]
    return by_count[kept:]
