"""Relative positions by skewing: the naive gather's values and gradients, in a fraction of its memory."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from aiayn.alternatives.relative_positions import RelativeScores, skewed

B, H, K = 2, 3, 61


def naive(scores: RelativeScores, queries: Tensor, keys: Tensor) -> Tensor:
    """Eq. 4 of Shaw et al. as it is written: a vector for each pair of tokens."""
    own, others = queries.size(-2), keys.size(-2)
    distances = torch.arange(others) - torch.arange(others - own, others).unsqueeze(1)  # (Q, M)
    vectors = scores.vectors[:, distances.clamp(-scores.max_distance, scores.max_distance) + scores.max_distance]
    return torch.einsum("...qk,...qmk->...qm", queries, keys.unsqueeze(-3) + vectors) / K**0.5


def drawn(queries: int, keys: int, max_distance: int) -> tuple[RelativeScores, Tensor, Tensor]:
    torch.manual_seed(7)
    scores = RelativeScores(H, K, max_distance).double()
    sides = (torch.randn(B, H, length, K, dtype=torch.float64, requires_grad=True) for length in (queries, keys))
    return scores, *sides


@pytest.mark.parametrize("max_distance", [2, 16])
@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (1, 1), (1, 11), (5, 13), (37, 37), (2, 41)])
def test_skewing_has_the_values_and_gradients_of_the_naive_gather(queries: int, keys: int, max_distance: int) -> None:
    scores, q, k = drawn(queries, keys, max_distance)
    ours, theirs = scores(q, k), naive(scores, q, k)
    torch.testing.assert_close(ours, theirs)
    inputs = [q, k, scores.vectors]
    gradients = [torch.autograd.grad(found, inputs, torch.ones_like(found).cumsum(-1)) for found in (ours, theirs)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_tokens_farther_apart_than_k_share_a_vector_and_nearer_ones_do_not() -> None:
    scores, q, _ = drawn(11, 11, 3)
    same = torch.zeros(B, H, 11, K, dtype=torch.float64)  # keys that say nothing of their own
    found = scores(q, same)[0, 0, 5]
    assert torch.equal(found[:3], found[:1].expand(3))  # distances -5 to -3
    assert torch.equal(found[8:], found[8:9].expand(3))  # 3 to 5
    assert len(found.detach().unique()) == 7  # control


def test_the_skew_by_hand() -> None:
    # Two queries, the last ones of three keys; columns are distances -2, -1, 0, 1 and 2, which no query needs
    rows = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]])
    assert skewed(rows).tolist() == [[2, 3, 4], [6, 7, 8]]


class Sizes(TorchDispatchMode):
    """Notes how many elements each tensor has that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        made = function(*arguments, **(options or {}))
        self.found += [x.numel() for x in (made if isinstance(made, tuple | list) else [made]) if isinstance(x, Tensor)]
        return made


def largest(make: Any, length: int) -> int:
    """Elements of the largest tensor in a forward and a backward pass over sentences of this length."""
    scores, q, k = drawn(length, length, 16)
    with Sizes() as sizes:
        make(scores, q, k).sum().backward()
    return max(sizes.found)


def test_no_vector_is_made_for_a_pair_of_tokens() -> None:
    length = 127
    pairs = B * H * length**2
    assert largest(lambda scores, q, k: scores(q, k), length) == 2 * pairs  # of each query at each distance
    assert largest(naive, length) == K * pairs  # control
