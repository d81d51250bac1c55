"""The columns and cells of the printed Table 3, each cell compared with the paper's figure."""

from collections.abc import Sequence
from dataclasses import dataclass

from aiayn.config.schema import Config
from aiayn.runs.records import number_text
from aiayn.tables.table3 import DEFINITION, KEYS, Line, Measured, Metric, Table

# Published base models spread over 0.8 BLEU on newstest2013; from base to A h=1, Table 3 loses 0.37 PPL for 0.9 BLEU.
BLEU_TOLERANCE, PPL_TOLERANCE = 0.4, 0.16
TOLERANCES: dict[Metric, float] = {"PPL": PPL_TOLERANCE, "BLEU": BLEU_TOLERANCE}
BETTER: dict[Metric, int] = {"PPL": -1, "BLEU": +1}
DIGITS: dict[Metric, int] = {"PPL": 2, "BLEU": 1}
# How a run that is not finished stands out.
STATUS = {"failed": "far", "stale": "near", "half-done": "near", "missing": "weak"}


@dataclass(frozen=True)
class Cell:
    """One place of the printed table."""

    text: str
    style: str = ""  # good, near, far, weak


@dataclass(frozen=True)
class Column:
    """One column of the printed table; neighbours of one group stand together."""

    group: str
    name: str
    cells: list[Cell]

    @property
    def width(self) -> int:
        """The characters of its widest place."""
        return max(len(text) for text in (self.name, *(cell.text for cell in self.cells)))

    @property
    def align(self) -> str:
        """`l` for text, `r` for numbers."""
        return "l" if self.group in ("letter", "row", "source") else "r"

    @property
    def title(self) -> str:
        """What stands above the group."""
        return self.group if self.group in ("PPL", "BLEU", "params") else ""


def columns_of(table: Table) -> list[Column]:
    """The columns of the printed table, from left to right."""
    lines = table.lines
    columns = [
        *name_columns(table),
        *(Column("definition", symbol, definition_cells(table, section, key)) for symbol, section, key in DEFINITION),
        *_metric(table, "PPL"),
        *_metric(table, "BLEU"),
        Column("params", "paper", [Cell(str(line.config.paper.params_millions or "")) for line in lines]),
        Column("params", "40 960", [params_cell(line, "params_at_40960_rows") for line in lines]),
        Column("params", "ours", [params_cell(line, "params") for line in lines]),
        Column("seeds", "seeds", [seeds_cell(line) for line in lines]),
    ]
    # The paper's vocabulary says nothing about a model of another width.
    return [column for column in columns if table.comparable or column.name != "40 960"]


def name_columns(table: Table) -> list[Column]:
    """The letters of the groups, each where its group begins, and the names of the rows."""
    letters = [Cell(line.group if opens else "") for line, opens in zip(table.lines, table.opens, strict=True)]
    return [Column("letter", "", letters), Column("row", "row", [Cell(line.name) for line in table.lines])]


def rows_of(columns: Sequence[Column]) -> list[tuple[Cell, ...]]:
    """The same cells, row by row."""
    return list(zip(*(column.cells for column in columns), strict=True))


def definition_cells(table: Table, section: str, key: str) -> list[Cell]:
    """Like the paper, only base and what differs from it is printed."""
    base, *others = (value_text(line.config, section, key) for line in table.lines)
    return [Cell(base), *(Cell(value if value != base else "") for value in others)]


def value_text(config: Config, section: str, key: str) -> str:
    """A value of a row as the paper prints it: 100000 steps are 100K."""
    value = getattr(getattr(config, section), key)
    return f"{value // 1000}K" if key == "max_steps" and value % 1000 == 0 else str(value)


def _metric(table: Table, metric: Metric) -> list[Column]:
    """The paper's column, ours and the difference; under other conditions also both effects: a row minus its base."""
    digits, tolerance = DIGITS[metric], TOLERANCES[metric]
    paper = [line.papers(metric) for line in table.lines]
    measured = [line.measured(KEYS[metric]) for line in table.lines]
    ours = table.means(metric)
    paper_column = Column(metric, "paper", [Cell(number_text(value, digits)) for value in paper])
    our_column = Column(metric, "ours", [measured_cell(value, digits) for value in measured])
    gaps = [None if mine is None else mine - theirs for mine, theirs in zip(ours, paper, strict=True)]
    styles = [_nearness(gap, tolerance, BETTER[metric]) if table.comparable else "weak" for gap in gaps]
    differences = [signed_cell(gap, digits, style) for gap, style in zip(gaps, styles, strict=True)]
    compared = [paper_column, our_column, Column(metric, "diff", differences)]
    if table.comparable:
        return compared
    effects = list(zip(table.effects(paper), table.effects(ours), strict=True))
    their_cells = [signed_cell(theirs, digits, "") for theirs, _ in effects]
    our_cells = [signed_cell(mine, digits, _agreement(mine, theirs, tolerance)) for theirs, mine in effects]
    return [*compared, Column(metric, "Δ paper", their_cells), Column(metric, "Δ ours", our_cells)]


def _nearness(difference: float | None, tolerance: float, better: int) -> str:
    """Reproduced or better, a little worse, far worse."""
    gain = 0.0 if difference is None else difference * better
    return "good" if gain >= -tolerance else "near" if gain >= -2 * tolerance else "far"


def _agreement(ours: float | None, paper: float | None, tolerance: float) -> str:
    """Whether an effect has the paper's sign; one that the paper itself may owe to chance says nothing."""
    if ours is None or paper is None or round(abs(paper), 6) < tolerance:
        return "weak"
    return "good" if ours * paper > 0 else "far"


def measured_cell(value: Measured | None, digits: int) -> Cell:
    """A mean over seeds with its deviation."""
    if value is None:
        return Cell("–", "weak")
    deviation = "" if value.deviation is None else f"±{number_text(value.deviation, digits)}"
    return Cell(f"{number_text(value.mean, digits)}{deviation}")


def signed_cell(value: float | None, digits: int, style: str) -> Cell:
    """A difference, with its sign unless it is printed as 0."""
    if value is None:
        return Cell("")
    size = number_text(abs(value), digits)
    sign = "" if float(size) == 0 else "+" if value > 0 else "−"
    return Cell(f"{sign}{size}", style)


def signed_text(value: float, digits: int = 2) -> str:
    """A figure with its sign, also a plus; a minus as wide as a plus."""
    return f"{value:+.{digits}f}".replace("-", "−")


def params_cell(line: Line, key: str) -> Cell:
    """Parameters in millions."""
    value = line.measured(key)
    return Cell("–", "weak") if value is None else Cell(f"{value.mean / 1e6:.{1 if value.mean >= 1e7 else 2}f}")


def seeds_cell(line: Line) -> Cell:
    """How many seeds are finished, or what became of the row."""
    return Cell(str(len(line.finished))) if line.finished else Cell(line.status, STATUS[line.status])
