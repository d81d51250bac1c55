"""One vocabulary for both languages (section 5.1): byte-pair encoding, learned and applied by SentencePiece."""

import io
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import sentencepiece

from aiayn import storage

PAD, UNK, BOS, EOS = 0, 1, 2, 3

# SentencePiece writes a space as U+2581, learns nothing from lines with U+2585 or NUL, and cuts lines where the name of
# a special token stands: so those characters travel as escapes, the special tokens have names that no escaped line can
# hold, and everything in a line is text
_ESCAPE = "\ue000"
_ESCAPED = {_ESCAPE: _ESCAPE + "0", "\u2581": _ESCAPE + "1", "\u2585": _ESCAPE + "2", "\0": _ESCAPE + "3"}
_ESCAPES = str.maketrans(_ESCAPED)
_UNESCAPED = {escaped: character for character, escaped in _ESCAPED.items()}


class Tokenizer:
    """A learned vocabulary: lines to token ids and back, exactly, as long as every character was seen in learning."""

    def __init__(self, model: Path) -> None:
        self._processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
        self.vocab_size: int = self._processor.get_piece_size()

    def encode(self, lines: Sequence[str]) -> list[npt.NDArray[np.int32]]:
        """The token ids of each line, without special tokens; a character never seen in learning becomes UNK."""
        ids: list[npt.NDArray[np.int32]] = self._processor.encode(
            [line.translate(_ESCAPES) for line in lines], out_type="numpy"
        )
        return ids

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Each token as it stands in the vocabulary: the beginning of a word as U+2581."""
        return [_unescape(self._processor.id_to_piece(int(token))) for token in ids]

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """The text of each sequence of token ids; PAD, BOS and EOS are silent, UNK appears as U+2047 between spaces."""
        return [_unescape(self._processor.decode([int(token) for token in sentence])) for sentence in ids]


def learn(read: Callable[[], Iterable[str]], vocab_size: int, model: Path) -> None:
    """Learns `vocab_size` pieces from lines of any length into the file `model`; the same lines give the same bytes.

    The text is read twice: `read` gives all lines each time it is called. Raises ValueError naming data.vocab_size when
    it is too large or too small for the text.
    """
    alphabet: set[str] = set()
    for line in read():
        alphabet.update(line.translate(_ESCAPES))
    failures: list[BaseException] = []

    def escaped() -> Iterator[str]:
        try:
            for line in read():
                yield line.translate(_ESCAPES)
        except BaseException as failure:
            failures.append(failure)  # SentencePiece turns whatever happens here into a RuntimeError
            raise

    written = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=escaped(),
            model_writer=written,
            model_type="bpe",
            vocab_size=vocab_size,
            # Text comes back exactly: no Unicode normalisation, no squeezing of spaces, no rare character left out
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            character_coverage=1.0,
            # SentencePiece counts coverage in float32 and so forgets a character seen once in 34 million
            required_chars="".join(sorted(alphabet - {" "})),
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
        if failures:
            raise failures[0] from None
        raise _explained(error, vocab_size) from error
    storage.write_bytes(model, written.getvalue())


def _unescape(text: str) -> str:
    return re.sub(_ESCAPE + "[0-3]", lambda match: _UNESCAPED[match.group()], text)


def _explained(error: RuntimeError, vocab_size: int) -> Exception:
    if match := re.search(r"to a value <= (\d+)", str(error)):
        return ValueError(f"data.vocab_size is {vocab_size}, but this text gives at most {match[1]} pieces: lower it")
    if match := re.search(r"required_chars\. -?\d+ vs (\d+)", str(error)):
        return ValueError(f"data.vocab_size is {vocab_size}, but this text needs at least {match[1]}: raise it")
    return error
