"""Every format tells the same Table 3, names its conditions, and stays inert whatever text a run left behind."""

import csv
import dataclasses
import io
import re
import unicodedata
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
from rich.console import Console

from aiayn.config import compose, folders
from aiayn.config.schema import ROWS, Config
from aiayn.runs import records
from aiayn.runs.records import Run, row_line
from aiayn.tables import formats, table3
from aiayn.tables.paper_claims import Claim, Finding
from aiayn.tables.table3 import Table

FORMATS = ("terminal", "md", "csv", "latex")
HOSTILE = (
    "<script>alert(1)</script> | `rm` \x1b[31m\x1b]0;t\x07 \u202egnp.exe\x00\r\n# x {{7*7}}"
    " [a](http://b) \\input{/etc} $x$ %_&~^"
)


@cache
def command(scale: str, data: str = "tiny") -> Config:
    """The words of `aiayn table` for runs at that scale on that data, `.paper` behind it for the paper's tokenizer."""
    corpus, _, papers = data.partition(".")
    return compose.compose_row(f"scale={scale}", f"data={corpus}", f"tokenizer={papers or 'sentencepiece'}")


def finished(row: str, like: Config, seed: int, ppl: float, bleu: float, params: int = 61_234_567) -> Run:
    trained = dataclasses.replace(compose.row(row, like), seed=seed)
    bleus = {"paper": bleu, "sacrebleu": bleu - 0.25, "intl": bleu + 0.5}
    result: dict[str, Any] = {
        **{"scale": like.scale.name, "data": folders.setting(like), "config": dataclasses.asdict(trained)},
        **{"params": params, "params_at_40960_rows": params + 4_000_000, "train_seconds": 93.0},
        "dev": {"ppl": ppl, "bits_per_character": 1.375, "bleu": bleus},
        "sha256": {"data": "d" * 64, "tokenizer": "7" * 64},
    }
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
    head, rule, *body = (
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in text.splitlines()
        if line.startswith("|")
    )
    assert all(re.fullmatch(r":?-+:?", cell) for cell in rule)
    return [dict(zip(head, row, strict=True)) for row in body]


def csv_rows(made: Table) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(render(made, "csv"))))


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_has_the_20_rows_in_the_papers_order(form: str) -> None:
    text = render(table(), form, wide()).replace("\\_", "_")
    found = re.findall(rf"^(?:\| )?({'|'.join(sorted(ROWS, key=len, reverse=True))})\b", text, re.MULTILINE)
    assert tuple(found) == ROWS


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_names_scale_factors_data_and_seeds(form: str) -> None:
    text = render(table(seeds=(1, 3)), form, wide())
    width = f"{command('mini').scale.width}"
    words = ("mini", "tiny", "1 3", width) if form == "csv" else ("scale mini", "tiny", "Seeds: 1, 3", width)
    for word in words:
        assert word in text


@pytest.mark.parametrize("form", ["terminal", "md", "latex"])
def test_the_caption_says_what_every_factor_multiplies_and_which_bleu(form: str) -> None:
    text = " ".join(render(table(), form, wide()).replace(r"$\times$", "×").split())
    for name, factor in records.factors(command("mini").scale).items():
        if factor != 1:
            assert f"{name.replace('_', ' ')} × {factor:g}" in text
    assert "BLEU is the paper's recipe" in text
    assert "20 of 20 rows finished" in text
    assert "not the paper's conditions" in text
    assert "not the paper's conditions" not in render(paper_table(), form, wide())


def test_caption_and_csv_say_which_part_of_the_corpus_was_used() -> None:
    whole, part = (
        {"max_words": 0, "max_train_words": 0, "pairs": 0},
        {"max_words": 7, "max_train_words": 5, "pairs": 14_009},
    )
    for selection, expected in ((whole, False), (part, True)):
        made = table()
        made = dataclasses.replace(made, scale=dataclasses.replace(made.scale, **selection))
        text = render(made, "md")
        assert ("Of all splits, pairs of at most 7 words a side." in text) == expected
        assert ("Of training, pairs of at most 5 words." in text) == expected
        assert ("Training text: the first 14,009 of its pairs." in text) == expected
        first = csv_rows(made)[0]
        assert {name: first[f"scale_{name}"] for name in selection} == {name: str(n) for name, n in selection.items()}


