"""Every case does the same work on the same sentences; the cases are timed interleaved."""

import pytest
import torch

from aiayn.bench import cases
from aiayn.config import compose, schema
from aiayn.runs.models import build


def test_cases_are_interleaved_and_round_0_is_not_counted():
    order = []
    lined_up = [cases.Case(name, "fp32", lambda number, name=name: order.append((number, name))) for name in "AB"]
    cases.time_interleaved(lined_up, 3, "cpu")
    assert order == [(number, name) for number in range(4) for name in "AB"]
    assert [len(case.seconds_per_round) for case in lined_up] == [3, 3]


@pytest.mark.parametrize("control", [False, True])  # autocast's default is to round a weight once
def test_in_training_a_weight_is_rounded_after_each_update(control, toy):
    weight, x = torch.nn.Parameter(torch.ones(5, 7)), torch.ones(3, 7)
    trainer = cases.Trainer(torch.nn.Linear(2, 3), [], "bf16", compose.compose_row(*toy))
    with torch.autocast("cpu", torch.bfloat16) if control else trainer.computing():
        before = torch.nn.functional.linear(x, weight)
        weight.data *= 2
        after = torch.nn.functional.linear(x, weight)
    assert torch.equal(after, before if control else before * 2)


@pytest.mark.parametrize("compiled", [False, True])
def test_ours_is_compiled_where_it_trains_so(compiled, toy, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function: function)
    run = schema.vary(compose.compose_row(*toy), hardware={"compile": compiled})
    assert cases.Trainer(build(run, 97), [], "bf16", run).model.is_compiled() == compiled


def test_an_update_is_computed_in_micro_batches(toy):
    run = compose.compose_row(*toy, "bench.mean_length=5", "hardware.tokens_per_micro_batch=40")
    updates = cases.random_updates(run)
    assert len(updates) == (run.bench.rounds + 1) * run.bench.updates
    assert max(len(batch.target) for update in updates for batch in update.batches) <= 40
    assert max(len(update.batches) for update in updates) > 1  # control


def test_a_case_with_other_results_is_not_timed(toy, monkeypatch):
    run = compose.compose_row(*toy, "model.d_k=8", "model.d_v=8", "bench.mean_length=5", "bench.rounds=1")
    loss = cases.baselines.smoothed_loss
    monkeypatch.setattr(cases.baselines, "smoothed_loss", lambda *given: 1.01 * loss(*given))
    with pytest.raises(AssertionError, match=r"torch\.nn fp32: not the same results"):
        cases.training(run, ["fp32"])
    with pytest.raises(schema.ConfigError, match="1024 positions"):
        cases.training(schema.vary(run, data={"max_length": 1025}), ["fp32"])
