"""How training grows: which trainings are measured, what of each is counted, and that tables say what was measured."""

import dataclasses
import json
import os
from types import SimpleNamespace

import pytest
import torch

from aiayn.bench import growth
from aiayn.config import checks, compose, schema
from aiayn.config.schema import vary
from aiayn.core import progress
from aiayn.cost import flops
from aiayn.data.update_plan import epoch_plan


@pytest.fixture
def run(toy) -> schema.Config:
    return compose.compose_row(*toy, "bench.seconds=0", "bench.mean_length=5")


def point(**changes) -> growth.Point:
    made_up = growth.Point(10, 900, 1000, 2.0, 0.5, 0.25, 4e9, 1_000_000, 700.0, 300.0)
    return dataclasses.replace(made_up, **changes)


def by_threads(runs) -> list[growth.Point]:
    """Each run at a pace that grows with its threads."""
    return [point(seconds=2.0 / run.hardware.threads) for run in runs]


def test_lengths_and_updates_change_one_thing_and_leave_a_run_that_can_be_trained(run):
    for length in growth.LENGTHS:
        other = checks.checked(growth.of_length(run, length))
        assert other.bench.mean_length <= other.data.max_length <= run.training.tokens_per_update
        assert (other.model, other.training) == (run.model, run.training)
    assert growth.of_length(run, 10).bench.mean_length == 10
    assert growth.of_length(run, 10).data.max_length == 40  # hardly any log-normal sentence is longer than that
    found = growth.of_updates(run)
    assert list(found) == ["12", "16", "32", "64", "128"]  # 64 tokens, and no sentence is over 12
    for size, other in found.items():
        assert checks.checked(other).training.tokens_per_update == int(size)
        assert (other.model, other.data) == (run.model, run.data)


def test_on_a_gpu_a_row_is_measured_at_the_papers_own_size_whatever_the_scale():
    small = compose.compose_row("experiment=c_n2", "scale=mini", "decoding.beam_size=7")
    found, paper = checks.checked(growth.paper_sized(small)), compose.rows()["c_n2"]
    assert found.model == paper.model != small.model
    assert found.training == paper.training
    assert (found.data.vocab_size, found.data.max_length) == (37_000, 256)
    assert found.hardware.tokens_per_micro_batch >= 256
    assert found.decoding.beam_size == 7


@pytest.mark.usefixtures("signals")
def test_everything_is_measured_once_shown_and_left_as_plain_numbers(run, monkeypatch):
    monkeypatch.setattr(growth, "ROWS", ("base", "c_n2"))
    monkeypatch.setattr(growth.compose, "row", lambda name, like: dataclasses.replace(like, experiment=name))
    monkeypatch.setattr(growth, "LENGTHS", (3, 7))
    monkeypatch.setattr(growth, "UPDATES", (0.5, 1))
    asked = []

    def in_processes(runs):
        asked.append(len(runs))
        return by_threads(runs) if len(asked) > 6 else [growth.measure(run) for run in runs]

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
    pairs = growth.synthetic_pairs(dataclasses.replace(run, bench=like_newstest), 7)
    assert found["tokens"] == len(pairs.source_ids)
    assert shown[0].rows[0]["tokens"] == f"{found['tokens']:,}"


def test_the_first_round_of_decoding_warms_up_and_is_not_counted(run, monkeypatch):
    times = iter([0.0, 100.0, 100.0, 101.0, 101.0, 104.0])
    monkeypatch.setattr(growth, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    monkeypatch.setattr(growth, "search", lambda *_: [SimpleNamespace(ids=[5, 7])] * 11)
    shown = []
    assert growth.decoded(run, 11, 2, shown.append)["seconds_a_round"] == [1.0, 3.0]
    assert [shown[0].rows[0][key] for key in ("seconds", "tok/s")] == ["2.00", "11"]


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


@pytest.mark.usefixtures("signals")
def test_what_follows_the_warm_up_is_counted_and_nothing_is_written_or_printed(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(progress, "LOG_SECONDS", -1.0)  # a line for each update
    point = growth.measure(run)
    assert capsys.readouterr() == ("", "")
    assert not (tmp_path / "runs").exists()
    assert point.updates == growth.FEWEST
    pairs = growth.sentences(run)
    source, target = pairs.source_lengths, pairs.target_lengths
    plan = list(epoch_plan(source, target, run.training.tokens_per_update, run.seed, 0))
    counted = plan[growth.WARM_UP : growth.WARM_UP + growth.FEWEST]
    assert point.source_tokens == sum(int(source[sentences].sum()) for sentences in counted)
    assert point.target_tokens == sum(int(target[sentences].sum()) for sentences in counted)
    assert point.target_tokens != sum(int(target[sentences].sum()) for sentences in plan[: growth.FEWEST])  # control
    lengths = flops.weighted_length(source), flops.weighted_length(target)
    rows = run.data.vocab_size
    assert point.flops == flops.training_flops(run.model, rows, point.source_tokens, point.target_tokens, *lengths)
    assert 0 < point.outside_seconds < point.seconds
    assert point.first_seconds > 0
    assert point.rate == point.target_tokens / point.seconds


def test_the_clock_ends_a_training_after_the_seconds_asked_for(tmp_path, monkeypatch):
    """On a clock of its own, which a step moves by 1 second."""
    now = [0.0]
    monkeypatch.setattr(growth.time, "perf_counter", lambda: now[0])
    module, trainer = SimpleNamespace(device=torch.device("cpu")), SimpleNamespace()
    outputs = dict.fromkeys(("loss", "nats", "gradient_norm", "learning_rate"), 0.0)
    watch = growth.Stopwatch(tmp_path, 7.0, lambda: None)

    def step(number: int) -> None:
        update = SimpleNamespace(number=number, source_tokens=3, target_tokens=5)
        watch.on_train_batch_start(trainer, module, update, number)
        now[0] += 1.0
        watch.on_train_batch_end(trainer, module, outputs, update, number)
        now[0] += 0.25

    for number in range(growth.WARM_UP + 5):
        step(number)
    with pytest.raises(growth.Enough):  # the sixth after the warm-up ends 6 * 1.25 seconds after it
        step(growth.WARM_UP + 5)
    assert watch.updates == 6
    assert (watch.taken, watch.inside, watch.first) == (7.5, 6.0, 1.0)
    assert (watch.source_tokens, watch.target_tokens) == (18, 30)


@pytest.mark.slow
def test_runs_measured_at_once_are_processes_whose_memory_is_not_that_of_this_one(run):
    ballast = torch.ones(10**8)  # 400 MB
    one, other = growth.in_processes([run, run])
    assert one.updates == other.updates == growth.FEWEST
    assert one.target_tokens == other.target_tokens
    for point in (one, other):
        assert 50 < point.before_mb <= point.peak_mb < growth._peak_mb(False) - 200
    assert len(ballast)


def test_an_error_in_such_a_process_arrives_as_itself(run):
    small = dataclasses.replace(run, hardware=dataclasses.replace(run.hardware, tokens_per_micro_batch=3))
    with pytest.raises(ValueError, match="tokens_per_micro_batch is 3"):
        growth.in_processes([small])
