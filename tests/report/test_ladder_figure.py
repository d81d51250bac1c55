"""The figure of the ladder shows the effects that were measured, and the paper's."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from aiayn.config import compose, folders
from aiayn.config.schema import Config
from aiayn.report import contents, figure_files, ladder_figure
from aiayn.tables.ladder import papers_effect

PutRuns = Callable[..., Config]


def points(figure: Any, row: str) -> list[tuple[float, float]]:
    (axes,) = [axes for axes in figure.axes if axes.get_title("left") == row]
    dots = [bars.lines[0] for bars in axes.containers]
    return [(float(dot.get_xdata()[0]), float(dot.get_ydata()[0])) for dot in dots]


def test_the_figure_shows_every_rows_effects_and_the_papers(put_runs: PutRuns) -> None:
    run = put_runs(
        "scale=mini", rows=("base", "a_h1", "big"), seeds=(1, 2), ppl=lambda row, seed: row.paper.ppl * 2 + seed / 9
    )
    put_runs("scale=small", rows=("base", "a_h1"))
    found = contents.collect(run)
    with figure_files.style():
        figure = ladder_figure.ladder(found.ladder, found.table.lines, "PPL")
        figure_files.svg(figure)
    assert [axes.get_title("left") for axes in figure.axes] == [*compose.ROWS[1:], "base trained at"]
    rungs = [(own, {line.name: line for line in own.table.lines}) for own in found.ladder.rungs]
    for row in ("a_h1", "big", "c_n2"):
        effects = [own.effect(lines[row], "PPL") for own, lines in rungs]
        expected = [(effect.compute, effect.value) for effect in effects if effect]
        assert points(figure, row) == expected
        assert len(expected) == {"a_h1": 2, "big": 1, "c_n2": 0}[row]
        (axes,) = [axes for axes in figure.axes if axes.get_title("left") == row]
        (diamond,) = [drawn for drawn in axes.lines if drawn.get_marker() == "D"]
        papers = papers_effect(rungs[0][1][row], found.table.base, "PPL")
        assert (diamond.get_xdata()[0], diamond.get_ydata()[0]) == pytest.approx((papers.compute, papers.value))
        assert axes.get_xscale() == "log"
    assert figure.axes[0].get_ylim() == figure.axes[3].get_ylim()  # group (A)
    assert figure.axes[0].get_ylim() != figure.axes[6].get_ylim()  # control: group (C)


def test_a_row_without_compute_has_no_point(put_runs: PutRuns) -> None:
    run = put_runs("scale=mini", rows=("base", "a_h1", "big"))
    path = folders.run_folder(compose.row("a_h1", run)) / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"source_tokens": None}))
    found = contents.collect(run)
    with figure_files.style():
        figure = ladder_figure.ladder(found.ladder, found.table.lines, "PPL")
    assert points(figure, "a_h1") == []
    assert len(points(figure, "big")) == 1  # control
