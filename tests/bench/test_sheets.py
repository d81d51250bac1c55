"""Tables of the benchmark: medians, ratios and verdicts from rounds; the same cells on the terminal and in Markdown."""

import io
import re

from rich.console import Console

from aiayn.bench import sheets

PART = {
    "unit": "update",
    "source_tokens": [300, 600, 900],
    "target_tokens": [200, 400, 600],
    "padded_share_of_rivals": 0.25,
    "units_a_round": 2,
    "lines": [
        {"name": "aiayn", "precision": "fp32", "checks": {"loss": 0.0}, "seconds_a_round": [1.0, 1.0, 3.0]},
        {"name": "slow", "precision": "fp32", "checks": {"loss": 0.5}, "seconds_a_round": [4.0, 2.0, 6.0]},
        {"name": "aiayn", "precision": "bf16", "checks": {"loss": 0.1}, "seconds_a_round": [0.5, 0.5, 1.5]},
        {"name": "fast", "precision": "bf16", "checks": {"loss": 0.2}, "seconds_a_round": [0.25, 1.0, 0.5]},
    ],
}


def cells(sheet: sheets.Sheet) -> dict[tuple[str, ...], list[str]]:
    return {(name, precision): others for name, precision, *others in map(dict.values, sheet.rows)}


def with_precisions(**seconds: float) -> dict:
    """A rival in several precisions beside ours in 1 second."""
    times = [("aiayn", "fp32", 1.0), *(("rival", precision, taken) for precision, taken in seconds.items())]
    lines = [{"name": n, "precision": p, "checks": {}, "seconds_a_round": [s] * 3} for n, p, s in times]
    return {**PART, "lines": lines}


def test_a_line_has_medians_over_rounds_and_the_median_ratio_to_ours_in_its_precision():
    rows = cells(sheets.by_line("training", PART))
    assert rows["aiayn", "fp32"][:3] == ["200", "300", "500.0"]  # of 200, 400, 200 tokens/s; 1 s for two updates
    assert rows["slow", "fp32"][:4] == ["100", "150", "2,000.0", "2.00 x"]  # of 4, 2, 2
    assert rows["fast", "bf16"][:4] == ["800", "1,200", "250.0", "0.50 x"]  # of 0.5, 2, 0.33


def test_training_has_its_share_of_a_known_peak_and_its_warm_up_and_decoding_has_neither():
    timed = {**PART, "lines": [{**line, "warm_up_seconds": 7.0} for line in PART["lines"]]}
    known = sheets.by_line("training", {**timed, "flops_a_token": 1e12, "peak": 1000.0})
    assert [row["of peak"] for row in known.rows] == ["20.0%", "10.0%", "40.0%", "80.0%"]
    assert {row["warm-up s"] for row in known.rows} == {"7.00"}
    unknown = sheets.by_line("training", {**timed, "flops_a_token": 1e12, "peak": None})
    for row in unknown.rows:
        assert "of peak" not in row
        assert "warm-up s" in row
    assert not {"of peak", "warm-up s"} & set(sheets.by_line("decoding", PART).rows[0])


def test_the_verdict_compares_fp32_with_fp32_and_then_each_in_its_fastest_precision():
    fp32, best = sheets.verdict(PART)
    assert fp32.startswith("fp32: 2.00 x the fastest rival (aiayn fp32 200, slow fp32 100")
    assert best.startswith("each in its fastest precision: 0.50 x the fastest rival (aiayn bf16 400, fast bf16 800")


def test_a_rivals_own_reduced_precision_counts_whichever_it_is():
    for precision in ("fp32", "medium", "bf16"):
        taken = {"fp32": 8.0, "medium": 8.0, "bf16": 8.0, precision: 2.0}
        fp32, best = sheets.verdict(with_precisions(**taken))
        assert f"2.00 x the fastest rival (aiayn fp32 400, rival {precision} 200" in best
        assert ("2.00 x" if precision == "fp32" else "8.00 x") in fp32  # control: in fp32 only fp32 counts


def test_ours_compiled_is_ours_and_no_rival():
    line = {"name": "aiayn, compiled", "precision": "bf16", "checks": {}, "seconds_a_round": [0.1, 0.1, 0.3]}
    part = {**PART, "lines": [*PART["lines"], line]}
    assert "2.50 x the fastest rival (aiayn, compiled bf16 2,000, fast bf16 800" in sheets.verdict(part)[1]
    assert sheets.by_line("training", part).rows[-1]["aiayn is"] == ""


