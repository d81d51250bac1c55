"""The columns of Table 3 and of the rows beyond it, each figure beside the paper's."""

from collections.abc import Sequence
from dataclasses import dataclass

from aiayn.runs.records import number_text
from aiayn.tables.table3 import DEFINITION, KEYS, TOLERANCES, Metric, Table

BETTER: dict[Metric, int] = {"PPL": -1, "BLEU": +1}
DIGITS: dict[Metric, int] = {"PPL": 2, "BLEU": 1}
# How a run that is not finished stands out
STATUS = {"failed": "far", "stale": "near", "half-done": "near", "missing": "weak"}


@dataclass(frozen=True)
class Cell:
    """One place of a printed table."""

    text: str
    style: str = ""  # good, near, far, weak


@dataclass(frozen=True)
class Column:
    """One column of a printed table; neighbours of one group stand together."""

    group: str
    name: str
    cells: list[Cell]

    @property
    def align(self) -> str:
        """`l` for text, `r` for numbers."""
        return "l" if self.group in ("letter", "row", "source") else "r"

    @property
    def title(self) -> str:
        """What stands above the group."""
        return self.group if self.group in ("PPL", "BLEU", "params") else ""


def of_table3(table: Table) -> list[Column]:
    """Table 3 from left to right. What base says of a row stands there once, as in the paper."""
    columns = [
        *names(table),
        *(definition(table, symbol, section, key) for symbol, section, key in DEFINITION),
        *_compared(table, "PPL"),
        *_compared(table, "BLEU"),
        Column("params", "paper", [Cell(str(line.config.paper.params_millions or "")) for line in table.lines]),
        params(table, "40 960", "params_at_40960_rows"),
        params(table, "ours", "params"),
        seeds(table),
    ]
    # The paper's vocabulary says nothing about a model of another width
    return [column for column in columns if table.comparable or column.name != "40 960"]


def names(table: Table) -> list[Column]:
    """The letters of the groups, each where its group begins, and the names of the rows."""
    letters = [Cell(line.group if opens else "") for line, opens in zip(table.lines, table.opens, strict=True)]
    return [Column("letter", "", letters), Column("row", "row", [Cell(line.name) for line in table.lines])]


def definition(table: Table, symbol: str, section: str, key: str) -> Column:
    """A value of base, and of the rows that differ from it: 100000 steps are 100K."""
    base, *others = (value_text(getattr(getattr(line.config, section), key), key) for line in table.lines)
    return Column("definition", symbol, [Cell(base), *(Cell(value if value != base else "") for value in others)])


def value_text(value: object, key: str) -> str:
    """A value of a row as the paper prints it: 100000 steps are 100K."""
    return f"{value // 1000}K" if key == "max_steps" and isinstance(value, int) and value % 1000 == 0 else str(value)


def measured(table: Table, metric: Metric) -> Column:
    """Our mean over seeds with its deviation."""
    cells = []
    for found in (line.measured(KEYS[metric]) for line in table.lines):
        texts = [] if found is None else [found.mean] if found.deviation is None else [found.mean, found.deviation]
        cells.append(
            Cell("±".join(number_text(value, DIGITS[metric]) for value in texts) or "–", "" if texts else "weak")
        )
    return Column(metric, "ours", cells)


def differences(metric: Metric, name: str, values: Sequence[float | None], styles: Sequence[str] | str = "") -> Column:
    """Figures with their signs, unless they are printed as 0."""
    cells = []
    for value, style in zip(values, styles or [""] * len(values), strict=True):
        size = "" if value is None else number_text(abs(value), DIGITS[metric])
        sign = "" if not size or float(size) == 0 else "+" if value and value > 0 else "−"
        cells.append(Cell(sign + size, style))
    return Column(metric, name, cells)


def params(table: Table, name: str, key: str) -> Column:
    """Parameters in millions."""
    means = [None if (found := line.measured(key)) is None else found.mean for line in table.lines]
    texts = ["" if mean is None else f"{mean / 1e6:.{1 if mean >= 1e7 else 2}f}" for mean in means]
    return Column("params", name, [Cell(text) if text else Cell("–", "weak") for text in texts])


def seeds(table: Table) -> Column:
    """How many seeds of each row are finished, or what became of the row."""
    cells = [
        Cell(str(len(line.finished))) if line.finished else Cell(line.status, STATUS[line.status])
        for line in table.lines
    ]
    return Column("seeds", "seeds", cells)


def _compared(table: Table, metric: Metric) -> list[Column]:
    """The paper's column, ours and the difference; under other conditions also both effects: a row minus its base."""
    tolerance, better = TOLERANCES[metric], BETTER[metric]
    paper, ours = [line.papers(metric) for line in table.lines], table.means(metric)
    gaps = [None if mine is None else mine - theirs for mine, theirs in zip(ours, paper, strict=True)]
    # Reproduced or better, a little worse, far worse
    gains = [0.0 if gap is None else gap * better for gap in gaps]
    near = ["good" if gain >= -tolerance else "near" if gain >= -2 * tolerance else "far" for gain in gains]
    compared = [
        Column(metric, "paper", [Cell(number_text(value, DIGITS[metric])) for value in paper]),
        measured(table, metric),
        differences(metric, "diff", gaps, near if table.comparable else ["weak"] * len(gaps)),
    ]
    if table.comparable:
        return compared
    their_effects, our_effects = table.effects(paper), table.effects(ours)
    agree = [_agreement(*pair, tolerance) for pair in zip(our_effects, their_effects, strict=True)]
    effects = differences(metric, "Δ paper", their_effects), differences(metric, "Δ ours", our_effects, agree)
    return [*compared, *effects]


def _agreement(ours: float | None, paper: float | None, tolerance: float) -> str:
    """Whether an effect has the paper's sign; one that the paper itself may owe to chance says nothing."""
    if ours is None or paper is None or round(abs(paper), 6) < tolerance:
        return "weak"
    return "good" if ours * paper > 0 else "far"
