"""Table 3 and the table of rows beyond it, for a terminal and as Markdown, CSV and LaTeX."""

import csv
import dataclasses
import io
import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import HORIZONTALS
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as Grid
from rich.text import Text
from tabulate import SEPARATING_LINE, tabulate

from aiayn.config.schema import ConfigError
from aiayn.runs.records import PAPER_DATA, factors, look_up, unlike
from aiayn.tables import columns
from aiayn.tables.columns import STATUS, Cell, Column
from aiayn.tables.paper_claims import MIN_ROWS, Finding, rank_correlation
from aiayn.tables.table3 import DEFINITION, METRICS, Line, Table

_COLOURS = {"good": "green", "near": "yellow", "far": "red", "weak": "dim"}
# What a terminal leaves out, the first that fits: a row's letter, its name, or its cells say the same
_NARROW = {"letter", "definition", "params"}
_LEFT_OUT = (
    *({"letter"}, {"row"}, {"letter", "definition"}, _NARROW, _NARROW | {"source"}),
    *(_NARROW | {"source", *others} for others in ({"diff"}, {"diff", "Δ paper", "Δ ours"})),
)


@dataclass(frozen=True)
class Layout:
    """A table as it is printed, whatever the format."""

    title: str
    caption: str
    columns: list[Column]
    opens: list[bool]  # whether each row is the first of its group
    notes: list[tuple[str, str, str]]  # (run, status, detail)
    records: list[dict[str, Any]]  # every number in full, for CSV
    claims: Sequence[str] = ()  # and what became of each

    @property
    def rows(self) -> list[tuple[bool, tuple[Cell, ...]]]:
        """The cells of each row, behind whether it is the first of its group."""
        return list(zip(self.opens, zip(*(column.cells for column in self.columns), strict=True), strict=True))

    def without(self, left_out: Collection[str]) -> "Layout":
        """The same without some columns, or groups of them."""
        kept = [column for column in self.columns if not {column.group, column.name} & set(left_out)]
        return dataclasses.replace(self, columns=kept)


def layout(table: Table) -> Layout:
    """Table 3 as it is printed."""
    return Layout(title(table), caption(table), columns.of_table3(table), table.opens, table.notes, _records(table))


def printed(layouts: Sequence[Layout], format: str, console: Console | None = None) -> str:
    """The tables as text in a format: `terminal`, `md`, `csv` or `latex`; one below the other, in `csv` as one table.

    For the terminal it is as wide and as coloured as `console` (standard output when none is given) allows; a file or a
    pipe gets every column, without colour. ConfigError for another format.
    """
    one_by_one: dict[str, Callable[[Layout], str]] = {
        "terminal": lambda layout: _terminal(layout, console or Console()),
        "md": _markdown,
        "latex": _latex,
    }
    if format == "csv":
        return _csv(layouts)
    if format not in one_by_one:
        raise ConfigError(f"format={format}: must be one of {', '.join(one_by_one)}, csv")
    return "\n".join(map(one_by_one[format], layouts))


def title(table: Table) -> str:
    """What stands above the table: the scale and the data are never left out."""
    finished = f"{table.finished} of {len(table.lines)} rows finished"
    conditions = "" if table.comparable else " (not the paper's conditions)"
    return f"Table 3 at scale {table.scale.name} on {table.data}{conditions}: {finished}"


def caption(table: Table) -> str:
    """At most four lines: scale, corpus, seeds, and how well the order of the rows agrees; docs/results.md has more."""
    # How text of the paper's name is not the paper's; other text has another name
    data = look_up(table.reference, "config.data")
    others = unlike(data, PAPER_DATA) if data["name"] == PAPER_DATA else []
    named = f" ({'; '.join(others)})" if others else ""
    effects = f"Not the paper's conditions{named}: compare effects (Δ is a row minus base), not figures. "
    return "\n".join([*conditions(table), f"{'' if table.comparable else effects}{rank_sentence(table)}"])


def conditions(table: Table) -> list[str]:
    """How a table's runs were made, and over which seeds its figures are means: scale, corpus, seeds."""
    scale, config = table.scale, look_up(table.reference, "config")
    changed = [f"{name.replace('_', ' ')} × {factor:g}" for name, factor in factors(scale).items() if factor != 1]
    base = dataclasses.asdict(table.base.trained)
    sizes = ", ".join(f"{name} {columns.value_text(base[section][key], key)}" for name, section, key in DEFINITION)
    selected = [
        f", pairs of at most {scale.max_words} words a side" if scale.max_words else "",
        f", in training of at most {scale.max_train_words} words" if scale.max_train_words else "",
        f", in training the first {scale.pairs:,} of them" if scale.pairs else "",
    ]
    deviation = "; mean ± sample standard deviation" if len(table.seeds) > 1 else ""
    return [
        f"Scale {scale.name}: {', '.join(changed)}; base was trained with {sizes}."
        if changed
        else f"Scale {scale.name}: every factor is 1.",
        f"Data: {table.data}, dev set{''.join(selected)}. Tokenizer: {config['tokenizer']}. "
        f"Precision: {config['hardware']['precision']}.",
        f"Seeds: {', '.join(map(str, table.seeds)) or 'none finished'}{deviation}."
        + (f" Runs with other settings than a row's, left out: {table.others}." if table.others else ""),
    ]


