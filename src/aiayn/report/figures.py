"""What is drawn of a table of runs: learning curves, the paper against ours, lengths, positions, the learning rate."""

import colorsys
import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.path import Path
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from matplotlib.transforms import Bbox
from scipy import stats

from aiayn.evaluation.metrics import bleu_of_counts
from aiayn.paper.schedule import learning_rate
from aiayn.report.curves import Curve
from aiayn.report.figure_files import INK, ROW
from aiayn.runs.records import look_up
from aiayn.tables.ladder import Effect, Ladder, Rung, papers_compute, papers_effect
from aiayn.tables.paper_claims import Counts, Metric, rank_correlation
from aiayn.tables.table3 import DEFINITION, Line, Table
from aiayn.tables.table3_columns import signed_text, value_text

Runs = Mapping[tuple[str, int], Mapping[str, Curve]]
"""The curves of each (row, seed), by quantity."""

NAMES = {
    "train/loss": "training loss, label-smoothed (nats a token)",
    "dev/ppl": "dev perplexity",
    "train/learning_rate": "learning rate",
    "steps": "updates",
    "tokens": "target tokens",
    "minutes": "minutes of training",
}
# (label of the axis, key of the result, field of the paper's figures, whether differences are of logarithms)
_METRICS = (("PPL", "dev.ppl", True), ("BLEU", "dev.bleu.paper", False))
_PAPER = "#b3541e"
_SUPTITLE: Any = {"fontsize": 10, "x": 0.01, "horizontalalignment": "left"}
_LENGTH_BUCKETS = 6
_NARROW = (5.2, 3.8)  # inches: a phone shows it whole, and a desktop two side by side
_TALL = (5.2, 4.6)
_PAGE = (5.2, 10.2)
_MARKERS = "osv^"  # of corpora


def colours(table: Table) -> dict[str, str]:
    """A colour for each row, readable on white and on black: a hue for each of the paper's groups, base in ink."""
    hues = {"(A)": (0.06, 0.13), "(B)": (0.74, 0.80), "(C)": (0.44, 0.61), "(D)": (0.92, 1.0), "(E)": (0.33, 0.33)}
    found = {}
    for group, members in itertools.groupby(table.lines, lambda line: line.group):
        rows = list(members)
        low, high = hues.get(group, (0.03, 0.03))
        for number, line in enumerate(rows):
            share = number / max(1, len(rows) - 1)
            lightness = 0.44 + 0.16 * (number % 2)
            red, green, blue = colorsys.hls_to_rgb((low + (high - low) * share) % 1, lightness, 0.65)
            found[line.name] = "#" + "".join(f"{round(255 * part):02x}" for part in (red, green, blue))
    return {**found, "base": INK}


def conditions(table: Table) -> str:
    """What every title ends with: a mini figure is never shown as if it were the paper's."""
    return f"scale {table.scale.name}, {table.data}"


def curve(table: Table, runs: Runs, quantity: str, axis: str) -> Figure:
    """One quantity of all runs along one axis; each line is named after its row, so that a page can switch it."""
    figure, axes = _figure(*_NARROW)
    shades = colours(table)
    for (row, seed), curves in runs.items():
        if quantity in curves and row in shades:
            x, y = curves[quantity].axes[axis], curves[quantity].values
            axes.plot(x, y, color=shades[row], gid=f"{ROW}{row}:{seed}", linewidth=1.8 if row == "base" else 1.0)
    if quantity == "dev/ppl":
        _plain_logarithms(axes)
    axes.set(xlabel=NAMES[axis], ylabel=NAMES[quantity], title=f"{NAMES[quantity]}, {conditions(table)}")
    return figure


def run(table: Table, runs: Runs, row: str) -> Figure:
    """Training loss and dev perplexity of one row beside base."""
    figure, (above, below) = _figure(*_TALL, 2, across=False)
    for axes, quantity in ((above, "train/loss"), (below, "dev/ppl")):
        for (name, _seed), curves in runs.items():
            if name in ("base", row) and quantity in curves:
                own = name == row
                style = {"color": _PAPER, "zorder": 3} if own else {"color": "#888888", "linewidth": 0.8}
                axes.plot(curves[quantity].axes["steps"], curves[quantity].values, **style)
        axes.set_title(NAMES[quantity].split(" (")[0])
    below.set_xlabel(NAMES["steps"])
    _plain_logarithms(below)
    figure.suptitle(f"{row}{'' if row == 'base' else ', base in grey'}: {conditions(table)}", **_SUPTITLE)
    return figure


