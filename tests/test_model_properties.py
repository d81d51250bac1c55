"""What every model of translation has to be, whatever its parts: seen in its logits and gradients."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from models import MODELS, Made, batch
from torch import Tensor, nn


def moved(model: nn.Module, side: str) -> Iterator[tuple[int, list[int]]]:
    """Each place of a side's tokens, and the logits that change when another token stands there."""
    given = batch()
    logits = model(given)
    for place in range(len(getattr(given, side))):
        tokens = getattr(given, side).clone()
        tokens[place] = 14
        other = model(replace(given, **{side: tokens}))
        yield place, (logits != other).any(1).nonzero().squeeze(1).tolist()


@MODELS
def test_a_later_target_token_never_changes_an_earlier_logit(made: Made) -> None:
    """And every later one of its own sentence."""
    model, offsets = made(), batch().target_offsets.tolist()
    unseen = offsets if getattr(model, "zero_start", False) else []  # zeros stand for what begins a sentence
    for changed, logits in moved(model, "target_input"):
        end = next(end for end in offsets if end > changed)
        assert logits == ([] if changed in unseen else list(range(changed, end)))


@MODELS
def test_a_source_token_changes_its_sentence_alone(made: Made) -> None:
    given = batch()
    for changed, logits in moved(made(), "source"):
        sentence = int(torch.searchsorted(given.source_offsets, changed, right=True)) - 1
        assert logits == list(range(*given.target_offsets[sentence : sentence + 2].tolist()))


@MODELS
def test_every_gradient_equals_finite_differences(made: Made) -> None:
    model, given = made(d_model=4, vocab_size=15), batch()
    names, parameters = zip(*model.named_parameters(), strict=True)

    def loss(*values: Tensor) -> Tensor:
        logits = torch.func.functional_call(model, dict(zip(names, values, strict=True)), (given,))
        return nn.functional.cross_entropy(logits, given.target, label_smoothing=0.1, reduction="sum")

    assert torch.autograd.gradcheck(loss, parameters, fast_mode=True)


@MODELS
def test_dropout_is_a_function_of_seed_and_update(made: Made) -> None:
    model, given = made(), batch()
    assert torch.equal(model(given), model(given, (1, 2)))
    model.train()
    one, again, *others = (model(given, randomness) for randomness in ((1, 2), (1, 2), (1, 3), (2, 2)))
    assert torch.equal(one, again)
    assert not any(torch.equal(one, other) for other in others)
    with pytest.raises(AssertionError, match="seed and update"):
        model(given)
