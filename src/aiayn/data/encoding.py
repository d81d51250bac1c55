"""Encodes a corpus in stages, tokenizer first, then split by split; after a kill, complete stages are reused."""

import ctypes
import json
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from aiayn.core import storage
from aiayn.core.process_pool import in_order
from aiayn.data import moses_bpe
from aiayn.data.encoded import SCHEMA, SIDES, SPLITS, STAGES, Dataset, digest, fingerprint
from aiayn.data.moses_bpe import MosesBpe, load
from aiayn.data.parallel_text import (
    ALL,
    BEYOND_PAIRS,
    OVER_MAX_WORDS,
    DataError,
    Files,
    Pair,
    Selection,
    Split,
    Text,
    in_chunks,
    read_pairs,
    select,
)
from aiayn.data.sentencepiece_bpe import EOS, UNK, Tokenizer, learn

_Chunk = tuple[int, *tuple[tuple[npt.NDArray[np.integer], npt.NDArray[np.int64]], ...]]
_PAIRS_AT_ONCE = 16_384
ANY_LENGTH = "scale.name=all scale.max_words=0 takes pairs of any length"
_MAX_PROCESSES = 8  # each holds about 75 MB, and one that reads cannot feed more


@dataclass(frozen=True)
class Origin:
    """What text a corpus is made of: `identity` distinguishes it from any other, `text` gets it, once it is needed."""

    identity: Mapping[str, str]
    text: Callable[[], Text]


def encode_corpus(
    folder: Path,
    origin: Origin,
    vocab_size: int,
    max_length: int,
    progress: Callable[[str], None],
    moses: tuple[str, str] | None = None,
    selection: Selection = ALL,
) -> Dataset:
    """The corpus, encoded into `folder`: the same input gives the same bytes, and where they stand already, no write.

    Trains the tokenizer from the training text: `vocab_size` subwords of SentencePiece, or, given the languages of both
    sides as `moses`, what the released code's recipe gives. Drops training pairs with a side of more than `max_length`
    tokens, EOS included; of dev and test, only pairs over `selection.max_words`. One process works while others wait
    for it. A preparation that was killed continues after its last complete stage: the tokenizer, and each split. Raises
    DataError when the text is unfit, when `folder` was prepared from something else, or when it is damaged.
    """
    vocabulary = {"moses": "-".join(moses), "merges": moses_bpe.MERGES} if moses else {"vocab_size": vocab_size}
    settings = {**vocabulary, "max_length": max_length, **selection.settings(), **origin.identity}
    if (folder / "manifest.json").exists():
        return _prepared_before(folder, settings)
    with storage.lock(folder / ".lock", wait=True, report=progress):
        if (folder / "manifest.json").exists():
            return _prepared_before(folder, settings)
        storage.remove_unfinished(folder)
        stages = _Stages(folder, settings)
        text = origin.text()
        if not stages.complete("tokenizer", progress):
            # Unfit text is refused now, not after minutes of training a vocabulary; the training text is read for that
            for split in SPLITS[1:]:
                if not sum(len(target) for _, target in read(split, text[split], selection, Counter())):
                    raise DataError(
                        f"{_names(text[split])} leave no {split} pair with text on the target side"
                        f" (scale.max_words is {selection.max_words}; {ANY_LENGTH})"
                    )
            pairs = _training_pairs(text["train"], selection)
            if moses:
                progress(f"learning {moses_bpe.MERGES} merges of Moses tokens")
                moses_bpe.learn(pairs, moses, folder / "tokenizer.model")
            else:
                progress(f"training a {vocab_size}-subword vocabulary")
                learn(chain.from_iterable(pairs), vocab_size, folder / "tokenizer.model")
            if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
                trim(0)  # or glibc would keep what learning took, beside the processes that are to come
            stages.add("tokenizer")
        tokenizer = load(folder / "tokenizer.model")
        for split in SPLITS:
            if not stages.complete(split, progress):
                counts = _encode(folder, split, text[split], selection, tokenizer, max_length, progress)
                if split != "train":
                    _save_texts(folder, split, text[split], selection)
                stages.add(split, counts)
        storage.adopt(stages.path, folder / "manifest.json")
    return Dataset.open(folder)


