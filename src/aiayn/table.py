"""`aiayn table`: Table 3, paper and ours, from every run folder of one data set and scale."""

import sys

from rich.console import Console

from aiayn import config, report, results
from aiayn.schema import Config


def main(run: Config) -> None:
    """Prints the table of `<output>/<data>-<scale>` in the format asked for."""
    runs = results.read_runs(config.sweep_folder(run))
    table = results.table(run, runs)
    text = report.render(table, run.format, Console() if run.format == "terminal" else None)
    sys.stdout.write(text if text.endswith("\n") else text + "\n")
    if not runs and (others := config.in_other_precisions(run)):
        print(f"aiayn: {config.sweep_folder(run)} has no runs{others}", file=sys.stderr)