def test_the_caption_says_which_criteria_for_a_scale_are_missed() -> None:
    missed = ("the corpus is seen 15 to 40 times (19 rows)", "no relapse (c_n8 +0.17)")
    for made, expected in ((table(), False), (dataclasses.replace(table(), missed=missed), True)):
        assert (f"Criteria for a scale that are missed: {'; '.join(missed)}." in render(made, "md")) == expected


def test_the_caption_says_which_tokenizer_the_perplexities_have() -> None:
    usual, papers = (render(table("paper", data), "md") for data in ("wmt14_en_de", "wmt14_en_de.paper"))
    assert "ours with ours (tokenizer=sentencepiece: " in usual
    assert "ours with one of its kind (tokenizer=paper: Moses tokens, 32K merges learned from this text)" in papers
    assert "tokenizer=paper" not in usual


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_names_the_precision_and_runs_in_another_are_another_table(form: str) -> None:
    half = compose.compose_row("scale=mini", "hardware.precision=bf16-mixed")
    runs = [finished(row, half, 1, 5.0, 20.0) for row in ROWS]
    text = render(table3.table(half, runs), form, wide()).replace("\\_", "_")
    words = ("tiny.bf16", "bf16-mixed") if form == "csv" else ("on tiny.bf16 ", "Precision: bf16-mixed.")
    for word in words:
        assert word in text
        assert word not in render(table(), form, wide())  # control


@pytest.mark.parametrize("form", FORMATS)
def test_text_of_the_papers_name_with_other_settings_is_not_said_to_be_the_papers(form: str) -> None:
    own = compose.compose_row("scale=paper", "data=wmt14_en_de", "data.vocab_size=8000")
    text = " ".join(render(table3.table(own, [finished("base", own, 1, 5.0, 20.0)]), form, wide()).split())
    if form == "csv":
        assert {row["comparable"] for row in csv_rows(table3.table(own, []))} == {"False"}
        assert {row["comparable"] for row in csv_rows(paper_table())} == {"True"}
        return
    assert "not the paper's conditions" in text
    assert "Not as in the paper: data.vocab_size=8000 instead of 37000." in text.replace("\\", "")
    assert "Not as in the paper" not in " ".join(render(paper_table(), form, wide()).split())  # control


@pytest.mark.parametrize("form", FORMATS)
def test_a_run_on_other_text_is_named_with_both_values_and_the_remedy_and_is_in_no_mean(form: str) -> None:
    other = dataclasses.replace(command("mini"), data=dataclasses.replace(command("mini").data, vocab_size=500))
    instead = [finished("a_h4", command("mini"), 1, 14.0, 20.0), finished("a_h4", other, 2, 3.0, 20.0)]
    text = render(table(instead=instead), form, wide()).replace("\\", "")
    assert "data.vocab_size was 500, is 1000, as in most runs of this table: delete its folder" in " ".join(
        text.split()
    )
    assert "8.5" not in text
    both = render(table(instead=[instead[0], finished("a_h4", command("mini"), 2, 3.0, 20.0)]), form, wide())
    assert "8.5" in both  # control


def test_base_is_captioned_with_the_values_it_was_trained_with() -> None:
    small = command("mini")
    text = render(table(), "md")
    assert f"d_model {small.model.d_model}, d_ff {small.model.d_ff}, h 8" in text
    assert "before scaling" not in render(paper_table(), "md")


def test_only_base_and_the_cells_that_differ_are_printed() -> None:
    symbols = ("N", "d_model", "d_ff", "h", "d_k", "d_v", "P_drop", "ε_ls", "steps")
    printed = {
        row["row"]: {name: row[name] for name in symbols if row[name]} for row in markdown_rows(render(table(), "md"))
    }
    assert list(printed["base"].values()) == ["6", "512", "2048", "8", "64", "64", "0.1", "0.1", "100K"]
    assert printed["a_h1"] == {"h": "1", "d_k": "512", "d_v": "512"}
    assert printed["b_dk16"] == {"d_k": "16"}
    assert printed["c_n2"] == {"N": "2"}
    assert printed["c_dmodel256"] == {"d_model": "256", "d_k": "32", "d_v": "32"}
    assert printed["d_dropout00"] == {"P_drop": "0.0"}
    assert printed["d_smoothing02"] == {"ε_ls": "0.2"}
    assert printed["e_learned_positions"] == {}
    assert printed["big"] == {"d_model": "1024", "d_ff": "4096", "h": "16", "P_drop": "0.3", "steps": "300K"}