def group(table: Table, letter: str) -> Figure:
    """The paper and ours in one group, base with it: figures where they may be compared, otherwise effects."""
    lines = [line for line in table.lines if line.group in ("base", letter)]
    if letter in ("(A)", "(B)"):  # which vary one size, base's among its values
        lines.sort(key=_sizes)
    figure, both = _figure(*_TALL, 2, across=False)
    for axes, (name, key, logarithm) in zip(both, _METRICS, strict=True):
        relative = not table.comparable
        theirs = {line.name: line.papers(name) for line in table.lines}
        ours = {line.name: [float(look_up(result, key)) for result in line.finished] for line in table.lines}
        for place, line in enumerate(lines):
            paper = _effect(theirs[line.name], theirs["base"], logarithm) if relative else theirs[line.name]
            axes.plot(place - 0.12, paper, "D", color=_PAPER, fillstyle="none", label="" if place else "paper")
            zero = statistics.mean(ours["base"]) if ours["base"] else None
            if relative and zero is None:
                continue
            points = [_effect(value, zero, logarithm) if relative and zero else value for value in ours[line.name]]
            _measured(axes, place + 0.12, points, "" if place else "ours")
        if relative:
            axes.axhline(0, color="#888888", linewidth=0.8)
        change = "change from base, " + ("%" if logarithm else "points") if relative else ""
        axes.set_xticks(range(len(lines)), [_label(table, line) for line in lines], rotation=30, ha="right", fontsize=8)
        axes.set(title=name, ylabel=change)
    both[0].legend(loc="best")
    figure.suptitle(f"Group {letter}: the paper and {conditions(table)}", **_SUPTITLE)
    return figure


def ranks(table: Table, metric: Metric) -> Figure:
    """Our figure of each row against the paper's, and their rank correlation."""
    figure, axes = _figure(*_NARROW)
    shades = colours(table)
    name, key, _ = next(found for found in _METRICS if found[0] == metric)
    points = {
        line.name: (line.papers(name), found.mean) for line in table.lines if (found := line.measured(key)) is not None
    }
    for row, point in points.items():
        axes.plot(*point, "o", color=shades[row], markersize=5, gid=f"{ROW}{row}:")
    correlation = rank_correlation(table, metric)
    told = ""
    if correlation is not None:
        low, high = map(signed_text, correlation.interval)
        told = f": Spearman ρ {signed_text(correlation.rho)} ({low} to {high}), {correlation.rows} rows"
    axes.set(xlabel=f"{name}, paper", ylabel=f"{name}, {conditions(table)}", title=f"{name}{told}")
    axes.margins(0.12)
    _name(axes, points)
    return figure


def ladder(climbed: Ladder, rows: Sequence[Line], metric: Metric) -> Figure:
    """One panel a row: its effect at every scale against the compute of its training, and the paper's at its own."""
    base, *others = rows
    figure = Figure(figsize=_PAGE)
    panels = list(figure.subplots(math.ceil((len(others) + 1) / 2), 2, sharex=True).flat)
    drawn = list(zip(others, panels, strict=False))
    corpora = list(dict.fromkeys(rung.table.data for rung in climbed.rungs))
    for line, axes in drawn:
        papers = papers_effect(line, base, metric)
        axes.axhline(0, color="#888888", linewidth=0.8)
        axes.axhline(papers.value, color=_PAPER, linewidth=0.8, linestyle=(0, (4, 3)))
        axes.plot(papers.compute, papers.value, "D", color=_PAPER, fillstyle="none", markersize=5)
        found = [(rung.table.data, effect) for rung in climbed.rungs if (effect := _at(rung, line.name, metric))]
        axes.plot([e.compute for _, e in found], [e.value for _, e in found], color="#888888", linewidth=0.8, zorder=1)
        for data, effect in found:
            marker = _MARKERS[corpora.index(data) % len(_MARKERS)]
            style: dict[str, Any] = {"fmt": marker, "color": INK, "markersize": 3.5, "capsize": 2, "elinewidth": 0.9}
            if effect.interval is None:
                axes.errorbar(effect.compute, effect.value, fillstyle="none", **style)
            else:
                low, high = effect.interval
                axes.errorbar(effect.compute, effect.value, [[effect.value - low], [high - effect.value]], **style)
        axes.set_title(line.name, fontsize=8, pad=3)
        axes.yaxis.set_major_locator(MaxNLocator(4))
    _same_limits(drawn)
    key, *empty = panels[len(others) :]
    for axes in empty:
        axes.set_axis_off()
    _key(key, climbed, base, corpora)
    for axes in panels:
        axes.tick_params(labelsize=7)
    _logarithmic_compute(panels[0])  # the others share its axis
    quantity = "ln PPL minus base's (lower is better)" if metric == "PPL" else "BLEU minus base's (higher is better)"
    figure.suptitle(f"{quantity} against the compute of training", **_SUPTITLE)
    figure.supxlabel("FLOPs of training", fontsize=8)
    return figure


