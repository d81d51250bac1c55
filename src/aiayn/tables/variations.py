"""The table of runs with other settings than a row's, such as `model.dropout=0.3`: each beside the row it varies."""

from collections.abc import Sequence
from dataclasses import replace

from aiayn.config import compose, folders
from aiayn.config.schema import Config, ConfigError
from aiayn.runs.records import SHARED, Run, changed, printable
from aiayn.tables import formats
from aiayn.tables.formats import Cell, Column, differences, measured, params, seeds
from aiayn.tables.table3 import METRICS, Line, Metric, Table


def layout(run: Config, runs: Sequence[Run], tables: Sequence[Table]) -> formats.Layout | None:
    """The variations as they are printed, below `tables`, which have their rows; None where nobody has made one."""
    if not any("+" in found.experiment for found in runs):
        return None
    rows = {line.name: line for table in reversed(tables) for line in table.lines}
    shared = {key: value for key, value in tables[0].base.claims.items() if key in SHARED}
    lines, settings = list[Line](), list[str]()
    for name in sorted({found.experiment for found in runs if "+" in found.experiment}):
        own = [found for found in runs if found.experiment == name]
        try:
            config = compose.read(folders.sweep_folder(run) / name / f"seed{own[0].seed}" / "config.yaml")
            settings.append(folders.label(config).partition(" (")[2].removesuffix(")"))
        except (ConfigError, OSError) as error:
            config, settings = run, [*settings, printable(str(error))]
        stale = tuple(found for found in own if found.result and changed(shared, found.result))
        counted = tuple(found for found in own if found not in stale)
        lines.append(Line(replace(config, experiment=name), config, counted, stale, shared))
    table = replace(tables[0], lines=tuple(lines), others=0)
    # A row beyond Table 3 is in no table while no such row is begun
    of_rows = replace(table, lines=tuple(rows.get(line.trained.experiment, replace(line, runs=())) for line in lines))
    effects: dict[Metric, list[float | None]] = {}
    for metric in METRICS:
        pairs = zip(table.means(metric), of_rows.means(metric), strict=True)
        effects[metric] = [None if x is None or y is None else x - y for x, y in pairs]
    columns = [
        Column("row", "row", [Cell(line.name) for line in lines]),
        Column("settings", "settings", list(map(Cell, settings))),
        *(measured(table, "PPL"), differences("PPL", "Δ", effects["PPL"])),
        *(measured(table, "BLEU"), differences("BLEU", "Δ", effects["BLEU"])),
        *(params(table, "ours", "params"), seeds(table)),
    ]
    records = []
    for line, text, ppl, bleu in zip(lines, settings, *effects.values(), strict=True):
        records.append(formats.record(table, line, {"settings": text}, {"effect_ppl": ppl, "effect_bleu": bleu}))
    title = f"Runs with other settings than a row's at scale {table.scale.name} on {table.data}"
    caption = "Δ is a variation minus its row; ± is the deviation over seeds. Settings are those after scaling."
    return formats.Layout(title, caption, columns, table, records)
