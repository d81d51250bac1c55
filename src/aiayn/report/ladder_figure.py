"""The figure of the ladder: each row's effect at every scale against the compute of its training, and the paper's."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from aiayn.config import compose, folders, schema
from aiayn.config.schema import Config, ConfigError
from aiayn.cost import flops
from aiayn.report import figures
from aiayn.report.figure_files import GREY, INK, PAPER_COLOUR, SUPTITLE
from aiayn.runs import records
from aiayn.tables import paper_claims, table3
from aiayn.tables.table3 import Line, Metric, Table

MIN_UPDATES = 100  # of base: with fewer the warm-up has hardly begun, and an effect says nothing


def tables(run: Config, ours: Table) -> list[Table]:
    """`ours` and the sweeps under `output` on its data, their scales' own or the paper's conditions, by compute."""
    scales = {name: compose.compose_row(f"scale={name}") for name in compose.read_folder("conf", "scale")}
    found, own = [ours], {name: scaled.data.name for name, scaled in scales.items()}
    for other in _others(run, scales):
        made = table3.table(other, records.read_runs(folders.sweep_folder(other)))
        on_own = all(own.get(each.scale.name) == each.data.name for each in (run, other))
        data, hardware = {"name": run.data.name} if on_own else {}, {"precision": run.hardware.precision}
        like_ours = schema.vary(other, hardware=hardware, data=data)
        if folders.setting(like_ours) == ours.data or made.comparable:
            found.append(made)
    found = [table for table in found if table.base.trained.training.max_steps >= MIN_UPDATES]
    return sorted(found, key=lambda table: planned(table, table.base))


def _others(run: Config, scales: Mapping[str, Config]) -> Iterator[Config]:
    """A run of each other sweep under `output`, by folder; its scale is ours of that name, where there is one."""
    for folder in sorted(path for path in Path(run.output).glob("*/") if path != folders.sweep_folder(run)):
        for path in sorted(folder.glob("*/seed*/config.yaml")):
            with suppress(ConfigError, OSError):
                found = dataclasses.replace(compose.read(path), output=run.output, prepared=run.prepared)
                if folders.sweep_folder(found) == folder:
                    yield dataclasses.replace(found, scale=scales.get(found.scale.name, found).scale)
                    break


def planned(table: Table, line: Line) -> float:
    """FLOPs of a row's training at the scale of the table: all its updates full, sentences as long as WMT14's."""
    rows = line.trained.fidelity.rows(records.look_up(table.reference, "config.data.vocab_size"))
    return flops.planned(line.trained.model, line.trained.training, rows)


def effect(table: Table, line: Line, metric: Metric) -> tuple[float, float | None] | None:
    """A row's ln PPL or BLEU minus base's, and its 95 % interval's half width; None where a row has no seed."""
    samples = {row.name: paper_claims.figures(row, metric) for row in (line, table.base)}
    if not all(samples.values()):
        return None
    mean, weights = np.mean(samples[line.name]) - np.mean(samples["base"]), {line.name: 1.0, "base": -1.0}
    t = paper_claims.rise(samples, weights, paper_claims.common_spread(table, metric))
    return float(mean), t and float(t.interval(1 - paper_claims.ERROR_RATE)[1] - mean)


def ladder(climbed: Sequence[Table], metric: Metric) -> Figure:
    """One panel a row: its effect at every scale, and the paper's; the rows of a group have one vertical scale."""
    base, *others = climbed[0].lines  # every table has the same rows
    figure = Figure(figsize=(5.2, 10.2))
    *panels, empty = figure.subplots(len(others) // 2 + 1, 2, sharex=True).flat
    empty.set_axis_off()
    drawn = list(zip(others, panels, strict=False))
    for number, (line, axes) in enumerate(drawn, 1):
        papers = paper_claims.unit(line.papers(metric), metric) - paper_claims.unit(base.papers(metric), metric)
        axes.axhline(0, color=GREY, linewidth=0.8)
        axes.axhline(papers, color=PAPER_COLOUR, linewidth=0.8, linestyle=(0, (4, 3)))
        axes.plot(flops.of_paper(line.config), papers, "D", color=PAPER_COLOUR, fillstyle="none", markersize=5)
        for table in climbed:
            if found := effect(table, table.lines[number], metric):
                place, fill = planned(table, table.lines[number]), "none" if found[1] is None else "full"
                axes.errorbar(place, *found, fmt="o", color=INK, fillstyle=fill, markersize=3.5, capsize=2)
        axes.set_title(line.name, fontsize=8, pad=3)
        axes.yaxis.set_major_locator(MaxNLocator(4))
    panels[-2].tick_params(labelbottom=True)  # nothing is drawn below it
    for _, members in itertools.groupby(drawn, lambda panel: panel[0].group):
        limits = {axes: axes.get_ylim() for _, axes in members}
        low, high = min(low for low, _ in limits.values()), max(high for _, high in limits.values())
        for axes in limits:
            axes.set_ylim(low - 0.1 * (high - low), high + 0.1 * (high - low))  # no marker is cut in half
    drawn[0][1].set_xscale("log")  # the others share its axis
    power = FuncFormatter(lambda value, _: flops.power(value, 0))
    drawn[0][1].xaxis.set(major_locator=LogLocator(numticks=5), minor_locator=NullLocator(), major_formatter=power)
    at = [f"base at {figures.conditions(table)}: {flops.power(planned(table, table.base))}" for table in climbed]
    differ = "the corpora differ; " * (len({table.data for table in climbed}) > 1)
    at.append(f"in the paper: {flops.power(flops.of_paper(base.config))}; {differ}hollow dots: one seed of row or base")
    figure.supxlabel("\n".join(at), fontsize=7)
    figure.suptitle(f"{'ln PPL' if metric == 'PPL' else metric} minus base's against FLOPs of training", **SUPTITLE)
    return figure
