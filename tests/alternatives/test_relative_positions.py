"""Relative positions: the values and gradients of the naive gather, in a fraction of its memory."""

from typing import Any

import pytest
import torch
from torch import Tensor

from aiayn.alternatives.relative_positions import RelativePositions
from aiayn.paper.attention import distances, scaled_dot_products

B, H, K = 2, 3, 61


def ours(relative: RelativePositions, queries: Tensor, keys: Tensor) -> Tensor:
    return scaled_dot_products(queries, keys) + relative(queries, distances(queries, keys))


def naive(relative: RelativePositions, queries: Tensor, keys: Tensor) -> Tensor:
    """Eq. 4 of Shaw et al. as it is written: a vector for each pair of tokens."""
    most = relative.max_distance
    distance = torch.arange(keys.size(-2)) - torch.arange(queries.size(-2)).unsqueeze(1)  # (Q, M)
    vectors = relative.vectors[:, distance.clamp(-most, most) + most]
    return torch.einsum("...qk,...qmk->...qm", queries, keys.unsqueeze(-3) + vectors) / K**0.5


def drawn(queries: int, keys: int, max_distance: int) -> tuple[RelativePositions, Tensor, Tensor]:
    torch.manual_seed(7)
    relative = RelativePositions(H, K, max_distance).double()
    sides = (torch.randn(B, H, length, K, dtype=torch.float64, requires_grad=True) for length in (queries, keys))
    return relative, *sides


@pytest.mark.parametrize(("queries", "keys", "max_distance"), [(7, 7, 16), (1, 11, 2), (37, 37, 16)])
def test_values_and_gradients_are_those_of_the_naive_gather(queries: int, keys: int, max_distance: int) -> None:
    relative, q, k = drawn(queries, keys, max_distance)
    found, expected = ours(relative, q, k), naive(relative, q, k)
    torch.testing.assert_close(found, expected)
    inputs = [q, k, relative.vectors]
    gradients = [torch.autograd.grad(x, inputs, torch.ones_like(x).cumsum(-1)) for x in (found, expected)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def largest(make: Any, length: int) -> int:
    """Elements of the largest tensor that is kept for the backward pass over sentences of this length."""
    sizes = list[int]()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
        make(*drawn(length, length, 16))
    return max(sizes)


def test_no_vector_is_made_for_a_pair_of_tokens() -> None:
    length = 127
    pairs = B * H * length**2
    assert largest(ours, length) == pairs
    assert largest(naive, length) == K * pairs  # control
