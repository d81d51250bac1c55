"""The encoded corpus on disk: token ids and offsets, memory-mapped, with a manifest that holds every file's SHA-256."""

import hashlib
import json
import shlex
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from aiayn.core import storage
from aiayn.data.moses_bpe import MosesBpe, load
from aiayn.data.parallel_text import SPLITS, DataError, Side, Split
from aiayn.data.sentencepiece_bpe import Tokenizer

Lengths = npt.NDArray[np.int64]  # tokens of each sentence of one side, EOS included

SIDES: tuple[Side, ...] = ("source", "target")
SCHEMA = 1
STAGES = {"tokenizer": ["tokenizer.model"]}
for _split in SPLITS:
    STAGES[_split] = [f"{_split}.{side}.{part}.npy" for side in SIDES for part in ("ids", "offsets")]
    STAGES[_split] += [f"{_split}.{side}.txt" for side in SIDES if _split != "train"]


@dataclass(frozen=True)
class Pairs:
    """The token ids of one split: sentence n of a side is `ids[offsets[n]:offsets[n + 1]]` and ends with EOS."""

    source_ids: npt.NDArray[np.integer]
    source_offsets: npt.NDArray[np.int64]
    target_ids: npt.NDArray[np.integer]
    target_offsets: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.source_offsets) - 1

    @property
    def source_lengths(self) -> Lengths:
        """Tokens of each source sentence."""
        return np.diff(self.source_offsets)

    @property
    def target_lengths(self) -> Lengths:
        """Tokens of each target sentence."""
        return np.diff(self.target_offsets)


class Dataset:
    """A prepared corpus: its pairs, texts and tokenizer; `sha256` names its content, `manifest` its origin."""

    def __init__(self, folder: Path) -> None:
        """The corpus that `prepare` wrote to `folder`, every file checked; raises DataError naming what is damaged."""
        path = folder / "manifest.json"
        try:
            manifest = json.loads(path.read_bytes())
            damage = _damage(folder, manifest)
        except FileNotFoundError as error:
            missing = f"{folder} holds no prepared data: `aiayn prepare` with the same arguments makes it"
            raise DataError(missing) from error
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise DataError(f"{path} is damaged or not ours: {remedy(folder)}") from error
        if damage:
            raise DataError(f"{damage}: {remedy(folder)}")
        self.folder, self.manifest = folder, manifest
        self.sha256: str = manifest["sha256"]

    @cached_property
    def tokenizer(self) -> Tokenizer | MosesBpe:
        """The vocabulary that both sides share."""
        return load(self.folder / "tokenizer.model")

    def pairs(self, split: Split) -> Pairs:
        """The encoded sentence pairs of a split, memory-mapped; raises DataError for files that only look like ours."""
        try:
            return Pairs(*(np.load(self.folder / name, mmap_mode="r") for name in STAGES[split][:4]))
        except ValueError as error:  # of numpy, which unpickles nothing
            raise DataError(f"{self.folder} holds {split} ids that are none of ours: {remedy(self.folder)}") from error

    def texts(self, split: Split, side: Side) -> list[str]:
        """The sentences of one side of dev or test as they came, one for each pair."""
        return (self.folder / f"{split}.{side}.txt").read_bytes().decode().split("\n")[:-1]


def _damage(folder: Path, manifest: dict[str, Any]) -> str:
    """What is wrong with the first damaged file of a corpus; empty when none is."""
    if manifest["schema"] != SCHEMA:
        return f"{folder} was prepared by another version of this program"
    if manifest["sha256"] != digest(manifest):
        return f"{folder / 'manifest.json'} is damaged"
    for path in map(folder.joinpath, chain.from_iterable(STAGES.values())):
        if not path.is_file():
            return f"{path} is missing"
        if (actual := fingerprint(path)) != manifest["files"][path.name]:
            return f"{path} is damaged, its {actual['bytes']} bytes are not those that were prepared"
    return ""


def fingerprint(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": storage.sha256(path)}


def digest(manifest: dict[str, Any]) -> str:
    content = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def remedy(folder: Path) -> str:
    return f"repair it with `rm -r {shlex.quote(str(folder))}` and the same command again"
