"""`aiayn table`: Table 3, paper and ours, from every run folder of one data set and scale; below it what is beyond."""

import sys
from pathlib import Path

from aiayn.config import compose, folders
from aiayn.config.schema import Config, ConfigError
from aiayn.runs import records
from aiayn.runs.records import Run
from aiayn.tables import beyond, formats, paper_claims, table3


def of_own_settings(folder: Path, found: Run) -> str:
    """The line of a run that is no row's: what it changes, and its figures."""
    path = folder / found.experiment / f"seed{found.seed}" / "config.yaml"
    try:
        return records.row_line(compose.read(path), found)
    except (ConfigError, OSError) as error:
        return f"{found.experiment} seed {found.seed}  {error}"


def main(run: Config) -> None:
    """Prints the table of `<output>/<data>-<scale>` in the format asked for."""
    folder = folders.sweep_folder(run)
    runs = records.read_runs(folder)
    table = table3.table(run, runs)
    layouts = [formats.layout(table)]
    if others := beyond.table(run, runs):
        findings = paper_claims.check(others, beyond.counts_of(run, others), beyond.CLAIMS)
        layouts.append(beyond.layout(others, findings))
    sys.stdout.write(formats.printed(layouts, run.format))
    if run.format == "terminal" and (varied := [found for found in runs if "+" in found.experiment]):
        print("\nRuns with other settings than a row's (values after scaling):")
        for found in varied:
            print(f"  {of_own_settings(folder, found)}")
    if not runs and (precisions := folders.in_other_precisions(run)):
        print(f"aiayn: {folder} has no runs{precisions}", file=sys.stderr)
