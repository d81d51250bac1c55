"""`aiayn report`: one page with Table 3, the paper's claims tested and every figure; the figures as files, too."""

import dataclasses
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.figure import Figure

from aiayn.config import folders
from aiayn.config.schema import Config, ConfigError
from aiayn.core import progress, storage
from aiayn.data.dataset import Dataset
from aiayn.data.parallel_text import DataError
from aiayn.paper.layers import sinusoids
from aiayn.report import curves, figure_files, figures, ladder_figure
from aiayn.runs import checkpoint, records
from aiayn.runs.records import printable
from aiayn.tables import beyond, formats, paper_claims, table3
from aiayn.tables.paper_claims import Counts, Finding
from aiayn.tables.table3 import METRICS, Table

CLAIM_COLUMNS = ("sentence", "metric", "rows", "verdict", "paper", "ours", "interval", "sentences", "p", "because")


class Section(NamedTuple):
    """One part of a page: paragraphs, a table, runs that are not in it, and images with their descriptions."""

    title: str
    texts: Sequence[str] = ()
    head: Sequence[tuple[str, str]] = ()  # name and alignment, l or r
    rows: Sequence[tuple[bool, Sequence[tuple[str, str]]]] = ()  # whether it opens a group; text and style of its cells
    notes: Sequence[tuple[str, str, str]] = ()  # run, status, detail
    figures: Sequence[tuple[str, str]] = ()  # description and URI


def page(title: str, sections: Sequence[Section]) -> str:
    """The sections as one inert file: it holds no script, asks for nothing, and every text stays text."""
    loader = PackageLoader("aiayn.report", "templates")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return environment.get_template("page.html").render(title=title, sections=sections)


class Material(NamedTuple):
    """What the report is made of, read from the run folders and the prepared corpus."""

    table: Table
    beyond: Table | None  # the rows beyond Table 3 and those compared with them, if one is begun
    runs: figures.Runs
    words: Sequence[int]  # of each source sentence of dev
    counts: Counts  # n-grams of the translations of dev, by the rows beyond Table 3 too
    missing: str  # why there is no BLEU over sentences
    learned: Mapping[str, Any]  # positional vectors of row E, by side
    scales: Sequence[Table]
    layers: Mapping[str, Sequence[tuple[int, float]]]  # (length, seconds a token) of each type; empty if unmeasured


def collect(run: Config) -> Material:
    """Everything that lies in the folders of one scale and data set; whatever is damaged there is left out."""
    folder = folders.sweep_folder(run)
    stored = records.read_runs(folder)
    table, others = table3.table(run, stored), beyond.table(run, stored)
    lines = (*table.lines, *(others.lines[1:] if others else ()))
    named = [(line.name, found.seed) for line in lines for found in line.runs]
    read = {key: curves.read(folder / key[0] / f"seed{key[1]}") for key in progress.each(named, "reading curves")}
    try:
        words = [len(line.split()) for line in Dataset.open(folders.prepared_folder(run)).texts("dev", "source")]
        counts = beyond.counts_of(run, dataclasses.replace(table, lines=lines))
        missing = "" if counts else "No paired bootstrap: no finished run has translations of the corpus that is here."
    except (DataError, OSError) as error:
        words, counts, missing = [], {}, f"No paired bootstrap: {printable(str(error))}"
    scales, layers = ladder_figure.tables(run, table), _layers(Path(run.bench.output))
    return Material(table, others, read, words, counts, missing, _learned(table, folder), scales, layers)


def _layers(path: Path) -> dict[str, list[tuple[int, float]]]:
    """What `bench.kind=layers` has measured, where its numbers lie and are whole."""
    try:
        part = json.loads(path.read_text("utf-8"))["parts"]["layers"]
        lengths = [int(length) for length in part["lengths"]]
        times = {printable(line["name"]): map(float, line["seconds_per_token"]) for line in part["layers"]}
        return {name: list(zip(lengths, seconds, strict=True)) for name, seconds in times.items()}
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return {}


def _learned(table: Table, folder: Path) -> dict[str, Any]:
    """The positional vectors that the first finished run of row E with a checkpoint has learned."""
    row = next(line for line in table.lines if line.config.model.positions == "learned")
    for run in row.finished:
        with suppress(storage.StorageError):
            newest = checkpoint.newest(folder / row.name / f"seed{run['seed']}" / "checkpoints")
            weights = checkpoint.average(newest) if newest else {}
            sides = {side: weights.get(f"transformer.{side}_positions.weight") for side in ("source", "target")}
            return {f"Learned, {side} side": found.numpy()[:64] for side, found in sides.items() if found is not None}
    return {}


