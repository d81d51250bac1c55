"""`aiayn report`: one page with Table 3, every run behind it, its curves and the paper's claims; figures as files."""

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Any

from markupsafe import Markup
from matplotlib.figure import Figure

from aiayn.config import compose, folders
from aiayn.config.schema import Config, ConfigError, leaves
from aiayn.core import progress, storage
from aiayn.cost import flops
from aiayn.paper.layers import sinusoids
from aiayn.report import curves, figure_files, figures, html_page, ladder_figure
from aiayn.report.contents import Material, collect
from aiayn.runs import records
from aiayn.runs.records import Run, look_up, printable
from aiayn.tables import beyond, formats, paper_claims
from aiayn.tables.ladder import MIN_UPDATES, Effect, Ladder, Rung, papers_effect
from aiayn.tables.paper_claims import MIN_ROWS
from aiayn.tables.table3 import KEYS, METRICS, Line, Metric, Table
from aiayn.tables.table3_columns import BETTER, BLEU_TOLERANCE, Cell, Column, columns_of, rows_of, signed_text

SAMPLES = 6
_GROUPS = ("(A)", "(B)", "(C)", "(D)", "(E)")
_FACTS = {
    "steps": "updates",
    "params": "parameters",
    "dev.ppl": "dev perplexity",
    "dev.bits_per_character": "bits per character",
    "dev.bleu": "dev BLEU",
    "dev.bleu_ci95": "sacreBLEU, 95 % over sentences",
    "dev.signatures": "BLEU signatures",
    "train_seconds": "seconds of training",
    "device_seconds": "seconds of training, times devices (of a CPU: cores)",
    "target_tokens": "target tokens seen",
    "target_tokens_per_second": "target tokens a second",
    "hardware": "hardware",
    "versions": "versions",
    "sha256": "SHA-256",
    "finished_at": "finished",
}


def draw_figures(material: Material) -> dict[str, tuple[Figure, str]]:
    """Every figure by its name, with what it shows in words."""
    table, runs = material.table, material.runs
    words = [len(line.split()) for line in material.dev.sources]
    drawn = {
        f"curve-{quantity.replace('/', '-')}-{axis}": (
            figures.curve(table, runs, quantity, axis),
            f"{figures.NAMES[quantity]} of every run against {figures.NAMES[axis]}",
        )
        for axis, quantity in itertools.product(curves.AXES, curves.QUANTITIES)
    }
    for letter in _GROUPS:
        drawn[f"group-{letter[1].lower()}"] = (
            figures.group(table, letter),
            f"group {letter}, the paper's figures and ours",
        )
    for metric in METRICS:
        ranks = figures.ranks(table, metric)
        drawn[f"ranks-{metric.lower()}"] = ranks, f"our {metric} of each row against the paper's"
        if material.ladder.rungs:
            climbed = ladder_figure.ladder(material.ladder, table.lines, metric)
            quantity = f"difference from base in {'ln PPL' if metric == 'PPL' else metric}"
            of_ladder = f"{quantity} of each row at every scale against the compute of its training"
            drawn[f"ladder-{metric.lower()}"] = climbed, of_ladder
    if material.dev.counts:
        drawn["lengths"] = figures.lengths(table, material.dev.counts, words), "BLEU by the length of the source"
    if others := material.beyond:
        rows = "base and the rows beyond Table 3"
        learning = figures.curve(others, runs, "dev/ppl", "steps")
        drawn["beyond-curve"] = figures.with_legend(learning), f"dev perplexity of {rows}"
        if material.dev.counts:
            by_length = figures.lengths(others, material.dev.counts, words)
            drawn["beyond-lengths"] = figures.with_legend(by_length), f"BLEU of {rows} by the length of the source"
    tables = {"Sinusoids (3.5)": sinusoids(64, table.base.trained.model.d_model).numpy()} | dict(material.learned)
    drawn["positions"] = figures.positions(tables), "positional vectors as a picture, one column a position"
    if material.layers:
        drawn["layers"] = figures.layers(material.layers), "time of a token in each layer type against the length"
    drawn["schedule"] = figures.schedule(table), "learning rate against updates"
    for line in table.lines:
        if any(row == line.name and found for (row, _), found in runs.items()):
            drawn[f"run-{line.name}"] = figures.run(table, runs, line.name), f"learning curves of {line.name}"
    return drawn


