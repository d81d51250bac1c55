"""How the embedded corpus is split, by its pairs alone; `python tests/split_tiny.py` splits the package's files."""

import hashlib
import lzma
import re
from collections import Counter

from aiayn.data.parallel_text import EMBEDDED, Files, Pair, Split, read_pairs

HELD_OUT: dict[Split, int] = {"dev": 10_000, "test": 3000}


def key(sentence: str) -> str:
    """What near-duplicates have in common: lower-case words without placeholders, digits and punctuation."""
    words = re.sub(r"\{[^}]*\}|<[^>]*>|%\S+", " ", sentence.lower())
    return " ".join(re.sub(r"[\W\d_]+", " ", words).split())


def split(pairs: list[Pair]) -> dict[Split, list[Pair]]:
    """The pairs in the order of their SHA-256: the first are held out if neither side has a near-duplicate anywhere."""
    ordered = sorted(pairs, key=lambda pair: hashlib.sha256("\t".join(pair).encode()).digest())
    times = [Counter(key(pair[side]) for pair in pairs) for side in (0, 1)]
    alone = [pair for pair in ordered if all(times[side][key(pair[side])] == 1 for side in (0, 1))]
    dev = alone[: HELD_OUT["dev"]]
    test = alone[len(dev) : len(dev) + HELD_OUT["test"]]
    held_out = {*dev, *test}
    return {"train": [pair for pair in ordered if pair not in held_out], "dev": dev, "test": test}


def embedded() -> dict[Split, list[Pair]]:
    """The pairs of the package's files."""
    return {name: list(read_pairs(files, None)) for name, files in EMBEDDED["tiny"].items()}


def _write(files: Files, pairs: list[Pair]) -> None:
    for path, lines in zip((files.source, files.target), zip(*pairs, strict=True), strict=True):
        text = "".join(line + "\n" for line in lines).encode()
        path.write_bytes(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))


if __name__ == "__main__":
    for name, pairs in split([pair for part in embedded().values() for pair in part]).items():
        _write(EMBEDDED["tiny"][name], pairs)
        print(f"{name}: {len(pairs)} pairs")
