"""The figures of a table of runs: learning curves, the paper against ours, lengths."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from aiayn.evaluation.metrics import bleu_of_counts
from aiayn.report.curves import Curve
from aiayn.report.figure_files import GREY, INK, PAPER_COLOUR, SUPTITLE
from aiayn.tables.paper_claims import Counts, rank_correlation, signed
from aiayn.tables.table3 import DEFINITION, KEYS, METRICS, Line, Table

Runs = Mapping[tuple[str, int], Mapping[str, Curve]]  # the curves of each (row, seed), by quantity

NAMES = {
    "train/loss": "training loss, label-smoothed (nats)",
    "dev/ppl": "dev perplexity",
    "train/learning_rate": "learning rate",
    "steps": "updates",
    "tokens": "target tokens",
    "minutes": "minutes of training",
}
_LENGTH_BUCKETS = 6
_LINE = {"arrowstyle": "-", "color": GREY, "linewidth": 0.4, "relpos": (0, 0.5)}  # from a point to its name
_BESIDE: Any = {"textcoords": "axes fraction", "va": "center", "fontsize": 7, "arrowprops": _LINE}
_SIZE = (5.2, 4.6)  # inches: a phone shows it whole, and a desktop two side by side
_BELOW: Any = {"fontsize": 7, "ncols": 4, "loc": "outside lower center"}  # a legend of rows
_PAPER: Any = {"marker": "D", "color": PAPER_COLOUR, "fillstyle": "none", "linestyle": "", "label": "paper"}
_OURS: Any = {"marker": "o", "color": INK, "markersize": 4, "linestyle": "", "label": "ours"}


def colours(table: Table) -> dict[str, Any]:
    """A colour for each row, base in ink."""
    shades = matplotlib.colormaps["tab20"].colors  # type: ignore[attr-defined]
    return {line.name: shades[number % len(shades)] for number, line in enumerate(table.lines, -1)} | {"base": INK}


def conditions(table: Table) -> str:
    """What every title ends with: a mini figure is never shown as if it were the paper's."""
    return f"scale {table.scale.name}, corpus {table.data}"


def caption(table: Table) -> str:
    """The conditions with the seeds, and whether they are the paper's."""
    seeds = f"{'seed' if len(table.seeds) == 1 else 'seeds'} {', '.join(map(str, table.seeds)) or 'none finished'}"
    return f"{conditions(table)}, {seeds}{'' if table.comparable else '; not the paper’s conditions'}"


def curve(table: Table, runs: Runs, quantity: str, axis: str) -> Figure:
    """One quantity of all runs along one axis."""
    figure = Figure(figsize=_SIZE)
    axes = figure.subplots()
    shades = colours(table)
    for (row, _seed), curves in runs.items():
        if quantity in curves and row in shades:
            x, y = curves[quantity].axes[axis], curves[quantity].values
            axes.plot(x, y, color=shades[row], linewidth=1.8 if row == "base" else 1.0, label=row)
    if quantity == "dev/ppl" and axes.has_data():
        low, high = axes.get_ylim()
        axes.set_yscale("log")
        # With few powers of ten a logarithmic axis would name one value or none
        ticks = MaxNLocator(6) if high < 10 * low else LogLocator(subs=(1, 2, 5))
        plain = FuncFormatter(lambda value, _: f"{value:g}")
        axes.yaxis.set(major_locator=ticks, minor_locator=NullLocator(), major_formatter=plain)
    axes.set(xlabel=NAMES[axis], ylabel=NAMES[quantity], title=f"{NAMES[quantity]}, {conditions(table)}")
    _legend(figure, axes, **_BELOW)
    return figure


def group(table: Table, letter: str) -> Figure:
    """The paper and ours in one group, base with it: figures where they may be compared, otherwise effects."""
    lines = [line for line in table.lines if line.group in ("base", letter)]
    if letter in ("(A)", "(B)"):  # which vary one size, base's among its values
        lines.sort(key=lambda line: [getattr(getattr(line.config, section), key) for _, section, key in DEFINITION])
    figure = Figure(figsize=_SIZE)
    both = figure.subplots(2, sharex=True)
    for axes, name in zip(both, METRICS, strict=True):
        relative, percent = not table.comparable, name == "PPL" and not table.comparable
        papers = {line.name: [line.papers(name)] for line in table.lines}
        ours = {line.name: line.values(KEYS[name]) for line in table.lines}
        for place, line in enumerate(lines):
            for at, sample, style in ((place - 0.12, papers, _PAPER), (place + 0.12, ours, _OURS)):
                own, base = sample[line.name], sample["base"] if relative else []
                if own and (base or not relative):
                    _measured(axes, at, own, base, percent, style)
        if relative:
            axes.axhline(0, color=GREY, linewidth=0.8)
        change = "change from base, " + ("%" if percent else "points") if relative else ""
        axes.set_xticks(range(len(lines)), [_label(table, line) for line in lines], rotation=30, ha="right", fontsize=8)
        axes.set(title=name, ylabel=change)
    _legend(both[0], both[0])
    figure.suptitle(f"Group {letter}: the paper and {conditions(table)}", **SUPTITLE)
    return figure


