"""The schedule of a sweep: which run gets which devices of a machine, and when."""

import heapq
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from aiayn.config.schema import Hardware


class Turn(NamedTuple):
    """A run at work on some devices, in the unit of its seconds from the start."""

    name: str
    devices: tuple[int, ...]
    start: float
    end: float


def schedule(seconds: Mapping[str, float], devices: Mapping[str, int], available: int) -> list[Turn]:
    """The devices and times of all runs, longest first; `seconds` is what one device takes, in any unit."""
    free = [(0.0, number) for number in range(available)]
    turns = []
    for name in sorted(seconds, key=lambda name: -seconds[name] / devices[name]):
        taken = [heapq.heappop(free) for _ in range(devices[name])]
        start = max(time for time, _ in taken)
        end = start + seconds[name] / len(taken)  # communication is not counted
        turns.append(Turn(name, tuple(sorted(number for _, number in taken)), start, end))
        for _, number in taken:
            heapq.heappush(free, (end, number))
    return turns


def best_schedule(seconds: Mapping[str, float], min_devices: int, max_devices: int, available: int) -> list[Turn]:
    """The schedule with `min_devices` per run; the longest get up to `max_devices` while that ends it sooner."""
    devices = dict.fromkeys(seconds, min_devices)
    best = schedule(seconds, devices, available)
    while seconds:
        longest = max(seconds, key=lambda name: seconds[name] / devices[name])
        if devices[longest] >= min(max_devices, available):
            break
        devices[longest] += 1
        tried = schedule(seconds, devices, available)
        if length(tried) >= length(best):
            break
        best = tried
    return best


def most_of_one(hardware: Hardware, available: int) -> int:
    """How many devices one run may have: any number of GPUs; on a CPU what it asks for, so that it keeps its bits."""
    return available if hardware.accelerator == "gpu" else hardware.devices


def length(turns: Sequence[Turn]) -> float:
    """When the last run ends."""
    return max((turn.end for turn in turns), default=0.0)
