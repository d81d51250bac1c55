"""How training grows: which trainings are measured, and that tables say what was measured."""

import dataclasses
import json
import os

import pytest

from aiayn.bench import growth, measurement
from aiayn.config import checks, compose, schema
from aiayn.config.schema import vary


@pytest.fixture
def run(toy) -> schema.Config:
    return compose.compose_row(*toy, "bench.seconds=0", "bench.mean_length=5")


def point(**changes) -> measurement.Point:
    made_up = measurement.Point(10, 900, 1000, 2.0, 0.5, 0.25, 4e9, 1_000_000, 700.0, 300.0)
    return dataclasses.replace(made_up, **changes)


def by_threads(runs) -> list[measurement.Point]:
    """Each run at a pace that grows with its threads."""
    return [point(seconds=2.0 / run.hardware.threads) for run in runs]


def test_lengths_and_updates_change_one_thing_and_leave_a_run_that_can_be_trained(run):
    for length in growth.LENGTHS:
        other = checks.checked(growth.of_length(run, length))
        assert other.bench.mean_length <= other.data.max_length <= run.training.tokens_per_update
        assert (other.model, other.training) == (run.model, run.training)
    assert growth.of_length(run, 10).bench.mean_length == 10
    found = growth.of_updates(run)
    assert list(found) == ["12", "16", "32", "64", "128"]  # 64 tokens, and no sentence is over 12
    for size, other in found.items():
        assert checks.checked(other).training.tokens_per_update == int(size)
        assert (other.model, other.data) == (run.model, run.data)


@pytest.mark.usefixtures("signals")
def test_everything_is_measured_once_shown_and_left_as_plain_numbers(run, monkeypatch):
    monkeypatch.setattr(growth, "ROWS", ("base", "c_n2"))
    monkeypatch.setattr(growth.compose, "row", lambda name, like: dataclasses.replace(like, experiment=name))
    monkeypatch.setattr(growth, "LENGTHS", (3, 7))
    monkeypatch.setattr(growth, "UPDATES", (0.5, 1))
    asked = []

    def in_processes(runs):
        asked.append(len(runs))
        return by_threads(runs) if len(asked) > 6 else [measurement.measure(run) for run in runs]

    monkeypatch.setattr(growth, "in_processes", in_processes)
    shown = []
    result = json.loads(json.dumps(growth.growth(run, shown.append)))
    assert [sheet.title.split(",")[0] for sheet in shown] == [
        "by row",
        "by mean length of the sentences",
        "by target tokens of an update",
        "runs of a sweep on this machine",
    ]
    for sheet in shown:
        assert all(list(row) == list(sheet.rows[0]) for row in sheet.rows)
    assert [list(result[part]) for part in ("rows", "lengths", "updates")] == [
        ["base", "c_n2"],
        ["3", "7"],
        ["32", "64"],
    ]
    cores = len(os.sched_getaffinity(0))
    assert asked == [1] * 6 + [cores, 1] * 3
    base = result["rows"]["base"]
    row = shown[0].rows[0]
    assert row["target tok/s"] == f"{base['target_tokens'] / base['seconds']:,.0f}"
    assert row["peak MB"] == f"{base['peak_mb']:,.0f}"


def test_side_by_side_adds_up_what_runs_at_once_do(run, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2})
    monkeypatch.setattr(growth, "in_processes", by_threads)
    found, table = growth.side_by_side(run)
    assert found == {
        "3 at once, 1 thread each": [1500.0] * 3,
        "one after the other, 3 threads": [1500.0] * 3,
    }
    slow = lambda runs: [point(seconds=4.0) if len(runs) == 1 else point() for _ in runs]  # noqa: E731
    monkeypatch.setattr(growth, "in_processes", slow)
    _, table = growth.side_by_side(run)
    assert table.remarks == ["3 at once, 1 thread each is 6.00 x as fast"]


def test_a_corpus_is_decoded_to_outputs_as_long_as_their_sources(run):
    shown = []
    found = growth.decoded(run, 7, 2, shown.append)
    assert (found["sentences"], len(found["seconds_a_round"])) == (7, 2)
    like_newstest = dataclasses.replace(run.bench, mean_length=28.0)
    pairs = measurement.synthetic_pairs(dataclasses.replace(run, bench=like_newstest), 7)
    assert found["tokens"] == len(pairs.source_ids)
    assert shown[0].rows[0]["tokens"] == f"{found['tokens']:,}"


def test_a_gpu_has_its_share_of_the_peak_and_its_own_memory_and_a_cpu_neither(run, monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H200")
    gpu = vary(run, hardware={"accelerator": "gpu", "precision": "bf16-mixed"})
    fast = point(flops=2 * 494.7e12)  # in 2 seconds: half the peak
    shown = growth.sheet("by row", "row", {"base": fast}, gpu, "and more")
    (cells,) = shown.rows
    assert (cells["TFLOP/s"], cells["of the peak"], cells["peak MB"]) == ("494.7", "50.0%", "700")
    assert (cells["ms an update"], cells["ms beside the step"], cells["params M"]) == ("200.0", "50.00", "1.00")
    assert shown.remarks == ["peak MB: GPU memory that torch took; not compiled", "and more"]
    in_32_bits = vary(gpu, hardware={"precision": "32-true"})  # the peak is that of bf16
    assert "of the peak" not in growth.sheet("", "row", {"base": fast}, in_32_bits).rows[0]
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a new one")
    assert "of the peak" not in growth.sheet("", "row", {"base": fast}, gpu).rows[0]
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: 1 / 0)
    shown = growth.sheet("by row", "row", {"base": point()}, run)
    assert shown.rows[0]["GFLOP/s"] == "2.0"
    assert "300 of it libraries" in shown.remarks[0]
