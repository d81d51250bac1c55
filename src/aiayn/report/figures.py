"""The figures of a table of runs: learning curves, the paper against ours, lengths, positions, the learning rate."""

import colorsys
import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.path import Path
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator
from matplotlib.transforms import Bbox

from aiayn.evaluation.metrics import bleu_of_counts
from aiayn.paper.schedule import learning_rate
from aiayn.report.curves import Curve
from aiayn.report.figure_files import INK, PAPER_COLOUR, ROW, SUPTITLE
from aiayn.tables.paper_claims import Counts, rank_correlation, rise
from aiayn.tables.table3 import DEFINITION, KEYS, METRICS, Line, Metric, Table
from aiayn.tables.table3_columns import signed_text, value_text

Runs = Mapping[tuple[str, int], Mapping[str, Curve]]
"""The curves of each (row, seed), by quantity."""

NAMES = {
    "train/loss": "training loss, label-smoothed (nats)",
    "dev/ppl": "dev perplexity",
    "train/learning_rate": "learning rate",
    "steps": "updates",
    "tokens": "target tokens",
    "minutes": "minutes of training",
}
_LENGTH_BUCKETS = 6
_NARROW = (5.2, 3.8)  # inches: a phone shows it whole, and a desktop two side by side
_TALL = (5.2, 4.6)
_PAPER = {"fmt": "D", "color": PAPER_COLOUR, "fillstyle": "none", "label": "paper"}
_OURS = {"fmt": "o", "color": INK, "markersize": 4, "capsize": 2, "label": "ours; bars: 95 %"}


def colours(table: Table) -> dict[str, str]:
    """A colour for each row, readable on white and on black: a hue for each of the paper's groups, base in ink."""
    hues = {"(A)": (0.06, 0.13), "(B)": (0.74, 0.80), "(C)": (0.44, 0.61), "(D)": (0.92, 1.0), "(E)": (0.33, 0.33)}
    hues |= {"(F)": (0.03, 0.50), "(S)": (0.62, 0.76)}  # beyond Table 3, in figures of their own
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
    return f"scale {table.scale.name}, corpus {table.data}"


def curve(table: Table, runs: Runs, quantity: str, axis: str) -> Figure:
    """One quantity of all runs along one axis; each line is named after its row, so that a page can switch it."""
    figure, axes = _figure(_NARROW)
    shades = colours(table)
    for (row, seed), curves in runs.items():
        if quantity in curves and row in shades:
            x, y = curves[quantity].axes[axis], curves[quantity].values
            axes.plot(
                x, y, color=shades[row], gid=f"{ROW}{row}:{seed}", linewidth=1.8 if row == "base" else 1.0, label=row
            )
    if quantity == "dev/ppl":
        _plain_logarithms(axes)
    axes.set(xlabel=NAMES[axis], ylabel=NAMES[quantity], title=f"{NAMES[quantity]}, {conditions(table)}")
    return figure


def run(table: Table, runs: Runs, row: str) -> Figure:
    """Training loss and dev perplexity of one row beside base."""
    figure, (above, below) = _figure(_TALL, 2)
    for axes, quantity in ((above, "train/loss"), (below, "dev/ppl")):
        for (name, _seed), curves in runs.items():
            if name in ("base", row) and quantity in curves:
                own = name == row
                style = {"color": PAPER_COLOUR, "zorder": 3} if own else {"color": "#888888", "linewidth": 0.8}
                axes.plot(curves[quantity].axes["steps"], curves[quantity].values, **style)
        axes.set_title(NAMES[quantity].split(" (")[0])
    below.set_xlabel(NAMES["steps"])
    _plain_logarithms(below)
    figure.suptitle(f"{row}{'' if row == 'base' else ', base in grey'}: {conditions(table)}", **SUPTITLE)
    return figure


def group(table: Table, letter: str) -> Figure:
    """The paper and ours in one group, base with it: figures where they may be compared, otherwise effects."""
    lines = [line for line in table.lines if line.group in ("base", letter)]
    if letter in ("(A)", "(B)"):  # which vary one size, base's among its values
        lines.sort(key=lambda line: [getattr(getattr(line.config, section), key) for _, section, key in DEFINITION])
    figure, both = _figure(_TALL, 2)
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
            axes.axhline(0, color="#888888", linewidth=0.8)
        change = "change from base, " + ("%" if percent else "points") if relative else ""
        axes.set_xticks(range(len(lines)), [_label(table, line) for line in lines], rotation=30, ha="right", fontsize=8)
        axes.set(title=name, ylabel=change)
    handles, labels = both[0].get_legend_handles_labels()
    named = dict(zip(labels, handles, strict=True))
    both[0].legend(named.values(), named.keys())
    figure.suptitle(f"Group {letter}: the paper and {conditions(table)}", **SUPTITLE)
    return figure


