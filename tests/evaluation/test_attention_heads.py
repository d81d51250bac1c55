"""Heads in numbers: weights that are known give values that are known, whatever batches they come in."""

import math
import re
from itertools import pairwise

import numpy as np
import pytest
import torch
from models import BOS, EOS, VOCAB, WAYS, Attach, batch, transformer

from aiayn.data.encoded import Pairs
from aiayn.evaluation import attention_heads
from aiayn.evaluation.attention_heads import KINDS, Sums, look, measure, measured
from aiayn.paper.transformer import Transformer

NO_PADDING = torch.zeros(3, 7, dtype=torch.bool)


def pairs() -> Pairs:
    """29 sentence pairs of 2 to 11 tokens a side."""
    draw = np.random.default_rng(5)
    sides = []
    for _ in range(2):
        lengths = draw.integers(2, 12, 29)
        ids = draw.integers(4, VOCAB, lengths.sum())
        ids[np.cumsum(lengths) - 1] = EOS
        sides += [ids, np.concatenate([[0], np.cumsum(lengths)])]
    return Pairs(*sides)


def same(one: Sums, other: Sums) -> bool:
    return one.tokens == other.tokens and all(
        torch.allclose(one.means(kind), other.means(kind), rtol=1e-10, atol=1e-12) for kind in KINDS
    )


def test_uniform_weights_have_the_logarithm_of_n_as_entropy_and_a_known_mean_distance() -> None:
    distance, entropy, diagonal, beside = (measured(torch.full((3, 2, 7, 7), 1 / 7), NO_PADDING) / 21).unbind(-1)
    assert entropy.tolist() == pytest.approx([math.log(7)] * 2)
    assert distance.tolist() == pytest.approx([(7**2 - 1) / (3 * 7)] * 2)  # the mean of |i - j| on a square
    assert diagonal.tolist() == pytest.approx([1 / 7] * 2)
    assert beside.tolist() == pytest.approx([12 / 49] * 2)


def test_identity_weights_have_distance_0_and_all_weight_on_the_diagonal() -> None:
    identity = torch.eye(7).expand(3, 2, 7, 7)
    assert (measured(identity, NO_PADDING) / 21).tolist() == [[0, 0, 1, 0]] * 2
    previous = torch.eye(7).roll(-1, 1)
    previous[0] = torch.eye(7)[1]
    assert (measured(previous.expand(3, 2, 7, 7), NO_PADDING) / 21).tolist() == [[1, 0, 0, 1]] * 2  # control


def test_a_query_that_is_padding_does_not_count() -> None:
    weights = torch.from_numpy(np.random.default_rng(3).dirichlet(np.ones(7), size=(3, 2, 7)))
    padding = torch.arange(7) >= torch.tensor([[7], [2], [5]])
    changed = weights.clone()
    changed[1, :, 2:], changed[2, :, 5:] = 0.5, 0.25
    assert torch.equal(measured(changed, padding), measured(weights, padding))
    assert not torch.equal(measured(changed, NO_PADDING), measured(weights, NO_PADDING))  # control


@WAYS
def test_batches_change_nothing(attach: Attach) -> None:
    model, split = transformer(attach, d_model=22), pairs()
    once, often = (measure(model, split, tokens, lambda more: None) for tokens in (10_000, 13))
    assert same(once, often)
    assert once.tokens == dict(
        zip(KINDS, map(len, (split.source_ids, split.target_ids, split.target_ids)), strict=True)
    )
    means = measure_by_hand(model, split)
    for kind in KINDS:
        assert once.means(kind).shape == (2, 3 + 1, 4)
        assert torch.allclose(once.means(kind)[:, :-1], means[kind], rtol=1e-10)
    # Control: the mean over sentences' means is another
    assert not torch.allclose(once.means("encoder")[:, :-1], measure_by_hand(model, split, True)["encoder"], rtol=1e-3)


