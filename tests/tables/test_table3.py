"""The numbers of the table are plain statistics of the results, and only comparable runs count."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_results import RUN, changed, damaged, put, result

from aiayn.config import compose, schema
from aiayn.core import storage
from aiayn.runs import records
from aiayn.runs.records import read_runs
from aiayn.tables import formats, table3
from aiayn.tables.table3 import table


def test_a_run_with_overrides_stays_out_of_the_table(sweep: Path) -> None:
    put(sweep, "a_h1", 1, result())
    put(sweep, "a_h1+1f2e3d4c", 1, result(ppl=1.0))
    runs = read_runs(sweep)
    assert [(run.experiment, run.status) for run in runs] == [("a_h1", "finished"), ("a_h1+1f2e3d4c", "finished")]
    made = table(RUN, runs)
    assert made.lines[1].measured("dev.ppl") == table3.Measured(37.5, None)
    assert made.others == 1


def test_mean_and_deviation_are_numpys_over_the_finished_seeds(sweep: Path) -> None:
    figures = [36.25, 38.0, 37.1]
    for seed, ppl in enumerate(figures, 1):
        put(sweep, "a_h1", seed, result(seed=seed, ppl=ppl))
    storage.write_json(sweep / "a_h1" / "seed4" / "failure.json", {"exit_code": 3, "cause": "NaN"})
    made = table(RUN, read_runs(sweep))
    measured = made.lines[1].measured("dev.ppl")
    assert measured.mean == pytest.approx(np.mean(figures), abs=1e-12)
    assert measured.deviation == pytest.approx(np.std(figures, ddof=1), abs=1e-12)
    assert measured.deviation != pytest.approx(np.std(figures), rel=0.1)
    assert made.seeds == [1, 2, 3]
    assert made.notes[0] == ("a_h1 seed 4", "failed", "NaN (exit code 3)")


def test_of_a_row_without_a_finished_seed_the_worst_is_told(sweep: Path) -> None:
    def status() -> str:
        return table(RUN, read_runs(sweep)).lines[1].status

    assert status() == "missing"
    storage.append_lines(sweep / "a_h1" / "seed1" / "metrics.jsonl", ['{"step": 3}'])
    assert status() == "half-done"
    put(sweep, "a_h1", 2, alike("a_h1", 2, "model.d_k", 63))
    assert status() == "stale"
    storage.write_json(sweep / "a_h1" / "seed3" / "failure.json", {"exit_code": 3, "cause": "NaN"})
    assert status() == "failed"
    put(sweep, "a_h1", 4, result(seed=4))
    assert status() == "finished"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("model.d_k", 63), ("training.max_steps", 5), ("scale.batch", 0.5)),
        *(("fidelity.zero_start", True), ("decoding.beam_size", 5)),
    ],
)
def test_a_run_of_other_values_than_its_row_is_stale(sweep: Path, key: str, value: Any) -> None:
    path = put(sweep, "a_h1", 1, result())
    assert table(RUN, read_runs(sweep)).lines[1].status == "finished"
    path.write_bytes(damaged(f"config.{key}", value))
    line = table(RUN, read_runs(sweep)).lines[1]
    assert (line.status, line.finished) == ("stale", [])
    assert f"{key} was {value}, is " in line.notes[0][2]


@pytest.mark.parametrize(
    ("word", "comparable"),
    [
        *(("tokenizer=paper", True), ("hardware.precision=bf16-mixed", True), ("data.source=/x", True)),
        *(("data=wmt14_en_fr", False), ("scale=mini", False)),
        *(("data.vocab_size=8000", False), ("scale.pairs=5003", False)),
    ],
)
def test_only_the_papers_text_and_scale_are_comparable(word: str, comparable: bool) -> None:
    run = compose.compose_row("scale=paper", "data=wmt14_en_de", word)
    assert table(run, []).comparable is comparable
    assert not table(schema.vary(run, data={"train_source": "mine.en"}), []).comparable


def alike(experiment: str, seed: int, key: str, value: Any, **figures: float) -> dict[str, Any]:
    """A finished run with another value of what all runs of a table share."""
    return changed(result(experiment, seed, **figures), records.place_in_result(key), value)


@pytest.mark.parametrize("key", records.SHARED)
def test_a_run_that_differs_in_what_all_share_is_stale(sweep: Path, key: str) -> None:
    for seed in (1, 2):
        put(sweep, "a_h1", seed, result("a_h1", seed, ppl=14.0 + seed))
    before = table(RUN, read_runs(sweep)).lines[1]
    assert before.measured("dev.ppl") == table3.Measured(15.5, pytest.approx(0.5**0.5))  # control
    other = {"data.vocab_size": 8000, "data.max_length": 31, "hardware.precision": "64-true"}.get(key, "other")
    put(sweep, "a_h1", 3, alike("a_h1", 3, key, other, ppl=3.0))
    line = table(RUN, read_runs(sweep)).lines[1]
    assert line.measured("dev.ppl") == before.measured("dev.ppl")
    assert [run.seed for run in line.stale] == [3]
    ((name, status, detail),) = line.notes
    assert (name, status) == ("a_h1 seed 3", "stale")
    assert detail.startswith(f"{key} was {other}, is ")


def test_rows_are_compared_on_one_text_only(sweep: Path) -> None:
    """Not only the seeds of one row: an effect is the difference of two rows."""
    for row in ("base", "a_h4"):
        put(sweep, row, 1, result(row, 1, ppl=14.0))
    put(sweep, "a_h1", 1, alike("a_h1", 1, "sha256.data", "e" * 64, ppl=3.0))
    made = table(RUN, read_runs(sweep))
    assert [line.status for line in made.lines[:3]] == ["finished", "stale", "finished"]
    assert made.notes[0][2].startswith("sha256.data was eeeeeeeeeeee, is dddddddddddd, ")


def test_most_runs_decide_what_a_table_is_of_then_base(sweep: Path) -> None:
    put(sweep, "base", 1, result("base", 1))
    put(sweep, "a_h1", 1, alike("a_h1", 1, "data.vocab_size", 500))
    assert [line.status for line in table(RUN, read_runs(sweep)).lines[:2]] == ["finished", "stale"]
    put(sweep, "a_h4", 1, alike("a_h4", 1, "data.vocab_size", 500))
    made = table(RUN, read_runs(sweep))
    assert [line.status for line in made.lines[:3]] == ["stale", "finished", "finished"]
    assert records.look_up(made.reference, "config.data.vocab_size") == 500
    # One that no row counts has no say
    put(sweep, "a_h4", 1, alike("a_h4", 1, "model.d_k", 63) | {"sha256": {"data": "e" * 64, "tokenizer": "7" * 64}})
    assert [line.status for line in table(RUN, read_runs(sweep)).lines[:3]] == ["finished", "stale", "stale"]


def test_rows_of_other_code_or_another_processor_are_named(sweep: Path) -> None:
    made = (("base", 1, "x", "EPYC"), ("base", 2, None, "Xeon"), ("a_h1", 1, "y", "cpu"), ("a_h4", 1, "x", ["Xeon"]))
    for row, seed, code, processor in made:
        value = changed(result(row, seed), "sha256.code", code)
        put(sweep, row, seed, changed(value, "hardware.accelerator", processor))
    compared = table(RUN, read_runs(sweep))
    assert (compared.finished, formats.layout(compared).records[0]["processor"]) == (3, "EPYC; Xeon")
    assert compared.origins == {"source code": ["a_h1"], "processor": ["base", "a_h1", "a_h4"]}
    said = " Other source code than the first run's: a_h1. Other processor than the first run's: base, a_h1, a_h4."
    assert formats.conditions(compared).endswith(said)
    assert table(RUN, read_runs(sweep)[-1:]).origins == {}  # control: one run alone


def test_every_result_affecting_key_is_compared() -> None:
    claimed = set(table(RUN, []).lines[0].claims)
    assert claimed.isdisjoint(records.SHARED)
    left = schema.RESULT_AFFECTING - claimed - set(records.SHARED)
    assert left == {"experiment", "seed"}
