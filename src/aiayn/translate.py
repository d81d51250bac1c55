"""`aiayn translate`: standard input to standard output, n lines in, n lines out."""

import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import BinaryIO

import torch

from aiayn.dataset import Dataset
from aiayn.evaluate import search, trained
from aiayn.schema import Config, Decoding
from aiayn.transformer import Transformer

LINES_AT_ONCE = 1000


def translate(model: Transformer, dataset: Dataset, decoding: Decoding, lines: Iterable[bytes]) -> Iterator[str]:
    """One translation for each line, in order; empty for a line without text. Bytes that are no UTF-8 are replaced."""
    rest = iter(lines)
    while chunk := list(islice(rest, LINES_AT_ONCE)):
        texts = [line.decode("utf-8", "replace").removesuffix("\n").removesuffix("\r") for line in chunk]
        ids = [
            ids if text.strip() else ids[:0] for text, ids in zip(texts, dataset.tokenizer.encode(texts), strict=True)
        ]
        yield from dataset.tokenizer.decode([hypothesis.ids for hypothesis in search(model, ids, decoding)])


def main(config: Config, source: BinaryIO | None = None) -> None:
    """Translates standard input with the run that the configuration names."""
    torch.set_num_threads(config.hardware.threads)
    model, dataset, _folder = trained(config)
    for line in translate(model, dataset, config.decoding, source or sys.stdin.buffer):
        print(line.replace("\n", " "), flush=True)
