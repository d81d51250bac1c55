"""`aiayn table`: Table 3, paper and ours, from every run folder of one data set and scale; below it others."""

import sys

from aiayn.config import folders
from aiayn.config.schema import Config
from aiayn.runs import records
from aiayn.tables import beyond, formats, paper_claims, table3, variations


def main(run: Config) -> None:
    """Prints the table of `<output>/<data>-<scale>` in the format asked for."""
    folder = folders.sweep_folder(run)
    runs = records.read_runs(folder)
    table = table3.table(run, runs)
    layouts, tables = [formats.layout(table)], [table]
    if others := beyond.table(run, runs):
        tables.append(others)
        findings = paper_claims.check(others, beyond.on_dev(run, others.lines)[1], beyond.CLAIMS)
        layouts.append(beyond.layout(others, findings))
    if varied := variations.layout(run, runs, tables):
        layouts.append(varied)
    sys.stdout.write(formats.printed(layouts, run.format))
    if not runs:
        print(f"aiayn: {folder} has no runs{folders.other_runs(run)}", file=sys.stderr)
    records.refuse_unreadable(*runs)