def test_where_there_is_no_fp32_no_verdict_is_given_on_it():
    alone = {**PART, "lines": [line for line in PART["lines"] if line["precision"] == "bf16"]}
    assert [line.partition(":")[0] for line in sheets.verdict(alone)] == ["each in its fastest precision"]


def test_rivals_are_columns_and_what_one_does_not_do_is_left_empty():
    found = sheets.by_rival({"training": PART, "decoding": with_precisions(fp32=4.0)})
    assert list(found.rows[0]) == ["", "precision", "aiayn", "slow", "fast", "rival"]
    assert [list(row.values()) for row in found.rows] == [
        ["training", "fp32", "200", "100", "", ""],
        ["training", "bf16", "400", "", "800", ""],
        ["decoding", "fp32", "400", "", "", "100"],
    ]
    assert len(found.remarks) == 4


LAYERS = {
    "precision": "fp32",
    "sizes": {"d": 64, "r": 7, "k": 3, "sequences": 2},
    "lengths": [16, 32, 64],
    "crossings": {"measured": 45.3, "counted": 128.0, "by_orders": 64.0},
    "layers": [
        {
            **{"name": name, "complexity": "O(n)", "sequential": "O(1)", "path": "O(n/k)", "steps": 1},
            **{"path_length": 1234, "seconds_a_round": [[1.0] * 5] * 3, "seconds_a_token": times},
            **{"flops": [16e6, 64e6, 192e6], "exponent": 1.456, "exponent_of_flops": 1.792},
        }
        for name, times in (("one", [1e-6, 2e-6, 4e-6]), ("two", [2e-6, 2e-6, 1e-6]))
    ],
}


def test_table_1_has_the_papers_orders_what_was_found_and_both_ends_of_the_measurement():
    table, times = sheets.by_layer(LAYERS)
    assert "d = 64, r = 7, k = 3" in table.title
    assert "median of 5 rounds" in table.title
    first = table.rows[0]
    assert list(first.values())[:6] == ["one", "O(n)", "O(1)", "O(n/k)", "1", "1,234"]
    assert [first[f"{what} at {n}"] for what in ("MFLOP", "µs") for n in (16, 64)] == ["1.00", "3.00", "1.00", "4.00"]
    assert (first["FLOP exponent"], first["time exponent"]) == ("1.79", "1.46")
    assert times.rows[1] == {"n": "two", "16": "2.00", "32": "2.00", "64": "1.00"}


def test_table_1_names_the_precision_in_which_cudnn_computes_lstms():
    assert not any("fp16" in remark for remark in sheets.by_layer(LAYERS)[0].remarks)
    assert any("Recurrent in fp16" in remark for remark in sheets.by_layer({**LAYERS, "precision": "bf16"})[0].remarks)


def test_the_crossing_is_given_as_measured_as_counted_and_by_the_orders_and_may_be_nowhere():
    measured, counted = sheets.by_layer(LAYERS)[0].remarks[-2:]
    assert "measured from n = 45 on (it is 2.00 x as fast at 16, 0.25 x at 64)" in measured
    assert "from n = 128 on (2 d)" in counted
    assert "from n = 64 on (d)" in counted
    nowhere = {**LAYERS, "crossings": {**LAYERS["crossings"], "measured": None}}
    assert "measured at no length" in sheets.by_layer(nowhere)[0].remarks[-2]


def test_markdown_and_terminal_show_the_same_cells():
    rows = [{"row": "base", "a|b": "1.5", "x": "why"}, {"row": "big", "a|b": "2", "x": "because"}]
    sheet = sheets.Sheet("how much", rows, ["so"], ("row", "x"))
    lines = re.sub(" +", " ", sheet.markdown()).splitlines()
    assert lines[:4] == ["### how much", "", "| row | a\\|b | x |", "|:------|-------:|:--------|"]
    assert lines[4:] == ["| base | 1.5 | why |", "| big | 2 | because |", "", "- so"]
    console = Console(file=io.StringIO(), width=80)
    console.print(sheet.terminal())
    shown = [line.split() for line in console.file.getvalue().splitlines()]
    assert shown == [["how", "much"], ["row", "a|b", "x"], ["base", "1.5", "why"], ["big", "2", "because"]]
