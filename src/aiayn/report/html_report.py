"""`aiayn report`: one page with Table 3, the paper's claims tested and every figure; the figures as files, too."""

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from aiayn.config import folders
from aiayn.config.schema import Config, ConfigError
from aiayn.core import progress, storage
from aiayn.report import curves, figure_files, figures, ladder_figure
from aiayn.runs import records
from aiayn.tables import beyond, formats, paper_claims, table3, variations
from aiayn.tables.paper_claims import Finding
from aiayn.tables.table3 import METRICS, Table

CLAIM_COLUMNS = ("sentence", "metric", "rows", "verdict", "paper", "ours", "interval", "sentences", "p", "because")


class Section(NamedTuple):
    """One part of a page: paragraphs, a table, runs that are not in it, and images with their descriptions."""

    title: str
    texts: Sequence[str] = ()
    head: Sequence[tuple[str, str]] = ()  # name and alignment, l or r
    rows: Sequence[tuple[bool, Sequence[tuple[str, str]]]] = ()  # whether it opens a group; text and style of its cells
    notes: Sequence[tuple[str, str, str]] = ()  # run, status, detail
    figures: Collection[tuple[str, Any]] = ()  # description and URI; before they are written name and figure


def page(title: str, sections: Sequence[Section]) -> str:
    """The sections as one inert file: it holds no script, asks for nothing, and every text stays text."""
    loader = PackageLoader("aiayn.report", "templates")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return environment.get_template("page.html").render(title=title, sections=sections)


def sections(run: Config, stored: Sequence[records.Run], table: Table, others: Table | None) -> list[Section]:
    """The parts of the report, each with its figures by name, drawn and not written yet; without what is damaged."""
    folder, lines = folders.sweep_folder(run), (*table.lines, *(others.lines[len(beyond.COMPARED) :] if others else ()))
    seeds = [(line.name, found.seed) for line in lines for found in line.runs]
    runs = {key: curves.read(folder / key[0] / f"seed{key[1]}") for key in progress.tracked(seeds, "reading curves")}
    words, counts, missing = beyond.on_dev(run, lines)
    test = "t-tests over seeds, with one spread for all rows where Bartlett's test allows it; p-values corrected."
    gains = "Effects are gains, in BLEU or % of PPL."
    bootstrap = missing or f"Over sentences: {paper_claims.RESAMPLES} resamples of {len(words)}."
    scales = ladder_figure.tables(run, table)
    ladders = {f"ladder-{metric.lower()}": ladder_figure.ladder(scales, metric) for metric in METRICS if scales}
    compared = {"effects": figures.effects(table)}
    compared |= {f"group-{letter}": figures.group(table, f"({letter.upper()})") for letter in "abcde"}
    curved = {
        f"curve-{quantity.replace('/', '-')}-{axis}": figures.curve(table, runs, quantity, axis)
        for axis, quantity in itertools.product(curves.AXES, curves.QUANTITIES)
        if axis == "steps" or quantity != "train/learning_rate"
    }
    lengths = {"lengths": figures.lengths(table, counts, words)} if counts else {}
    parts = [
        _tabled(formats.layout(table), "Table 3, paper and ours", titled=False),  # the page's heading is its title
        _claims("The paper's claims", [test, gains, bootstrap], paper_claims.check(table, counts)),
        *([Section("By scale", figures=ladders.items())] if scales else []),
        Section("Paper against ours", figures=compared.items()),
        Section("Learning curves", figures=curved.items()),
        Section("Lengths", [missing] if missing else [], figures=lengths.items()),
    ]
    if others:
        findings = paper_claims.check(others, counts, beyond.CLAIMS)
        drawn = {"beyond-curve": figures.curve(others, runs, "dev/ppl", "steps")}
        drawn |= {"beyond-lengths": figures.lengths(others, counts, words)} if counts else {}
        parts.append(_tabled(beyond.layout(others, findings), "Beyond Table 3"))
        parts.append(_claims("Claims beyond Table 3", [], findings)._replace(figures=drawn.items()))
    if varied := variations.layout(run, stored, [table, others] if others else [table]):
        parts.append(_tabled(varied, "Your variations"))
    return parts


def _tabled(layout: formats.Layout, title: str, *, titled: bool = True) -> Section:
    """A table as `aiayn table` prints it, with or without its own title."""
    head = [(column.title, column.align) for column in layout.columns]
    return Section(title, [layout.title] * titled + [layout.caption], head, layout.rows, layout.table.notes)


def _claims(title: str, texts: Sequence[str], findings: Iterable[Finding]) -> Section:
    head = [(name, "r" if name in ("paper", "ours", "interval", "sentences", "p") else "l") for name in CLAIM_COLUMNS]
    told = [found.texts for found in findings]
    cells = [[(found[key], found[key] if key == "verdict" else "") for key in CLAIM_COLUMNS] for found in told]
    return Section(title, texts, head, [(False, row) for row in cells])


def main(run: Config) -> None:
    """Writes the page and the figures of `<output>/<data>-<scale>` into `report/` there, and says where."""
    folder = folders.sweep_folder(run) / "report"
    stored = records.read_runs(folder.parent)
    if not stored:
        raise ConfigError(f"{folder.parent} has no runs{folders.other_runs(run)}; train one first")
    table = table3.table(run, stored)
    others, title, drawn, parts = beyond.table(run, stored), formats.title(table), folder / "figures", []
    about = {"ladder": "conditions and compute stand below it", "beyond": figures.caption(others or table)}
    with figure_files.style():
        for part in progress.tracked(sections(run, stored, table, others), "drawing the figures"):
            images = []
            for name, figure in part.figures:
                described = f"{name}: {about.get(name.partition('-')[0], figures.caption(table))}"
                images.append((described, figure_files.write(drawn, name, figure)))
            parts.append(part._replace(figures=images))
    storage.write_text(folder / "report.html", page(title, parts))
    print(title, folder / "report.html", sep="\n")
    print(f"{drawn}: {sum(len(part.figures) for part in parts)} figures, each as SVG and PNG")
    records.refuse_unreadable(*stored)
