"""`aiayn table`: Table 3, paper and ours, from every run folder of one data set and scale; below it what is beyond."""

import sys

from aiayn.config import folders
from aiayn.config.schema import Config
from aiayn.runs import records
from aiayn.tables import beyond, criteria, formats, paper_claims, table3


def main(run: Config) -> None:
    """Prints the table of `<output>/<data>-<scale>` in the format asked for."""
    folder = folders.sweep_folder(run)
    runs = records.read_runs(folder)
    table = criteria.judged(table3.table(run, runs), folder)
    layouts = [formats.layout(table)]
    if others := beyond.table(run, runs):
        findings = paper_claims.check(others, beyond.counts_of(run, others), beyond.CLAIMS)
        layouts.append(beyond.layout(others, findings))
    sys.stdout.write(formats.printed(layouts, run.format))
    if not runs and (precisions := folders.in_other_precisions(run)):
        print(f"aiayn: {folder} has no runs{precisions}", file=sys.stderr)