def ranks(table: Table, metric: Metric) -> Figure:
    """Our figure of each row against the paper's, and their rank correlation."""
    figure, axes = _figure(_NARROW)
    shades = colours(table)
    points = {
        line.name: (line.papers(metric), found.mean)
        for line in table.lines
        if (found := line.measured(KEYS[metric])) is not None
    }
    for row, point in points.items():
        axes.plot(*point, "o", color=shades[row], markersize=5, gid=f"{ROW}{row}:")
    correlation = rank_correlation(table, metric)
    summary = ""
    if correlation is not None:
        low, high = map(signed_text, correlation.interval)
        summary = f": Spearman ρ {signed_text(correlation.rho)} ({low} to {high}), {correlation.rows} rows"
    axes.set(xlabel=f"{metric}, paper", ylabel=f"{metric}, {conditions(table)}", title=f"{metric}{summary}")
    axes.margins(0.12)
    _name(axes, points)
    return figure


@dataclass(frozen=True)
class ByLength:
    """BLEU of rows in buckets of equally many sentences, by the words of the source."""

    buckets: list[str]
    """`3 to 5` for the bucket with sources of 3, 4 and 5 words."""
    bleu: dict[str, list[float]]
    """Of each row with a finished run the mean over its seeds, for each bucket."""
    trained_up_to: int
    """The words of the longest source that was trained on."""
    buckets_within: int | None
    """How many buckets hold sources no longer than those; None where all or none of the sources are."""


def by_length(table: Table, counts: Counts, source_words: Sequence[int]) -> ByLength:
    """What `lengths` draws, from the n-gram counts of each run's sentences and the words of their sources."""
    words = np.array(source_words)
    bounds = np.unique(np.quantile(words, np.linspace(0, 1, _LENGTH_BUCKETS + 1), method="nearest"))
    bounds = bounds[min(1, len(bounds) - 1) :]  # a bucket's longest source; one bucket where all are of one length
    trained, within = table.scale.max_train_words or table.scale.max_words or int(words.max()), None
    if words.min() <= trained < words.max():
        longest = words[words <= trained].max()
        bounds = np.union1d(bounds, [longest])  # no bucket holds lengths on both sides of the limit
        within = int(np.searchsorted(bounds, longest)) + 1
    bucket_of, bleu = np.searchsorted(bounds, words), dict[str, list[float]]()
    for line in table.lines:
        if own := [of_run for (row, _), of_run in counts.items() if row == line.name]:
            bleu[line.name] = [
                statistics.mean(bleu_of_counts(of_run[bucket_of == bucket].sum(0)) for of_run in own)
                for bucket in range(len(bounds))
            ]
    starts = [words.min(), *(bounds[:-1] + 1)]
    buckets = [f"{low}" if low == high else f"{low} to {high}" for low, high in zip(starts, bounds, strict=True)]
    return ByLength(buckets, bleu, trained, within)


def lengths(table: Table, counts: Counts, source_words: Sequence[int]) -> Figure:
    """BLEU of each row by the length of the source, in buckets of equally many sentences, the mean over its seeds."""
    found = by_length(table, counts, source_words)
    figure, axes = _figure(_NARROW)
    shades = colours(table)
    if found.buckets_within is not None:
        at, text = found.buckets_within - 0.5, f"trained on up to {found.trained_up_to}"
        axes.axvline(at, color="#888888", linestyle="--", linewidth=0.9)
        axes.annotate(text, (at, 1), xycoords=("data", "axes fraction"), fontsize=7, ha="right", va="top")
    for row, bleu in found.bleu.items():
        axes.plot(bleu, "o-", color=shades[row], markersize=3, gid=f"{ROW}{row}:",
                  linewidth=1.8 if row == "base" else 1.0, label=row)  # fmt: skip
    axes.set_xticks(range(len(found.buckets)), found.buckets)
    axes.set(xlabel="words of the source", ylabel="BLEU", title=f"Length against BLEU, {conditions(table)}")
    return figure