def rank_sentence(table: Table) -> str:
    """Spearman's rho between the paper's rows and ours, for each metric with its interval, or why there is none."""
    start = "Spearman's ρ between the paper's rows and ours"
    rows = table.finished
    if rows < MIN_ROWS:
        return f"{start}: not enough rows ({rows} finished, at least {MIN_ROWS} needed)."
    summaries, drawn = [], "rows"
    for metric in METRICS:
        found = rank_correlation(table, metric)
        if found is None:
            summaries.append(f"{metric} none, all rows are equal")
            continue
        low, high = map(_signed, found.interval)
        summaries.append(f"{metric} {_signed(found.rho)} ({low} to {high})")
        some = "rows and seeds" if found.repeated == rows else "rows, and over seeds where a row has several"
        drawn = some if found.repeated else "rows alone, since no row has a second seed"
    return f"{start}: {', '.join(summaries)}; {rows} rows, 95 % intervals by bootstrap over {drawn}."


def finding_texts(found: Finding) -> dict[str, str]:
    """A finding in words and figures, as a page or a table prints it."""
    claim = found.claim
    bleu = claim.metric == "BLEU"

    def gain(effect: float) -> str:
        return _signed(effect) if bleu else f"{100 * -math.expm1(-effect):+.1f} %".replace("-", "−")

    def between(pair: tuple[float, float] | None) -> str:
        return "–" if pair is None else f"{gain(pair[0])} to {gain(pair[1])}"

    *lower, last = claim.rows
    sign = " = " if claim.equal else " ≤ " if claim.not_worse else " < "
    return {
        "sentence": claim.sentence,
        "rows": sign.join([*lower, last if claim.share == 1 else f"{claim.share:g} {last}"]),
        "metric": claim.metric,
        "paper": "–" if found.paper is None else gain(found.paper),
        "ours": "–" if found.effect is None else gain(found.effect),
        "interval": between(found.interval),
        "sentences": between(found.sentences) + (" (90 %)" if claim.equal and found.sentences else ""),
        "p": "–" if found.p is None else "< 0.001" if found.p < 0.001 else f"{found.p:.3f}",
        "verdict": found.verdict,
        "because": found.because,
    }


def _signed(value: float) -> str:
    return f"{value:+.2f}".replace("-", "−")


def _terminal(table: Layout, console: Console) -> str:
    for left_out in _LEFT_OUT:
        grid = _grid(table.without(left_out))
        needed = Measurement.get(console, console.options.update(max_width=1000), grid)
        if not console.is_terminal or needed.minimum <= console.width:
            break
    if not console.is_terminal:
        console = Console(file=console.file, width=needed.maximum, color_system=None)
    notes = [
        Text.assemble((status, _COLOURS[STATUS[status]]), f"  {run}: {detail}") for run, status, detail in table.notes
    ]
    with console.capture() as capture:
        console.print(Text(table.title, "bold"))
        console.print(grid, width=max(console.width, needed.minimum), crop=False)
        console.print(Text(table.caption, "dim"), *notes, *map(Text, table.claims), sep="\n")
    return capture.get()


def _grid(table: Layout) -> Grid:
    """The table for a terminal: bars between groups of columns, rules between groups of rows; a source may wrap."""
    grid, cells, title = Grid(box=HORIZONTALS, padding=0, show_edge=False, border_style="dim"), list[list[Text]](), ""
    for column in table.columns:
        if column.title != title:
            grid.add_column("│\n│", style="dim", min_width=1)
            cells.append([Text("│")] * len(column.cells))
        head = f"{column.title if column.title != title else ''}\n{column.name}"
        title, width = column.title, max(map(len, (column.name, *(cell.text for cell in column.cells))))
        grid.add_column(head, min_width=20 if column.group == "source" else width)
        grid.columns[-1].justify = "left" if column.align == "l" else "right"
        cells.append([Text(cell.text, _COLOURS.get(cell.style, "")) for cell in column.cells])
    for row, closes in zip(zip(*cells, strict=True), [*table.opens[1:], True], strict=True):
        grid.add_row(*row, end_section=closes)
    return grid