def page(material: Material, drawn: Mapping[str, tuple[Figure, str]]) -> str:
    """The page as HTML."""
    table = material.table
    inline = {
        name: figure_files.inline(figure, name, f"{words}, {figures.conditions(table)}")
        for name, (figure, words) in progress.each(drawn.items(), "drawing the page")
    }
    by_kind: dict[str, list[Markup]] = defaultdict(list)
    for name, figure in inline.items():
        by_kind[name.partition("-")[0]].append(figure)
    columns = [column for column in columns_of(table) if column.group != "letter"]
    spans = [(group, len(list(members))) for group, members in itertools.groupby(columns, lambda column: column.group)]
    # The second table as `aiayn table` prints it; none while none of its rows is begun
    others = material.beyond and beyond.layout(material.beyond, material.beyond_findings).without({"letter"})
    shades = {**figures.colours(table), "base": figure_files.INK_OF_PAGE}
    return html_page.page(
        "report.html",
        title=formats.title(table),
        conditions=figures.conditions(table),
        comparable=table.comparable,
        caption=formats.caption(table),
        colouring=_colouring(table),
        notes=table.notes,
        spans=spans,
        heads=columns,
        rows=[
            {
                "name": line.name,
                "opens_group": opens,
                "cells": cells,
                "figure": inline.get(f"run-{line.name}"),
                "difference": _difference(table, line),
                "runs": [_run(material, line, found) for found in (*line.runs, *line.stale)],
            }
            for line, cells, opens in zip(table.lines, _cells(table, columns), table.opens, strict=True)
        ],
        findings=[formats.finding_texts(found) for found in material.findings],
        beyond=others,
        beyond_findings=[formats.finding_texts(found) for found in material.beyond_findings],
        ladder=_ladder(material.ladder, table),
        margin_bleu=BLEU_TOLERANCE,
        margin_ppl=f"{100 * math.expm1(paper_claims.CLAIMS[-2].margin):.1f}",
        bootstrap=material.dev.missing
        or f"Over sentences: {paper_claims.RESAMPLES} resamples of {len(material.dev.references)}.",
        correlations=formats.rank_sentence(table),
        figures=by_kind,
        curves=zip(itertools.product(curves.AXES, curves.QUANTITIES), by_kind["curve"], strict=True),
        axes=curves.AXES,
        groups=_GROUPS,
        switches=[{"name": line.name, "group": line.group, "colour": shades[line.name]} for line in table.lines],
        positions_note=""
        if material.learned
        else "No checkpoint of e_learned_positions is here to draw its vectors from.",
    )


def main(run: Config) -> None:
    """Writes the page and the figures of `<output>/<data>-<scale>` into `report/` there, and says where."""
    folder = folders.sweep_folder(run) / "report"
    if not records.read_runs(folder.parent):
        raise ConfigError(f"{folder.parent} has no runs{folders.in_other_precisions(run)}; train one first")
    material = collect(run)
    with figure_files.style():
        drawn = draw_figures(material)
        text = page(material, drawn)
        for name, (figure, _) in progress.each(drawn.items(), "drawing the files"):
            # The page has a box for each row instead
            if name.startswith("curve-") or name == "lengths":
                figures.with_legend(figure)
            figure_files.write(folder / "figures", name, figure)
    storage.write_text(folder / "report.html", text)
    print(formats.title(material.table), folder / "report.html", sep="\n")
    print(f"{folder / 'figures'}: {len(drawn)} figures, each as SVG and PNG")


def _spread(table: Table, line: Line, key: str) -> float | None:
    """The standard deviation over seeds of the row's figure, or of its difference from base where that is compared."""
    of_rows = [line] if table.comparable else [line, table.base]
    deviations = [found.deviation for row in of_rows if (found := row.measured(key)) is not None]
    known = [deviation for deviation in deviations if deviation is not None]
    return math.hypot(*known) if len(known) == len(of_rows) else None


def _shade(table: Table, column: Column, line: Line) -> str:
    """How many spreads better or worse, as a class of the page; empty below one, and where no spread is known."""
    metric = next((metric for metric in METRICS if metric == column.group), None)
    if metric is None or column.name != ("diff" if table.comparable else "Δ ours"):
        return ""
    key = KEYS[metric]
    own, base, spread = line.measured(key), table.base.measured(key), _spread(table, line, key)
    if own is None or base is None or not spread or (line is table.base and not table.comparable):
        return ""
    gain = (own.mean - (line.papers(metric) if table.comparable else base.mean)) * BETTER[metric] / spread
    return "" if abs(gain) < 1 else f"{'up' if gain > 0 else 'down'}{1 if abs(gain) < 2 else 2 if abs(gain) < 4 else 3}"


def _colouring(table: Table) -> str:
    against = "the paper" if table.comparable else "base"
    if not any(_spread(table, line, "dev.ppl") for line in table.lines):
        return f"No cell is coloured: with one seed a row it is unknown how large a difference from {against} is noise."
    return (
        f"Colours: the difference from {against} in units of its spread over seeds, from 1, 2 and 4 spreads;"
        " green is better, orange worse. Rows with one seed have no spread and no colour."
    )


def _cells(table: Table, columns: list[Column]) -> list[list[dict[str, str]]]:
    rows = []
    for number, (line, cells) in enumerate(zip(table.lines, rows_of(columns), strict=True)):
        row = []
        for column, cell in zip(columns, cells, strict=True):
            # An empty place says: as base
            meant = column.cells[0] if column.group == "definition" and not cell.text else cell
            value = str(number) if column.group == "row" else _sortable(meant)
            style = _shade(table, column, line) or column.group
            row.append({"text": cell.text, "value": value, "style": style})
        rows.append(row)
    return rows


