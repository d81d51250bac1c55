"""`aiayn translate`: standard input to standard output, n lines in, n lines out."""

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice

from aiayn.alternatives.recurrent import TranslationModel
from aiayn.config.schema import Config, Decoding, Hardware
from aiayn.core import progress
from aiayn.data.dataset import Dataset
from aiayn.evaluation.search import decoder_of, search
from aiayn.runs.models import compute_with, trained

LINES_AT_ONCE = 1000
# Attention takes memory by the square of a line's tokens, so a book without a line feed must not be one sentence
LONGEST = 1000
CHARACTERS_PER_SUBWORD = 16  # SentencePiece's own limit: so many characters for each token never cut a line too short


def translate(
    model: TranslationModel,
    dataset: Dataset,
    decoding: Decoding,
    hardware: Hardware,
    lines: Iterable[bytes],
    warn: Callable[[str], None],
    done: Callable[[int], None] | None = None,
    typed: bool = False,
) -> Iterator[str]:
    """One translation for each line, in order; empty for a line without text. Bytes that are no UTF-8 are replaced.

    Of a line beyond `LONGEST` tokens, or what training kept if that is more, `warn` says that only the beginning is.
    """
    limit = max(LONGEST, dataset.manifest["settings"]["max_length"])
    rest = iter(lines)
    number = 0
    while chunk := list(islice(rest, 1 if typed else LINES_AT_ONCE)):
        texts = [line.decode("utf-8", "replace").removesuffix("\n").removesuffix("\r") for line in chunk]
        if number == 0:
            texts[0] = texts[0].removeprefix("\ufeff")  # a byte order mark is no text
        beginnings = [text[: limit * CHARACTERS_PER_SUBWORD] for text in texts]
        sources = []
        for text, beginning, ids in zip(texts, beginnings, dataset.tokenizer.encode(beginnings), strict=True):
            number += 1
            if len(ids) > limit or beginning != text:
                warn(f"line {number} has more than {limit} tokens: only its beginning is translated")
            sources.append(ids[:limit] if text.strip() else ids[:0])
        hypotheses = search(decoder_of(model), sources, decoding, hardware, done)
        yield from dataset.tokenizer.decode([hypothesis.ids for hypothesis in hypotheses])


def main(config: Config) -> None:
    """Translates standard input with the run that the configuration names."""
    compute_with(config.hardware.threads)
    model, dataset, *_ = trained(config)
    lines, warn = sys.stdin.buffer, partial(print, "aiayn:", file=sys.stderr)
    typed = sys.stdin.isatty()  # each line waits for its answer
    shown = sys.stdout.isatty()  # the translations themselves show how far it is
    with contextlib.nullcontext() if shown else progress.counted("translating", None, "lines") as done:
        for line in translate(model, dataset, config.decoding, config.hardware, lines, warn, done, typed):
            # Bytes, so that neither the locale nor the platform's line end has a say
            sys.stdout.buffer.write(line.replace("\n", " ").encode() + b"\n")
            sys.stdout.buffer.flush()