def draw_figures(material: Material) -> dict[str, Figure]:
    """Every figure by its name."""
    table, runs = material.table, material.runs
    drawn = {"effects": figures.effects(table)}
    drawn |= {f"group-{letter}": figures.group(table, f"({letter.upper()})") for letter in "abcde"}
    if material.scales:
        drawn |= {f"ladder-{metric.lower()}": ladder_figure.ladder(material.scales, metric) for metric in METRICS}
    for axis, quantity in itertools.product(curves.AXES, curves.QUANTITIES):
        drawn[f"curve-{quantity.replace('/', '-')}-{axis}"] = figures.curve(table, runs, quantity, axis)
    if material.beyond:
        drawn["beyond-curve"] = figures.curve(material.beyond, runs, "dev/ppl", "steps")
    for name, made in (("lengths", table), ("beyond-lengths", material.beyond)):
        if made and material.counts:
            drawn[name] = figures.lengths(made, material.counts, material.words)
    tables = {"Sinusoids (3.5)": sinusoids(64, table.base.trained.model.d_model).numpy(), **material.learned}
    drawn["positions"] = figures.positions(tables)
    return drawn | ({"layers": figures.layers(material.layers)} if material.layers else {})


def sections(material: Material, images: Mapping[str, str]) -> list[Section]:
    """The parts of the report, with the images that there are by their names."""

    def shown(*starts: str) -> list[tuple[str, str]]:
        about = figures.caption(material.table)
        return [(f"{name}: {about}", image) for name, image in images.items() if name.startswith(starts)]

    table = material.table
    test = "Welch's t-test over seeds, p-values corrected for their number. Effects are gains, in BLEU or % of PPL."
    bootstrap = material.missing or f"Over sentences: {paper_claims.RESAMPLES} resamples of {len(material.words)}."
    parts = [
        _tabled(formats.layout(table), "Table 3, paper and ours"),
        _claims("The paper's claims", [test, bootstrap], paper_claims.check(table, material.counts)),
        Section("By scale", figures=shown("ladder")),
        Section("Paper against ours", [formats.rank_sentence(table)], figures=shown("effects", "group")),
        Section("Learning curves", figures=shown("curve")),
        Section("Lengths and positions", figures=shown("lengths", "positions")),
    ]
    if others := material.beyond:
        findings = paper_claims.check(others, material.counts, beyond.CLAIMS)
        parts.append(_tabled(beyond.layout(others, findings), "Beyond Table 3"))
        parts.append(_claims("Claims beyond Table 3", [], findings)._replace(figures=shown("beyond")))
    if material.layers:
        parts.append(Section("Layers of Table 1, by aiayn bench bench.kind=layers", figures=shown("layers")))
    return parts


def _tabled(layout: formats.Layout, title: str) -> Section:
    """A table as `aiayn table` prints it."""
    head = [(column.title, column.align) for column in layout.columns]
    return Section(title, [layout.title, layout.caption], head, layout.rows, layout.table.notes)


def _claims(title: str, texts: Sequence[str], findings: Iterable[Finding]) -> Section:
    head = [(name, "r" if name in ("paper", "ours", "interval", "sentences", "p") else "l") for name in CLAIM_COLUMNS]
    told = [found.texts for found in findings]
    cells = [[(found[key], found[key] if key == "verdict" else "") for key in CLAIM_COLUMNS] for found in told]
    return Section(title, texts, head, [(False, row) for row in cells])


def main(run: Config) -> None:
    """Writes the page and the figures of `<output>/<data>-<scale>` into `report/` there, and says where."""
    folder = folders.sweep_folder(run) / "report"
    if not records.read_runs(folder.parent):
        raise ConfigError(f"{folder.parent} has no runs{folders.in_other_precisions(run)}; train one first")
    material = collect(run)
    with figure_files.style():
        drawn = progress.each(draw_figures(material).items(), "drawing the figures")
        images = {name: figure_files.write(folder / "figures", name, figure) for name, figure in drawn}
    title = formats.title(material.table)
    storage.write_text(folder / "report.html", page(title, sections(material, images)))
    print(title, folder / "report.html", sep="\n")
    print(f"{folder / 'figures'}: {len(images)} figures, each as SVG and PNG")
