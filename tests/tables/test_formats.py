"""Every format tells the same Table 3, names its conditions, and stays inert whatever text a run left behind."""

import csv
import dataclasses
import io
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import run_results
from rich.console import Console

from aiayn.config import compose
from aiayn.config.schema import ROWS, Config
from aiayn.runs import records
from aiayn.runs.records import Run
from aiayn.tables import formats, table3
from aiayn.tables.table3 import Table

FORMATS = ("terminal", "md", "csv", "latex")
HOSTILE = (
    "<script>alert(1)</script> | `rm` \x1b[31m\x1b]0;t\x07 \u202egnp.exe\x00\r\n# x {{7*7}}"
    " [a](http://b) \\input{/etc} $x$ %_&~^"
)


@cache
def command(scale: str, data: str = "tiny") -> Config:
    return compose.compose_row(f"scale={scale}", f"data={data}", "prepared=nowhere")


def finished(row: str, like: Config, seed: int, ppl: float, bleu: float) -> Run:
    trained = dataclasses.replace(compose.row(row, like), seed=seed)
    result = run_results.result_of(trained, ppl, bleu) | {"params": 61_234_567, "params_at_40960_rows": 65_234_567}
    return Run(row, seed, "finished", "", result, trained.training.max_steps)


def table(
    name: str = "mini",
    data: str = "tiny",
    seeds: Sequence[int] = (1,),
    ppl: Callable[[Config, int], float] = lambda row, seed: row.paper.ppl + 30,
    bleu: Callable[[Config, int], float] = lambda row, seed: row.paper.bleu - 5,
    instead: Sequence[Run] = (),
) -> Table:
    """A table of all rows finished, but for those of which `instead` has runs."""
    others = {run.experiment for run in instead}
    like = command(name, data)
    runs = [
        finished(row.experiment, like, seed, ppl(row, seed), bleu(row, seed))
        for row in compose.rows().values()
        for seed in seeds
        if row.experiment not in others
    ]
    return table3.table(like, [*runs, *instead])


def paper_table(**arguments: Any) -> Table:
    return table("paper", "wmt14_en_de", **arguments)


def render(made: Table, form: str, console: Console | None = None) -> str:
    return formats.printed([formats.layout(made)], form, console)


def wide() -> Console:
    return Console(width=200, file=io.StringIO(), force_terminal=True, color_system=None)


def markdown_rows(text: str) -> list[dict[str, str]]:
    """The rows of the one table in a Markdown text, by the rule that a bar without a backslash divides cells."""
    bars = [line for line in text.splitlines() if line.startswith("|")]
    head, _, *body = ([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in bars)
    return [dict(zip(head, row, strict=True)) for row in body]


def csv_rows(made: Table) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(render(made, "csv"))))


def test_other_precision_or_data_settings_are_told() -> None:
    assert ", max words 1; base has" in render(table3.table(command("smoke"), []), "md")
    half = compose.compose_row("scale=mini", "hardware.precision=bf16-mixed")
    assert "on tiny.bf16 " in render(table3.table(half, []), "md")
    own = compose.compose_row("scale=paper", "data=wmt14_en_de", "data.vocab_size=8000")
    for made, comparable in ((table3.table(own, [finished("base", own, 1, 5.0, 20.0)]), False), (paper_table(), True)):
        text = render(made, "md")
        assert ("not the paper's conditions" in text) is not comparable
        assert ("data.vocab_size=8000 instead of 37000" in text) is not comparable
        assert {row["comparable"] for row in csv_rows(made)} == {str(comparable)}


def test_only_base_and_the_cells_that_differ_are_printed() -> None:
    symbols = ("N", "d_model", "d_ff", "h", "d_k", "d_v", "P_drop", "ε_ls", "steps")
    rows = markdown_rows(render(table(), "md"))
    printed = {row["row"]: {name: row[name] for name in symbols if row[name]} for row in rows}
    assert [*printed["base"].values()] == ["6", "512", "2048", "8", "64", "64", "0.1", "0.1", "100K"]
    assert printed["a_h1"] == {"h": "1", "d_k": "512", "d_v": "512"}
    assert printed["d_smoothing02"] == {"ε_ls": "0.2"}
    assert printed["e_learned_positions"] == {}
    assert printed["big"] == {"d_model": "1024", "d_ff": "4096", "h": "16", "P_drop": "0.3", "steps": "300K"}


