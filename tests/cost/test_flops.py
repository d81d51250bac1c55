"""What training computes: the formula against torch's own count and against a table that others made."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from aiayn.alternatives.parts import transformer
from aiayn.alternatives.recurrent import RecurrentModel
from aiayn.config import compose, schema
from aiayn.cost import flops
from aiayn.paper.batch import Batch
from aiayn.paper.loss import label_smoothed_cross_entropy

VOCAB, SOURCE, TARGET = 101, 19, 17
SENTENCES = 64  # of one length on each side, and whole blocks of tokens: nothing is padded
TOKENS = {"source_tokens": SENTENCES * SOURCE, "target_tokens": SENTENCES * TARGET}
# num_layers, d_model, d_ff, num_heads, d_k, d_v, dropout, and the kinds of the model and its parts
SIZES = schema.Model(2, 26, 43, 3, 5, 17, 0.0, "transformer", "sinusoids", "scaled", "connections")


def formula(sizes: schema.Model, length: float = TARGET) -> float:
    return flops.training_flops(sizes, VOCAB, **TOKENS, source_length=SOURCE, length=length)


def counted(model: torch.nn.Module) -> int:
    """Products of one forward and backward pass, by torch; in float64, which oneDNN's own operators do not take."""
    source, target = (torch.randint(4, VOCAB, (count,)) for count in TOKENS.values())
    offsets = [torch.arange(SENTENCES + 1) * length for length in (SOURCE, TARGET)]
    with FlopCounterMode(display=False) as counter:
        hidden = model.double().hidden(Batch(source, target, target, *offsets))
        loss, _ = label_smoothed_cross_entropy(hidden, model.embedding.weight, target, 0.1)
        loss.backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("part", [{}, {"positions": "relative"}, {"positions": "none"}, {"scores": "dot"}], ids=str)
def test_the_formula_is_torchs_count_to_the_last_operation(part: dict[str, str]) -> None:
    sizes = dataclasses.replace(SIZES, **part)
    # Of masked self-attention all is computed, twice what the formula counts
    whole_mask = formula(sizes, 2 * TARGET)
    assert counted(transformer(**vars(sizes), max_length=23, vocab_size=VOCAB)) == whole_mask
    # Controls: the count sees so little, and the positions of other pairs
    assert 0 < whole_mask - formula(sizes) < 0.03 * whole_mask
    assert (whole_mask == formula(SIZES, 2 * TARGET)) == (part != {"positions": "relative"})


def test_additive_scores_add_once_more_for_each_product() -> None:
    """By hand; torch counts products alone."""
    pairs = TOKENS["source_tokens"] * SOURCE + TOKENS["target_tokens"] * (TARGET / 2 + SOURCE)
    added = formula(dataclasses.replace(SIZES, scores="additive")) - formula(SIZES)
    assert added == 6 * SIZES.num_layers * SIZES.num_heads * SIZES.d_k * pairs


def test_every_gpu_that_can_be_named_is_known() -> None:
    (choices,) = (meta["choices"] for key, _, meta in schema.leaves(schema.Config()) if key == "plan.gpu")
    assert set(choices) == set(flops.GPUS)
    for name, device in (("gpu", flops.GPUS["a100"]), ("cpu", flops.CORE)):
        assert flops.device(compose.compose_row(f"hardware={name}").hardware, "a100") is device
    assert all(0 < device.efficiency < 1 and device.basis for device in flops.GPUS.values())


def test_the_length_of_attention_is_the_mean_over_tokens() -> None:
    lengths = [7, 2, 31, 2, 5, 13, 3, 3]
    expected = np.mean([length for length in lengths for _ in range(length)])
    pairs = SimpleNamespace(source_lengths=np.array(lengths), target_lengths=np.array([4, 4]))
    assert flops.weighted_lengths(pairs) == pytest.approx((expected, 4), rel=1e-15)  # type: ignore[arg-type]
    assert expected > 2 * np.mean(lengths)  # control: not the mean over sentences


@pytest.mark.parametrize("kind", ["rnn", "rnn_attention"])
def test_a_recurrent_formula_is_torchs_count(kind: str) -> None:
    sizes = compose.compose_row(f"experiment=s_{kind}", "scale=paper", "model.num_layers=3", "model.d_model=26").model
    model = RecurrentModel(num_layers=3, d_model=26, dropout=0.0, attention=kind == "rnn_attention", vocab_size=VOCAB)
    # The first state of the encoder is zero and has no gradient: one product less in each direction of each layer
    no_gradient = SENTENCES * 3 * 2 * (2 * 4 * 13 * 13)
    assert counted(model) == formula(sizes) - no_gradient
    other = "rnn" if kind == "rnn_attention" else "rnn_attention"
    assert formula(dataclasses.replace(sizes, kind=other)) != formula(sizes)  # control
