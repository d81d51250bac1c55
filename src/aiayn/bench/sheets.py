"""What `aiayn bench` has measured as tables: one form for the terminal and one for Markdown."""

import statistics
from collections.abc import Mapping, Sequence
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
    rows: Sequence[Mapping[str, str]]  # of the same keys: what stands above the columns
    remarks: Sequence[str] = ()
    words: Sequence[str] = ("",)  # columns that stand to the left; numbers stand to the right

    def terminal(self) -> Table:
        """The table without the remarks, as rich prints it."""
        shown = Table(title=self.title, title_justify="left", box=None, pad_edge=False)
        for name in self.rows[0]:
            shown.add_column(name, justify="left" if name in self.words else "right")
        for row in self.rows:
            shown.add_row(*row.values())
        return shown

    def markdown(self) -> str:
        """The whole as Markdown."""
        align = ["left" if name in self.words else "right" for name in self.rows[0]]
        rows = [{name.replace("|", "\\|"): cell.replace("|", "\\|") for name, cell in row.items()} for row in self.rows]
        text = tabulate(rows, "keys", tablefmt="pipe", colalign=align, disable_numparse=True)
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
        rates = {side: _rate(part[f"{side}_tokens"], line["seconds_a_round"]) for side in ("target", "source")}
        milliseconds = 1000 * statistics.median(line["seconds_a_round"]) / part["units_a_round"]
        row = {"": line["name"], "precision": line["precision"]}
        row |= {f"{side} tok/s": f"{rate:,.0f}" for side, rate in rates.items()}
        row[f"ms {'an' if unit == 'update' else 'a'} {unit}"] = f"{milliseconds:,.1f}"
        row["aiayn is"] = "" if line["name"].startswith(OURS) else f"{ratio:.2f} x"
        if part.get("peak"):
            row["of peak"] = f"{rates['target'] * part['flops_a_token'] / TERA / part['peak']:.1%}"
        if "flops_a_token" in part:  # of training alone
            row["warm-up s"] = f"{line['warm_up_seconds']:.2f}"
        row["check"] = ", ".join(f"{name.replace('_', ' ')} {value:.2g}" for name, value in line["checks"].items())
        rows.append(row)
    padded = f"padded share of the rivals' tokens {part['padded_share_of_rivals']:.1%}, of ours none"
    counted = f"{part['units_a_round']} {unit}{'e' if unit == 'batch' else ''}s a round"
    title = f"{kind}: {counted}, median of {len(part['target_tokens'])} rounds"
    return Sheet(title, rows, [padded, *verdict(part)], words=("", "precision", "check"))


def by_rival(parts: dict[str, dict[str, Any]]) -> Sheet:
    """All contests in short, target tokens/s with the contestants as columns."""
    names = list(dict.fromkeys(line["name"] for part in parts.values() for line in part["lines"]))
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for kind, part in parts.items():
        for line in part["lines"]:
            precision, rate = line["precision"], _rate(part["target_tokens"], line["seconds_a_round"])
            row = rows.setdefault((kind, precision), {"": kind, "precision": precision, **dict.fromkeys(names, "")})
            row[line["name"]] = f"{rate:,.0f}"
    remarks = [f"{kind}: {line}" for kind, part in parts.items() for line in verdict(part)]
    return Sheet("Target tokens a second", list(rows.values()), remarks, words=("", "precision"))


def by_layer(part: dict[str, Any]) -> list[Sheet]:
    """Table 1 with what was counted and measured, and the measured time at every length."""
    lengths, lines, sizes = part["lengths"], part["layers"], part["sizes"]
    ends = (0, -1)
    rows = [
        {
            "layer type": line["name"],
            "complexity": line["complexity"],
            "sequential": line["sequential"],
            "max. path": line["path"],
            "steps": f"{line['steps']:,}",
            "path": f"{line['path_length']:,}",
            **{f"MFLOP at {lengths[end]:,}": f"{line['flops'][end] / lengths[end] / 1e6:,.2f}" for end in ends},
            **{f"µs at {lengths[end]:,}": f"{line['seconds_a_token'][end] * 1e6:,.2f}" for end in ends},
            "FLOP exponent": f"{line['exponent_of_flops']:.2f}",
            "time exponent": f"{line['exponent']:.2f}",
        }
        for line in lines
    ]
    rounds = len(lines[0]["seconds_a_round"][0])
    alike = f"d = {sizes['d']}, r = {sizes['r']}, k = {sizes['k']}; {sizes['sequences']} sequence(s) at once"
    title = f"Table 1 measured, forward and backward in {part['precision']}, {alike}; median of {rounds} rounds"
    table = Sheet(
        title,
        rows,
        [
            "complexity, sequential operations and maximum path length: the paper's orders;"
            f" steps and path: found at n = {lengths[-1]:,}, the path by breadth-first search over gradients",
            "MFLOP and µs: of a token, in sequences of so many tokens;"
            f" exponents: of n in a sequence's cost, fitted from {lengths[len(lengths) // 2]:,} to {lengths[-1]:,}",
            # ATen/cudnn/AutocastRNN.cpp
            *(["Recurrent in fp16: cuDNN takes it for LSTMs under autocast"] if part["precision"] == "bf16" else []),
            *_crossings(part),
        ],
        words=("layer type", "complexity", "sequential", "max. path"),
    )
    heads = ["n", *(f"{length:,}" for length in lengths)]
    cells = ([line["name"], *(f"{1e6 * seconds:,.2f}" for seconds in line["seconds_a_token"])] for line in lines)
    times = [dict(zip(heads, row, strict=True)) for row in cells]
    return [table, Sheet("µs a token, by the length of the sequence", times, words=("n",))]


def _crossings(part: dict[str, Any]) -> list[str]:
    """From which length on self-attention costs more than the recurrent layer."""
    at = part["crossings"]
    attention, recurrent = (line["seconds_a_token"] for line in part["layers"][:2])
    measured = f"from n = {at['measured']:,.0f} on" if at["measured"] else "at no length that was measured"
    ratios = [theirs / own for theirs, own in zip(recurrent, attention, strict=True)]
    return [
        f"self-attention takes longer than the recurrent layer: measured {measured} (it is {ratios[0]:.2f} x as fast"
        f" at {part['lengths'][0]:,}, {ratios[-1]:.2f} x at {part['lengths'][-1]:,})",
        f"it computes more, projections included, from n = {at['counted']:,.0f} on (2 d);"
        f" by the orders alone, n² d and n d², from n = {at['by_orders']:,.0f} on (d)",
    ]


def verdict(part: dict[str, Any]) -> list[str]:
    """Ours beside the fastest rival: both in fp32, then each in whichever precision it is fastest in."""
    lines = []
    rates = [(_rate(part["target_tokens"], x["seconds_a_round"]), x["name"], x["precision"]) for x in part["lines"]]
    in_fp32 = [line for line in rates if line[2] == "fp32"]
    for what, chosen in (("fp32", in_fp32), ("each in its fastest precision", rates)):
        own = [line for line in chosen if line[1].startswith(OURS)]
        theirs = [line for line in chosen if not line[1].startswith(OURS)]
        if own and theirs:
            (rate, name, precision), (best, rival, other) = max(own), max(theirs)
            lines.append(
                f"{what}: {rate / best:.2f} x the fastest rival ({name} {precision} {rate:,.0f},"
                f" {rival} {other} {best:,.0f} target tokens/s)"
            )
    return lines


def _rate(tokens: list[int], seconds: list[float]) -> float:
    return statistics.median(count / taken for count, taken in zip(tokens, seconds, strict=True))
