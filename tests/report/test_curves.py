"""Curves are the rows of metrics.jsonl, if it is whole."""

import json
from pathlib import Path

import numpy as np
import pytest

from aiayn.core import storage
from aiayn.report import curves
from aiayn.report.curves import POINTS


def write(folder: Path, updates: int, *more: str) -> None:
    counts = {"source_tokens": 5, "target_tokens": 7}
    rows = [{"step": s, "train/loss": 1000.0 - s, "seconds": 3.0 * s, **counts} for s in range(1, updates + 1)]
    storage.write_text(folder / "metrics.jsonl", "".join(f"{line}\n" for line in [*map(json.dumps, rows), *more]))


def test_each_quantity_stands_at_its_updates_tokens_and_minutes(tmp_path: Path) -> None:
    write(tmp_path, 20, '{"step": 10, "dev/ppl": 31.5}', '{"step": 11, "dev/ppl": 1e300}')  # which no axis can hold
    found = curves.read(tmp_path)
    assert found["train/loss"].values.tolist() == [1000.0 - s for s in range(1, 21)]
    assert found["train/loss"].axes["tokens"].tolist() == [7 * s for s in range(1, 21)]
    assert found["dev/ppl"].axes == {"steps": [10], "tokens": [70], "minutes": [0.5]}
    assert found["dev/ppl"].values.tolist() == [31.5]


def test_a_long_curve_is_thinned_to_means(tmp_path: Path) -> None:
    write(tmp_path, 10 * POINTS)
    found = curves.read(tmp_path)["train/loss"]
    assert len(found.values) == POINTS
    assert found.values[0] == np.mean([1000.0 - s for s in range(1, 11)])
    assert np.allclose(found.axes["steps"] + found.values, 1000.0)


@pytest.mark.parametrize("line", ["torn {", '{"step": 4, "train/loss": NaN}', "[" * 9999])
def test_a_run_with_a_damaged_line_has_no_curves(tmp_path: Path, line: str) -> None:
    assert curves.read(tmp_path) == {}  # no file
    write(tmp_path, 5)
    assert len(curves.read(tmp_path)["train/loss"].values) == 5  # control
    write(tmp_path, 5, line)
    assert curves.read(tmp_path) == {}
