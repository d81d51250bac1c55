"""Encodes a corpus in stages, tokenizer first, then split by split; after a kill, complete stages are reused."""

import json
import math
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from aiayn.config.schema import Scale
from aiayn.core import storage
from aiayn.data import moses_bpe, parallel_text, sentencepiece_bpe
from aiayn.data.dataset import SCHEMA, SIDES, STAGES, Dataset, digest, fingerprint
from aiayn.data.moses_bpe import MosesBpe, load
from aiayn.data.parallel_text import SPLITS, DataError, Files, Pair, Side, Split, Text, by_chunks, read
from aiayn.data.sentencepiece_bpe import EOS, UNK, Tokenizer

# The tokens of all sentences of a side, each closed by EOS, and their lengths with it
_Packed = tuple[npt.NDArray[np.integer], npt.NDArray[np.int64]]
_OFFSET = np.dtype(np.int64)


def encode_corpus(
    folder: Path,
    identity: Mapping[str, str],
    text_of: Callable[[], Text],
    vocab_size: int,
    max_length: int,
    progress: Callable[[str], None],
    moses: tuple[str, str] | None,
    scale: Scale,
) -> Dataset:
    """The corpus, encoded into `folder`: the same input gives the same bytes, and where they stand already, no write.

    `identity` distinguishes the text from any other, `text_of` gets it once it is needed. Both languages as `moses` ask
    for the released code's tokenizer, not SentencePiece's. Drops training pairs with over `max_length` tokens on a
    side, EOS included. One process works, others wait. DataError: unfit text, or `folder` damaged or of other text.
    """
    settings = settings_of(identity, vocab_size, max_length, moses, scale)
    with ExitStack() as owner:
        if not (folder / "manifest.json").exists():
            owner.enter_context(storage.lock(folder / ".lock", wait=True, report=progress))
        if not (folder / "manifest.json").exists():  # nor has another process made it meanwhile
            storage.remove_unfinished(folder)
            stages = _Stages(folder, settings, progress)
            text = text_of()
            if not stages.complete("tokenizer"):
                for split in SPLITS:
                    refuse_unfit(split, text[split], scale)
                pairs = read("train", text["train"], scale, Counter())
                if moses:
                    progress(f"training {moses_bpe.MERGES} merges of Moses tokens")
                    moses_bpe.train(pairs, moses, folder / "tokenizer.model")
                else:
                    progress(f"training a vocabulary of {vocab_size} subwords")
                    sentencepiece_bpe.train(chain.from_iterable(pairs), vocab_size, folder / "tokenizer.model")
                stages.add("tokenizer")
            tokenizer = load(folder / "tokenizer.model")
            for split in SPLITS:
                if not stages.complete(split):
                    stages.add(split, _encode(folder, split, text[split], scale, tokenizer, max_length, progress))
            storage.adopt(stages.path, folder / "manifest.json")
    dataset = Dataset(folder)
    refuse_changed(folder, dataset.manifest["settings"], settings)
    return dataset


class _Stages:
    """The stages that are complete: a manifest in the making, which becomes the manifest with the last of them."""

    def __init__(self, folder: Path, settings: dict[str, Any], progress: Callable[[str], None]) -> None:
        self.path, self.progress = folder / ".manifest.part", progress
        self.manifest: dict[str, Any] = {"schema": SCHEMA, "settings": settings, "splits": {}, "files": {}}
        with suppress(OSError, ValueError, KeyError, TypeError):  # a damaged record is as good as none
            before = json.loads(self.path.read_bytes())
            same = all(before[key] == self.manifest[key] for key in ("schema", "settings"))
            if same and before["sha256"] == digest(before):
                self.manifest = before

    def complete(self, stage: str) -> bool:
        """True when a stage's files are those that it left; made anew, they have the same bytes."""
        paths, files = map(self.path.with_name, STAGES[stage]), self.manifest["files"]
        complete = all(path.is_file() and fingerprint(path) == files.get(path.name) for path in paths)
        if complete:
            self.progress(f"{stage}: complete before")
        return complete

    def add(self, stage: str, counts: dict[str, Any] | None = None) -> None:
        """Records a stage by the SHA-256 of its files, and a split's counts."""
        if counts:
            self.manifest["splits"][stage] = counts
        self.manifest["files"] |= {name: fingerprint(self.path.with_name(name)) for name in STAGES[stage]}
        self.manifest["sha256"] = digest(self.manifest)
        storage.write_json(self.path, self.manifest)


def settings_of(
    identity: Mapping[str, str], vocab_size: int, max_length: int, moses: tuple[str, str] | None, scale: Scale
) -> dict[str, Any]:
    """What distinguishes a prepared corpus from any other, as its manifest has it."""
    vocabulary = {"moses": "-".join(moses), "merges": moses_bpe.MERGES} if moses else {"vocab_size": vocab_size}
    selected = {"max_words": scale.max_words, "pairs": scale.pairs}
    selected |= {"max_train_words": scale.max_train_words} if scale.max_train_words else {}  # kept runs have none
    return {**vocabulary, "max_length": max_length, **selected, **identity}