def test_at_the_papers_scale_the_difference_is_ours_minus_the_papers() -> None:
    made = paper_table(ppl=lambda row, seed: row.paper.ppl + 0.07, bleu=lambda row, seed: row.paper.bleu - 0.3)
    for row in markdown_rows(render(made, "md")):
        paper = compose.rows()[row["row"]].paper
        assert (row["PPL paper"], row["BLEU paper"]) == (f"{paper.ppl:.2f}", f"{paper.bleu:.1f}")
        assert (row["PPL ours"], row["PPL diff"]) == (f"{paper.ppl + 0.07:.2f}", "+0.07")
        assert (row["BLEU ours"], row["BLEU diff"]) == (f"{paper.bleu - 0.3:.1f}", "−0.3")
        assert row["params paper"] == str(paper.params_millions or "")
        assert (row["params 40 960"], row["params ours"]) == ("65.2", "61.2")


def test_at_another_scale_the_effects_are_compared_each_with_its_own_base() -> None:
    rows = markdown_rows(render(table(ppl=lambda row, seed: 10 * row.paper.ppl), "md"))
    base, first = rows[0], rows[1]
    assert (base["PPL Δ paper"], base["PPL Δ ours"]) == ("", "")
    assert (first["PPL Δ paper"], first["PPL Δ ours"]) == ("+0.37", "+3.70")
    assert (first["BLEU Δ paper"], first["BLEU Δ ours"]) == ("−0.9", "−0.9")
    assert first["PPL diff"] == f"+{9 * 5.29:.2f}"  # 10 x 5.29 - 5.29
    assert "params 40 960" not in first


def test_several_seeds_are_a_mean_and_a_deviation() -> None:
    made = table(seeds=(1, 2, 3), ppl=lambda row, seed: 40 + seed, bleu=lambda row, seed: 20)
    base = markdown_rows(render(made, "md"))[0]
    assert (base["PPL ours"], base["BLEU ours"], base["seeds"]) == ("42.00±1.00", "20.0±0.0", "3")
    assert "sample standard deviation" in render(made, "md")
    assert "sample standard deviation" not in render(table(), "md")


def test_a_difference_that_rounds_to_nothing_has_no_sign() -> None:
    made = paper_table(ppl=lambda row, seed: row.paper.ppl - 0.001)
    assert {row["PPL diff"] for row in markdown_rows(render(made, "md"))} == {"0.00"}


@pytest.mark.parametrize("ppl", [1.0, 999.99, 8000.0, 5e4, 1e30])
def test_figures_of_any_size_keep_the_table_narrow(ppl: float) -> None:
    rows = markdown_rows(render(table(ppl=lambda row, seed: ppl), "md"))
    assert all(len(row["PPL ours"]) <= 6 and float(row["PPL ours"]) == pytest.approx(ppl, rel=1e-2) for row in rows)


UNFINISHED = (
    Run("a_h4", 1, "failed", "loss is not finite at update 17 (exit code 3)", None, 17),
    Run("c_n8", 1, "half-done", "", None, 5),
    Run("big", 1, "missing", "", None, 0),
)


