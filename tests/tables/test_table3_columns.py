"""The cells of the printed table: every column has a cell for each row, and a figure stands only where it is one."""

import dataclasses

import pytest

from aiayn.config import compose
from aiayn.config.schema import ROWS, Config
from aiayn.runs import records
from aiayn.tables import table3, table3_columns

MINI = compose.compose_row("scale=mini")
PAPER = compose.compose_row("scale=paper", "data=wmt14_en_de")


def found(like: Config, **figures: float) -> dict[str, list[table3_columns.Column]]:
    """The columns, by group, of a table in which these rows have a BLEU, all with a perplexity of 5."""
    runs = []
    for row, bleu in figures.items():
        run = compose.row(row, like)
        result = {"config": dataclasses.asdict(run), "params": 7, "params_at_40960_rows": 65_000_000}
        result["dev"] = {"ppl": 5.0, "bleu": {"paper": bleu}}
        runs.append(records.Run(row, 1, "finished", "", result, 11))
    table = table3.table(like, runs)
    groups: dict[str, list[table3_columns.Column]] = {}
    for column in table3_columns.columns_of(table):
        groups.setdefault(column.group, []).append(column)
    return groups


@pytest.mark.parametrize("like", [MINI, PAPER])
def test_every_column_has_a_cell_for_each_row_and_is_as_wide_as_its_widest(like):
    every = [column for group in found(like, base=25.0).values() for column in group]
    assert {len(column.cells) for column in every} == {len(ROWS)}
    assert len(table3_columns.rows_of(every)) == len(ROWS)
    for column in every:
        assert all(len(cell.text) <= column.width for cell in column.cells)


def test_effects_stand_only_beside_figures_made_under_other_conditions_than_the_papers():
    names = [column.name for column in found(MINI, base=25.0)["BLEU"]]
    assert names == ["paper", "ours", "diff", "Δ paper", "Δ ours"]
    names = [column.name for column in found(PAPER, base=25.0)["BLEU"]]
    assert names == ["paper", "ours", "diff"]


def test_an_effect_is_our_row_minus_our_base_and_a_row_without_figures_has_none():
    ours = found(MINI, base=25.0, a_h1=24.0)["BLEU"][-1]
    assert [cell.text for cell in ours.cells[:3]] == ["", "−1.0", ""]
    assert ours.cells[1].style == "good"  # the paper's h = 1 loses too
    assert found(MINI, base=25.0, a_h1=26.0)["BLEU"][-1].cells[1].style == "far"  # control


@pytest.mark.parametrize(
    ("bleu", "style"),
    [(30.0, "good"), (25.8, "good"), (25.41, "good"), (25.39, "near"), (25.01, "near"), (24.99, "far"), (20.0, "far")],
)
def test_up_to_0_4_bleu_below_the_paper_is_reproduced_up_to_0_8_near_and_less_is_far(bleu, style):
    difference = found(PAPER, base=bleu)["BLEU"][-1].cells[0]
    assert difference.style == style
    assert found(MINI, base=bleu)["BLEU"][2].cells[0].style == "weak"  # under other conditions it says nothing


@pytest.mark.parametrize(("count", "text"), [(477_184, "0.48"), (9_994_000, "9.99"), (12_345_678, "12.3")])
def test_parameters_are_millions_in_three_digits(count, text):
    config = compose.rows()["base"]
    run = records.Run("base", 1, "finished", "", {"params": count}, 11)
    assert table3_columns.params_cell(table3.Line(config, config, (run,), (), {}), "params").text == text


@pytest.mark.parametrize(
    ("value", "text"), [(4.918, "4.92"), (999.994, "999.99"), (1234.5, "1234"), (99999.0, "99999"), (1e7, "1e+07")]
)
def test_a_figure_of_any_size_is_short(value, text):
    assert records.number_text(value, 2) == text
