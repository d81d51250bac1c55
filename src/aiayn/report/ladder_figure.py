"""The figure of the ladder: each row's effect at every scale against the compute of its training."""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from aiayn.report.figure_files import INK, PAPER_COLOUR, SUPTITLE
from aiayn.tables.ladder import Ladder, papers_effect
from aiayn.tables.table2 import papers_compute
from aiayn.tables.table3 import Line, Metric

_PAGE = (5.2, 10.2)
_MARKERS = "osv^"  # of corpora


def ladder(climbed: Ladder, rows: Sequence[Line], metric: Metric) -> Figure:
    """One panel a row: its effect at every scale against the compute of its training, and the paper's at its own."""
    base, *others = rows
    figure = Figure(figsize=_PAGE)
    panels = list(figure.subplots(math.ceil((len(others) + 1) / 2), 2, sharex=True).flat)
    drawn = list(zip(others, panels, strict=False))
    corpora = list(dict.fromkeys(rung.table.data for rung in climbed.rungs))
    for number, (line, axes) in enumerate(drawn, 1):  # every rung has the same rows, base first
        papers = papers_effect(line, base, metric)
        axes.axhline(0, color="#888888", linewidth=0.8)
        axes.axhline(papers.value, color=PAPER_COLOUR, linewidth=0.8, linestyle=(0, (4, 3)))
        axes.plot(papers.compute, papers.value, "D", color=PAPER_COLOUR, fillstyle="none", markersize=5)
        effects = [(rung.table.data, rung.effect(rung.table.lines[number], metric)) for rung in climbed.rungs]
        found = [(data, effect) for data, effect in effects if effect and effect.compute]
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
        axes.margins(y=0.12)  # no marker is cut in half
    _same_limits(drawn)
    key, *empty = panels[len(others) :]
    for axes in empty:
        axes.set_axis_off()
    _key(key, climbed, base, corpora)
    for axes in panels:
        axes.tick_params(labelsize=7)
    panels[0].set_xscale("log")  # the others share its axis
    panels[0].xaxis.set_major_locator(LogLocator(numticks=5))
    panels[0].xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0e}".replace("e+", "e")))
    panels[0].xaxis.set_minor_locator(NullLocator())
    quantity = "ln PPL minus base's (lower is better)" if metric == "PPL" else "BLEU minus base's (higher is better)"
    figure.suptitle(f"{quantity} against the compute of training", **SUPTITLE)
    figure.supxlabel("FLOPs of training (hollow: one seed)", fontsize=8)
    return figure


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
    entries.append(("the paper", papers_compute(base.config), "D", PAPER_COLOUR))
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