@pytest.mark.parametrize("form", FORMATS)
def test_missing_failed_half_done_and_stale_rows_appear_as_such_with_their_cause(form: str) -> None:
    stale = finished("a_h16", command("small"), 1, 5.0, 20.0)
    text = render(table(instead=[*UNFINISHED, stale]), form, wide()).replace("\\_", "_")
    lines = {name: next(line for line in text.splitlines() if re.match(rf"(\| )?{name}\b", line)) for name in ROWS}
    for name, status in (("a_h4", "failed"), ("c_n8", "half-done"), ("big", "missing"), ("a_h16", "stale")):
        assert status in lines[name]
        assert status not in lines["base"]
    assert "loss is not finite at update 17 (exit code 3)" in text
    assert f"5 of {round(100_000 * command('mini').scale.steps):,} updates" in text
    assert re.search(r"(model|training)\.\w+ was \d+, is \d+, and \d+ more: delete its folder", text)
    if form != "csv":
        assert "16 of 20 rows finished" in text


def test_unfinished_rows_have_no_figures() -> None:
    for row in markdown_rows(render(table(instead=UNFINISHED), "md")):
        assert (row["PPL ours"] == "–") == (row["row"] in ("a_h4", "c_n8", "big"))
        assert not (row["PPL ours"] == "–" and row["PPL Δ ours"])


def test_without_any_run_the_table_is_the_papers() -> None:
    made = table3.table(command("mini"), [])
    for form in FORMATS:
        assert "25.8" in render(made, form, wide())
    assert {row["PPL ours"] for row in markdown_rows(render(made, "md"))} == {"–"}
    assert "Seeds: none finished" in render(made, "md")


def hostile() -> Table:
    run = Run("a_h4", 1, "failed", records.printable(HOSTILE), None, 17)
    mini = command("mini")
    named = dataclasses.replace(mini, data=dataclasses.replace(mini.data, name=HOSTILE.replace("\n", " ")))
    return table3.table(named, [run])


@pytest.mark.parametrize("form", FORMATS)
def test_hostile_causes_leave_no_control_character(form: str) -> None:
    made = dataclasses.replace(hostile(), data="tiny")
    text = render(made, form, wide())
    assert "alert(1)" in text
    assert not any(unicodedata.category(character).startswith("C") for character in text.replace("\n", ""))


def test_hostile_text_stays_text_in_markdown() -> None:
    text = render(hostile(), "md")
    for line in text.splitlines():
        outside = re.sub(r"`[^`]*`", "", line)
        assert not re.search(r"(?<!\\)[<\[$~]", outside), line
    assert all(len(row) == 23 for row in markdown_rows(text))
    assert line_count(text, "#") == 1


def line_count(text: str, start: str) -> int:
    return sum(line.startswith(start) for line in text.splitlines())


def test_hostile_text_stays_text_in_latex() -> None:
    check_latex(render(hostile(), "latex"))
    with pytest.raises(AssertionError):
        check_latex(render(table(), "latex").replace("20 of 20", "20 % of 20"))


def check_latex(text: str) -> None:
    """What plain LaTeX needs of a table: ASCII, known commands, balanced groups and mathematics, equal rows."""
    assert text.isascii()
    commands = {
        *("begin", "end", "centering", "footnotesize", "setlength", "tabcolsep", "caption", "multicolumn", "hline"),
        *("mathrm", "pm", "times", "Delta", "epsilon", "rho", "ldots"),
        *("textbackslash", "textasciitilde", "textasciicircum"),
    }
    assert set(re.findall(r"\\([A-Za-z]+)", text)) <= commands
    plain = re.sub(r"\\\\|\\[{}$&#_%]", "", text)
    outside = re.sub(r"\$[^$]*\$", "", plain)
    assert "$" not in outside
    assert not re.search(r"[#%_^~<>|]", outside)
    depth = 0
    for character in plain:
        depth += {"{": 1, "}": -1}.get(character, 0)
        assert depth >= 0
    assert depth == 0
    columns = re.search(r"\\begin\{tabular\}\{([lr]+)\}", text)
    assert columns
    body = re.sub(r"\\&", "", text[columns.end() : text.index(r"\end{tabular}")]).replace(r"\hline", "")
    rows = [row for row in body.split(r"\\") if row.strip()]
    assert len(rows) == 22
    for row in rows:
        spans = [int(count) for count in re.findall(r"\\multicolumn\{(\d+)\}", row)]
        assert row.count("&") + 1 + sum(spans) - len(spans) == len(columns[1])


