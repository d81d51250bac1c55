"""Prints BLEU by the length of the source in Markdown, the points of `aiayn report`'s figures, from finished runs.

    python experiments/results/lengths_table.py scale=lengths

The words are those of `aiayn report`; what `aiayn prepare` makes with them has to be there.
"""

import statistics
import sys

from tabulate import tabulate

from aiayn.config import compose
from aiayn.report import contents, figures


def main(*words: str) -> None:
    """One line for each row with a finished run, one column for each bucket of lengths: mean ± sample deviation."""
    material = contents.collect(compose.compose_row(*words))
    lengths, counts = [len(line.split()) for line in material.dev.sources], material.dev.counts
    buckets: list[str] = []
    bleu_of: dict[str, dict[int, list[float]]] = {}  # of each row and seed; base stands in both tables
    for seed in sorted({seed for _, seed in counts}):
        own = {(row, its): of_run for (row, its), of_run in counts.items() if its == seed}
        for table in filter(None, (material.table, material.beyond)):
            found = figures.by_length(table, own, lengths)
            buckets = found.buckets
            for row, bleu in found.bleu.items():
                bleu_of.setdefault(row, {})[seed] = bleu
    lines = [[row, *map(_cell, zip(*of_seeds.values(), strict=True))] for row, of_seeds in bleu_of.items()]
    print(tabulate(lines, ["row", *buckets], tablefmt="github", disable_numparse=True))


def _cell(values: tuple[float, ...]) -> str:
    mean = f"{statistics.mean(values):.1f}"
    return f"{mean}±{statistics.stdev(values):.1f}" if len(values) > 1 else mean


if __name__ == "__main__":
    main(*sys.argv[1:])
