"""Additive scores by their definition, at once or in parts; relative positions by the naive gather, in less memory."""

from typing import Any

import pytest
import torch
from torch import Tensor

from aiayn.alternatives import scores
from aiayn.alternatives.scores import AdditiveScores, RelativePositions
from aiayn.config.schema import MAX_DISTANCE
from aiayn.paper.attention import distances, scaled_dot_products

B, H, K = 2, 3, 61


def ours(relative: RelativePositions, queries: Tensor, keys: Tensor) -> Tensor:
    return scaled_dot_products(queries, keys) + relative(queries, distances(queries, keys))


def naive(relative: RelativePositions, queries: Tensor, keys: Tensor) -> Tensor:
    """Eq. 4 of Shaw et al. as it is written: a vector for each pair of tokens."""
    most = MAX_DISTANCE
    distance = torch.arange(keys.size(-2)) - torch.arange(queries.size(-2)).unsqueeze(1)  # (Q, M)
    vectors = relative.vectors[:, distance.clamp(-most, most) + most]
    return torch.einsum("...qk,...qmk->...qm", queries, keys.unsqueeze(-3) + vectors) / K**0.5


def drawn(queries: int, keys: int) -> tuple[RelativePositions, Tensor, Tensor]:
    torch.manual_seed(7)
    relative = RelativePositions(H, K).double()
    sides = (torch.randn(B, H, length, K, dtype=torch.float64, requires_grad=True) for length in (queries, keys))
    return relative, *sides


@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (1, 41), (37, 37)])
def test_values_and_gradients_are_those_of_the_naive_gather(queries: int, keys: int) -> None:
    relative, q, k = drawn(queries, keys)
    found, expected = ours(relative, q, k), naive(relative, q, k)
    torch.testing.assert_close(found, expected)
    inputs = [q, k, relative.vectors]
    gradients = [torch.autograd.grad(x, inputs, torch.ones_like(x).cumsum(-1)) for x in (found, expected)]
    torch.testing.assert_close(*gradients)


def largest(make: Any, length: int) -> int:
    """Elements of the largest tensor that is kept for the backward pass over sentences of this length."""
    sizes = list[int]()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
        make(*drawn(length, length))
    return max(sizes)


def test_no_vector_is_made_for_a_pair_of_tokens() -> None:
    length = 127
    pairs = B * H * length**2
    assert largest(ours, length) == pairs
    assert largest(naive, length) == K * pairs  # control


def test_additive_scores_have_a_vector_for_each_head(monkeypatch) -> None:
    torch.manual_seed(3)
    additive = AdditiveScores(3, 5).double()
    queries, keys = (torch.randn(7, 3, tokens, 5).double().requires_grad_() for tokens in (7, 11))
    expected = torch.einsum("bhqmk,hk->bhqm", torch.tanh(queries[:, :, :, None] + keys[:, :, None]), additive.v)
    torch.testing.assert_close(additive(queries, keys), expected)
    torch.testing.assert_close(additive(queries[:, :, -1:], keys), expected[:, :, -1:])
    assert not torch.allclose(additive(queries.flip(1), keys.flip(1)).flip(1), expected)  # control: heads differ
    # As on a GPU, two sentences at a time
    monkeypatch.setitem(scores.CHUNK_ELEMENTS, "cpu", 3 * 7 * 11 * 5 * 2 + 1)
    torch.testing.assert_close(parts := additive(queries, keys), expected)
    inputs, probe = (queries, keys, additive.v), torch.randn_like(expected)
    torch.testing.assert_close(*(torch.autograd.grad(x, inputs, probe) for x in (parts, expected)))