def test_at_paper_scale_diff_is_ours_minus_the_papers() -> None:
    made = paper_table(ppl=lambda row, seed: row.paper.ppl + 0.07, bleu=lambda row, seed: row.paper.bleu - 0.3)
    for row in markdown_rows(render(made, "md")):
        paper = compose.rows()[row["row"]].paper
        assert (row["PPL paper"], row["BLEU paper"]) == (f"{paper.ppl:.2f}", f"{paper.bleu:.1f}")
        assert (row["PPL ours"], row["PPL diff"]) == (f"{paper.ppl + 0.07:.2f}", "+0.07")
        assert (row["BLEU ours"], row["BLEU diff"]) == (f"{paper.bleu - 0.3:.1f}", "−0.3")
        assert row["params paper"] == str(paper.params_millions or "")
        assert (row["params 40 960"], row["params ours"]) == ("65.2", "61.2")


def test_at_another_scale_effects_are_compared() -> None:
    base, first, *_ = markdown_rows(render(table(ppl=lambda row, seed: 10 * row.paper.ppl), "md"))
    assert (base["PPL Δ paper"], base["PPL Δ ours"]) == ("", "")
    assert (first["PPL Δ paper"], first["PPL Δ ours"]) == ("+0.37", "+3.70")
    assert (first["BLEU Δ paper"], first["BLEU Δ ours"]) == ("−0.9", "−0.9")
    assert not {"params 40 960", "PPL diff"} & set(first)


UNFINISHED = (
    Run("a_h4", 1, "failed", "loss is not finite at update 17 (exit code 3)", None, 17),
    Run("c_n8", 1, "half-done", "", None, 5),
    Run("big", 1, "missing", "", None, 0),
)


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_has_all_rows_and_the_cause_of_gaps(form: str) -> None:
    stale = finished("a_h16", command("small"), 1, 5.0, 20.0)
    text = render(table(seeds=(1, 3), instead=[*UNFINISHED, stale]), form, wide()).replace("\\_", "_")
    found = re.findall(rf"^(?:\|)? ?({'|'.join(sorted(ROWS, key=len, reverse=True))})\b", text, re.MULTILINE)
    assert tuple(found) == ROWS
    words = ("mini", "tiny", "1 3") if form == "csv" else ("Scale mini", "on tiny ", "Seeds: 1, 3", "16 of 20 rows")
    assert all(word in text for word in (*words, f"{command('mini').scale.width}"))
    for name, status in (("a_h4", "failed"), ("c_n8", "half-done"), ("big", "missing"), ("a_h16", "stale")):
        assert re.search(rf"(?m)^\|? ?{name}\b.*{status}", text)
    assert "loss is not finite at update 17 (exit code 3)" in text
    assert f"5 of {round(100_000 * command('mini').scale.steps):,} updates" in text
    assert re.search(r"scale\.\w+ was \S+, is \S+, and \d+ more: give scale\.\w+=\S+, or delete", text)


def hostile() -> Table:
    run = Run("a_h4", 1, "failed", records.printable(HOSTILE), None, 17)
    mini = command("mini")
    named = dataclasses.replace(mini, data=dataclasses.replace(mini.data, name=HOSTILE.replace("\n", " ")))
    return table3.table(named, [run])


def check_latex(text: str) -> None:
    """What plain LaTeX needs of a table: ASCII, balanced groups and mathematics, equal rows."""
    assert text.isascii()
    plain = re.sub(r"\\\\|\\[{}$&#_%]", "", text)
    assert plain.count("{") == plain.count("}")
    outside = re.sub(r"\$[^$]*\$", "", plain)
    assert not re.search(r"[$#%_^~<>|]", outside)
    ((columns, body),) = re.findall(r"(?s)\\begin\{tabular\}\{([lr]+)\}(.*)\\end\{tabular\}", text)
    rows = [row for row in body.replace(r"\&", "").replace(r"\hline", "").split(r"\\") if row.strip()]
    assert [row.count("&") + 1 for row in rows] == [len(columns)] * 21


