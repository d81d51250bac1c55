"""Each contestant does the same work on the same sentences, in the precision that it is named after."""

import dataclasses

import numpy as np
import pytest
import torch

from aiayn.alternatives.parts import transformer
from aiayn.bench import contestants, rivals
from aiayn.config import compose, schema
from aiayn.data.sentencepiece_bpe import EOS
from aiayn.data.update_plan import gather
from aiayn.evaluation.evaluate import build
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