@pytest.mark.parametrize("form", ["terminal", "md", "latex"])
def test_every_format_has_the_rank_correlation_with_its_interval(form: str) -> None:
    def told(made: Table) -> str:
        text = " ".join(
            render(made, form, wide()).replace(r"$\rho$", "ρ").replace("$-$", "−").replace(r"\%", "%").split()
        )
        return text.partition("Spearman's ρ ")[2].partition("Row")[0].partition("Runs")[0]

    turned = table(seeds=(1, 2), bleu=lambda row, seed: 50 - row.paper.bleu)
    assert told(turned).startswith(
        "between the paper's rows and ours: PPL +1.00 (+1.00 to +1.00), BLEU −1.00 (−1.00 to −1.00); 20 rows,"
        " 95 % intervals by bootstrap over rows and seeds."
    )
    assert "over rows alone, since no row has a second seed" in told(table())
    some = [run for line in turned.lines for run in line.runs if run.seed == 1 or line.name == "base"]
    assert "over rows, and over seeds where a row has several." in told(table3.table(command("mini"), some))
    few = table3.table(command("mini"), [run for line in table().lines[:9] for run in line.runs])
    assert told(few).startswith("between the paper's rows and ours: not enough rows (9 finished, at least 10 needed).")
    level = table(bleu=lambda row, seed: 20.0)
    assert "BLEU none, all rows are equal; 20 rows" in told(level)


def test_the_csv_has_the_rank_correlations_as_columns() -> None:
    made = table(seeds=(1, 2), bleu=lambda row, seed: 50 - row.paper.bleu)
    keys = [f"spearman_{metric}{end}" for metric in ("ppl", "bleu") for end in ("", "_low", "_high")]
    for row in csv_rows(made):
        assert [float(row[key]) for key in keys] == pytest.approx([1, 1, 1, -1, -1, -1])
    assert {row[key] for row in csv_rows(table3.table(command("mini"), [])) for key in keys} == {""}


@pytest.mark.parametrize("made", [table(seeds=(1, 2), instead=UNFINISHED), paper_table()], ids=["mini", "paper"])
def test_latex_is_one_plain_table(made: Table) -> None:
    check_latex(render(made, "latex"))


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


@pytest.mark.parametrize("width", [80, 90, 100, 120, 150])
@pytest.mark.parametrize("made", [table(seeds=(1, 2), instead=UNFINISHED), paper_table()], ids=["mini", "paper"])
def test_the_terminal_table_fits_its_window_and_keeps_every_figure(made: Table, width: int) -> None:
    console = Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None)
    lines = render(made, "terminal", console).splitlines()
    assert max(map(len, lines)) <= width
    body = [line for line in lines if "│" in line][2:]
    assert len(body) == 20
    for line, row in zip(body, compose.rows().values(), strict=True):
        assert f"{row.paper.ppl:.2f}" in line.split("│")[1]
        assert f"{row.paper.bleu:.1f}" in line.split("│")[2]
    # No cell is cut: each is one of a window that has room for all
    whole = [line.split() for line in render(made, "terminal", wide()).splitlines() if "│" in line][2:]
    letters = {line.group for line in made.lines}
    assert all(set(line.split()) - letters <= set(cells) for line, cells in zip(body, whole, strict=True))


def test_a_window_too_narrow_for_any_layout_wraps_lines_and_cuts_none() -> None:
    console = Console(width=30, file=io.StringIO(), force_terminal=True, color_system=None)
    body = [line for line in render(table(seeds=(1, 2)), "terminal", console).splitlines() if "│" in line][2:]
    assert [float(line.split()[-2]) for line in body] == [row.paper.bleu for row in compose.rows().values()]


def test_a_file_or_pipe_gets_every_column_without_colour() -> None:
    text = render(table(), "terminal", Console(width=40, file=io.StringIO()))
    assert "\x1b" not in text
    for name in ("row", "d_model", "PPL", "BLEU", "params", "seeds"):
        assert name in text
    assert {len(line) for line in text.splitlines() if "│" in line or "┼" in line} == {len(text.splitlines()[1])}


def coloured(made: Table, name: str) -> str:
    console = Console(width=200, file=io.StringIO(), force_terminal=True, color_system="standard")
    return next(line for line in render(made, "terminal", console).splitlines() if line.startswith(name))