def _at(rung: Rung, row: str, metric: Metric) -> Effect | None:
    line = next(line for line in rung.table.lines if line.name == row)
    effect = rung.effect(line, metric)
    return effect if effect and effect.compute else None


def _same_limits(panels: Iterable[tuple[Line, Axes]]) -> None:
    """Gives the rows of a group one scale, so that their effects can be compared by eye."""
    for _, members in itertools.groupby(panels, lambda panel: panel[0].group):
        group = [axes for _, axes in members]
        low, high = (choose(axes.get_ylim()[end] for axes in group) for end, choose in ((0, min), (1, max)))
        for axes in group:
            axes.set_ylim(low, high)


def _key(axes: Axes, climbed: Ladder, base: Line, corpora: Sequence[str]) -> None:
    """In a panel of its own, which compute is which scale: base's, one below the other."""
    entries = [
        (rung.name, rung.compute(rung.table.base) or rung.planned, _MARKERS[corpora.index(rung.table.data)], INK)
        for rung in climbed.rungs
    ]
    entries.append(("the paper", papers_compute(base), "D", _PAPER))
    middle = math.sqrt(entries[0][1] * entries[-1][1])
    for height, (name, compute, marker, colour) in enumerate(entries):
        axes.plot(compute, -height, marker, color=colour, fillstyle="none" if marker == "D" else "full", markersize=4)
        left = compute < middle
        place: Any = {"xytext": (6 if left else -6, 0), "textcoords": "offset points", "va": "center", "fontsize": 7}
        text = axes.annotate(name, (compute, -height), ha="left" if left else "right", **place)
        text.set_in_layout(False)  # the panels keep their width, however long a name is
    axes.set(ylim=(0.7 - len(entries), 0.6))
    axes.set_yticks([])
    axes.grid(visible=False)
    axes.set_title("base trained at", fontsize=8, pad=3)


def _logarithmic_compute(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(numticks=5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0e}".replace("e+", "e")))
    axes.xaxis.set_minor_locator(NullLocator())


def lengths(table: Table, counts: Counts, source_words: Sequence[int]) -> Figure:
    """BLEU of each row by the length of the source, in buckets of equally many sentences, the mean over its seeds."""
    figure, axes = _figure(*_NARROW)
    shades = colours(table)
    words = np.array(source_words)
    bounds = np.unique(np.quantile(words, np.linspace(0, 1, _LENGTH_BUCKETS + 1), method="nearest"))[1:]
    buckets = np.searchsorted(bounds, words)
    for line in table.lines:
        own = [of_run for (row, _), of_run in counts.items() if row == line.name]
        if own:
            bleu = [
                statistics.mean(bleu_of_counts(of_run[buckets == bucket].sum(0)) for of_run in own)
                for bucket in range(len(bounds))
            ]
            axes.plot(bleu, "o-", color=shades[line.name], markersize=3, gid=f"{ROW}{line.name}:",
                      linewidth=1.8 if line.name == "base" else 1.0)  # fmt: skip
    starts = [words.min(), *(bounds[:-1] + 1)]
    names = [f"{low}" if low == high else f"{low} to {high}" for low, high in zip(starts, bounds, strict=True)]
    axes.set_xticks(range(len(bounds)), names)
    axes.set(xlabel="words of the source", ylabel="BLEU", title=f"Length against BLEU, {conditions(table)}")
    return figure


def positions(tables: Mapping[str, npt.NDArray[Any]]) -> Figure:
    """Tables of positional vectors (positions, d_model) as pictures."""
    figure, drawn = _figure(6.8, 2.0 + 1.3 * len(tables), len(tables), across=False)
    for axes, (name, vectors) in zip(np.atleast_1d(drawn), tables.items(), strict=True):
        bound = float(np.quantile(np.abs(vectors), 0.99))
        axes.imshow(vectors.T, aspect="auto", cmap="RdBu", vmin=-bound, vmax=bound, interpolation="nearest")
        axes.grid(visible=False)
        axes.set(title=name, ylabel="dimension")
    axes.set_xlabel("position")
    return figure


def schedule(table: Table) -> Figure:
    """The learning rate of base and big, Eq. 3 times the scale's factor."""
    figure, axes = _figure(*_NARROW)
    for line, shade in ((table.base, INK), (table.lines[-1], _PAPER)):
        model, training = line.trained.model, line.trained.training
        steps = np.unique(np.linspace(1, training.max_steps, 400).astype(int))
        rates = [
            training.learning_rate_factor * learning_rate(int(step), model.d_model, training.warmup_steps)
            for step in steps
        ]
        axes.plot(steps, rates, color=shade, label=f"{line.name}: warm-up {training.warmup_steps:,} updates")
    axes.legend()
    axes.set(xlabel=NAMES["steps"], ylabel=NAMES["train/learning_rate"], title=f"Learning rate, {conditions(table)}")
    return figure


def _figure(width: float, height: float, count: int = 1, across: bool = True) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height))
    return figure, figure.subplots(1, count) if across else figure.subplots(count, 1, sharex=True)


