"""What is drawn is what was measured: points, intervals and titles read back from the figures."""

import dataclasses

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from aiayn.config import compose
from aiayn.report import figures
from aiayn.report.curves import AXES, Curve
from aiayn.report.figure_files import style
from aiayn.tables.table3 import Table
from tests.tables.test_formats import table as made_up


def table(seeds: int = 1, scale: str = "mini", data: str = "tiny") -> Table:
    """Made-up results in which each seed adds 1 % of perplexity and 0.1 BLEU."""
    return made_up(
        *(scale, data, range(seeds)),
        ppl=lambda row, seed: row.paper.ppl * 2 * (1 + seed / 100),
        bleu=lambda row, seed: row.paper.bleu + seed / 10,
    )


def points(figure: Figure, panel: int, marker: str) -> list[float]:
    """The heights of the points with a marker, from left to right."""
    found = [line for line in figure.axes[panel].lines if line.get_marker() == marker]
    return [float(line.get_ydata()[0]) for line in sorted(found, key=lambda line: line.get_xdata()[0])]


def test_a_group_shows_the_papers_effects_and_ours() -> None:
    figure = figures.group(table(3), "(A)")
    rows = [compose.rows()[row].paper for row in ("a_h1", "a_h4", "base", "a_h16", "a_h32")]
    for panel, expected in ((0, [100 * (row.ppl / 4.92 - 1) for row in rows]), (1, [row.bleu - 25.8 for row in rows])):
        assert points(figure, panel, "D") == pytest.approx(expected)
        assert points(figure, panel, "o") == pytest.approx(expected, abs=0.15)
    labels = [label.get_text() for label in figure.axes[1].get_xticklabels()]
    assert labels == ["h 1", "h 4", "base", "h 16", "h 32"]
    figure = figures.group(table(1, "paper", "wmt14_en_de"), "(A)")  # figures, under the paper's conditions
    assert points(figure, 0, "D") == [row.ppl for row in rows]
    assert points(figure, 0, "o") == pytest.approx([2 * row.ppl for row in rows])


def test_effects_are_rows_minus_base_and_every_row_is_named() -> None:
    with style():
        figure = figures.effects(table(3))
        figure.draw_without_rendering()
    rows = [row.paper for row in compose.rows().values()]
    effects = {"PPL": [row.ppl - 4.92 for row in rows], "BLEU": [row.bleu - 25.8 for row in rows]}
    for axes, (metric, papers), factor in zip(figure.axes, effects.items(), (2.02, 1), strict=True):
        dots = [line.get_xydata()[0] for line in axes.lines if line.get_marker() == "o"]
        assert np.allclose(dots, [(effect, factor * effect) for effect in papers])
        assert axes.get_title("left").startswith(f"{metric}: Spearman ρ +1.00 (")
        boxes = {text.get_text(): Text.get_window_extent(text) for text in axes.texts}
        assert set(boxes) == set(compose.ROWS)
        assert not any(one.overlaps(other) for one in boxes.values() for other in boxes.values() if one is not other)
    assert figure.get_suptitle() == "Effects: scale mini, corpus tiny, seeds 0, 1, 2; not the paper’s conditions"


@pytest.mark.parametrize("axis", AXES)
def test_a_curve_has_its_own_values_along_the_axis(axis: str) -> None:
    # Three points, at other places along each axis
    places = {name: 10.0**power * np.array([1, 2, 3]) for power, name in enumerate(AXES)}
    drawn = {"dev/ppl": Curve(places, np.array([36.0, 22.0, 15.0])), "train/loss": Curve(places, np.ones(3))}
    figure = figures.curve(table(), {("a_h1", 2): drawn, ("a_h1", 3): drawn}, "dev/ppl", axis)
    (axes,) = figure.axes
    line, _ = axes.lines
    assert line.get_xdata().tolist() == drawn["dev/ppl"].axes[axis].tolist()
    assert line.get_ydata().tolist() == [36, 22, 15]
    assert "scale mini, corpus tiny" in axes.get_title()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a_h1"]  # once for all its seeds


@pytest.mark.parametrize(("limit", "line"), [(0, None), (5, 1.5), (12, None)])
def test_buckets_of_lengths_end_where_training_did(limit, line) -> None:
    made = table()
    scale = dataclasses.replace(made.scale, max_words=0, max_train_words=limit)
    counts = {("base", 1): np.ones((300, 10), np.int64)}
    (axes,) = figures.lengths(dataclasses.replace(made, scale=scale), counts, [1, 2, 3, 9, 12] * 60).axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1 to 2", "3", "4 to 9", "10 to 12"]
    assert [drawn.get_xdata()[0] for drawn in axes.lines if drawn.get_linestyle() == "--"] == ([line] if line else [])
    assert [text.get_text() for text in axes.texts] == ([f"trained on up to {limit}"] if line else [])


def test_a_bucket_of_lengths_has_the_bleu_of_its_sentences() -> None:
    # Of each sentence the n-grams that are right, and all, of 1 to 4 words; its length, and its reference's
    wrong, right = [0, 0, 0, 0, 9, 8, 7, 6, 9, 9], [9, 8, 7, 6, 9, 8, 7, 6, 9, 9]
    words = [3, 5, 9] * 60
    counts = np.array([right if length == 9 else wrong for length in words])
    (axes,) = figures.lengths(table(), {("base", 1): counts}, words).axes
    (drawn,) = (line for line in axes.lines if line.get_label() == "base")
    assert drawn.get_ydata() == pytest.approx([0, 100])
