"""Table 3 and the table of rows beyond it: columns and caption, for a terminal and as Markdown, CSV and LaTeX."""

import csv
import dataclasses
import io
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from rich.box import HORIZONTALS
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as Grid
from rich.text import Text
from tabulate import SEPARATING_LINE, tabulate

from aiayn.config.schema import ConfigError
from aiayn.runs.records import PAPER_DATA, changes, look_up, number_text, unlike
from aiayn.tables.paper_claims import MIN_ROWS, rank_correlation, signed
from aiayn.tables.table3 import DEFINITION, KEYS, METRICS, ORIGINS, TOLERANCES, Line, Metric, Table

DIGITS: dict[Metric, int] = {"PPL": 2, "BLEU": 1}
_STATUS = {"failed": "far", "unreadable": "far", "stale": "near", "half-done": "near", "missing": "weak"}
_COLOURS = {"good": "green", "near": "yellow", "far": "red", "weak": "dim"}  # of cells, and of unfinished runs
# Columns that a terminal leaves out, the first that fits
_NARROW = {"definition", "params"}
_LEFT_OUT = (set[str](), _NARROW, _NARROW | {"source"}, _NARROW | {"source", "Δ paper", "Δ ours"})


class Cell(NamedTuple):
    """One place of a printed table."""

    text: str
    style: str = ""  # good, near, far, weak


class Column(NamedTuple):
    """One column of a printed table; neighbours of one group stand together."""

    group: str
    name: str
    cells: list[Cell]

    @property
    def align(self) -> str:
        """`l` for text, `r` for numbers."""
        return "l" if self.group in ("row", "settings", "source") else "r"

    @property
    def title(self) -> str:
        """The name, behind that of a group that readers see."""
        return f"{self.group} {self.name}" if self.group in ("PPL", "BLEU", "params") else self.name


class Layout(NamedTuple):
    """A table as it is printed, whatever the format."""

    title: str
    caption: str
    columns: list[Column]
    table: Table
    records: list[dict[str, Any]]  # every number in full, for CSV
    claims: Sequence[str] = ()  # and what became of each

    @property
    def rows(self) -> list[tuple[bool, tuple[Cell, ...]]]:
        """The cells of each row, behind whether it is the first of its group."""
        return list(zip(self.table.opens, zip(*(column.cells for column in self.columns), strict=True), strict=True))


def layout(table: Table) -> Layout:
    """Table 3 as it is printed. What base says of a row stands there once, as in the paper."""
    # The paper's vocabulary says nothing about a model of another width
    at_40960 = [params(table, "40 960", "params_at_40960_rows")] if table.comparable else []
    columns = [
        Column("row", "row", [Cell(line.name) for line in table.lines]),
        *(definition(table, *place) for place in DEFINITION),
        *_compared(table, "PPL"),
        *_compared(table, "BLEU"),
        Column("params", "paper", [Cell(str(line.config.paper.params_millions or "")) for line in table.lines]),
        *(*at_40960, params(table, "ours", "params"), seeds(table)),
    ]
    compare = "" if table.comparable else " Compare effects, not figures: Δ is a row minus base."
    return Layout(title(table), f"{conditions(table)}{compare} {rank_sentence(table)}", columns, table, _records(table))


def definition(table: Table, symbol: str, section: str, key: str) -> Column:
    """A value of base, and of the rows that differ from it."""
    base, *others = (value_text(getattr(getattr(line.config, section), key), key) for line in table.lines)
    return Column("definition", symbol, [Cell(base), *(Cell(value if value != base else "") for value in others)])


def value_text(value: object, key: str) -> str:
    """A value of a row as the paper prints it: 100000 steps are 100K."""
    return f"{value // 1000}K" if key == "max_steps" and isinstance(value, int) and value % 1000 == 0 else str(value)


def measured(table: Table, metric: Metric) -> Column:
    """Our mean over seeds with its deviation."""
    cells = []
    for line in table.lines:
        known = [value for value in line.measured(KEYS[metric]) or () if value is not None]
        text = "±".join(number_text(value, DIGITS[metric]) for value in known)
        cells.append(Cell(text) if text else Cell("–", "weak"))
    return Column(metric, "ours", cells)