def positions(tables: Mapping[str, npt.NDArray[Any]]) -> Figure:
    """Tables of positional vectors (positions, d_model) as pictures; below, which offsets are rotations.

    PE(pos + k) is a rotation of PE(pos), the same for all pos, just where the angle between them depends on k alone.
    """
    figure, (*pictures, below) = _figure((6.8, 4.0 + 1.3 * len(tables)), len(tables) + 1)
    for axes, (name, vectors) in zip(pictures, tables.items(), strict=True):
        bound = float(np.quantile(np.abs(vectors), 0.99))
        axes.imshow(vectors.T, aspect="auto", cmap="RdBu", vmin=-bound, vmax=bound, interpolation="nearest")
        axes.grid(visible=False)
        axes.set(title=f"{name}, by position", ylabel="dimension")
    for shade, (name, vectors) in zip((INK, PAPER_COLOUR, "#3e6e8e"), tables.items(), strict=False):
        unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        cosines = [np.diagonal(unit @ unit.T, k) for k in range(len(vectors) // 2)]
        low, mean, high = ([reduce(of_k) for of_k in cosines] for reduce in (np.min, np.mean, np.max))
        below.fill_between(range(len(mean)), low, high, color=shade, alpha=0.2, linewidth=0)
        below.plot(mean, color=shade, label=name)
    below.legend(loc="upper right")
    below.set(title="Cosine of PE(pos) and PE(pos + k): mean, and range over pos", xlabel="position, or offset k")
    return figure


def schedule(table: Table) -> Figure:
    """The learning rate of base and big, Eq. 3 times the scale's factor."""
    figure, axes = _figure(_NARROW)
    for line, shade in ((table.base, INK), (table.lines[-1], PAPER_COLOUR)):
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


def layers(times: Mapping[str, Sequence[tuple[int, float]]]) -> Figure:
    """Of each layer type of Table 1 the seconds a token, measured, against the length of the sequence."""
    figure, axes = _figure(_NARROW)
    for marker, (name, points) in zip(itertools.cycle("osv^D"), times.items()):
        axes.plot(*zip(*points, strict=True), f"{marker}-", markersize=3, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.legend()
    axes.set(xlabel="tokens of the sequence, n", ylabel="seconds a token", title="Layers of Table 1, measured")
    return figure


def with_legend(figure: Figure) -> Figure:
    """The same figure of rows with each row's name and colour below it, once for all its seeds."""
    (axes,) = figure.axes
    lines = {str(line.get_label()): line for line in axes.get_lines() if line.get_gid()}
    if lines:
        # Constrained once more: a page that the figure was drawn for has fixed its layout
        figure.set_layout_engine("constrained")
        figure.legend(lines.values(), lines.keys(), fontsize=7, ncols=3, loc="outside lower center")
    return figure


def _figure(size: tuple[float, float], panels: int = 1) -> tuple[Figure, Any]:
    """A figure and its panels, one below the other; a single one by itself."""
    figure = Figure(figsize=size)
    return figure, figure.subplots(panels, sharex=True)


def _name(axes: Axes, points: Mapping[str, tuple[float, float]]) -> None:
    """Writes each point's name into the nearest place that is free; a line leads to one that is not beside it."""
    axes.figure.draw_without_rendering()  # type: ignore[union-attr]  # the layout decides where there is room
    to_pixels, edge = axes.transData, axes.bbox
    at = {name: to_pixels.transform(point) for name, point in points.items()}
    dot = edge.height / 60
    dots = [Bbox([place - dot, place + dot]) for place in at.values()]
    names: list[Bbox] = []
    # Points in a crowd are named first: those at its edge have room outside
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
    low, high = axes.get_ylim()
    axes.set_yscale("log")
    if high < 10 * low:  # with so few powers of ten a logarithmic axis would name one value or none
        axes.yaxis.set_major_locator(MaxNLocator(6))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        return
    for pick in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        pick(FuncFormatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "125" else ""))


def _label(table: Table, line: Line) -> str:
    """The first value that the row changes, in the paper's symbols."""
    if line.name == "base":
        return "base"
    for symbol, section, key in DEFINITION:
        value = value_text(line.config, section, key)
        if value != value_text(table.base.config, section, key):
            return f"{symbol} {value}"
    return "learned"


def _measured(
    axes: Axes, place: float, own: Sequence[float], base: Sequence[float], percent: bool, style: Mapping[str, Any]
) -> None:
    """The mean over seeds, less base's where that is given, with its 95 % confidence interval; each seed as a dash."""
    zero = statistics.mean(base) if base else 0.0
    unit = 100 / zero if percent else 1.0
    samples = {"own": [unit * value for value in own], "base": [unit * value for value in base]}
    # Base's difference from itself is 0, whatever its seeds
    found = None if own is base else rise(samples, {"own": 1.0, "base": -1.0} if base else {"own": 1.0})
    if len(own) > 1:
        seeds = [unit * (value - zero) for value in own]
        axes.plot([place + 0.1] * len(own), seeds, "_", color="#888888", markersize=4, label="each seed")
    error = found.interval[1] - found.effect if found else None
    axes.errorbar(place, unit * (statistics.mean(own) - zero), error, **style)