@pytest.mark.parametrize("made", [table(seeds=(1, 2), instead=UNFINISHED), hostile()])
def test_latex_is_one_plain_table(made: Table) -> None:
    text = render(made, "latex")
    check_latex(text)
    assert re.search(r"\\label\{tab:table-3\}\n.* \$d_\{\\mathrm\{ff\}\}\$ ", text, re.DOTALL)
    with pytest.raises(AssertionError):
        check_latex(text.replace("of 20 rows", "% of 20 rows"))


def test_csv_has_every_number_in_full() -> None:
    made = table(seeds=(1, 2), ppl=lambda row, seed: row.paper.ppl * 7 + seed / 3)
    for row in csv_rows(made):
        paper = compose.rows()[row["row"]]
        assert float(row["ppl"]) == pytest.approx(paper.paper.ppl * 7 + 0.5, abs=1e-12)
        assert float(row["ppl_deviation"]) == pytest.approx((1 / 18) ** 0.5, abs=1e-12)
        assert float(row["bleu_sacrebleu"]) == paper.paper.bleu - 5.25
        assert float(row["paper_ppl"]) == paper.paper.ppl
        assert row["learned_positions"] == str(row["row"] == "e_learned_positions")
        assert (row["d_k"], row["params"], row["seeds"]) == (str(paper.model.d_k), "61234567", "1 2")
        assert (row["scale"], row["scale_width"], row["data"]) == ("mini", str(command("mini").scale.width), "tiny")


def test_no_csv_cell_is_a_formula() -> None:
    made = table3.table(command("mini"), [Run("a_h4", 1, "failed", "=cmd|' /C calc'!A0", None, 1)])
    cells = [cell for row in csv.reader(io.StringIO(render(made, "csv"))) for cell in row]
    assert any("=cmd" in cell for cell in cells)
    assert not any(re.match(r"[=+@\t]|-(?!\d)", cell) for cell in cells)


@pytest.mark.parametrize("width", [80, 100, 120])
@pytest.mark.parametrize("made", [table(seeds=(1, 2), instead=UNFINISHED), paper_table()], ids=["mini", "paper"])
def test_terminal_table_fits_and_cuts_no_figure(made: Table, width: int) -> None:
    def rows(console: Console) -> list[str]:
        lines = render(made, "terminal", console).splitlines()
        assert max(map(len, lines)) <= console.width
        return [line for line in lines if line.startswith(ROWS)]

    # No cell is cut: each is one of a window that has room for all
    narrow = rows(Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None))
    for line, whole, row in zip(narrow, rows(wide()), compose.rows().values(), strict=True):
        assert {f"{row.paper.ppl:.2f}", f"{row.paper.bleu:.1f}"} <= set(line.split()) <= set(whole.split())
    assert "d_model" in render(made, "terminal", Console(width=40, file=io.StringIO()))  # a pipe gets every column


GREEN, YELLOW, RED = "\x1b[32m", "\x1b[33m", "\x1b[31m"


@pytest.mark.parametrize(
    ("made", "coloured"),
    [
        (paper_table(bleu=lambda row, seed: row.paper.bleu - 1.5), f"{RED}−1.5"),
        (paper_table(bleu=lambda row, seed: row.paper.bleu - 0.6), f"{YELLOW}−0.6"),
        (paper_table(ppl=lambda row, seed: row.paper.ppl + 1.5), f"{RED}+1.50"),
        (table(), f"{GREEN} +0.37"),
        (table(ppl=lambda row, seed: 50 - row.paper.ppl), f"{RED} −0.37"),
    ],
)  # fmt: skip
def test_worse_figures_and_effects_against_the_papers_are_red(made: Table, coloured: str) -> None:
    console = Console(width=200, file=io.StringIO(), force_terminal=True, color_system="standard")
    line = next(line for line in render(made, "terminal", console).splitlines() if line.startswith("a_h1"))
    assert coloured in line


def test_hostile_text_stays_text_in_markdown() -> None:
    text = render(hostile(), "md")
    for line in text.splitlines():
        assert not re.search(r"(?<!\\)[<\[$~]", re.sub(r"`[^`]*`", "", line)), line
    assert len(markdown_rows(text)) == 20  # each of which has as many cells as the head