GREEN, YELLOW, RED = "\x1b[32m", "\x1b[33m", "\x1b[31m"


@pytest.mark.parametrize(("gap", "colour"), [(-1.5, RED), (-0.6, YELLOW), (-0.2, GREEN), (1.5, GREEN)])
def test_a_worse_bleu_than_the_papers_turns_yellow_then_red(gap: float, colour: str) -> None:
    line = coloured(
        paper_table(ppl=lambda row, seed: row.paper.ppl, bleu=lambda row, seed: row.paper.bleu + gap), "a_h1"
    )
    assert f"{colour}{'+' if gap > 0 else '−'}{abs(gap)}" in line


def test_a_worse_perplexity_is_a_higher_one() -> None:
    assert f"{RED}+0.50" in coloured(paper_table(ppl=lambda row, seed: row.paper.ppl + 0.5), "a_h1")
    assert f"{GREEN}−0.50" in coloured(paper_table(ppl=lambda row, seed: row.paper.ppl - 0.5), "a_h1")


def test_an_effect_against_the_papers_is_red_and_one_with_it_green() -> None:
    assert f"{GREEN} +0.37" in coloured(table(), "a_h1")
    assert f"{RED} −0.37" in coloured(table(ppl=lambda row, seed: 50 - row.paper.ppl), "a_h1")


def test_a_line_on_a_run_has_its_figures_or_its_cause() -> None:
    row = compose.row("a_h1", command("mini"))
    run = finished("a_h1", command("mini"), 2, 37.456, 19.25)
    assert row_line(row, run).split("  ")[-4:] == ["finished", "PPL 37.46", "BLEU 19.2", "1.6 min"]
    assert row_line(row, UNFINISHED[0]).endswith("seed 1  failed  loss is not finite at update 17 (exit code 3)")
    assert row_line(row, UNFINISHED[1]).endswith("half-done  after 5 updates")


def test_a_line_on_a_run_has_the_papers_figures_under_the_papers_conditions_only() -> None:
    theirs = compose.row("a_h1", command("paper", "wmt14_en_de"))
    run = finished("a_h1", theirs, 2, 5.31, 24.75)
    assert "PPL 5.31 (paper 5.29)  BLEU 24.8 (paper 24.9)" in row_line(theirs, run)
    fewer = dataclasses.replace(theirs, data=dataclasses.replace(theirs.data, vocab_size=8000))
    for other in (command("paper"), dataclasses.replace(theirs, scale=command("mini").scale), fewer):
        assert "paper" not in row_line(other, run)


def test_an_unknown_format_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="format=html: must be one of terminal, md, latex, csv"):
        render(table(), "html")


def finding(metric: str, p: float | None) -> dict[str, str]:
    """A finding in words of which every effect is another."""
    claim = Claim("Bigger is better", metric, ("c_n2", "base"))  # type: ignore[arg-type]
    return formats.finding_texts(Finding(claim, 0.5, 0.1, (-0.1, 0.3), (0.05, 0.15), p, "reproduced", "3 seeds a row"))


def test_a_claim_s_effect_is_in_points_of_bleu_or_in_percent_of_the_perplexity() -> None:
    bleu, ppl = finding("BLEU", None), finding("PPL", None)
    keys = ("paper", "ours", "interval", "sentences")
    assert [bleu[key] for key in keys] == ["+0.50", "+0.10", "−0.10 to +0.30", "+0.05 to +0.15"]
    # Of a perplexity of 100, what is gained by so many nats: 100 (1 - exp(-0.5)) = 39.3, and so on
    assert [ppl[key] for key in keys] == ["+39.3 %", "+9.5 %", "−10.5 % to +25.9 %", "+4.9 % to +13.9 %"]


@pytest.mark.parametrize(
    ("p", "text"), [(None, "–"), (0.5, "0.500"), (0.0051, "0.005"), (0.001, "0.001"), (0.0009, "< 0.001")]
)
def test_a_p_value_has_three_decimals_and_is_never_printed_as_0(p: float | None, text: str) -> None:
    assert finding("PPL", p)["p"] == text
