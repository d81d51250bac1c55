"""Rivals of the benchmark compute what we compute: the comparison is of speed alone."""

import copy
import dataclasses

import numpy as np
import pytest
import torch

from aiayn.alternatives.parts import transformer
from aiayn.bench import rivals
from aiayn.bench.contestants import endless, synthetic_pairs
from aiayn.config import compose, schema
from aiayn.data.update_plan import gather
from aiayn.paper.fast.cross_entropy import label_smoothed_cross_entropy
from aiayn.paper.fast.model import accelerate
from aiayn.paper.transformer import Transformer

VOCABULARY = 97
INSTALLED = {"torch.nn": "torch", "Marian": "transformers", "CTranslate2": "ctranslate2"}


@pytest.fixture
def run() -> schema.Config:
    sizes = ["model.d_model=38", "model.d_ff=43", "model.num_heads=2", "model.d_k=19", "model.d_v=19", "scale=paper"]
    return compose.compose_row(*sizes, "model.num_layers=2", f"data.vocab_size={VOCABULARY}", "bench.mean_length=7")


@pytest.fixture
def model(run) -> Transformer:
    torch.manual_seed(3)
    model = transformer(**dataclasses.asdict(run.model), max_length=23, vocab_size=VOCABULARY).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return accelerate(model)


def test_padding_loses_no_token_and_adds_none(run):
    batch = gather(synthetic_pairs(run, 13), np.arange(13))
    padded = rivals.padded(batch)
    assert torch.equal(padded.source[~padded.source_padding], batch.source)
    assert torch.equal(padded.target_input[padded.is_target], batch.target_input)
    assert torch.equal(padded.target, batch.target)
    assert padded.source_padding.any()  # control: there is padding


@pytest.mark.parametrize("name", ["torch.nn", "Marian"])
def test_a_rival_has_our_loss_and_our_gradients(name, model, run):
    pytest.importorskip(INSTALLED[name], reason="needs the extra: pip install -e '.[bench]'")
    batch = gather(synthetic_pairs(run, 17), np.arange(17))
    rival = rivals.trainable(model)[name].eval()
    padded = rivals.padded(batch)
    theirs = rivals.smoothed_loss(rival.hidden(padded), rival.embedding.weight, padded, 0.1)
    ours, _ = label_smoothed_cross_entropy(model.hidden(batch), model.embedding.weight, batch.target, 0.1)
    torch.testing.assert_close(theirs, ours, atol=0, rtol=1e-5)
    without, _ = label_smoothed_cross_entropy(model.hidden(batch), model.embedding.weight, batch.target, 0.0)
    assert abs(theirs - without) / ours > 5e-4  # control: the smoothing counts
    (ours / len(batch.target)).backward()
    (theirs / len(batch.target)).backward()
    gradients = copy.deepcopy(model)
    for there, parameter in zip(gradients.parameters(), model.parameters(), strict=True):
        there.data = parameter.grad
    expected = rivals.gradients_of(gradients, name)
    found = {key: parameter.grad for key, parameter in rival.named_parameters() if parameter.grad is not None}
    assert len(found) > 40
    for key, gradient in found.items():
        torch.testing.assert_close(gradient, expected[key], atol=1e-5, rtol=1e-3, msg=lambda text, key=key: key + text)
    assert max(float(gradient.abs().max()) for gradient in found.values()) > 1e-2  # control: more than the tolerance


@pytest.mark.parametrize("beam_size", [1, 4])
def test_every_search_finds_the_same_outputs_of_the_same_length(model, beam_size):
    length = 11
    random = np.random.default_rng(5)
    sources = random.integers(4, VOCABULARY, (rivals.SENTENCES + 3, length - 1)).tolist()
    rival = {precision: rivals.decoders(endless(model), 2, length, precision) for precision in ("fp32", "int8")}
    found = {name: decode(sources, beam_size) for name, decode in rival["fp32"].items()}
    expected = found["torch.nn"]
    assert {len(ids) for ids in expected} == {length}
    assert len({tuple(ids) for ids in expected}) > 1  # control: not one answer to everything
    for name, outputs in found.items():
        assert outputs == expected, name
    for name, decode in rival["int8"].items():
        assert {len(ids) for ids in decode(sources, beam_size)} == {length}, name


def test_rivals_and_their_gradients_are_where_the_model_is(model):
    """On `meta`, which every machine has, in place of a GPU."""
    for name, rival in rivals.trainable(model.to("meta")).items():
        tensors = [*rival.state_dict().values(), *rivals.gradients_of(model, name).values()]
        assert {tensor.device.type for tensor in tensors} == {"meta"}, name


def test_learned_positions_leave_marian_out_and_nobody_else(run):
    sizes = dataclasses.asdict(run.model) | {"positions": "learned"}
    model = accelerate(transformer(**sizes, max_length=23, vocab_size=VOCABULARY).eval())
    assert set(rivals.trainable(model)) == {"torch.nn"}
    batch = gather(synthetic_pairs(run, 17), np.arange(17))
    padded, rival = rivals.padded(batch), rivals.trainable(model)["torch.nn"].eval()
    torch.testing.assert_close(rival.hidden(padded)[padded.is_target], model.hidden(batch), atol=1e-5, rtol=1e-4)


def test_a_row_that_a_rival_cannot_hold_is_refused(model):
    model.encoder[0].self_attention.d_k = 20
    with pytest.raises(schema.ConfigError, match="cannot hold this row"):
        rivals.trainable(model)
