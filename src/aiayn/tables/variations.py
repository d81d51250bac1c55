"""The table of runs with other settings than a row's, such as `model.dropout=0.3`: each beside the row it varies."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from aiayn.config import compose, folders
from aiayn.config.schema import Config, ConfigError, result_affecting
from aiayn.runs.records import SHARED, Run, changed
from aiayn.tables import formats, table3
from aiayn.tables.formats import Cell, Column, differences, measured, params, seeds
from aiayn.tables.table3 import DEFINITION, METRICS, Line, Metric, Table


def layout(run: Config, runs: Sequence[Run], tables: Sequence[Table]) -> formats.Layout | None:
    """The variations as they are printed, below `tables`, which have their rows; None where nobody has made one."""
    if not (varied := [found for found in runs if "+" in found.experiment]):
        return None
    rows = {line.name: line for table in reversed(tables) for line in table.lines}
    first = next((found.result for found in varied if found.result), {})  # as long as no row counts
    shared = {key: value for key, value in tables[0].base.claims.items() if key in SHARED} or table3.conditions(first)
    shared |= {key: value for key, value in result_affecting(run).items() if key.startswith("scale.")}
    lines, settings = list[Line](), list[str]()
    for name in sorted({found.experiment for found in varied}):
        own, configs = [found for found in varied if found.experiment == name], list[Config]()
        for found in own:
            with suppress(ConfigError, OSError):
                configs.append(compose.read(folders.sweep_folder(run) / name / f"seed{found.seed}" / "config.yaml"))
        config = min(configs, key=lambda config: config.scale != run.scale, default=replace(run, experiment=name))
        unread = "config.yaml cannot be read"
        settings.append(folders.label(config).partition(" (")[2].removesuffix(")") if configs else unread)
        claims = (table3.claims_of(config) if configs else {}) | shared
        stale = tuple(found for found in own if found.result and changed(claims, found.result))
        counted = tuple(found for found in own if found not in stale)
        lines.append(Line(replace(config, experiment=name), config, counted, stale, claims))
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
        *(column for m in METRICS for column in (measured(table, m), differences(m, "Δ", effects[m]))),
        *(params(table, "ours", "params"), seeds(table)),
    ]
    records = []
    for line, text, ppl, bleu in zip(lines, settings, *effects.values(), strict=True):
        definition = dict.fromkeys(key for *_, key in DEFINITION) | {"settings": text}  # sizes of rows are unscaled
        records.append(formats.record(table, line, definition, {"effect_ppl": ppl, "effect_bleu": bleu}))
    title = f"Runs with other settings than a row's at scale {table.scale.name} on {table.data}"
    caption = "Δ is a variation minus its row; ± is the deviation over seeds. Settings are those after scaling."
    return formats.Layout(title, caption, columns, table, records)
