"""Melodies in all twelve major keys, to be transposed to C: generated ones, and for the test set real tunes.

`python melodies.py make FOLDER` writes {train,dev,test}.{source,target}; `python melodies.py score REFERENCES MELODIES`
prints how many notes of two files are equal, one melody a line. A note is a pitch and its length in eighths: `^F 2`.
"""

import random
import sys
from pathlib import Path

SPLITS = {"train": 12_000, "dev": 500}
SCALE = (0, 2, 4, 5, 7, 9, 11)  # semitones of a major scale above its first note
NAMES = ("C", "^C", "D", "^D", "E", "F", "^F", "G", "^G", "A", "^A", "B")
# Degrees of the scale (1 is the key's first note, 8 the octave above it, 0 the note below it) and eighths
TUNES = {
    "Twinkle, twinkle, little star": "1 2 1 2 5 2 5 2 6 2 6 2 5 4 4 2 4 2 3 2 3 2 2 2 2 2 1 4",
    "Frère Jacques": "1 2 2 2 3 2 1 2 1 2 2 2 3 2 1 2 3 2 4 2 5 4 3 2 4 2 5 4",
    "Frère Jacques, second half": "5 1 6 1 5 1 4 1 3 2 1 2 5 1 6 1 5 1 4 1 3 2 1 2 1 2 -2 2 1 4",
    "Ode to Joy": "3 2 3 2 4 2 5 2 5 2 4 2 3 2 2 2 1 2 1 2 2 2 3 2 3 3 2 1 2 4",
    "Mary had a little lamb": "3 2 2 2 1 2 2 2 3 2 3 2 3 4 2 2 2 2 2 4 3 2 5 2 5 4",
    "Au clair de la lune": "1 2 1 2 1 2 2 2 3 4 2 4 1 2 3 2 2 2 2 2 1 8",
    "London Bridge is falling down": "5 3 6 1 5 2 4 2 3 2 4 2 5 4 2 2 3 2 4 4 3 2 4 2 5 4",
    "When the saints go marching in": "1 2 3 2 4 2 5 8 1 2 3 2 4 2 5 8 1 2 3 2 4 2 5 4 3 4 1 4 3 4 2 8",
    "Jingle Bells": "3 2 3 2 3 4 3 2 3 2 3 4 3 2 5 2 1 3 2 1 3 8",
    "Alle meine Entchen": "1 2 2 2 3 2 4 2 5 4 5 4 6 2 6 2 6 2 6 2 5 8",
}
Melody = list[tuple[int, int]]
"""Degrees and eighths."""


def generated(draw: random.Random) -> Melody:
    """A random walk on the scale, mostly in steps, that begins on the key's triad and ends on its first note."""
    melody, degree = Melody(), draw.choice((1, 3, 5))
    for _ in range(draw.randint(7, 17)):
        melody.append((degree, draw.choices((1, 2, 3, 4, 8), (3, 9, 1, 3, 1))[0]))
        degree = min(9, max(-3, degree + draw.choices((-4, -3, -2, -1, 0, 1, 2, 3, 4), (1, 1, 3, 7, 4, 7, 3, 1, 1))[0]))
    return [*melody, (1, 4)]


def text(melody: Melody, key: int) -> str:
    """The melody in the key so many semitones above C; an octave above C4's has a ', one below a comma."""
    words = []
    for degree, eighths in melody:
        octave, step = divmod(degree - 1, 7)
        octave, pitch = divmod(12 * octave + SCALE[step] + key, 12)
        words += [NAMES[pitch] + ("'" * octave if octave > 0 else "," * -octave), str(eighths)]
    return " ".join(words)


def make(folder: Path) -> None:
    """Generated melodies for training and dev, each in a random key; for test every tune in every key."""
    draw = random.Random(1)
    folder.mkdir(parents=True, exist_ok=True)
    made = {split: [(generated(draw), draw.randrange(12)) for _ in range(count)] for split, count in SPLITS.items()}
    numbers = [list(map(int, tune.split())) for tune in TUNES.values()]
    tunes = [list(zip(tune[::2], tune[1::2], strict=True)) for tune in numbers]
    made["test"] = [(tune, key) for tune in tunes for key in range(12)]
    for split, melodies in made.items():
        (folder / f"{split}.source").write_text("".join(text(melody, key) + "\n" for melody, key in melodies))
        (folder / f"{split}.target").write_text("".join(text(melody, 0) + "\n" for melody, _ in melodies))


def score(references: Path, melodies: Path) -> None:
    """The share of notes, pitch and length, that are right in their place, and of melodies right throughout."""
    right = notes = whole = 0
    pairs = list(zip(references.read_text().splitlines(), melodies.read_text().splitlines(), strict=True))
    for reference, melody in pairs:
        wanted, given = (list(zip(line.split()[::2], line.split()[1::2], strict=False)) for line in (reference, melody))
        right += sum(one == other for one, other in zip(wanted, given, strict=False))
        notes, whole = notes + len(wanted), whole + (reference == melody)
    print(f"{100 * right / notes:.2f} % of {notes} notes, {100 * whole / len(pairs):.2f} % of {len(pairs)} melodies")


if __name__ == "__main__":
    command, *paths = sys.argv[1:]
    {"make": make, "score": score}[command](*map(Path, paths))