class _Stages:
    """The stages that are complete: a manifest in the making, which becomes the manifest with the last of them."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.path = folder / ".manifest.part"
        self.manifest: dict[str, Any] = {"schema": SCHEMA, "settings": settings, "splits": {}, "files": {}}
        with suppress(OSError, ValueError, KeyError, TypeError):  # a damaged record is as good as none
            before = json.loads(self.path.read_bytes())
            if before["sha256"] == digest(before) and all(
                before[k] == self.manifest[k] for k in ("schema", "settings")
            ):
                self.manifest = before

    def complete(self, stage: str, progress: Callable[[str], None]) -> bool:
        """True when a stage's files are those that it left; otherwise it is forgotten, as are all after it."""
        files, folder = self.manifest["files"], self.path.parent
        if all((folder / name).is_file() and fingerprint(folder / name) == files.get(name) for name in STAGES[stage]):
            progress(f"{stage}: complete before")
            return True
        later = list(STAGES)[list(STAGES).index(stage) :]
        for each in later:
            self.manifest["splits"].pop(each, None)
            for name in STAGES[each]:
                files.pop(name, None)
        return False

    def add(self, stage: str, counts: dict[str, Any] | None = None) -> None:
        """Records a stage by the SHA-256 of its files, and a split's counts."""
        if counts:
            self.manifest["splits"][stage] = counts
        self.manifest["files"] |= {name: fingerprint(self.path.parent / name) for name in STAGES[stage]}
        self.manifest["sha256"] = digest(self.manifest)
        storage.write_json(self.path, self.manifest)


def _prepared_before(folder: Path, settings: dict[str, Any]) -> Dataset:
    dataset = Dataset.open(folder)
    refuse_changed(folder, dataset.manifest["settings"], settings)
    return dataset


