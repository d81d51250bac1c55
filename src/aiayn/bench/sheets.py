"""What `aiayn bench` has measured as tables: one form for the terminal and one for Markdown."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text
from tabulate import tabulate

from aiayn.cost.flops import TERA

OURS = "aiayn"


@dataclass(frozen=True)
class Sheet:
    """A table with a title above it and remarks under it."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    remarks: Sequence[str] = ()
    words: Sequence[int] = (0,)  # columns that stand to the left; numbers stand to the right

    def terminal(self) -> Table:
        """The table without the remarks, as rich prints it."""
        shown = Table(title=self.title, title_justify="left", box=None, pad_edge=False)
        for number, name in enumerate(self.head):
            shown.add_column(name, justify="left" if number in self.words else "right")
        for row in self.rows:
            shown.add_row(*row)
        return shown

    def markdown(self) -> str:
        """The whole as Markdown."""
        align = ["left" if number in self.words else "right" for number in range(len(self.head))]
        head, *rows = ([cell.replace("|", "\\|") for cell in row] for row in (self.head, *self.rows))
        text = tabulate(rows, head, tablefmt="pipe", colalign=align, disable_numparse=True)
        return "\n".join([f"### {self.title}", "", text, "", *(f"- {line}" for line in self.remarks), ""])


@dataclass(frozen=True)
class Verbatim:
    """Text that another library has laid out, with a title above it."""

    title: str
    text: str
    remarks: Sequence[str] = ()

    def terminal(self) -> Text:
        """The whole, each line as long as it is."""
        return Text(f"{self.title}\n{self.text}", no_wrap=True, overflow="ignore")

    def markdown(self) -> str:
        """The whole as a block of Markdown."""
        return "\n".join([f"### {self.title}", "", "```", self.text.strip(), "```", ""])


def by_line(kind: str, part: dict[str, Any]) -> Sheet:
    """A contest in full, one line for each contestant and precision."""
    unit = part["unit"]
    ours = {line["precision"]: line["seconds_a_round"] for line in part["lines"] if line["name"] == OURS}
    rows = []
    for line in part["lines"]:
        base = ours.get(line["precision"]) or next(iter(ours.values()))
        ratio = statistics.median(theirs / own for theirs, own in zip(line["seconds_a_round"], base, strict=True))
        rates = (_rate(part[f"{side}_tokens"], line["seconds_a_round"]) for side in ("target", "source"))
        milliseconds = 1000 * statistics.median(line["seconds_a_round"]) / part["units_a_round"]
        rows.append(
            [
                line["name"],
                line["precision"],
                *(f"{rate:,.0f}" for rate in rates),
                f"{milliseconds:,.1f}",
                "" if line["name"].startswith(OURS) else f"{ratio:.2f} x",
                *_efforts(part, line),
                ", ".join(f"{name.replace('_', ' ')} {value:.2g}" for name, value in line["checks"].items()),
            ]
        )
    article = "an" if unit == "update" else "a"
    head = ["", "precision", "target tok/s", "source tok/s", f"ms {article} {unit}", "aiayn is"]
    head += [
        *(["of peak"] if part.get("peak") else []),
        *(["warm-up s"] if "flops_a_token" in part else []),
        "check",
    ]
    padded = f"padded share of the rivals' tokens {part['padded_share_of_rivals']:.1%}, of ours none"
    rounds = len(part["target_tokens"])
    counted = f"{part['units_a_round']} {unit}{'e' if unit == 'batch' else ''}s a round"
    title = f"{kind}: {counted}, median of {rounds} rounds"
    return Sheet(title, head, rows, [padded, *verdict(part)], words=(0, 1, len(head) - 1))


def by_rival(parts: dict[str, dict[str, Any]]) -> Sheet:
    """All contests in short, target tokens/s with the contestants as columns."""
    names = list(dict.fromkeys(line["name"] for part in parts.values() for line in part["lines"]))
    rows = []
    for kind, part in parts.items():
        rates: dict[str, dict[str, float]] = {}
        for line in part["lines"]:
            rates.setdefault(line["precision"], {})[line["name"]] = _rate(
                part["target_tokens"], line["seconds_a_round"]
            )
        for precision, found in rates.items():
            rows.append([kind, precision, *(f"{found[name]:,.0f}" if name in found else "" for name in names)])
    remarks = [f"{kind}: {line}" for kind, part in parts.items() for line in verdict(part)]
    return Sheet("Target tokens a second", ["", "precision", *names], rows, remarks, words=(0, 1))


def verdict(part: dict[str, Any]) -> list[str]:
    """Ours beside the fastest rival: both in fp32, then each in whichever precision it is fastest in."""
    lines = []
    for what, chosen in (
        ("fp32", [x for x in part["lines"] if x["precision"] == "fp32"]),
        ("each in its fastest precision", part["lines"]),
    ):
        rates = {(x["name"], x["precision"]): _rate(part["target_tokens"], x["seconds_a_round"]) for x in chosen}
        own = [(rate, *key) for key, rate in rates.items() if key[0].startswith(OURS)]
        theirs = [(rate, *key) for key, rate in rates.items() if not key[0].startswith(OURS)]
        if own and theirs:
            (rate, name, precision), (best, rival, other) = max(own), max(theirs)
            lines.append(
                f"{what}: {rate / best:.2f} x the fastest rival ({name} {precision} {rate:,.0f},"
                f" {rival} {other} {best:,.0f} target tokens/s)"
            )
    return lines


def _efforts(part: dict[str, Any], line: dict[str, Any]) -> list[str]:
    """What only training has: the share of the device's peak, and the warm-up, compilation included."""
    if "flops_a_token" not in part:
        return []
    pace = _rate(part["target_tokens"], line["seconds_a_round"]) * part["flops_a_token"] / TERA
    return [*([f"{pace / part['peak']:.1%}"] if part["peak"] else []), f"{line['warm_up_seconds']:.2f}"]


def _rate(tokens: list[int], seconds: list[float]) -> float:
    return statistics.median(count / taken for count, taken in zip(tokens, seconds, strict=True))
