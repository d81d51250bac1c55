"""`aiayn table`: Table 3, paper and ours, from every run folder of one data set and scale; below it what is beyond."""

import sys

from rich.console import Console

from aiayn.config import folders
from aiayn.config.schema import Config
from aiayn.runs import records
from aiayn.tables import beyond, criteria, formats, table3


def main(run: Config) -> None:
    """Prints the table of `<output>/<data>-<scale>` in the format asked for."""
    folder = folders.sweep_folder(run)
    runs = records.read_runs(folder)
    table = criteria.judged(table3.table(run, runs), folder)
    layouts = [formats.layout(table)]
    if others := beyond.table(run, runs):
        layouts.append(beyond.layout(others, beyond.counts_of(run, others)))
    texts = [formats.printed(layout, run.format, Console() if run.format == "terminal" else None) for layout in layouts]
    sys.stdout.write("\n".join(text if text.endswith("\n") else text + "\n" for text in texts))
    if not runs and (precisions := folders.in_other_precisions(run)):
        print(f"aiayn: {folders.sweep_folder(run)} has no runs{precisions}", file=sys.stderr)
