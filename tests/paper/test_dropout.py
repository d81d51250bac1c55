"""Dropout: its rate and its mean; its masks are independent of each other and a function of nothing but their key."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from aiayn.paper.dropout import Dropout, Randomness, draw, layer_keys

T, D = 401, 499
KEYS = [[7259495040179160149, -2818071681898790777], [4997663860803287740, 2879004085327703009]]
MASK = ["011110110111", "000001110011", "101011111000", "100001101100"]


def bits(seed: int = 1, update: int = 0, side: str = "source", layer: int = 0, first: int = 0, tokens: int = T) -> Any:
    return draw(layer_keys(seed, update, side, 3)[layer : layer + 1], first, tokens, D)


def kept(probability: float, given: Randomness) -> Tensor:
    """Which elements of a (T, D) tensor stay."""
    return Dropout(probability)(torch.ones(given.tokens.size(1), D), given) > 0


def standard(mask: Tensor, probability: float) -> Tensor:
    """Each element with mean 0 and variance 1."""
    return (mask.double() - (1 - probability)) / math.sqrt(probability * (1 - probability))


@pytest.mark.parametrize("probability", [0.1, 0.3, 0.5, 0.9])
def test_dropout_zeroes_the_share_it_should_and_scales_the_rest(probability: float) -> None:
    x = torch.randn(T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(7), requires_grad=True)
    y = Dropout(probability)(x, bits())
    factor = (y / x).detach()
    stays = factor != 0
    assert abs(float(standard(stays, probability).sum())) < 4 * math.sqrt(x.numel())
    assert abs(float(standard(stays, probability + 0.01).sum())) > 4 * math.sqrt(x.numel())  # control
    torch.testing.assert_close(factor[stays], torch.full_like(factor[stays], 1 / (1 - probability)), rtol=1e-9, atol=0)
    torch.testing.assert_close(*torch.autograd.grad(y.sum(), x), factor, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_mean_of_an_element_stays_in_any_type(dtype: torch.dtype) -> None:
    y = Dropout(0.3)(torch.ones(T, D, dtype=dtype), bits())
    scale = float(y.max())
    assert abs(0.7 * scale - 1) < 1e-6
    assert abs(float(y.double().mean()) - 1) < 4 * math.sqrt(0.3 / 0.7 / y.numel())
    assert abs(0.7 * float(torch.tensor(scale).bfloat16()) - 1) > 5e-4  # control: in bfloat16 the scale is not right
    for probability, stays in ((1e-12, True), (1 - 1e-12, False)):  # never rounded to nothing or all
        y = Dropout(probability)(torch.ones(T, D, dtype=dtype), bits())
        assert bool((y > 0).all()) == stays
        assert bool(y.isfinite().all())


@pytest.mark.parametrize("probability", [0.1, 0.5])
def test_masks_of_other_keys_are_independent(probability: float) -> None:
    one = standard(kept(probability, bits()), probability)
    for other in ({"seed": 2}, {"update": 1}, {"side": "target"}, {"layer": 1}, {"first": T}, {"first": 2**40}):
        both = float((one * standard(kept(probability, bits(**other)), probability)).sum())
        assert abs(both) < 4 * math.sqrt(one.numel()), other
    assert float(one.square().sum()) > 400 * math.sqrt(one.numel())  # control: the same key


@pytest.mark.parametrize("probability", [0.1, 0.5])
@pytest.mark.parametrize("layer", [0, 1])
def test_tokens_and_features_are_independent(probability: float, layer: int) -> None:
    def shares(mask: Tensor) -> list[tuple[float, float]]:
        """For rows, then columns: how large the largest correlation of two is, and the mean of all squares."""
        found = []
        for x in (mask, mask.t()):
            pairs = (x @ x.t() / math.sqrt(x.size(1)))[torch.ones(len(x), len(x)).triu(1).bool()]
            found.append((float(pairs.abs().max()), float(pairs.square().mean())))
        return found

    one = standard(kept(probability, bits(layer=layer)), probability)
    for largest, squares in shares(one):
        assert largest < 6  # of 100 000 normal ones
        # More than 1 if two tokens and two features made a square whose fourth corner follows from the others
        assert squares == pytest.approx(1, abs=0.02)
    for sums in (one.sum(0) / math.sqrt(T), one.sum(1) / math.sqrt(D)):
        assert float(sums.square().mean()) == pytest.approx(1, abs=5 * math.sqrt(2 / len(sums)))
    # Control: a sum of a number of the token and one of the feature has such squares
    draw = torch.Generator().manual_seed(3)
    rows, columns = (torch.rand(shape, generator=draw) for shape in ((T, 1), (1, D)))
    assert all(squares > 2 for _, squares in shares(standard((rows + columns) % 1 > probability, probability)))


def test_a_mask_is_that_of_its_tokens_in_any_micro_batch() -> None:
    whole = kept(0.3, bits())
    parts = [kept(0.3, bits(first=first, tokens=tokens)) for first, tokens in ((0, 7), (7, 131), (138, T - 138))]
    assert torch.equal(torch.cat(parts), whole)
    assert not torch.equal(kept(0.3, bits(tokens=131)), whole[7:138])  # control: by its place in the micro-batch


def test_keys_and_masks_never_change() -> None:
    assert layer_keys(1, 2, "source", 2).tolist() == KEYS
    assert torch.equal(layer_keys(1, 2, "source", 5)[:2], layer_keys(1, 2, "source", 2))
    mask = kept(0.5, bits(3, 5, "target", 1, first=7, tokens=4))
    assert ["".join("01"[int(bit)] for bit in row) for row in mask[:, :12]] == MASK
    assert not torch.equal(layer_keys(1, 23, "source", 1), layer_keys(12, 3, "source", 1))
