"""A synthetic treebank: English sentences of a small random grammar, and their bracketed trees without the words.

`python trees.py make FOLDER` writes {train,dev,test}.{source,target}. `python trees.py convert TREEBANK FOLDER/train`
writes the same two files of trees in the Penn Treebank's format. `python trees.py score REFERENCES TREES` prints the
labelled F1 of the brackets of two files, one tree a line.
"""

import random
import re
import sys
from collections import Counter
from pathlib import Path

SPLITS = {"train": 12_000, "dev": 500, "test": 500}
MOST_WORDS = 12
# Of each symbol: how often, and what it becomes. A prepositional phrase belongs to a noun or a verb at random
RULES: dict[str, list[tuple[int, str]]] = {
    "S": [(8, "NP VP"), (2, "PP NP VP"), (1, "S CC S")],
    "NP": [(5, "DT NN"), (3, "DT JJ NN"), (3, "NNP"), (2, "NP PP"), (1, "NP SBAR"), (1, "NP CC NP")],
    "VP": [(3, "VBZ"), (5, "VBT NP"), (3, "VBT NP PP"), (2, "VBZ PP"), (2, "VBC SBAR"), (1, "VBZ RB")],
    "PP": [(1, "IN NP")],
    "SBAR": [(1, "WDT VP")],
}
WORDS = {
    "DT": "the a every some this no",
    "NN": "dog cat teacher student river house letter window garden bridge book train child song engine",
    "NNP": "Ada Alan Grace Emmy Kurt Sofia",
    "JJ": "old small red quiet young strange heavy bright",
    "VBZ": "sleeps runs sings waits arrives laughs",
    "VBT": "sees finds follows reads opens paints hears likes",
    "VBC": "says believes knows doubts",
    "IN": "in near with under behind of",
    "RB": "slowly often again quietly",
    "CC": "and or",
    "WDT": "that",
}


def derive(symbol: str, draw: random.Random, words: list[str]) -> str:
    """A random tree below the symbol; its words are appended to `words`."""
    if symbol in WORDS:
        words.append(draw.choice(WORDS[symbol].split()))
        return symbol
    ((_, right),) = draw.choices(RULES[symbol], [weight for weight, _ in RULES[symbol]])
    return f"({symbol} {' '.join(derive(part, draw, words) for part in right.split())} ){symbol}"


def make(folder: Path) -> None:
    """Every sentence once, so that none of dev or test is in the training text."""
    draw, seen = random.Random(1), set[str]()
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in SPLITS.items():
        pairs = list[tuple[str, str]]()
        while len(pairs) < count:
            words = list[str]()
            tree, sentence = derive("S", draw, words), " ".join(words)
            if len(words) <= MOST_WORDS and sentence not in seen:
                seen.add(sentence)
                pairs.append((sentence, tree))
        for side, lines in zip(("source", "target"), zip(*pairs, strict=True), strict=True):
            (folder / f"{split}.{side}").write_text("".join(line + "\n" for line in lines))


def convert(treebank: Path, stem: Path) -> None:
    """The words and trees of a file in the Penn Treebank's format, as stem.source and stem.target.

    Traces and the constituents that hold nothing else are left out, as are function tags and indices (NP-SBJ-1 is NP).
    """
    stem.parent.mkdir(parents=True, exist_ok=True)
    opened, sources, targets = list[tuple[str, list[str]]](), list[str](), list[str]()
    words = list[str]()
    for bracket, label, word in re.findall(r"(\()\s*([^\s()]*)|([^\s()]+)|\)", treebank.read_text(encoding="utf-8")):
        if bracket:
            opened.append((label if label.startswith("-") else re.split("[-=|]", label)[0], []))
            continue
        if not opened:
            raise SystemExit(f"{treebank}: a bracket or word outside of a tree, after {len(targets)} trees")
        if word:
            if opened[-1][0] != "-NONE-":
                words.append(word)
                opened[-1][1].append("")  # a word takes no token of the tree: its tag does
            continue
        label, parts = opened.pop()
        if parts == [""]:
            tree = label
        elif parts and label:
            tree = f"({label} {' '.join(parts)} ){label}"
        else:
            tree = " ".join(parts)  # the bracket without a label around each tree
        if opened and tree:
            opened[-1][1].append(tree)
        elif tree:
            sources.append(" ".join(words))
            targets.append(tree)
            words.clear()
    if opened:
        raise SystemExit(f"{treebank}: the last tree is not closed")
    for side, lines in ("source", sources), ("target", targets):
        stem.with_name(f"{stem.name}.{side}").write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def brackets(tree: str) -> Counter[tuple[str, int, int]]:
    """Each constituent as (label, first word, end); empty for a tree whose brackets do not match."""
    found, opened, place = Counter[tuple[str, int, int]](), list[tuple[str, int]](), 0
    for token in tree.split():
        if token.startswith("("):
            opened.append((token[1:], place))
        elif token.startswith(")"):
            if not opened or opened[-1][0] != token[1:]:
                return Counter()
            label, start = opened.pop()
            found[label, start, place] += 1
        else:
            place += 1
    return Counter() if opened else found


def score(references: Path, trees: Path) -> None:
    """Labelled precision, recall and F1 over all brackets, and how many trees are whole or right throughout."""
    pairs = list(zip(references.read_text().splitlines(), trees.read_text().splitlines(), strict=True))
    right = wanted = given = 0
    for reference, tree in pairs:
        gold, own = brackets(reference), brackets(tree)
        right, wanted, given = right + (gold & own).total(), wanted + gold.total(), given + own.total()
    whole = sum(bool(brackets(tree)) for _, tree in pairs)
    exact = sum(reference == tree for reference, tree in pairs)
    print(f"labelled F1 {200 * right / (wanted + given):.2f}", end=" ")
    print(f"(precision {100 * right / max(1, given):.2f}, recall {100 * right / wanted:.2f})")
    print(f"of {len(pairs)} trees, {whole} have brackets that match, {exact} are the reference")


if __name__ == "__main__":
    command, *paths = sys.argv[1:]
    {"make": make, "convert": convert, "score": score}[command](*map(Path, paths))
