"""The second table: rows beyond Table 3 and those compared with them, figures of others, our effects and verdicts."""

import csv
import dataclasses
import io
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from aiayn.config import folders, schema
from aiayn.core import storage
from aiayn.runs.records import Run
from aiayn.tables import beyond, formats, paper_claims, table3
from aiayn.tables import table as command_table
from aiayn.tables.table3 import Table
from tests.tables.test_formats import FORMATS, command, finished, markdown_rows
from tests.tables.test_paper_claims import counts_like

LIKE = command("mini")
FIGURES = {  # PPL and BLEU as the literature would have them
    "base": (20.0, 25.0),
    "a_h1": (20.2, 24.8),
    "f_no_positions": (60.0, 9.0),
    "f_relative_positions": (20.1, 25.1),  # a little more perplexity than base, within the margin
    "f_no_residual": (90.0, 3.0),
    "f_no_residual_positions": (70.0, 7.0),
    "f_unscaled": (25.0, 20.0),
    "f_additive": (21.0, 24.0),
    "s_rnn": (50.0, 10.0),
    "s_rnn_attention": (24.0, 22.0),
}


def runs(figures: dict[str, tuple[float, float]] = FIGURES, seeds: Sequence[int] = (1, 2, 3)) -> list[Run]:
    """Results of these rows, with a little noise over the seeds."""
    random = np.random.default_rng(5)
    return [
        finished(row, LIKE, seed, ppl * math.exp(random.normal(0, 0.002)), bleu + random.normal(0, 0.05))
        for row, (ppl, bleu) in figures.items()
        for seed in seeds
    ]


def made(*arguments: Any) -> Table:
    found = beyond.table(LIKE, runs(*arguments))
    assert found is not None
    return found


def counts(figures: dict[str, tuple[float, float]] = FIGURES) -> dict[tuple[str, int], Any]:
    return counts_like({row: bleu for row, (_, bleu) in figures.items()})


def verdicts(table: Table, counts: dict[tuple[str, int], Any]) -> dict[str, set[str]]:
    """The verdicts on PPL and on BLEU."""
    found = paper_claims.check(table, counts, beyond.CLAIMS)
    return {metric: {f.verdict for f in found if f.claim.metric == metric} for metric in table3.METRICS}


def test_rows_stand_beside_base_and_published_figures() -> None:
    table = made()
    assert [line.group for line in table.lines] == ["base", "(A)", *["(F)"] * 6, *["(S)"] * 2]
    assert [line.name for line in table3.table(LIKE, runs()).lines] == [*schema.ROWS]  # and Table 3 none of them
    rows = {row["row"]: row for row in markdown_rows(formats.printed([beyond.layout(table, [])], "md"))}
    assert [*rows] == ["base", "a_h1", *schema.BEYOND]
    papers = "Vaswani et al. 2017, newstest2013 en-de, Table 3"
    assert [rows[name]["published where"] for name in ("base", "a_h1")] == [papers, papers]
    published = {"base": "25.8", "a_h1": "24.9", "f_unscaled": "18.2", "s_rnn": "10.0", "f_no_residual": ""}
    assert {name: rows[name]["BLEU published"] for name in published} == published
    for line in table.lines[1:]:
        effect = line.measured("dev.bleu.paper").mean - table.base.measured("dev.bleu.paper").mean
        assert rows[line.name]["BLEU Δ"].replace("−", "-").lstrip("+") == f"{effect:.1f}"
    parts = [[rows[name][key] for key in ("positions", "scores", "residual", "h")] for name in ("base", "f_additive")]
    assert parts == [["sinusoids", "scaled", "connections", "8"], ["", "additive", "", "1"]]


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_has_every_row_source_and_claim(format: str) -> None:
    layout = beyond.layout(made(), paper_claims.check(made(), counts(), beyond.CLAIMS))
    text = formats.printed([layout], format, Console(width=400, file=io.StringIO())).replace("\\_", "_")
    words = ("a_h1", *schema.BEYOND, *(claim.sentence for claim in beyond.CLAIMS), "Shaw et al. 2018", "reproduced")
    assert all(word in text for word in words)


