"""Encodes a corpus in stages, tokenizer first, then split by split; after a kill, complete stages are reused."""

import ctypes
import json
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, dropwhile
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from aiayn.core import storage
from aiayn.core.process_pool import in_order
from aiayn.data import moses_bpe, sentencepiece_bpe
from aiayn.data.dataset import SCHEMA, SIDES, STAGES, Dataset, digest, fingerprint
from aiayn.data.moses_bpe import MosesBpe, load
from aiayn.data.parallel_text import (
    ALL,
    BEYOND_PAIRS,
    OVER_MAX_WORDS,
    SPLITS,
    DataError,
    Files,
    Pair,
    Selection,
    Side,
    Split,
    Text,
    in_chunks,
    read_pairs,
    select,
)
from aiayn.data.sentencepiece_bpe import EOS, UNK, Tokenizer

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

    The tokenizer has `vocab_size` subwords of SentencePiece or, given both languages as `moses`, those of the released
    code's recipe. Drops training pairs with a side of more than `max_length` tokens, EOS included; of dev and test only
    what `selection` does. One process works, others wait. After a kill it continues behind the last complete stage.
    Raises DataError when the text is unfit, or when `folder` is damaged or was prepared from something else.
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
            for split in SPLITS:
                _refuse_unfit(split, text[split], selection)
            pairs = read("train", text["train"], selection, Counter())
            if moses:
                progress(f"training {moses_bpe.MERGES} merges of Moses tokens")
                moses_bpe.train(pairs, moses, folder / "tokenizer.model")
            else:
                progress(f"training a {vocab_size}-subword vocabulary")
                sentencepiece_bpe.train(chain.from_iterable(pairs), vocab_size, folder / "tokenizer.model")
            if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
                trim(0)  # or glibc would keep what the training took, beside the processes that are to come
            stages.add("tokenizer")
        tokenizer = load(folder / "tokenizer.model")
        for split in SPLITS:
            if not stages.complete(split, progress):
                stages.add(split, _encode(folder, split, text[split], selection, tokenizer, max_length, progress))
        storage.adopt(stages.path, folder / "manifest.json")
    return Dataset.open(folder)


class _Stages:
    """The stages that are complete: a manifest in the making, which becomes the manifest with the last of them."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.path = folder / ".manifest.part"
        self.manifest: dict[str, Any] = {"schema": SCHEMA, "settings": settings, "splits": {}, "files": {}}
        with suppress(OSError, ValueError, KeyError, TypeError):  # a damaged record is as good as none
            before = json.loads(self.path.read_bytes())
            same = all(before[key] == self.manifest[key] for key in ("schema", "settings"))
            if same and before["sha256"] == digest(before):
                self.manifest = before

    def complete(self, stage: str, progress: Callable[[str], None]) -> bool:
        """True when a stage's files are those that it left; otherwise it is forgotten, as are all after it."""
        files, folder = self.manifest["files"], self.path.parent
        if all((folder / name).is_file() and fingerprint(folder / name) == files.get(name) for name in STAGES[stage]):
            progress(f"{stage}: complete before")
            return True
        for later in dropwhile(lambda name: name != stage, STAGES):
            self.manifest["splits"].pop(later, None)
            for name in STAGES[later]:
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
        raise DataError(
            f"{folder} was prepared from something else ({'; '.join(changed)}): give another data.name, or delete it"
            f" with `rm -r {shlex.quote(str(folder))}` and the runs made from it"
        )


def read(split: Split, parts: Sequence[Files], selection: Selection, dropped: Counter[str]) -> Iterator[Pair]:
    """The pairs of a split that the selection leaves; the others are counted in `dropped` by reason."""
    pairs = chain.from_iterable(read_pairs(files, dropped if split == "train" else None) for files in parts)
    return select(pairs, selection.of(split), dropped)


def _names(parts: Sequence[Files]) -> str:
    return ", ".join(f"{files.source} and {files.target}" for files in parts)


def _refuse_unfit(split: Split, parts: Sequence[Files], selection: Selection) -> None:
    """DataError now, not after minutes of training a vocabulary, for which the whole training text is read."""
    has_text = (bool(target) for _, target in read(split, parts, selection, Counter()))
    if not (any(has_text) if split == "train" else sum(has_text)):
        raise DataError(
            f"{_names(parts)} leave no {split} pair with text on the target side (scale.max_words is"
            f" {selection.max_words}, scale.max_train_words {selection.max_train_words}; {ANY_LENGTH})"
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
    """Writes token ids, and of dev and test the text, and returns the counts for the manifest; reads the split once."""
    unfit = ("empty", "invalid UTF-8", "too long", BEYOND_PAIRS) if split == "train" else ()
    dropped = Counter(dict.fromkeys((*unfit, OVER_MAX_WORDS), 0))
    # Paper: silent on long pairs; the released code drops those of more than 256 tokens from training
    longest = max_length - 1 if split == "train" else None  # EOS is one token more
    pairs = read(split, parts, selection, dropped)
    encoder = partial(_encoder, tokenizer.path, longest)
    counts: Counter[str] = Counter()
    with ExitStack() as stack:

        def written(part: str, side: Side) -> BinaryIO:
            return stack.enter_context(storage.atomic(folder / f"{split}.{side}.{part}"))

        ids = {side: _Array(written("ids.npy", side), _dtype(tokenizer)) for side in SIDES}
        offsets = {side: _Array(written("offsets.npy", side), np.dtype(np.int64)) for side in SIDES}
        if split != "train":
            pairs = _saving(pairs, [written("txt", side) for side in SIDES])
        for side in SIDES:
            offsets[side].append(np.zeros(1, np.int64))
        for number_read, *sides in in_order(encoder, in_chunks(pairs, _PAIRS_AT_ONCE), _MAX_PROCESSES):
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
    tokenizer = load(model)

    def encode(chunk: list[Pair]) -> _Chunk:
        """The number of pairs, and of each side of those that are short enough the ids and lengths."""
        sides = (tokenizer.encode([pair[i] for pair in chunk], side) for i, side in enumerate(SIDES))
        pairs = list(zip(*sides, strict=True))
        if longest is not None:
            pairs = [pair for pair in pairs if max(map(len, pair)) <= longest]
        source, target = (_packed([pair[i] for pair in pairs], _dtype(tokenizer)) for i in (0, 1))
        return len(chunk), source, target

    return encode


def _dtype(tokenizer: Tokenizer | MosesBpe) -> np.dtype[Any]:
    return np.dtype(np.uint16 if tokenizer.vocab_size < 65_536 else np.int32)


def _packed(
    sentences: Sequence[npt.NDArray[np.int32]], dtype: np.dtype[Any]
) -> tuple[npt.NDArray[np.integer], npt.NDArray[np.int64]]:
    """The tokens of all sentences in one array, each sentence closed by EOS, and the lengths with it."""
    empty, eos = np.zeros(0, np.int32), np.array([EOS], np.int32)
    packed = np.concatenate([empty, *chain.from_iterable((ids, eos) for ids in sentences)])
    return packed.astype(dtype), np.array([len(ids) + 1 for ids in sentences], np.int64)


def _saving(pairs: Iterator[Pair], files: Sequence[BinaryIO]) -> Iterator[Pair]:
    for pair in pairs:
        for text, file in zip(pair, files, strict=True):
            file.write(f"{text}\n".encode())
        yield pair


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