def differences(metric: Metric, name: str, values: Sequence[float | None], styles: Sequence[str] = ()) -> Column:
    """Figures with their signs, unless they are printed as 0."""
    cells = []
    for value, style in zip(values, styles or [""] * len(values), strict=True):
        size = "" if value is None else number_text(abs(value), DIGITS[metric])
        sign = "" if not size or float(size) == 0 else "+" if value and value > 0 else "−"
        cells.append(Cell(sign + size, style))
    return Column(metric, name, cells)


def params(table: Table, name: str, key: str) -> Column:
    """Parameters in millions."""
    means = [found and found.mean / 1e6 for found in (line.measured(key) for line in table.lines)]
    return Column("params", name, [Cell(f"{x:.{1 if x >= 10 else 2}f}") if x else Cell("–", "weak") for x in means])


def seeds(table: Table) -> Column:
    """How many seeds of each row are finished, or what became of the row."""
    cells = [Cell(str(len(line.finished) or line.status), _STATUS.get(line.status, "")) for line in table.lines]
    return Column("seeds", "seeds", cells)


def _compared(table: Table, metric: Metric) -> list[Column]:
    """The paper's column and ours; beside them the difference or, under other conditions, the effects of both."""
    paper, ours, tolerance = [line.papers(metric) for line in table.lines], table.means(metric), TOLERANCES[metric]
    columns = [Column(metric, "paper", [Cell(number_text(value, DIGITS[metric])) for value in paper])]
    columns.append(measured(table, metric))
    if table.comparable:
        gaps = [None if mine is None else mine - theirs for mine, theirs in zip(ours, paper, strict=True)]
        gains = [0.0 if gap is None else gap if metric == "BLEU" else -gap for gap in gaps]
        near = ["good" if gain >= -tolerance else "near" if gain >= -2 * tolerance else "far" for gain in gains]
        return [*columns, differences(metric, "diff", gaps, near)]
    theirs, own = table.effects(paper), table.effects(ours)
    # Whether an effect has the paper's sign; one that the paper itself may owe to chance says nothing
    agree = [
        "weak" if not x or y is None or round(abs(y), 6) < tolerance else "good" if x * y > 0 else "far"
        for x, y in zip(own, theirs, strict=True)
    ]
    return [*columns, differences(metric, "Δ paper", theirs), differences(metric, "Δ ours", own, agree)]


def title(table: Table) -> str:
    """What stands above the table: the scale and the data are never left out."""
    finished = f"{table.finished} of {len(table.lines)} rows finished"
    conditions = "" if table.comparable else " (not the paper's conditions)"
    return f"Table 3 at scale {table.scale.name} on {table.data}{conditions}: {finished}"


def conditions(table: Table) -> str:
    """How a table's runs were made, and over which seeds its figures are means."""
    base = dataclasses.asdict(table.base.trained)
    changed = [f"{key.replace('_', ' ')} {value}" for key, value in changes(table.scale).items()]
    sizes = ", ".join(f"{name} {value_text(base[section][key], key)}" for name, section, key in DEFINITION)
    # How text of the paper's name is not the paper's; other text has another name
    data = look_up(table.reference, "config.data")
    others = unlike(data, PAPER_DATA) if data["name"] == PAPER_DATA else []
    deviation = " (mean ± sample standard deviation)" if len(table.seeds) > 1 else ""
    return (
        f"Scale {table.scale.name}: {', '.join(changed) or 'every factor is 1'}; base has {sizes}."
        f" Data: {table.data}, dev set{''.join(f', {other}' for other in others)}."
        f" Seeds: {', '.join(map(str, table.seeds)) or 'none finished'}{deviation}."
        + (f" Runs left out, since settings or folders are not a row's: {table.others}." if table.others else "")
        + "".join(f" Other {origin} than the first run's: {', '.join(rows)}." for origin, rows in table.origins.items())
    )


