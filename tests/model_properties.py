"""What every model of translation has to be, whatever its parts: each property once, for the tests of each model."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from models import BOS, EOS, SOURCES, VOCAB, batch, pack
from torch import Tensor, nn


def assert_a_later_target_token_changes_no_earlier_logit(model: nn.Module) -> None:
    """And every later one of its own sentence."""
    ends = batch().target_offsets
    for changed, moved in _moved(model, "target_input"):
        end = next(int(end) for end in ends if end > changed)
        assert moved == list(range(changed, end))


def assert_a_source_token_changes_every_logit_of_its_sentence_alone(model: nn.Module) -> None:
    given = batch()
    for changed, moved in _moved(model, "source"):
        sentence = int(torch.searchsorted(given.source_offsets, changed, right=True)) - 1
        assert moved == list(range(*given.target_offsets[sentence : sentence + 2].tolist()))


def _moved(model: nn.Module, side: str) -> Iterator[tuple[int, list[int]]]:
    """Each place of a side's tokens, and the logits that change when another token stands there."""
    given = batch()
    logits = model(given)
    for place in range(len(getattr(given, side))):
        tokens = getattr(given, side).clone()
        tokens[place] = 14
        other = model(replace(given, **{side: tokens}))
        yield place, (logits != other).any(1).nonzero().squeeze(1).tolist()


def assert_the_gradient_is_that_of_finite_differences(model: nn.Module) -> None:
    """For every parameter of a model in float64 with a vocabulary of 15."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    given = batch()

    def loss(*values: Tensor) -> Tensor:
        logits = torch.func.functional_call(model, dict(zip(names, values, strict=True)), (given,))
        return nn.functional.cross_entropy(logits, given.target, label_smoothing=0.1, reduction="sum")

    assert torch.autograd.gradcheck(loss, parameters, fast_mode=True)


def assert_one_token_at_a_time_equals_all_at_once(model: nn.Module, decoder: Any, **rounding: float) -> None:
    """Beyond `max_length`, too."""
    target = [[8, 4, 6, 10, 9, 5, 7, 11, EOS]] * len(SOURCES)
    expected = model(batch(SOURCES, target)).unflatten(0, (len(SOURCES), -1))
    decoding = decoder.start(*pack(SOURCES))
    for t, token in enumerate([BOS, *target[0][:-1]]):
        logits = decoding.step(torch.full((len(SOURCES), 1), token))
        torch.testing.assert_close(logits[:, 0], expected[:, t], **rounding)


def assert_dropout_is_a_function_of_seed_and_update(model: nn.Module) -> None:
    given = batch()
    assert torch.equal(model(given), model(given, (1, 2)))
    model.train()
    one, again, *others = (model(given, randomness) for randomness in ((1, 2), (1, 2), (1, 3), (2, 2)))
    assert torch.equal(one, again)
    assert not any(torch.equal(one, other) for other in others)
    with pytest.raises(AssertionError, match="seed and update"):
        model(given)


def assert_hypotheses_go_on_from_their_own_past(
    start: Callable[[Tensor, Tensor], Any],
    logits_after: Callable[[list[int], list[int]], Tensor],
    kept_memory: Callable[[Any], int],
    **rounding: float,
) -> None:
    """Whatever sentences are kept and however hypotheses are reordered.

    `start` gives the decoder's state of packed sources, `logits_after` the last logits of one source and one past by
    another way, `kept_memory` the number of sentences whose memory a state holds.
    """
    decoding = start(*pack(SOURCES))
    sources, pasts = SOURCES, [[[]] for _ in SOURCES]
    random = torch.Generator().manual_seed(3)
    for width, kept in ((3, [0, 1, 2]), (4, [2, 0]), (2, [0, 1]), (5, [1])):
        old = len(pasts[0])
        tokens = torch.randint(4, VOCAB, (len(sources), old), generator=random)
        pasts = [
            [[*past, int(token)] for past, token in zip(hypotheses, row, strict=True)]
            for hypotheses, row in zip(pasts, tokens, strict=True)
        ]
        logits = decoding.step(tokens)
        assert logits.shape == (len(sources), old, VOCAB)
        for source, hypotheses, row in zip(sources, pasts, logits, strict=True):
            for past, ours in zip(hypotheses, row, strict=True):
                torch.testing.assert_close(ours, logits_after(source, past), **rounding)
        decoding.keep(torch.tensor(kept))
        parents = torch.randint(old, (len(kept), width), generator=random)
        decoding.reorder(parents)
        sources = [sources[row] for row in kept]
        pasts = [[pasts[row][int(parent)] for parent in line] for row, line in zip(kept, parents, strict=True)]
        assert kept_memory(decoding) == len(kept)  # once for all hypotheses


def assert_reordering_matters(start: Callable[[Tensor, Tensor], Any]) -> None:
    """The control of the property above: the wrong past gives other logits."""
    results = []
    for parents in ([[0, 1]], [[1, 0]]):
        decoding = start(*pack(SOURCES[:1]))
        decoding.reorder(torch.tensor([[0, 0]]))
        decoding.step(torch.tensor([[5, 6]]))
        decoding.reorder(torch.tensor(parents))
        results.append(decoding.step(torch.tensor([[7, 7]])))
    assert not torch.allclose(results[0], results[1])
    torch.testing.assert_close(results[0], results[1].flip(1))