def refuse_changed(folder: Path, before: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """DataError naming each of `settings` that was another when the corpus in `folder` was prepared."""
    changed = [f"{key} was {before.get(key)}, is {new}" for key, new in settings.items() if before.get(key) != new]
    if changed:
        raise DataError(
            f"{folder} was prepared from something else ({'; '.join(changed)}): give prepared=FOLDER and output=FOLDER"
            f" or, to text of your own, another data.name, or `rm -r {shlex.quote(str(folder))}` and delete its runs"
        )


def refuse_unfit(split: Split, parts: Sequence[Files], scale: Scale) -> None:
    """DataError now, not after minutes of training a vocabulary, for which the whole training text is read."""
    dropped = Counter[str]()
    has_text = (bool(target.strip()) for _, target in read(split, parts, scale, dropped))
    if not (any(has_text) if split == "train" else sum(has_text)):
        why = f"dropped are {parallel_text.listed(dropped)}" if dropped else "no line of it holds text"
        raise DataError(f"{parts[0].target} leaves no {split} pair with text on the target side: {why}")


def _encode(
    folder: Path,
    split: Split,
    parts: Sequence[Files],
    scale: Scale,
    tokenizer: Tokenizer | MosesBpe,
    max_length: int,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Writes token ids, and of dev and test the text, and returns the counts for the manifest; reads the split once."""
    unfit = ("empty", "invalid UTF-8", "too long", "beyond pairs") if split == "train" else ()
    dropped = Counter(dict.fromkeys((*unfit, "over max_words"), 0))  # the hash of the data includes these names
    # Paper: silent on long pairs; the released code drops those of more than 256 tokens from training
    longest = max_length - 1 if split == "train" else math.inf  # EOS is one token more
    pairs = read(split, parts, scale, dropped)
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size < 65_536 else np.int32)
    encoder = partial(_encoder, tokenizer.path, longest, dtype)
    counts: Counter[str] = Counter()
    characters = [Counter[str]() for side in SIDES]  # of dev and test
    with ExitStack() as stack:

        def written(part: str, side: Side) -> BinaryIO:
            return stack.enter_context(storage.atomic(folder / f"{split}.{side}.{part}"))

        ids = {side: written("ids.npy", side) for side in SIDES}
        offsets = {side: written("offsets.npy", side) for side in SIDES}
        if split != "train":
            pairs = _saving(pairs, [written("txt", side) for side in SIDES], characters)
        for side in SIDES:
            _write_header(ids[side], dtype, 0)
            _write_header(offsets[side], _OFFSET, 0)
            offsets[side].write(np.zeros(1, _OFFSET).data)
        for number_read, *sides in by_chunks(encoder, pairs):
            for side, (packed, lengths) in zip(SIDES, sides, strict=True):
                offsets[side].write((counts[f"{side}_tokens"] + np.cumsum(lengths)).data)
                ids[side].write(packed.data)
                counts[f"{side}_tokens"] += len(packed)
                counts[f"{side}_unknown"] += int((packed == UNK).sum())
            counts["kept"] += len(lengths)
            if split == "train":
                dropped["too long"] += number_read - len(lengths)
            progress(f"{split}: {counts['kept']} pairs encoded")
        if counts["kept"] == 0:
            none = f"{parts[0].target}: no {split} pair has only data.max_length={max_length} tokens"
            raise DataError(f"{none}; raise it, or give each sentence a line of its own that ends in \\n")
        for side in SIDES:
            _write_header(ids[side], dtype, counts[f"{side}_tokens"])
            _write_header(offsets[side], _OFFSET, counts["kept"] + 1)
    if isinstance(tokenizer, Tokenizer):  # one UNK of which stands for neighbours too
        for side, of_side in zip(SIDES, characters, strict=True):
            counts[f"{side}_unknown"] = tokenizer.unseen(of_side)
    lines = counts["kept"] + dropped.total()
    if unusable := dropped - Counter({reason: dropped[reason] for reason in ("over max_words", "beyond pairs")}):
        warning = "warning: " if unusable.total() > 0.1 * lines else ""
        texts = ", ".join(f"{files.source} and {files.target}" for files in parts)
        left = f"{unusable.total()} of {lines} pairs of {texts} are dropped"
        progress(f"{warning}{split}: {left}: {parallel_text.listed(unusable)}")
    return {"lines": lines, "dropped": dict(dropped), **counts}


def _encoder(model: Path, longest: float, dtype: np.dtype[Any]) -> Callable[[list[Pair]], tuple[int, _Packed, _Packed]]:
    tokenizer = load(model)

    def encode(chunk: list[Pair]) -> tuple[int, _Packed, _Packed]:
        """The number of pairs, and both sides of those that are short enough."""
        sides = (tokenizer.encode([pair[i] for pair in chunk], side) for i, side in enumerate(SIDES))
        pairs = [pair for pair in zip(*sides, strict=True) if max(map(len, pair)) <= longest]
        source, target = (_packed([pair[i] for pair in pairs], dtype) for i in (0, 1))
        return len(chunk), source, target

    return encode


def _packed(sentences: Sequence[npt.NDArray[np.int32]], dtype: np.dtype[Any]) -> _Packed:
    empty, eos = np.zeros(0, np.int32), np.array([EOS], np.int32)
    packed = np.concatenate([empty, *chain.from_iterable((ids, eos) for ids in sentences)])
    return packed.astype(dtype), np.array([len(ids) + 1 for ids in sentences], _OFFSET)


def _saving(pairs: Iterator[Pair], files: Sequence[BinaryIO], characters: Sequence[Counter[str]]) -> Iterator[Pair]:
    for pair in pairs:
        for text, file, counts in zip(pair, files, characters, strict=True):
            file.write(f"{text}\n".encode())
            counts.update(text)
        yield pair


def _write_header(file: BinaryIO, dtype: np.dtype[Any], length: int) -> None:
    """Begins a .npy file; numpy leaves room for the length of its array, which is known last."""
    file.seek(0)
    np.lib.format.write_array_header_1_0(file, {"descr": dtype.str, "fortran_order": False, "shape": (length,)})
