"""The learning curves of a run, read back from `metrics.jsonl`."""

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from aiayn.core import storage
from aiayn.runs.records import METRICS, read_metrics

Numbers = npt.NDArray[np.float64]

AXES = ("steps", "tokens", "minutes")
QUANTITIES = ("train/loss", "dev/ppl", "train/learning_rate")
POINTS = 160
LARGEST = 1e100  # of what is drawn: a perplexity has no bound, the arithmetic of axes has


class Curve(NamedTuple):
    """One quantity along a run; each axis of AXES says where its values were measured."""

    axes: dict[str, Numbers]
    values: Numbers


def read(folder: Path) -> dict[str, Curve]:
    """The curves of the run in `folder`, by quantity; none where its metrics are damaged, which one line says."""
    try:
        rows = read_metrics(folder / METRICS)
    except storage.StorageError as error:
        print(f"aiayn: no curves: {error}", file=sys.stderr)
        return {}
    updates = [row for row in rows if "train/loss" in row]
    steps, tokens, seconds = (_column(updates, key) for key in ("step", "target_tokens", "seconds"))
    totals = {"tokens": np.cumsum(tokens), "minutes": seconds / 60}
    curves = {}
    for quantity in QUANTITIES:
        own = [row for row in rows if abs(row.get(quantity, math.inf)) < LARGEST]
        if not own or not updates:
            continue
        at = _column(own, "step")
        # A dev measurement has no count of tokens of its own: it stands at the update after which it was made
        axes = {"steps": at} | {axis: np.interp(at, steps, total) for axis, total in totals.items()}
        thinned = {axis: _thinned(values) for axis, values in axes.items()}
        curves[quantity] = Curve(thinned, _thinned(_column(own, quantity)))
    return curves


def _column(rows: Sequence[Mapping[str, float]], key: str) -> Numbers:
    return np.array([row[key] for row in rows], dtype=np.float64)


def _thinned(values: Numbers) -> Numbers:
    """The means of neighbours: a page needs no more points than a screen shows."""
    return np.array([part.mean() for part in np.array_split(values, min(POINTS, len(values)))])
