"""The ladder's numbers are those counted by hand from the runs, and its figure shows them."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from run_results import finish

from aiayn.config import compose, folders
from aiayn.config.schema import Config
from aiayn.core import storage
from aiayn.report import figure_files, ladder_figure
from aiayn.report.ladder_figure import effect, planned
from aiayn.runs import records
from aiayn.tables import paper_claims, table3
from aiayn.tables.table3 import Table
from tests.tables.test_paper_claims import differing

PutRuns = Callable[..., Config]


@pytest.fixture
def put_runs(tmp_path: Path) -> PutRuns:
    """Writes runs of some rows with twice the paper's PPL, and returns a run of their sweep; nothing is prepared."""

    def put(*overrides: str, rows: Sequence[str] = compose.ROWS, seeds: Sequence[int] = (1,)) -> Config:
        run = compose.compose_row(*overrides, f"output={tmp_path}/runs", f"prepared={tmp_path}/prepared")
        for name, seed in itertools.product(rows, seeds):
            row = compose.row(name, dataclasses.replace(run, seed=seed))
            finish(row, row.paper.ppl * 2, row.paper.bleu - 5)
        return run

    return put


def climbed(run: Config) -> list[Table]:
    return ladder_figure.tables(run, table3.table(run, records.read_runs(folders.sweep_folder(run))))


def names(run: Config) -> list[str]:
    return [f"{table.scale.name}, {table.data}" for table in climbed(run)]


def test_every_scale_is_there_in_the_order_of_compute(put_runs: PutRuns) -> None:
    put_runs("scale=paper", "data=wmt14_en_de", rows=("base",))
    put_runs("scale=small", "data=tiny", rows=("base", "a_h1"))
    put_runs("scale=small", "data=tiny", "hardware=gpu", rows=("base", "a_h1"))
    put_runs("scale=small", rows=("base",))  # on verses, its own corpus
    # Controls: another corpus, other formulas, too few updates, a damaged folder and a copied one
    put_runs("scale=mini", "data=tiny", "data.name=other", rows=("base",))
    put_runs("scale=small", "data=tiny", "fidelity=released_code", rows=("base",))
    put_runs("scale=mini", "scale.name=short", "scale.steps=0.00099", rows=("base",))
    run = put_runs("scale=mini")
    good = (folders.run_folder(compose.row("base", run)) / "config.yaml").read_text()
    for name, text in (("torn", "<script>"), ("copied", good)):
        storage.write_text(Path(run.output) / name / "base" / "seed1" / "config.yaml", text)
    assert names(run) == ["mini, tiny", "small, bible", "small, tiny", "small, tiny.bf16", "paper, wmt14_en_de"]
    of_paper = compose.compose_row("scale=paper", "data=wmt14_en_de", f"output={run.output}")
    assert names(of_paper) == ["paper, wmt14_en_de"]


def test_the_figure_shows_every_rows_effects_and_the_papers(put_runs: PutRuns) -> None:
    run = put_runs("scale=mini", rows=("base", "a_h1", "big"), seeds=(1, 2))
    put_runs("scale=small", "data=tiny", rows=("base", "a_h1"))
    found = climbed(run)
    with figure_files.style():
        figure = ladder_figure.ladder(found, "PPL")
        figure_files.drawn(figure, "svg")
    panels: dict[str, Any] = {axes.get_title("left"): axes for axes in figure.axes}
    assert set(panels) == {*compose.ROWS[1:], ""}  # one is empty
    for row, scales in (("a_h1", 2), ("big", 1), ("c_n2", 0)):
        lines = [next(line for line in table.lines if line.name == row) for table in found]
        effects = [effect(table, line, "PPL") for table, line in zip(found, lines, strict=True)]
        dots = [bars.lines[0].get_xydata()[0].tolist() for bars in panels[row].containers]
        assert dots == [[planned(*of), made[0]] for *of, made in zip(found, lines, effects, strict=True) if made]
        assert len(dots) == scales
        expected = math.log(lines[0].papers("PPL") / 4.92)  # of twice the perplexity of each
        assert all(made[0] == pytest.approx(expected) for made in effects if made)
        (diamond,) = [drawn for drawn in panels[row].lines if drawn.get_marker() == "D"]
        assert diamond.get_ydata()[0] == pytest.approx(expected)
    assert panels["a_h1"].get_ylim() == panels["a_h32"].get_ylim()
    assert panels["a_h1"].get_ylim() != panels["c_n2"].get_ylim()  # control: another group


def test_an_interval_is_that_of_the_claim() -> None:
    made = differing("d_dropout00", 0.04, 0.02)
    found = next(f for f in paper_claims.check(made, {}) if f.claim.rows == ("d_dropout00", "base"))
    line = next(line for line in made.lines if line.name == "d_dropout00")
    mean, half = effect(made, line, "PPL")
    assert (mean - half, mean + half) == pytest.approx(found.interval)
    one = dataclasses.replace(line, runs=line.runs[:1])
    assert effect(made, one, "PPL")[1] is None
