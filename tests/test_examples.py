"""The scripts of docs/examples: what they make is parallel text, and their scores see a difference."""

import random
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

FOLDER = Path(__file__).parents[1] / "docs" / "examples"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))


def script(name: str) -> SimpleNamespace:
    """The script's functions; skips where it needs a package that is not here."""
    if name == "digits":
        pytest.importorskip("sklearn", reason="digits are scikit-learn's")
    return SimpleNamespace(**runpy.run_path(str(FOLDER / f"{name}.py")))


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


@pytest.mark.parametrize("name", NAMES)
def test_an_example_makes_the_same_three_splits_each_time(name: str, tmp_path: Path) -> None:
    made = []
    for folder in (tmp_path / "one", tmp_path / "two"):
        script(name).make(folder)
        made.append({path.name: lines(path) for path in folder.iterdir()})
    assert made[0] == made[1]
    for split in ("train", "dev", "test"):
        assert len(made[0][f"{split}.source"]) == len(made[0][f"{split}.target"]) > 100
    if name == "trees":
        assert not {*made[0]["train.source"]} & {*made[0]["dev.source"], *made[0]["test.source"]}
        for sentence, tree in zip(made[0]["dev.source"], made[0]["dev.target"], strict=True):
            assert script("trees").brackets(tree)["S", 0, len(sentence.split())] >= 1


def test_labelled_f1_counts_brackets_by_label_and_place(tmp_path, capsys) -> None:
    trees = script("trees")
    (tmp_path / "reference").write_text("(S (NP DT NN )NP (VP VBZ )VP )S\n" * 2)
    # One label is another, and one tree has brackets that do not match: 2 right of 3 given and 6 wanted
    (tmp_path / "own").write_text("(S (NP DT NN )NP (PP VBZ )PP )S\n(S (NP DT NN )VP )S\n")
    trees.score(tmp_path / "reference", tmp_path / "own")
    printed = capsys.readouterr().out
    assert "labelled F1 44.44 (precision 66.67, recall 33.33)" in printed
    assert "of 2 trees, 1 have brackets that match, 0 are the reference" in printed


def test_a_penn_treebank_keeps_its_labels_alone(tmp_path) -> None:
    trees = script("trees")
    (tmp_path / "wsj").write_text(
        """( (S
    (NP-SBJ-1 (DT The) (NN train) (-LRB- -LRB-) (ADJP (JJ old)) (-RRB- -RRB-))
    (VP (VBZ seems) (S (NP-SBJ (-NONE- *-1)) (VP (TO to) (VP=2 (VB wait)))))
    (. .)) )
((NP (PRP$ its) (NN café)))
"""
    )
    trees.convert(tmp_path / "wsj", tmp_path / "new" / "dev")
    assert lines(tmp_path / "new" / "dev.source") == ["The train -LRB- old -RRB- seems to wait .", "its café"]
    assert lines(tmp_path / "new" / "dev.target") == [
        "(S (NP DT NN -LRB- (ADJP JJ )ADJP -RRB- )NP (VP VBZ (S (VP TO (VP VB )VP )VP )S )VP . )S",
        "(NP PRP$ NN )NP",
    ]


@pytest.mark.parametrize(
    ("text", "words"), [("(S (NN a))\n)", "outside of a tree, after 1"), ("(S (NN a)", "not closed")]
)
def test_a_treebank_with_brackets_that_do_not_match_is_refused(text: str, words: str, tmp_path) -> None:
    (tmp_path / "wsj").write_text(text)
    with pytest.raises(SystemExit, match=words):
        script("trees").convert(tmp_path / "wsj", tmp_path / "dev")
    assert not (tmp_path / "dev.source").exists()


def test_a_melody_in_another_key_is_as_many_semitones_higher(tmp_path, capsys) -> None:
    melodies = script("melodies")
    melody = melodies.generated(random.Random(3))
    marks = "C ^C D ^D E F ^F G ^G A ^A B".split()  # noqa: SIM905
    low, high = (
        [marks.index(note.strip("',")) + 12 * (note.count("'") - note.count(",")) for note in notes]
        for notes in (melodies.text(melody, key).split()[::2] for key in (0, 2))
    )
    assert high == [pitch + 2 for pitch in low]
    (tmp_path / "reference").write_text("C 1 D 2 E 2\nC 1\n")
    (tmp_path / "own").write_text("C 1 D 1\nC 1\n")
    melodies.score(tmp_path / "reference", tmp_path / "own")
    assert "50.00 % of 4 notes, 50.00 % of 2 melodies" in capsys.readouterr().out


def test_the_bits_of_a_table_of_counts_are_those_by_hand() -> None:
    digits = script("digits")
    train = [(0, 5), (0, 5), (1, 7)]
    assert digits.bits(train, [(0, 5)]) == pytest.approx(2.6630, abs=1e-4)  # log2((2 + 17) / (2 + 1))
    assert digits.enlarged(list(range(16)))[:8] == [0, 0, 1, 1, 2, 2, 3, 3]
