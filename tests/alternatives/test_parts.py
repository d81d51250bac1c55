"""Each part from beyond Table 3 against its definition, a head and a pair of tokens at a time; and it stays plain."""

import math
from functools import partial

import pytest
import torch
from models import BOS, PARTS, SOURCES, TABLE_3, TARGETS, attend_by_definition, batch, transformer
from torch import Tensor, nn

from aiayn.config.schema import MAX_DISTANCE
from aiayn.paper.layers import AddAndNorm, sinusoids
from aiayn.paper.transformer import Transformer

# S tokens of the source; T of the target; D d_model

WEIGHTED = ("additive", "relative_positions")  # parts with weights of their own


def by_definition(model: Transformer, source: list[int], target_input: list[int], **part: str) -> Tensor:
    """The logits (T, vocabulary) for one sentence pair, with nothing of the model but its weights."""
    part = {**TABLE_3, **part}
    d_model = model.d_model

    def score(attention: nn.Module, to_itself: bool, head: int, query: Tensor, key: Tensor, distance: int) -> Tensor:
        if part["scores"] == "additive":
            return (attention.scores.v[head] * torch.tanh(query + key)).sum()
        if part["positions"] == "relative" and to_itself:
            most = MAX_DISTANCE
            key = key + attention.bias.vectors[head, max(-most, min(most, distance)) + most]
        return query @ key / (1 if part["scores"] == "dot" else math.sqrt(len(key)))

    def attend(attention: nn.Module, x: Tensor, memory: Tensor | None, causal: bool) -> Tensor:
        return attend_by_definition(attention, x, memory, causal, partial(score, attention, memory is None))

    def add(around: AddAndNorm, x: Tensor, sublayer: Tensor) -> Tensor:
        return around.norm(x + sublayer if part["residual"] == "connections" else sublayer)

    def positions(length: int) -> Tensor | int:
        return sinusoids(length, d_model) if part["positions"] == "sinusoids" else 0

    sides = []
    for tokens, layers in ((source, model.encoder), (target_input, model.decoder)):
        x = model.embedding.weight[tokens] * math.sqrt(d_model)
        for number, layer in enumerate(layers):
            if number == 0 or part["residual"] == "positions":
                x = x + positions(len(tokens))
            x = add(layer.after_self_attention, x, attend(layer.self_attention, x, None, bool(sides)))
            if sides:
                x = add(layer.after_memory_attention, x, attend(layer.memory_attention, x, sides[0], False))
            x = add(layer.after_feed_forward, x, layer.feed_forward[2](layer.feed_forward[0](x).relu()))
        sides.append(x)
    return sides[1] @ model.embedding.weight.t()


# Longer than two clipped distances
LONG = [[4 + number % 17 for number in range(37)], [5 + number % 13 for number in range(41)]]
PAIRS = [*zip(SOURCES, TARGETS, strict=True), LONG]


@pytest.mark.parametrize("name", PARTS)
def test_a_part_does_what_its_definition_says(name: str) -> None:
    model = transformer(**PARTS[name])
    logits = model(batch(*map(list, zip(*PAIRS, strict=True))))
    expected = [by_definition(model, source, [BOS, *target[:-1]], **PARTS[name]) for source, target in PAIRS]
    torch.testing.assert_close(logits, torch.cat(expected))
    # Control: without the part it is another function
    source, target = PAIRS[0]
    with torch.no_grad():
        for own, weight in model.named_parameters():
            if own.endswith((".vectors", ".v")):  # of relative positions, of additive scores
                weight.zero_()
    other = by_definition(model, source, [BOS, *target[:-1]], **(PARTS[name] if name in WEIGHTED else TABLE_3))
    assert not torch.allclose(other, expected[0])
