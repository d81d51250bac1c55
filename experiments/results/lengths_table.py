"""Prints BLEU by the length of the source in Markdown, the points of `aiayn report`'s figures, from finished runs.

    python experiments/results/lengths_table.py scale.name=lengths scale.max_words=15 ...

The words are those of `aiayn report`; what `aiayn prepare` makes with them has to be there.
"""

import sys

from tabulate import tabulate

from aiayn.config import compose
from aiayn.report import contents, figures


def main(*words: str) -> None:
    """One line for each row with a finished run, one column for each bucket of lengths."""
    material = contents.collect(compose.compose_row(*words))
    lengths = [len(line.split()) for line in material.dev.sources]
    tables = [table for table in (material.table, material.beyond) if table]
    found = [figures.by_length(table, material.dev.counts, lengths) for table in tables]
    bleu_of = {row: bleu for of_table in found for row, bleu in of_table.bleu.items()}
    lines = [[row, *(f"{value:.1f}" for value in bleu)] for row, bleu in bleu_of.items()]
    print(tabulate(lines, ["row", *found[0].buckets], tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