def measure_by_hand(model: Transformer, split: Pairs, of_sentences: bool = False) -> dict[str, torch.Tensor]:
    """The means from single sentences, by loops over tokens; over all tokens, or of each sentence's own mean."""
    values: dict[str, list[list[torch.Tensor]]] = {kind: [] for kind in KINDS}
    source, target = (
        [ids[start:end].tolist() for start, end in pairwise(offsets)]
        for ids, offsets in ((split.source_ids, split.source_offsets), (split.target_ids, split.target_offsets))
    )
    for sides in zip(source, target, strict=True):
        found: dict[str, list[torch.Tensor]] = {kind: [] for kind in KINDS}
        look(model, batch(*([side] for side in sides)), lambda kind, weights, *_, to=found: to[kind].append(weights[0]))
        for kind, layers in found.items():
            rows = []
            for i in range(layers[0].size(1)):
                row = torch.stack([layer[:, i] for layer in layers])  # (layers, H, M)
                near = {j: row[..., j] for j in range(row.size(-1))}
                distance = sum(abs(i - j) * weight for j, weight in near.items())
                entropy = -(row * row.clamp(min=1e-300).log()).sum(-1)
                none = torch.zeros_like(entropy)
                shares = near.get(i, none), near.get(i - 1, none) + near.get(i + 1, none)
                rows.append(torch.stack([distance, entropy, *shares], -1))
            values[kind].append(rows)
    if of_sentences:
        return {
            kind: torch.stack([torch.stack(rows).mean(0) for rows in found]).mean(0) for kind, found in values.items()
        }
    return {kind: torch.stack([row for rows in found for row in rows]).mean(0) for kind, found in values.items()}


def test_no_preference_is_even_over_what_each_token_may_look_at() -> None:
    split = pairs()
    found = measure(transformer(d_model=22), split, 101, lambda more: None)
    source, target = np.diff(split.source_offsets), np.diff(split.target_offsets)
    own = [(source, source), (target, None), (target, source)]
    for kind, (queries, keys) in zip(KINDS, own, strict=True):
        nats = [
            math.log(i + 1 if keys is None else keys[sentence])
            for sentence, length in enumerate(queries)
            for i in range(length)
        ]
        assert found.means(kind)[:, -1, 1].tolist() == pytest.approx([np.mean(nats)] * 2)
    assert not torch.allclose(found.means("encoder")[:, 0, 1], found.means("encoder")[:, -1, 1], rtol=1e-3)  # control


def test_every_head_has_a_line_and_the_extreme_ones_are_named() -> None:
    heads = torch.tensor([[[1.0, 0.5, 0.25, 0.5], [2.5, 0.25, 0.5, 0.125], [2.0, 1.0, 0.125, 0.25]]])
    sums = [heads[0] * 8, heads[0].flip(0) * 8]
    text = attention_heads.text(
        Sums(dict.fromkeys(KINDS, 8), {kind: [part.double() for part in sums] for kind in KINDS})
    )
    first, *_ = text.split("\n\n")
    assert first.startswith("Encoder self-attention, over 8 query tokens\n")
    rows = [line.split() for line in first.splitlines()[2:7]]
    assert [row[0] for row in rows] == ["1.1", "1.2", "2.1", "2.2", "uniform"]
    assert rows[1] == ["1.2", "2.50", "0.25", "50.0", "%", "12.5", "%"]
    assert "distance: nearest 1.1 (1.00), farthest 1.2 (2.50)" in first
    assert "diagonal: least 2.1 (12.5 %), most 1.2 (50.0 %)" in first
    assert len(re.findall("uniform", text)) == len(KINDS)


def test_the_decoder_sees_its_own_input_from_bos_on() -> None:
    """Distances of the decoder's queries are between tokens of its input: BOS looks at BOS alone."""
    seen = []
    look(transformer(), batch(), lambda kind, weights, *_: seen.append((kind, weights)))
    first = next(weights for kind, weights in seen if kind == "decoder")
    assert batch().target_input[0] == BOS
    assert (first[:, :, 0, 0] == 1).all()
    assert (first[:, :, 0, 1:] == 0).all()
