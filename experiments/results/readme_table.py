"""Prints the README's table: each row's change from base in the paper and at two scales, from finished runs.

`python experiments/results/readme_table.py runs`; below it, what `aiayn table` has of the rank correlations,
and how many effects have the paper's sign.
"""

import sys

from aiayn.config import compose, folders
from aiayn.runs import records
from aiayn.tables import formats, table3
from aiayn.tables.table3 import DEFINITION, KEYS, METRICS, Line, Metric, Table
from aiayn.tables.table3_columns import DIGITS, number_text, signed_text, value_text

SCALES = ("mini", "small")


def definition(table: Table, line: Line) -> str:
    """What a row changes of base; of base, its sizes."""
    texts = []
    for symbol, section, key in DEFINITION:
        own, base = (value_text(of.config, section, key) for of in (line, table.base))
        if own != base or (line is table.base and section == "model" and key != "dropout"):
            texts.append(f"{own} steps" if key == "max_steps" else f"{symbol} {own}")
    return ", ".join(texts) or "learned positions"


def cell(value: float | None, base: float | None, metric: Metric, *, is_base: bool) -> str:
    """Base's figure as it is, another row's as its change: of PPL in percent, of BLEU in points."""
    if value is None or base is None:
        return "–"
    if is_base:
        return number_text(value, DIGITS[metric])
    change, digits, unit = (100 * (value / base - 1), 0, " %") if metric == "PPL" else (value - base, 1, "")
    return f"{signed_text(change, digits)}{unit}" if round(change, digits) else f"0{unit}"


def signs(table: Table, metric: Metric) -> str:
    """How many of our effects have the sign of the paper's, of those that are not 0 there."""
    base = table.base.measured(KEYS[metric])
    found = [
        (line.papers(metric) - table.base.papers(metric)) * (own.mean - base.mean) > 0
        for line in table.lines
        if base and (own := line.measured(KEYS[metric])) and line.papers(metric) != table.base.papers(metric)
    ]
    return f"{metric}: {sum(found)} of {len(found)} effects have the paper's sign"


def main(output: str) -> None:
    """Prints all of it."""
    tables = {}
    for scale in SCALES:
        run = compose.compose_row(f"scale={scale}", f"output={output}")
        tables[scale] = table3.table(run, records.read_runs(folders.sweep_folder(run)))
    first = next(iter(tables.values()))
    heads = [f"{metric}, {whose}" for metric in METRICS for whose in ("paper", *(f"`{scale}`" for scale in tables))]
    print(f"| row | differs from base in | {' | '.join(heads)} |", f"|---|---|{'--:|' * len(heads)}", sep="\n")
    for number, line in enumerate(first.lines):
        cells = [line.name, definition(first, line)]
        for metric in METRICS:
            cells.append(cell(line.papers(metric), first.base.papers(metric), metric, is_base=line is first.base))
            for made in tables.values():
                found = (made.lines[number].measured(KEYS[metric]), made.base.measured(KEYS[metric]))
                means = (None if one is None else one.mean for one in found)
                cells.append(cell(*means, metric, is_base=line is first.base))
        print(f"| {' | '.join(cells)} |")
    for scale, made in tables.items():
        seeds = f"seed{'s' if len(made.seeds) > 1 else ''} {', '.join(map(str, made.seeds))}"
        print("", f"{scale}, {seeds}: {formats.rank_sentence(made)}", sep="\n")
        print(*(signs(made, metric) for metric in METRICS), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1])
