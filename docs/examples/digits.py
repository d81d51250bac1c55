"""Super-resolution of handwritten digits: images of 4 x 4 pixels as sources, of 8 x 8 as targets.

`python digits.py make FOLDER` writes {train,dev,test}.{source,target}; `python digits.py score FOLDER RESULT IMAGES`
prints the bits per pixel of a run's result.json and of two baselines, and the error of its images. Needs scikit-learn.
"""

import json
import math
import sys
from collections import Counter
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

LEVELS = "abcdefghijklmnopq"  # 17 levels of grey, from white to black; a letter each, so that each is one token
SIDE = 8
STARTS = {"train": 0, "dev": 1397, "test": 1597}  # of 1797 images, mixed before


def make(folder: Path) -> None:
    """Each image as a line of letters, row by row; a source's pixel is the rounded mean of four."""
    images = load_digits().images[np.random.default_rng(1).permutation(1797)].astype(int)
    means = images.reshape(-1, SIDE // 2, 2, SIDE // 2, 2).mean((2, 4))
    folder.mkdir(parents=True, exist_ok=True)
    for split, (start, end) in zip(STARTS, ((0, 1397), (1397, 1597), (1597, 1797)), strict=True):
        for side, pixels in (("source", np.floor(means + 0.5).astype(int)), ("target", images)):
            lines = (" ".join(LEVELS[level] for level in image.flatten()) for image in pixels[start:end])
            (folder / f"{split}.{side}").write_text("".join(line + "\n" for line in lines))


def read(path: Path) -> list[list[int]]:
    """The levels of each line."""
    return [[LEVELS.index(letter) for letter in line.split()] for line in path.read_text().splitlines()]


def enlarged(small: list[int]) -> list[int]:
    """Every pixel of 4 x 4 as four of 8 x 8."""
    return np.array(small).reshape(SIDE // 2, SIDE // 2).repeat(2, 0).repeat(2, 1).flatten().tolist()


def bits(train: list[tuple[int, ...]], dev: list[tuple[int, ...]]) -> float:
    """Bits per pixel of a table of counts plus one: the last of each tuple is the level, the others what is known."""
    counts, known = Counter(train), Counter(row[:-1] for row in train)
    return -sum(math.log2((counts[row] + 1) / (known[row[:-1]] + len(LEVELS))) for row in dev) / len(dev)


def score(folder: Path, result: Path, images: Path) -> None:
    """Bits per pixel, EOS included, and the root mean square error in levels, both on the dev set."""
    sides = {s: [read(folder / f"{s}.source"), read(folder / f"{s}.target")] for s in ("train", "dev")}
    levels, of_source = (
        {s: [row for pair in zip(*both, strict=True) for row in rows(*pair)] for s, both in sides.items()}
        for rows in (
            lambda small, large: [(level,) for level in large],
            lambda small, large: zip(enlarged(small), large, strict=True),
        )
    )
    pixels = len(levels["dev"])
    nats = json.loads(result.read_text())["dev"]["nats"]
    print(f"bits per pixel: {nats / math.log(2) / pixels:.3f}; from counts of levels {bits(**levels):.3f},", end=" ")
    print(f"of levels beside the source's pixel {bits(**of_source):.3f}, uniform {math.log2(len(LEVELS)):.3f}")
    source, target = (np.array(side) for side in sides["dev"])
    made = read(images)
    whole = [number for number, image in enumerate(made) if len(image) == SIDE**2]
    nearest = np.array([enlarged(small) for small in source.tolist()])
    ours = np.array([made[n] for n in whole]).reshape(-1, SIDE**2)  # also where no image is whole
    own = math.sqrt(((ours - target[whole]) ** 2).mean()) if whole else math.nan
    print(f"{len(whole)} of {len(made)} images are whole; RMSE {own:.3f} of 16, pixels repeated", end=" ")
    print(f"{math.sqrt(np.mean((nearest - target) ** 2)):.3f}")


if __name__ == "__main__":
    command, *paths = sys.argv[1:]
    {"make": make, "score": score}[command](*map(Path, paths))