def _name(axes: Axes, points: Mapping[str, tuple[float, float]]) -> None:
    """Writes each point's name into the nearest place that is free; a line leads to one that is not beside it."""
    axes.figure.draw_without_rendering()  # type: ignore[union-attr]  # the layout decides where there is room
    to_pixels, edge = axes.transData, axes.bbox
    at = {name: to_pixels.transform(point) for name, point in points.items()}
    dot = edge.height / 60
    dots = [Bbox([place - dot, place + dot]) for place in at.values()]
    names: list[Bbox] = []
    # Whoever stands in the crowd chooses first: those at its edge have the room outside
    crowd = {name: sum(np.hypot(*(place - other)) < 12 * dot for other in at.values()) for name, place in at.items()}
    for name in sorted(points, key=lambda name: -crowd[name]):
        text = axes.text(*points[name], name, fontsize=7, ha="center", va="center", gid=f"{ROW}{name}:")
        size = np.array(text.get_window_extent().size)
        for far, angle in itertools.product(np.arange(1, 20) * dot, np.linspace(0, 2 * np.pi, 24, endpoint=False)):
            way = np.array([np.cos(angle), np.sin(angle)])
            centre = at[name] + way * (size / 2 + far)
            box, leader = Bbox([centre - size / 2, centre + size / 2]), Path([at[name], at[name] + way * far])
            beside = edge.count_contains(box.corners()) == 4 and not box.count_overlaps([*dots, *names])
            if beside and not any(leader.intersects_bbox(other) for other in names):
                break
        text.set_position(tuple(to_pixels.inverted().transform(centre)))
        names.append(box)
        if far > dot:
            near = to_pixels.inverted().transform([at[name], np.clip(at[name], box.min, box.max)])
            axes.plot(*near.T, color="#888888", linewidth=0.5, zorder=1, gid=f"{ROW}{name}:")


def _plain_logarithms(axes: Axes) -> None:
    if not axes.has_data():
        return
    axes.set_yscale("log")
    for pick in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        pick(FuncFormatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "125" else ""))


def _sizes(line: Line) -> tuple[float, ...]:
    return tuple(float(getattr(getattr(line.config, section), key)) for _, section, key in DEFINITION)


def _label(table: Table, line: Line) -> str:
    """What the row changes, in the paper's symbols; several values where it changes several."""
    if line.name == "base":
        return "base"
    texts = [
        f"{symbol} {value_text(line.config, section, key)}"
        for symbol, section, key in DEFINITION
        if value_text(line.config, section, key) != value_text(table.base.config, section, key)
    ]
    return texts[0] if texts else "learned"


def _effect(value: float, base: float, logarithm: bool) -> float:
    return 100 * (value / base - 1) if logarithm else value - base


def _measured(axes: Axes, place: float, points: Sequence[float], label: str) -> None:
    """The mean with its 95 % confidence interval over seeds, each seed faintly beside it; one seed has no interval."""
    if not points:
        return
    mean = statistics.mean(points)
    error = 0.0
    if len(points) > 1:
        error = float(stats.t.isf(0.025, len(points) - 1)) * statistics.stdev(points) / math.sqrt(len(points))
        axes.plot([place + 0.1] * len(points), points, "_", color="#888888", markersize=4)
    axes.errorbar(place, mean, error or None, fmt="o", color=INK, markersize=4, capsize=2, label=label)