def _markdown(table: Layout) -> str:
    table = table.without({"letter"})
    head = [_markdown_text(f"{column.title} {column.name}".strip()) for column in table.columns]
    rows = [[_markdown_text(cell.text) for cell in row] for _, row in table.rows]
    align = ["right" if column.align == "r" else "left" for column in table.columns]
    text = tabulate(rows, head, tablefmt="pipe", colalign=align, disable_numparse=True)
    notes = [f"- {status}: {run}: `{detail.replace('`', chr(39))}`" for run, status, detail in table.notes]
    notes += [f"- {_markdown_text(claim)}" for claim in table.claims]
    parts = [
        f"### {_markdown_text(table.title)}",
        text,
        _markdown_text(table.caption.replace("\n", " ")),
        "\n".join(notes),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _markdown_text(text: str) -> str:
    # An underscore inside a word means nothing on GitHub, and `P_drop` reads better without a backslash.
    return re.sub(r"[\\`*\[\]<>|~&$]|\b_|_\b", lambda special: f"\\{special[0]}", text)


def _records(table: Table) -> list[dict[str, Any]]:
    """Every number in full, and nothing left to a caption."""
    ranks: dict[str, float | None] = {}
    for metric in METRICS:
        found = rank_correlation(table, metric)
        figures = (found.rho, *found.interval) if found else (None, None, None)
        names = (f"spearman_{metric.lower()}{end}" for end in ("", "_low", "_high"))
        ranks |= dict(zip(names, figures, strict=True))
    records = []
    for line in table.lines:
        config = line.config
        learned = {"learned_positions": config.model.positions == "learned"}
        paper = {f"paper_{key}": value for key, value in dataclasses.asdict(config.paper).items()}
        records.append(record(table, line, learned | paper, ranks))
    return records


def record(table: Table, line: Line, definition: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """Every number of a line in full: after its sizes what else defines it, and before its notes what else is known."""
    keys = ("dev.ppl", "dev.bits_per_character", "dev.bleu.paper", "dev.bleu.sacrebleu", "dev.bleu.intl")
    found = {"row": line.name, **{key: getattr(getattr(line.config, section), key) for _, section, key in DEFINITION}}
    found |= definition
    found |= {"status": line.status, "seeds": " ".join(str(run.seed) for run in line.runs if run.result)}
    for key in keys:
        value = line.measured(key)
        name = key.removeprefix("dev.").replace(".", "_")
        found |= {name: value and value.mean, f"{name}_deviation": value and value.deviation}
    found |= {key: line.finished[0][key] if line.finished else None for key in ("params", "params_at_40960_rows")}
    found |= {"data": table.data, "precision": look_up(table.reference, "config.hardware.precision")}
    found |= {"comparable": table.comparable, "scale": table.scale.name}
    found |= {f"scale_{name}": value for name, value in dataclasses.asdict(table.scale).items() if name != "name"}
    found |= others
    return found | {"notes": "; ".join(f"{run} {status}: {detail}" for run, status, detail in line.notes)}


def _csv(tables: Sequence[Layout]) -> str:
    """The records of the tables under one header, each row once; what a table has no column for is empty."""
    rows: dict[str, dict[str, Any]] = {}
    for record in (record for table in tables for record in table.records):
        rows.setdefault(record["row"], record)
    text = io.StringIO()
    header = list(dict.fromkeys(key for record in rows.values() for key in record))
    writer = csv.DictWriter(text, header, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows.values())
    return text.getvalue()


def _latex(table: Layout) -> str:
    table = table.without({"letter"})
    head = [_latex_text(f"{column.title} {column.name}".strip()) for column in table.columns]
    rows: list[Any] = []
    for opens, row in table.rows:
        rows += [SEPARATING_LINE] if opens and rows else []
        rows.append([_latex_text(cell.text) for cell in row])
    align = ["right" if column.align == "r" else "left" for column in table.columns]
    text = tabulate(rows, head, tablefmt="latex_raw", colalign=align, disable_numparse=True)
    notes = [f"{status}: {run}: {detail}." for run, status, detail in table.notes]
    caption = _latex_text(" ".join([f"{table.title}.", *table.caption.splitlines(), *notes, *table.claims]))
    size = r"\centering\footnotesize\setlength{\tabcolsep}{3pt}"
    return "\n".join([r"\begin{table}", size, rf"\caption{{{caption}}}", text, r"\end{table}", ""])


# What plain LaTeX needs of text; any other character beyond ASCII would need a font that it does not load
_LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", '"': "''", "…": r"\ldots{}"}
_LATEX |= {"±": r"$\pm$", "−": "$-$", "×": r"$\times$", "Δ": r"$\Delta$", "ρ": r"$\rho$", "ε": r"$\epsilon$", "–": "--"}
_LATEX |= {"≤": r"$\leq$"} | {character: f"${character}$" for character in "<>|"}
_LATEX |= {character: f"\\{character}" for character in "{}$&#_%"}


def _latex_text(text: str) -> str:
    return "".join(_LATEX.get(character, character if character.isascii() else "?") for character in text)