def refuse_changed(folder: Path, before: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """DataError naming each of `settings` that was another when the corpus in `folder` was prepared."""
    changed = [f"{key} was {before.get(key)}, is {new}" for key, new in settings.items() if before.get(key) != new]
    if changed:
        other = (
            f"give another data.name, or delete it with `rm -r {shlex.quote(str(folder))}` and the runs made from it"
        )
        raise DataError(f"{folder} was prepared from something else ({'; '.join(changed)}): {other}")


def read(split: Split, parts: Sequence[Files], selection: Selection, dropped: Counter[str]) -> Iterator[Pair]:
    """The pairs of a split that the selection leaves; the others are counted in `dropped` by reason.

    Of dev and test nothing but `max_words` drops a pair: an empty sentence stays, invalid UTF-8 raises DataError.
    """
    pairs = chain.from_iterable(read_pairs(files, dropped if split == "train" else None) for files in parts)
    return select(pairs, selection.of(split), dropped)


def _names(parts: Sequence[Files]) -> str:
    return ", ".join(f"{files.source} and {files.target}" for files in parts)


def _training_pairs(train: Sequence[Files], selection: Selection) -> Iterator[Pair]:
    empty = True
    for pair in read("train", train, selection, Counter()):
        empty = False
        yield pair
    if empty:
        raise DataError(
            f"{_names(train)} hold no sentence pair to learn from (of at most {selection.of('train').max_words} words:"
            " scale.max_words, scale.max_train_words)"
        )


def _encode(
    folder: Path,
    split: Split,
    parts: Sequence[Files],
    selection: Selection,
    tokenizer: Tokenizer | MosesBpe,
    max_length: int,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Writes the token ids of one split and returns its counts for the manifest; holds no more than a few chunks."""
    unfit = ("empty", "invalid UTF-8", "too long", BEYOND_PAIRS) if split == "train" else ()
    dropped = Counter(dict.fromkeys((*unfit, OVER_MAX_WORDS), 0))
    # Paper: silent on long pairs; the released code drops those of more than 256 tokens from training
    longest = max_length - 1 if split == "train" else None  # EOS is one token more
    chunks = in_chunks(read(split, parts, selection, dropped), _PAIRS_AT_ONCE)
    encoder = partial(_encoder, tokenizer.path, longest)
    counts: Counter[str] = Counter()
    with ExitStack() as stack:
        ids, offsets = (
            {
                side: _Array(stack.enter_context(storage.atomic(folder / f"{split}.{side}.{part}.npy")), dtype)
                for side in SIDES
            }
            for part, dtype in (("ids", _dtype(tokenizer)), ("offsets", np.dtype(np.int64)))
        )
        for side in SIDES:
            offsets[side].append(np.zeros(1, np.int64))
        for number_read, *sides in in_order(encoder, chunks, _MAX_PROCESSES):
            for side, (packed, lengths) in zip(SIDES, sides, strict=True):
                offsets[side].append(counts[f"{side}_tokens"] + np.cumsum(lengths))
                ids[side].append(packed)
                counts[f"{side}_tokens"] += len(packed)
                counts[f"{side}_unknown"] += int((packed == UNK).sum())
            counts["kept"] += len(lengths)
            if longest is not None:
                dropped["too long"] += number_read - len(lengths)
            progress(f"{split}: {counts['kept']} pairs encoded")
        if counts["kept"] == 0:
            raise DataError(
                f"{_names(parts)} leave no sentence pair (data.max_length is {max_length},"
                f" scale.max_words {selection.max_words}; {ANY_LENGTH})"
            )
        for array in (*ids.values(), *offsets.values()):
            array.finish()
    return {
        "lines": counts["kept"] + dropped.total(),
        "kept": counts["kept"],
        "dropped": dict(dropped),
        **{f"{side}_{what}": counts[f"{side}_{what}"] for side in SIDES for what in ("tokens", "unknown")},
    }


def _encoder(model: Path, longest: int | None) -> Callable[[list[Pair]], _Chunk]:
    return partial(_encode_chunk, load(model), longest)


def _encode_chunk(tokenizer: Tokenizer | MosesBpe, longest: int | None, chunk: list[Pair]) -> _Chunk:
    """The number of pairs, and of each side of those that are short enough the ids and lengths."""
    sides = (tokenizer.encode([pair[i] for pair in chunk], side) for i, side in enumerate(SIDES))
    pairs = list(zip(*sides, strict=True))
    if longest is not None:
        pairs = [pair for pair in pairs if max(map(len, pair)) <= longest]
    source, target = (_packed([pair[i] for pair in pairs], _dtype(tokenizer)) for i in (0, 1))
    return len(chunk), source, target


def _dtype(tokenizer: Tokenizer | MosesBpe) -> np.dtype[Any]:
    return np.dtype(np.uint16 if tokenizer.vocab_size < 65_536 else np.int32)


def _packed(
    sentences: Sequence[npt.NDArray[np.int32]], dtype: np.dtype[Any]
) -> tuple[npt.NDArray[np.integer], npt.NDArray[np.int64]]:
    """The tokens of all sentences in one array, each sentence closed by EOS, and the lengths with it."""
    lengths = np.fromiter(map(len, sentences), np.int64, len(sentences)) + 1
    packed = np.full(lengths.sum(), EOS, dtype=dtype)
    is_text = np.ones(len(packed), dtype=bool)
    is_text[np.cumsum(lengths) - 1] = False
    packed[is_text] = np.concatenate([*sentences, np.zeros(0, np.int32)])
    return packed, lengths


def _save_texts(folder: Path, split: Split, parts: Sequence[Files], selection: Selection) -> None:
    for i, side in enumerate(SIDES):
        with storage.atomic(folder / f"{split}.{side}.txt") as file:
            for pair in read(split, parts, selection, Counter()):
                file.write(f"{pair[i]}\n".encode())


class _Array:
    """A one-dimensional array on its way into a .npy file, part by part: the same bytes as numpy's own."""

    def __init__(self, file: BinaryIO, dtype: np.dtype[Any]) -> None:
        self._file, self._dtype, self._length = file, dtype, 0
        self._write_header()

    def append(self, part: npt.NDArray[Any]) -> None:
        assert part.dtype == self._dtype
        self._file.write(part.data)
        self._length += len(part)

    def finish(self) -> None:
        """Says at the beginning how long it has become; numpy leaves room for that."""
        self._file.seek(0)
        self._write_header()

    def _write_header(self) -> None:
        described = {"descr": self._dtype.str, "fortran_order": False, "shape": (self._length,)}
        np.lib.format.write_array_header_1_0(self._file, described)