def rank_sentence(table: Table) -> str:
    """Spearman's rho between the paper's rows and ours, for each metric with its interval, or why there is none."""
    start, rows, texts = "Spearman's ρ between the paper's rows and ours", table.finished, []
    if rows < MIN_ROWS:
        return f"{start}: not enough rows ({rows} finished, at least {MIN_ROWS} needed)."
    for metric in METRICS:
        found = rank_correlation(table, metric)
        texts.append("{} {} ({} to {})".format(metric, *map(signed, found)) if found else f"{metric} none")
    return f"{start}: {', '.join(texts)}; {rows} rows, 95 % intervals by bootstrap over rows and seeds."


def _records(table: Table) -> list[dict[str, Any]]:
    ranks: dict[str, Any] = {}
    for metric in METRICS:
        names = (f"spearman_{metric.lower()}{end}" for end in ("", "_low", "_high"))
        ranks |= zip(names, rank_correlation(table, metric) or [None] * 3, strict=True)
    records = []
    for line in table.lines:
        paper = {f"paper_{key}": value for key, value in dataclasses.asdict(line.config.paper).items()}
        learned = {"learned_positions": line.config.model.positions == "learned"}
        records.append(record(table, line, learned | paper, ranks))
    return records


def record(table: Table, line: Line, definition: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """A line of the CSV, every number in full: after its sizes what else defines it, before its notes all else."""
    found: dict[str, Any] = {"row": line.name}
    found |= {key: getattr(getattr(line.config, section), key) for _, section, key in DEFINITION} | definition
    found |= {"status": line.status, "seeds": " ".join(str(run.seed) for run in line.runs if run.result)}
    for name in ("ppl", "bits_per_character", "bleu_paper", "bleu_sacrebleu", "bleu_intl"):
        value = line.measured(f"dev.{name.replace('bleu_', 'bleu.')}")
        found |= {name: value and value.mean, f"{name}_deviation": value and value.deviation}
    found |= {key: line.finished[0][key] if line.finished else None for key in ("params", "params_at_40960_rows")}
    found |= {origin.replace(" ", "_"): "; ".join(line.origins(origin)) for origin in ORIGINS}
    found |= {"data": table.data, "precision": look_up(table.reference, "config.hardware.precision")}
    found |= {"comparable": table.comparable, "scale": table.scale.name}
    found |= {f"scale_{name}": value for name, value in dataclasses.asdict(table.scale).items() if name != "name"}
    return found | others | {"notes": "; ".join(f"{run} {status}: {detail}" for run, status, detail in line.notes)}


def printed(layouts: Sequence[Layout], format: str, console: Console | None = None) -> str:
    """The tables as `terminal`, `md`, `csv` (one table of all) or `latex` text. ConfigError for another format."""
    if format == "csv":
        return _csv(layouts)
    terminal = partial(_terminal, console or Console())
    one_by_one: dict[str, Callable[[Layout], str]] = {"terminal": terminal, "md": _markdown, "latex": _latex}
    if format not in one_by_one:
        raise ConfigError(f"format={format}: must be one of {', '.join(one_by_one)}, csv")
    return "\n".join(map(one_by_one[format], layouts))


def _terminal(console: Console, layout: Layout) -> str:
    """What the terminal has room for; a file or a pipe gets every column, without colour."""
    for left_out in _LEFT_OUT:
        kept = [column for column in layout.columns if not {column.group, column.name} & left_out]
        grid = _grid(layout._replace(columns=kept))
        needed = Measurement.get(console, console.options.update(max_width=1000), grid)
        if not console.is_terminal or needed.minimum <= console.width:
            break
    if not console.is_terminal:
        console = Console(file=console.file, width=needed.maximum, color_system=None)
    notes = [
        Text.assemble((kind, _COLOURS[_STATUS[kind]]), f"  {run}: {told}") for run, kind, told in layout.table.notes
    ]
    with console.capture() as capture:
        console.print(Text(layout.title, "bold"))
        console.print(grid, width=max(console.width, needed.minimum), crop=False)
        console.print(Text(layout.caption, "dim"), *notes, *map(Text, layout.claims), sep="\n")
    return capture.get()


def _grid(layout: Layout) -> Grid:
    grid = Grid(box=HORIZONTALS, padding=0, show_edge=False, border_style="dim")
    for column in layout.columns:
        group = column.group if column.title != column.name else ""
        longest = max(map(len, (column.name, *(cell.text for cell in column.cells))))
        width = 20 if column.group in ("settings", "source") else longest
        grid.add_column(f"{group}\n{column.name}", justify="left" if column.align == "l" else "right", min_width=width)
    for (_, cells), closes in zip(layout.rows, [*layout.table.opens[1:], True], strict=True):
        grid.add_row(*(Text(cell.text, _COLOURS.get(cell.style, "")) for cell in cells), end_section=closes)
    return grid


def _tabulated(layout: Layout, format: str, escaped: Callable[[str], str]) -> str:
    rows: list[Any] = []
    for opens, row in layout.rows:
        rows += [SEPARATING_LINE] if opens and rows and format != "pipe" else []
        rows.append([escaped(cell.text) for cell in row])
    head = [escaped(column.title) for column in layout.columns]
    align = ["right" if column.align == "r" else "left" for column in layout.columns]
    return str(tabulate(rows, head, tablefmt=format, colalign=align, disable_numparse=True))


def _markdown(layout: Layout) -> str:
    text = _tabulated(layout, "pipe", _markdown_text)
    notes = [f"- {status}: {run}: `{detail.replace('`', chr(39))}`" for run, status, detail in layout.table.notes]
    notes += [f"- {_markdown_text(claim)}" for claim in layout.claims]
    parts = [f"### {_markdown_text(layout.title)}", text, _markdown_text(layout.caption), "\n".join(notes)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _markdown_text(text: str) -> str:
    # An underscore inside a word means nothing on GitHub, and `P_drop` reads better without a backslash.
    return re.sub(r"[\\`*\[\]<>|~&$]|\b_|_\b", lambda special: f"\\{special[0]}", text)


def _csv(layouts: Sequence[Layout]) -> str:
    """The records of the tables under one header, each row once; what a table has no column for is empty."""
    rows: dict[str, dict[str, Any]] = {}
    for record in (record for layout in layouts for record in layout.records):
        rows.setdefault(record["row"], record)
    text = io.StringIO()
    header = list(dict.fromkeys(key for record in rows.values() for key in record))
    writer = csv.DictWriter(text, header, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows.values())
    return text.getvalue()


def _latex(layout: Layout) -> str:
    head, rows = _tabulated(layout, "latex_raw", _latex_text).split(r"\\", 1)
    symbols = re.sub(r"\$?(\\?\w+)\$?\\_(\w+)", r"$\1_{\\mathrm{\2}}$", head)
    notes = [f"{status}: {run}: {detail}." for run, status, detail in layout.table.notes]
    caption = _latex_text(" ".join([f"{layout.title}.", layout.caption, *notes, *layout.claims]))
    text = rf"\resizebox{{\textwidth}}{{!}}{{{symbols}\\{rows}}}"  # 21 columns are wider than any page
    name = re.sub(r"\W+", "-", layout.title.partition(" at ")[0].lower())
    return "\n".join([r"\begin{table*}", rf"\caption{{{caption}}}\label{{tab:{name}}}", text, r"\end{table*}", ""])


# What plain LaTeX needs of text; any other character beyond ASCII would need a font that it does not load
_LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", '"': "''", "…": r"\ldots{}"}
_LATEX |= {"±": r"$\pm$", "−": "$-$", "×": r"$\times$", "Δ": r"$\Delta$", "ρ": r"$\rho$", "ε": r"$\epsilon$", "–": "--"}
_LATEX |= {"≤": r"$\leq$"} | {character: f"${character}$" for character in "<>|"}
_LATEX |= {character: f"\\{character}" for character in "{}$&#_%"}


def _latex_text(text: str) -> str:
    return "".join(_LATEX.get(character, character if character.isascii() else "?") for character in text)
