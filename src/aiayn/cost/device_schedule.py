"""The schedule of a sweep: which run gets which devices of a machine, and when."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from aiayn.config.schema import Hardware


class Timed(Protocol):
    """A run with its name and how long one device takes for it, in any unit."""

    @property
    def name(self) -> str: ...

    @property
    def seconds(self) -> float: ...


Scheduled = TypeVar("Scheduled", bound=Timed)


@dataclass(frozen=True)
class Turn(Generic[Scheduled]):
    """A run at work on some devices, in the unit of its seconds from the start."""

    row: Scheduled
    devices: tuple[int, ...]
    start: float
    end: float


def schedule(rows: Sequence[Scheduled], devices: dict[str, int], available: int) -> list[Turn[Scheduled]]:
    """The devices and times of all rows, longest first: each row takes the devices that are free first.

    An update that several devices share is taken to be as much faster: communication is not counted.
    """
    free = [(0.0, number) for number in range(available)]
    turns = []
    for row in sorted(rows, key=lambda row: -row.seconds / devices[row.name]):
        taken = [heapq.heappop(free) for _ in range(devices[row.name])]
        start = max(time for time, _ in taken)
        end = start + row.seconds / len(taken)
        turns.append(Turn(row, tuple(sorted(number for _, number in taken)), start, end))
        for _, number in taken:
            heapq.heappush(free, (end, number))
    return turns


def best_schedule(rows: Sequence[Scheduled], each: int, most: int, available: int) -> list[Turn[Scheduled]]:
    """The schedule with `each` devices a row, and up to `most` for the longest while the whole ends sooner by it."""
    devices = {row.name: each for row in rows}
    best = schedule(rows, devices, available)
    while rows:
        longest = max(rows, key=lambda row: row.seconds / devices[row.name]).name
        if devices[longest] >= min(most, available):
            break
        devices[longest] += 1
        tried = schedule(rows, devices, available)
        if length(tried) >= length(best):
            break
        best = tried
    return best


def most_of_one(hardware: Hardware, available: int) -> int:
    """How many devices one run may have: any number of GPUs; on a CPU what it asks for, so that it keeps its bits."""
    return available if hardware.accelerator == "gpu" else hardware.devices


def length(turns: Sequence[Turn[Scheduled]]) -> float:
    """When the last row ends."""
    return max((turn.end for turn in turns), default=0.0)