def test_figures_like_the_literatures_reproduce_every_claim() -> None:
    assert len(beyond.CLAIMS) == 16
    assert verdicts(made(), counts()) == {"PPL": {"reproduced"}, "BLEU": {"reproduced"}}
    # Control: the rows in the opposite order
    turned = {row: (1600 / ppl, 28 - bleu) for row, (ppl, bleu) in FIGURES.items()}
    turned["f_relative_positions"] = (120.0, 0.5)  # which is as good as base, and so is neither's opposite
    assert verdicts(made(turned), counts(turned)) == {"PPL": {"contradicted"}, "BLEU": {"contradicted"}}
    assert verdicts(made(), {})["BLEU"] == {"undecided"}  # without translations
    assert verdicts(made(FIGURES, (1,)), counts()) == {"PPL": {"undecided"}, "BLEU": {"undecided"}}


def test_a_published_effect_needs_both_figures_in_one_paper() -> None:
    findings = paper_claims.check(made(), {}, beyond.CLAIMS)
    paper = {(found.claim.rows, found.claim.metric): found.paper for found in findings}
    assert paper[("f_unscaled", "f_additive"), "BLEU"] == pytest.approx(22.1 - 18.22)
    assert paper[("s_rnn", "s_rnn_attention"), "BLEU"] == pytest.approx(22.03 - 9.98)
    assert paper[("f_no_residual", "f_no_residual_positions"), "BLEU"] is None
    for rows in (("s_rnn_attention", "base"), ("f_unscaled", "a_h1")):  # of papers whose conditions differ
        assert paper[rows, "BLEU"] is None


@pytest.mark.parametrize("format", ["md", "csv"])
def test_it_is_printed_only_when_a_row_of_it_is_begun(format: str, tmp_path, capsys) -> None:
    run = dataclasses.replace(LIKE, output=str(tmp_path), prepared=str(tmp_path / "none"), format=format)
    command_table.main(run)
    alone = capsys.readouterr().out
    storage.append_lines(folders.sweep_folder(run) / "f_additive" / "seed1" / "metrics.jsonl", ['{"step": 3}'])
    command_table.main(run)
    both = capsys.readouterr().out
    assert ("Shaw" in alone, "Shaw" in both) == (False, True)
    if format == "md":
        assert both.startswith(alone)
    else:  # one header: every row once, with all that was known of it before
        before, whole = (list(csv.DictReader(io.StringIO(text))) for text in (alone, both))
        assert [row["row"] for row in whole] == [*schema.ROWS, *schema.BEYOND]
        assert all(old.items() <= row.items() for old, row in zip(before, whole, strict=False))


def test_counts_are_of_translations_of_this_corpus(tmp_path, monkeypatch) -> None:
    run = dataclasses.replace(LIKE, output=str(tmp_path))
    corpus = SimpleNamespace(sha256="d" * 64, texts=lambda split, side: ["ein Haus am See", "zwei Türen"])
    monkeypatch.setattr(beyond, "Dataset", lambda folder: corpus)
    table = made()
    del next(line for line in table.lines if line.name == "f_no_positions").runs[0].result["dev"]["bleu"]["paper"]
    for row, lines in (("base", 2), ("f_additive", 2), ("f_unscaled", 1), ("f_no_positions", 2)):
        folder = folders.sweep_folder(run) / row / "seed1"
        storage.write_text(folder / "translations.txt", "ein Haus am See\n" * lines)
    assert set(beyond.on_dev(run, table.lines)[1]) == {("base", 1), ("f_additive", 1)}
    corpus.sha256 = "e" * 64  # control
    assert beyond.on_dev(run, table.lines)[1] == {}