def effects(table: Table) -> Figure:
    """The paper's effect of each row (its figure minus base's) against ours, PPL and BLEU side by side."""
    figure = Figure(figsize=(9.6, 4.4))
    shades = colours(table)
    for axes, metric in zip(figure.subplots(1, 2), METRICS, strict=True):
        points, means = dict[str, tuple[float, float]](), table.means(metric)
        for line, mean in zip(table.lines, means, strict=True):
            if mean is not None and means[0] is not None:
                points[line.name] = line.papers(metric) - table.base.papers(metric), mean - means[0]
                axes.plot(*points[line.name], "o", color=shades[line.name], markersize=5)
        axes.axhline(0, color=GREY, linewidth=0.8)
        axes.axvline(0, color=GREY, linewidth=0.8)
        axes.locator_params(nbins=6)
        # Names stand beside the panel, one below the other in the order of the points; lines lead to them
        ordered = sorted(points, key=lambda name: points[name][1])
        for place, name in zip(np.linspace(0.01, 0.99, len(ordered)), ordered, strict=True):
            axes.annotate(name, points[name], (1.06, place), **_BESIDE)
        title: str = metric
        if found := rank_correlation(table, metric):
            title += ": Spearman ρ {} ({} to {})".format(*map(signed, found))
        axes.set(xlabel=f"{metric} minus base's, paper", ylabel=f"{metric} minus base's, ours", title=title)
    figure.suptitle(f"Effects: {caption(table)}", **SUPTITLE)
    return figure


def lengths(table: Table, counts: Counts, source_words: Sequence[int]) -> Figure:
    """BLEU of each row by the length of the source, in buckets of equally many sentences, the mean over its seeds."""
    figure = Figure(figsize=_SIZE)
    axes = figure.subplots()
    shades, words = colours(table), np.array(source_words)
    ends = np.unique(np.quantile(words, np.linspace(0, 1, _LENGTH_BUCKETS + 1), method="nearest"))
    ends = ends[min(1, len(ends) - 1) :]  # a bucket's longest source; one bucket where all are of one length
    trained = table.scale.max_train_words or table.scale.max_words or int(words.max())
    if words.min() <= trained < words.max():
        longest = words[words <= trained].max()
        ends = np.union1d(ends, [longest])  # no bucket holds lengths on both sides of the limit
        at = int(np.searchsorted(ends, longest)) + 0.5
        axes.axvline(at, color=GREY, linestyle="--", linewidth=0.9)
        place: Any = {"xycoords": ("data", "axes fraction"), "ha": "right", "va": "top"}
        axes.annotate(f"trained on up to {trained}", (at, 1), fontsize=7, **place)
    bucket_of = np.searchsorted(ends, words)
    for row in (line.name for line in table.lines):
        if runs := [of_run for (name, _), of_run in counts.items() if name == row]:
            sums = [[of_run[bucket_of == bucket].sum(0) for of_run in runs] for bucket in range(len(ends))]
            bleu = [statistics.mean(map(bleu_of_counts, of_bucket)) for of_bucket in sums]
            axes.plot(bleu, "o-", color=shades[row], markersize=3, linewidth=1.8 if row == "base" else 1.0, label=row)
    starts = [words.min(), *(ends[:-1] + 1)]
    named = [f"{low}" if low == high else f"{low} to {high}" for low, high in zip(starts, ends, strict=True)]
    axes.set_xticks(range(len(ends)), named)
    axes.set(xlabel="words of the source", ylabel="BLEU", title=f"Length against BLEU, {conditions(table)}")
    _legend(figure, axes, **_BELOW)
    return figure


def _legend(owner: Figure | Axes, axes: Axes, **options: Any) -> None:
    """What is drawn in the axes by its label, each label once."""
    handles, labels = axes.get_legend_handles_labels()
    if named := dict(zip(labels, handles, strict=True)):
        owner.legend(named.values(), named.keys(), **options)


def _label(table: Table, line: Line) -> str:
    """The first value that the row changes, in the paper's symbols."""
    for symbol, section, key in DEFINITION:
        value, base = (getattr(getattr(row.config, section), key) for row in (line, table.base))
        if value != base:
            return f"{symbol} {value}"
    return "base" if line is table.base else "learned"


def _measured(axes: Axes, at: float, row: list[float], base: list[float], percent: bool, style: dict[str, Any]) -> None:
    """The mean over seeds, less base's where that is given; each seed of several as a dash."""
    zero = statistics.mean(base) if base else 0.0
    seeds = [(100 / zero if percent else 1.0) * (value - zero) for value in row]
    axes.plot(at, statistics.mean(seeds), **style)
    if len(row) > 1:
        axes.plot([at + 0.1] * len(row), seeds, "_", color=GREY, markersize=7, label="each seed")
