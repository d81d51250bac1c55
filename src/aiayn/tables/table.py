"""`aiayn table`: Table 3, paper and ours, from every run folder of one data set and scale."""

import sys

from rich.console import Console

from aiayn.config import folders
from aiayn.config.schema import Config
from aiayn.runs import records
from aiayn.tables import criteria, formats, table3


def main(run: Config) -> None:
    """Prints the table of `<output>/<data>-<scale>` in the format asked for."""
    folder = folders.sweep_folder(run)
    runs = records.read_runs(folder)
    table = criteria.judged(table3.table(run, runs), folder)
    text = formats.render(table, run.format, Console() if run.format == "terminal" else None)
    sys.stdout.write(text if text.endswith("\n") else text + "\n")
    if not runs and (others := folders.in_other_precisions(run)):
        print(f"aiayn: {folders.sweep_folder(run)} has no runs{others}", file=sys.stderr)
