"""`aiayn table`: Table 3, paper and ours, from every run folder of one data set and scale; below it what is beyond."""

import sys

from aiayn.config import compose, folders
from aiayn.config.schema import Config, ConfigError
from aiayn.runs import records
from aiayn.tables import beyond, formats, paper_claims, table3


def main(run: Config) -> None:
    """Prints the table of `<output>/<data>-<scale>` in the format asked for."""
    folder = folders.sweep_folder(run)
    runs = records.read_runs(folder)
    table = table3.table(run, runs)
    layouts = [formats.layout(table)]
    if others := beyond.table(run, runs):
        findings = paper_claims.check(others, beyond.on_dev(run, others)[1], beyond.CLAIMS)
        layouts.append(beyond.layout(others, findings))
    sys.stdout.write(formats.printed(layouts, run.format))
    if run.format == "terminal" and (varied := [found for found in runs if "+" in found.experiment]):
        print("\nRuns with other settings than a row's (values after scaling):")
        for found in varied:
            try:
                made = compose.read(folder / found.experiment / f"seed{found.seed}" / "config.yaml")
                print(f"  {records.row_line(made, found)}")
            except (ConfigError, OSError) as error:
                run_name = found.experiment + f" seed {found.seed}" * (found.seed >= 0)
                print(f"  {run_name}  {error if found.seed >= 0 else found.cause}")
    if not runs and (precisions := folders.in_other_precisions(run)):
        print(f"aiayn: {folder} has no runs{precisions}", file=sys.stderr)
    records.refuse_unreadable(*runs)
