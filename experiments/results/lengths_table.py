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
    points, names = dict[str, list[str]](), list[str]()
    for table in (material.table, material.beyond):
        if table:
            (axes,) = figures.lengths(table, material.dev.counts, lengths).axes
            names = [label.get_text() for label in axes.get_xticklabels()]
            rows = {str(line.get_label()): line.get_ydata() for line in axes.lines}
            points |= {
                row: [f"{bleu:.1f}" for bleu in rows[row]] for row in (line.name for line in table.lines) if row in rows
            }
    print(
        tabulate(
            [[row, *bleu] for row, bleu in points.items()], ["row", *names], tablefmt="github", disable_numparse=True
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
