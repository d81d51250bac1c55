"""Prints, for each measurement of dev on the way, the rows' rank correlation with the paper in perplexity, in Markdown.

    python experiments/results/by_update.py experiments/results/small_three_seeds/runs d_smoothing00 d_dropout02

Means over a row's seeds; `big`, which trains longer, is left out. The last columns are the PPL of the rows that are
named behind the folder, less base's, in percent.
"""

import statistics
import sys
from collections import defaultdict
from pathlib import Path

from scipy.stats import spearmanr
from tabulate import tabulate

from aiayn.config import compose
from aiayn.report import curves


def main(folder: str, *shown: str) -> None:
    """One line for each number of updates at which every row was measured."""
    paper = {name: row.paper.ppl for name, row in compose.rows().items() if name != "big"}
    measured: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for name in paper:
        for run in sorted(Path(folder, name).glob("seed*")):
            dev = curves.read(run)["dev/ppl"]
            for step, ppl in zip(dev.axes["steps"], dev.values, strict=True):
                measured[int(step)][name].append(ppl)
    lines = []
    for step, found in sorted(measured.items()):
        if len(found) == len(paper):
            ours = {name: statistics.mean(values) for name, values in found.items()}
            effects = [f"{100 * (ours[name] / ours['base'] - 1):+.0f}" for name in shown]
            rho = spearmanr([*paper.values()], [ours[name] for name in paper]).statistic
            lines.append([step, f"{ours['base']:.2f}", f"{rho:+.2f}", *effects])
    heads = ["update", "PPL of base", "rho", *(f"{name}, %" for name in shown)]
    print(tabulate(lines, heads, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
