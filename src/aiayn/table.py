"""`aiayn table`: Table 3, paper and ours, from every run folder of one data set and scale."""

import sys

from rich.console import Console

from aiayn import config, criteria, report, results
from aiayn.schema import Config


def main(run: Config) -> None:
    """Prints the table of `<output>/<data>-<scale>` in the format asked for."""
    folder = config.sweep_folder(run)
    table = criteria.judged(
        results.table(config.rows(run.fidelity.name), results.read_runs(folder), run.scale, config.setting(run)), folder
    )
    text = report.render(table, run.format, Console() if run.format == "terminal" else None)
    sys.stdout.write(text if text.endswith("\n") else text + "\n")