def _sortable(cell: Cell) -> str:
    """The number in a cell, or its text; empty for a dash."""
    text = cell.text.partition("±")[0].replace("−", "-").replace("–", "").removeprefix("+")
    return f"{text[:-1]}000" if text.endswith("K") else text


def _difference(table: Table, line: Line) -> str:
    """What the row changes, in the paper's values and in those it was trained with here."""
    base, own, small_base, small = (
        {key: value for key, value, _ in leaves(row) if key.startswith(("model.", "training."))}
        for row in (table.base.config, line.config, table.base.trained, line.trained)
    )
    changes = []
    for key, value in own.items():
        if value != base[key]:
            scaled = (small_base[key], small[key]) != (base[key], value)
            here = f" (here {small_base[key]} to {small[key]})" if scaled else ""
            changes.append(f"{key} from {base[key]} to {value}{here}")
    return f"Differs from base in: {'; '.join(changes)}." if changes else "The base row."


def _run(material: Material, line: Line, run: Run) -> dict[str, Any]:
    if run.result is None:
        cause = run.cause or f"{run.steps_done:,} of {line.trained.training.max_steps:,} updates"
        facts = [("cause", cause), ("log", run.log)]
    else:
        known = {name: look_up(run.result, key) for key, name in _FACTS.items()}
        facts = [(name, _text(value)) for name, value in known.items() if value is not None]
    translations = material.dev.translations.get((line.name, run.seed), [])
    places = range(0, len(translations), max(1, len(translations) // SAMPLES))[:SAMPLES]
    samples = [
        [printable(side[place]) for side in (material.dev.sources, material.dev.references, translations)]
        for place in places
    ]
    status = "stale" if run in line.stale else run.status
    return {"seed": run.seed, "status": status, "facts": facts, "samples": samples}


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{printable(str(key))} {_text(part)}" for key, part in value.items())
    if isinstance(value, list):
        return " to ".join(_text(part) for part in value)
    if isinstance(value, float):
        return f"{value:,.3f}"
    return f"{value:,}" if isinstance(value, int) else printable(str(value))


def _ladder(climbed: Ladder, table: Table) -> dict[str, Any]:
    """What the page has of the ladder beside its figures: what each rung is, the claims there, and every effect."""
    rungs = climbed.rungs
    facts = [
        ("rows finished", [f"{rung.table.finished} of {len(rung.table.lines)}" for rung in rungs]),
        ("seeds", [", ".join(map(str, rung.table.seeds)) or "–" for rung in rungs]),
        ("FLOPs of base's training", [flops.power(rung.compute(rung.table.base) or rung.planned) for rung in rungs]),
        *((f"Spearman's ρ, {metric}", [_rank(rung, metric) for rung in rungs]) for metric in METRICS),
    ]
    effects = [
        {
            "row": line.name,
            "metric": "ln PPL" if metric == "PPL" else "BLEU",
            "paper": _effect_text(papers_effect(line, table.base, metric), metric),
            "ours": [_effect_text(rung.effect(rung.table.lines[number], metric), metric) for rung in rungs],
        }
        for number, line in enumerate(table.lines)
        for metric in METRICS
        if line is not table.base
    ]
    here = {rung.table.scale.name for rung in (*rungs, *climbed.left_out)}
    return {
        "names": [rung.name for rung in rungs],
        "facts": facts,
        "claims": list(zip(*(map(formats.finding_texts, rung.findings) for rung in rungs), strict=True)),
        "effects": effects,
        "left_out": [f"{rung.name} ({rung.table.base.trained.training.max_steps})" for rung in climbed.left_out],
        "min_updates": MIN_UPDATES,
        # A scale whose training sentences are shorter than its dev sentences is for another question than Table 3
        "not_begun": [name for name, own in compose.scales().items() if name not in here and not own.max_train_words],
    }


def _rank(rung: Rung, metric: Metric) -> str:
    found = paper_claims.rank_correlation(rung.table, metric)
    if found is None:
        return "not enough rows" if rung.table.finished < MIN_ROWS else "all rows are equal"
    low, high = map(signed_text, found.interval)
    return f"{signed_text(found.rho)} ({low} to {high}{'' if found.repeated else ', over rows alone'})"


def _effect_text(effect: Effect | None, metric: Metric) -> str:
    if effect is None:
        return "–"
    text = partial(signed_text, digits=3 if metric == "PPL" else 2)
    between = "" if effect.interval is None else f" ({text(effect.interval[0])} to {text(effect.interval[1])})"
    return f"{text(effect.value)}{between}" + (f" at {flops.power(effect.compute)}" if effect.compute else "")
