"""Each contestant does the same work on the same sentences, in the precision that it is named after.

They take turns, the rivals on a CPU in a process of their own.
"""

import dataclasses
import os

import numpy as np
import pytest
import torch

from aiayn.alternatives.parts import transformer
from aiayn.bench import contestants, rivals
from aiayn.bench.contestants import Contestant
from aiayn.config import compose, schema
from aiayn.data.sentencepiece_bpe import EOS
from aiayn.data.update_plan import gather
from aiayn.evaluation.evaluate import build
from aiayn.paper.fast import kernels
from aiayn.paper.fast.model import accelerate


@pytest.fixture
def run(toy) -> schema.Config:
    # Heads as wide as d_model / h, as rivals want them
    sizes = ["model.d_k=8", "model.d_v=8", "bench.mean_length=5", "bench.updates=2", "bench.rounds=3"]
    return compose.compose_row(*toy, *sizes)


def test_a_precision_holds_inside_and_is_gone_afterwards():
    product = lambda: (torch.ones(3, 5) @ torch.ones(5, 7)).dtype  # noqa: E731
    before = torch.get_float32_matmul_precision()
    for precision, setting, dtype in (
        ("fp32", "highest", torch.float32),
        ("medium", "medium", torch.float32),
        ("bf16", "highest", torch.bfloat16),
    ):
        with contestants.computing(precision, "cpu", training=True):
            assert (torch.get_float32_matmul_precision(), product()) == (setting, dtype)
        assert (torch.get_float32_matmul_precision(), product()) == (before, torch.float32)


@pytest.mark.parametrize("training", [False, True])
def test_in_training_a_weight_is_rounded_anew_after_each_update(training):
    weight, x = torch.nn.Parameter(torch.ones(5, 7)), torch.ones(3, 7)
    with contestants.computing("bf16", "cpu", training=training):
        before = torch.nn.functional.linear(x, weight)
        with torch.no_grad():
            weight *= 2
        after = torch.nn.functional.linear(x, weight)
    assert torch.equal(after, before * 2 if training else before)  # a search's weights do not change


def test_lengths_are_log_normal_with_the_mean_asked_for_and_both_sides_alike():
    run = compose.compose_row("bench.mean_length=25", "data.max_length=400", "scale=paper")
    pairs = contestants.synthetic_pairs(run, 20_011)
    for lengths in (pairs.source_lengths[:], pairs.target_lengths[:]):
        assert lengths.mean() == pytest.approx(25, rel=0.05)
        assert np.log(lengths).std() == pytest.approx(0.6, rel=0.1)
    assert np.corrcoef(pairs.source_lengths[:], pairs.target_lengths[:])[0, 1] > 0.8
    assert (pairs.source_ids[pairs.source_offsets[1:] - 1] == EOS).all()
    assert (pairs.source_ids == EOS).sum() == len(pairs)


def test_of_a_compiled_rival_encoder_and_decoder_run_compiled_and_it_computes_the_same(run, monkeypatch):
    """With a compiler that only notes what it is given and when that runs: a real one takes long."""
    ran = []

    def compile(function, **options):
        assert options == {"dynamic": True}
        return lambda *inputs: ran.append(function.__name__) or function(*inputs)

    torch.manual_seed(3)
    rival = rivals.TorchTransformer(transformer(**dataclasses.asdict(run.model), max_length=23, vocab_size=25)).eval()
    batch = rivals.padded(gather(contestants.synthetic_pairs(run, 5), np.arange(5)))
    expected = rival.hidden(batch)
    monkeypatch.setattr(torch, "compile", compile)
    contestants.compile_parts(rival, 5)
    assert torch.equal(rival.hidden(batch), expected)
    assert ran == ["encode", "decode"]


def test_a_compiled_rival_takes_part_where_a_compiler_pays(run):
    model = build(run, 25)
    plain = contestants.entrants(model, "cpu", ours=False)
    assert "torch.nn" in plain
    assert not any("compiled" in name for name in plain)
    found = contestants.entrants(model, "cuda", ours=False)
    assert list(found) == [*plain, "torch.nn, compiled"]
    assert found["torch.nn, compiled"] is found["torch.nn"]  # which is copied before it is compiled


@pytest.mark.parametrize(("device", "expected"), [("cpu", ["aiayn"]), ("cuda", ["aiayn", "aiayn, compiled"])])
def test_ours_is_compiled_too_where_a_compiler_pays(run, device, expected):
    assert list(contestants.entrants(build(run, 25), device, ours=True)) == expected


def test_an_endless_model_is_still_one_whose_answers_depend_on_the_question(run):
    torch.manual_seed(3)
    model = accelerate(transformer(**dataclasses.asdict(run.model), max_length=23, vocab_size=25).eval())
    sources = np.random.default_rng(5).integers(EOS + 1, 25, (13, contestants.OUTPUT_LENGTH - 1)).tolist()
    lengths = lambda: {len(ids) for ids in contestants._our_decode(model, run, "fp32")(sources, 4)}  # noqa: E731
    assert lengths() != {contestants.OUTPUT_LENGTH}  # control
    contestants.endless(model)
    assert lengths() == {contestants.OUTPUT_LENGTH}
    assert len({tuple(ids) for ids in contestants._our_decode(model, run, "fp32")(sources, 4)}) > 1


def test_contestants_take_turns_in_every_round_and_the_first_round_is_not_counted():
    order = []
    lined_up = [Contestant(name, "fp32", lambda number, name=name: order.append((number, name)), {}) for name in "AB"]
    contestants.take_turns(lined_up, 3, "cpu")
    assert order == [(number, name) for number in range(4) for name in "AB"]
    assert [len(contestant.seconds_a_round) for contestant in lined_up] == [3, 3]


def of_this_process(run, precisions, *, ours):
    """A contestant in the first precision, or if it is a rival in the second; its seventh round fails."""
    return [Contestant(str(os.getpid()), precisions[0 if ours else 1], lambda number: 1 // (number - 7), {})]


@pytest.mark.parametrize("accelerator", ["cpu", "gpu"])
def test_on_a_cpu_rivals_are_in_a_process_of_their_own(run, accelerator):
    run = dataclasses.replace(run, hardware=dataclasses.replace(run.hardware, accelerator=accelerator))
    with contestants._lined_up(of_this_process, True, run, ["fp32", "bf16"]) as (ours, theirs):
        assert ours.name == str(os.getpid())
        assert (theirs.name == ours.name) == (accelerator == "gpu")
        theirs.run(3)
        with pytest.raises(ZeroDivisionError):  # it really runs there
            theirs.run(7)


@pytest.mark.slow
def test_training_gives_every_line_the_same_tokens_and_equal_first_results(run):
    part = contestants.training(run, ["fp32", "bf16"])
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
    part = contestants.decoding(run, ["fp32", "int8"], beam_size=4)
    for line in part["lines"]:
        assert len(line["seconds_a_round"]) == 3
        assert line["checks"]["equal_outputs"] == 1 or line["precision"] == "int8", line
    own = [(line["name"], line["precision"]) for line in part["lines"] if line["name"].startswith("aiayn")]
    assert own == [("aiayn", "fp32"), *([("aiayn, compiled", "fp32")] if kernels.COMPILER else [])]
    assert all(line["name"].startswith("CTranslate2") for line in part["lines"] if line["precision"] == "int8")
