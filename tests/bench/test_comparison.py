"""Contestants take turns, rivals on a CPU in a process of their own, and every line has the same work."""

import dataclasses
import os

import pytest

from aiayn.bench import comparison
from aiayn.bench.contestants import Contestant
from aiayn.config import compose, schema
from aiayn.paper.fast import kernels


@pytest.fixture
def run(toy) -> schema.Config:
    # Heads as wide as d_model / h, as rivals want them
    sizes = ["model.d_k=8", "model.d_v=8", "bench.mean_length=5", "bench.updates=2", "bench.rounds=3"]
    return compose.compose_row(*toy, *sizes)


def test_contestants_take_turns_in_every_round_and_the_first_round_is_not_counted():
    order = []
    contestants = [
        Contestant(name, "fp32", lambda number, name=name: order.append((number, name)), {}) for name in "AB"
    ]
    comparison.take_turns(contestants, 3, "cpu")
    assert order == [(number, name) for number in range(4) for name in "AB"]
    assert [len(contestant.seconds_a_round) for contestant in contestants] == [3, 3]


def of_this_process(run, precisions, *, ours):
    """A contestant in the first precision, or if it is a rival in the second; its seventh round fails."""
    return [Contestant(str(os.getpid()), precisions[0 if ours else 1], lambda number: 1 // (number - 7), {})]


@pytest.mark.parametrize("accelerator", ["cpu", "gpu"])
def test_on_a_cpu_rivals_are_in_a_process_of_their_own(run, accelerator):
    run = dataclasses.replace(run, hardware=dataclasses.replace(run.hardware, accelerator=accelerator))
    with comparison._lined_up(of_this_process, True, run, ["fp32", "bf16"]) as (ours, theirs):
        assert ours.name == str(os.getpid())
        assert (theirs.name == ours.name) == (accelerator == "gpu")
        theirs.run(3)
        with pytest.raises(ZeroDivisionError):  # it really runs there
            theirs.run(7)


@pytest.mark.slow
def test_training_gives_every_line_the_same_tokens_and_equal_first_results(run):
    part = comparison.training(run, ["fp32", "bf16"])
    assert len(part["target_tokens"]) == len(part["source_tokens"]) == 3
    assert 0 < part["padded_share_of_rivals"] < 0.5
    assert {"aiayn", "torch.nn"} <= {line["name"] for line in part["lines"]}
    for line in part["lines"]:
        assert len(line["seconds_a_round"]) == 3
        assert line["warm_up_seconds"] > 0
        tolerance = 1e-5 if line["precision"] == "fp32" else 0.1
        assert line["checks"]["loss"] < tolerance
        assert line["checks"]["gradients"] < tolerance
        assert line["precision"] == "fp32" or line["checks"]["gradients"] > 1e-4  # control: the check sees bf16


@pytest.mark.slow
def test_decoding_compares_outputs_before_it_measures(run):
    part = comparison.decoding(run, ["fp32", "int8"], beam_size=4)
    for line in part["lines"]:
        assert len(line["seconds_a_round"]) == 3
        assert line["checks"]["equal_outputs"] == 1 or line["precision"] == "int8", line
    own = [(line["name"], line["precision"]) for line in part["lines"] if line["name"].startswith("aiayn")]
    assert own == [("aiayn", "fp32"), *([("aiayn, compiled", "fp32")] if kernels.COMPILER else [])]
    assert all(line["name"].startswith("CTranslate2") for line in part["lines"] if line["precision"] == "int8")
