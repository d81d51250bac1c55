"""What several devices would make of one training, from parts that were measured on one: an estimate, and it says so.

The ranks share each update, so the device has a smaller one and all tell each other the gradient: as training does it,
while the backward pass goes on, but for the embedding's gradient, which is known only at its end.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

GRADIENT_BYTES = 4  # of each parameter
BACKWARD = 2 / 3  # of a step's work


@dataclass(frozen=True)
class Link:
    """What one device sends to its neighbour in a second, one way, and where the figure comes from."""

    bytes_a_second: float
    basis: str


# The figures of the makers; what an all-reduce reaches is less
NVLINK = Link(450e9, "NVLink 4, 450 GB/s by its data sheet")
INFINIBAND = Link(50e9, "400 Gbit/s a GPU")
ETHERNET = Link(1.25e9, "10 Gbit/s a machine")


@dataclass(frozen=True)
class Pace:
    """The seconds of an update as a line: so many whatever it holds, and so many for each target token."""

    fixed: float
    each_token: float

    def seconds(self, tokens: float) -> float:
        """Of an update of so many target tokens."""
        return self.fixed + self.each_token * tokens


@dataclass(frozen=True)
class Forecast:
    """One training on several devices."""

    name: str
    ranks: int
    step_seconds: float  # each device's share of an update
    all_reduce_seconds: float
    last_share: float  # of the gradient, which can be sent only when the backward pass is over
    tokens: float  # target tokens of the update
    alone_seconds: float  # the same update on one device
    basis: str

    @property
    def exposed_seconds(self) -> float:
        """What of the all-reduce the backward pass does not hide."""
        last = self.last_share * self.all_reduce_seconds
        return last + max(0.0, self.all_reduce_seconds - last - BACKWARD * self.step_seconds)

    @property
    def seconds(self) -> float:
        """Of an update."""
        return self.step_seconds + self.exposed_seconds

    @property
    def rate(self) -> float:
        """Target tokens a second."""
        return self.tokens / self.seconds

    @property
    def efficiency(self) -> float:
        """How much faster than one device, as a share of the number of devices."""
        return self.alone_seconds / self.seconds / self.ranks


def pace(tokens: Sequence[float], seconds: Sequence[float]) -> Pace:
    """The line through what updates of several sizes took, with the least relative errors; neither part negative."""
    x, y = np.array(tokens, dtype=float), np.array(seconds, dtype=float)
    (fixed, each), *_ = np.linalg.lstsq(np.stack([1 / y, x / y], 1), np.ones(len(x)), rcond=None)
    if fixed < 0:
        fixed, each = 0.0, float((x / y).sum() / ((x / y) ** 2).sum())
    return Pace(float(fixed), max(0.0, float(each)))


def ring_seconds(size: float, ranks: int, bytes_a_second: float) -> float:
    """An all-reduce of so many bytes round a ring, which sends almost all of them twice; no time for the first byte."""
    return 2 * (ranks - 1) / ranks * size / bytes_a_second


def ring_bandwidth(size: float, ranks: int, seconds: float) -> float:
    """The inverse: what the link gave when an all-reduce took so long."""
    return 2 * (ranks - 1) / ranks * size / seconds


def shared(
    name: str, measured: Pace, tokens: float, ranks: int, parameters: int, last_share: float, link: Link
) -> Forecast:
    """One update of `tokens` divided among so many ranks."""
    exchange = ring_seconds(GRADIENT_BYTES * parameters, ranks, link.bytes_a_second)
    alone = measured.seconds(tokens)
    return Forecast(name, ranks, measured.seconds(tokens / ranks), exchange, last_share, tokens, alone, link.basis)
