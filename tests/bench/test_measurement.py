"""A short training as it is: what is counted, what is left alone, and processes that have their own memory."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from aiayn.bench import measurement
from aiayn.config import compose, schema
from aiayn.core import progress
from aiayn.cost import flops
from aiayn.data.update_plan import epoch_plan


@pytest.fixture
def run(toy) -> schema.Config:
    return compose.compose_row(*toy, "bench.seconds=0", "bench.mean_length=5")


@pytest.mark.usefixtures("signals")
def test_what_follows_the_warm_up_is_counted_and_nothing_is_written_or_printed(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(progress, "LOG_SECONDS", -1.0)  # a line for each update
    point = measurement.measure(run)
    assert capsys.readouterr() == ("", "")
    assert not (tmp_path / "runs").exists()
    assert point.updates == measurement.FEWEST
    pairs = measurement.sentences(run)
    source, target = pairs.source_lengths, pairs.target_lengths
    plan = list(epoch_plan(source, target, run.training.tokens_per_update, run.seed, 0))
    counted = plan[measurement.WARM_UP : measurement.WARM_UP + measurement.FEWEST]
    assert point.source_tokens == sum(int(source[sentences].sum()) for sentences in counted)
    assert point.target_tokens == sum(int(target[sentences].sum()) for sentences in counted)
    assert point.target_tokens != sum(
        int(target[sentences].sum()) for sentences in plan[: measurement.FEWEST]
    )  # control
    lengths = flops.weighted_length(source), flops.weighted_length(target)
    rows = run.data.vocab_size
    assert point.flops == flops.training_flops(run.model, rows, point.source_tokens, point.target_tokens, *lengths)
    assert 0 < point.outside_seconds < point.seconds
    assert point.first_seconds > 0
    assert point.rate == point.target_tokens / point.seconds
    assert point.update_seconds == point.seconds / measurement.FEWEST


def test_the_clock_ends_a_training_after_the_seconds_asked_for(tmp_path, monkeypatch):
    """On a clock of its own, which a step moves by 1 second."""
    now = [0.0]
    monkeypatch.setattr(measurement.time, "perf_counter", lambda: now[0])
    module, trainer = SimpleNamespace(device=torch.device("cpu")), SimpleNamespace()
    outputs = dict.fromkeys(("loss", "nats", "gradient_norm", "learning_rate"), 0.0)
    watch = measurement.Stopwatch(tmp_path, 7.0, lambda: None)

    def step(number: int) -> None:
        update = SimpleNamespace(number=number, source_tokens=3, target_tokens=5)
        watch.on_train_batch_start(trainer, module, update, number)
        now[0] += 1.0
        watch.on_train_batch_end(trainer, module, outputs, update, number)
        now[0] += 0.25

    for number in range(measurement.WARM_UP + 5):
        step(number)
    with pytest.raises(measurement.Enough):  # the sixth after the warm-up ends 6 * 1.25 seconds after it
        step(measurement.WARM_UP + 5)
    assert watch.updates == 6
    assert (watch.taken, watch.inside, watch.first) == (7.5, 6.0, 1.0)
    assert (watch.source_tokens, watch.target_tokens) == (18, 30)


def test_runs_measured_at_once_are_processes_whose_memory_is_not_that_of_this_one(run):
    ballast = torch.ones(10**8)  # 400 MB
    one, other = measurement.in_processes([run, run])
    assert one.updates == other.updates == measurement.FEWEST
    assert one.target_tokens == other.target_tokens
    for point in (one, other):
        assert 50 < point.before_mb <= point.peak_mb < measurement._peak_mb(False) - 200
    assert len(ballast)


def test_an_error_in_such_a_process_arrives_as_itself(run):
    small = dataclasses.replace(run, hardware=dataclasses.replace(run.hardware, tokens_per_micro_batch=3))
    with pytest.raises(ValueError, match="tokens_per_micro_batch is 3"):
        measurement.in_processes([small])
