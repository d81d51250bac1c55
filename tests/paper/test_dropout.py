"""Dropout: its rate and its mean; its masks are independent of each other and a function of nothing but their key."""

import math

import pytest
import torch
from torch import Tensor

from aiayn.paper.dropout import Dropout, Randomness, draw, layer_keys

T, D = 401, 499
KEYS = [[7259495040179160149, -2818071681898790777], [4997663860803287740, 2879004085327703009]]
MASK = ["011110110111", "000001110011", "101011111000", "100001101100"]


def bits(
    seed: int = 1, update: int = 0, side: str = "source", layer: int = 0, first: int = 0, tokens: int = T
) -> Randomness:
    return draw(layer_keys(seed, update, side, 3)[layer : layer + 1], first, tokens, D)


def kept(probability: float, given: Randomness) -> Tensor:
    """Which elements of a (T, D) tensor stay."""
    return Dropout(probability)(torch.ones(given.tokens.size(1), given.features.size(2)), given) > 0


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
    y.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, factor, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("probability", [0.1, 0.3])
def test_the_mean_of_an_element_stays_in_any_type(dtype: torch.dtype, probability: float) -> None:
    y = Dropout(probability)(torch.ones(T, D, dtype=dtype), bits())
    scale = float(y.max())
    assert abs((1 - probability) * scale - 1) < 1e-6
    assert abs(float(y.double().mean()) - 1) < 4 * math.sqrt(probability / (1 - probability) / y.numel())
    rounded = float(torch.tensor(scale).bfloat16())
    assert abs((1 - probability) * rounded - 1) > 5e-4  # control: in bfloat16 neither scale is right


@pytest.mark.parametrize(("probability", "stays"), [(1e-12, True), (1 - 1e-12, False)])
def test_a_probability_is_never_rounded_to_nothing_or_all(probability: float, stays: bool) -> None:
    y = Dropout(probability)(torch.ones(T, D), bits())
    assert bool((y > 0).all()) == stays
    assert bool(y.isfinite().all())


@pytest.mark.parametrize("probability", [0.1, 0.5])
def test_masks_of_other_seeds_updates_sides_layers_and_tokens_are_independent(probability: float) -> None:
    one = standard(kept(probability, bits()), probability)
    others = [
        {"seed": 2},
        {"update": 1},
        {"side": "target"},
        {"layer": 1},
        {"layer": 2},
        {"first": T},
        {"first": 2**40},
    ]
    for other in others:
        both = float((one * standard(kept(probability, bits(**other)), probability)).sum())
        assert abs(both) < 4 * math.sqrt(one.numel()), other
    assert float((one * standard(kept(probability, bits()), probability)).sum()) > 400 * math.sqrt(
        one.numel()
    )  # control


@pytest.mark.parametrize("probability", [0.1, 0.5])
@pytest.mark.parametrize("layer", [0, 1])
def test_tokens_and_features_are_independent_in_pairs_and_in_fours(probability: float, layer: int) -> None:
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


def test_a_mask_is_that_of_its_tokens_wherever_a_micro_batch_begins() -> None:
    whole = kept(0.3, bits())
    parts = [kept(0.3, bits(first=first, tokens=tokens)) for first, tokens in ((0, 7), (7, 131), (138, T - 138))]
    assert torch.equal(torch.cat(parts), whole)
    assert not torch.equal(kept(0.3, bits(tokens=131)), whole[7:138])  # control: by its place in the micro-batch


def test_every_bit_of_both_keys_counts() -> None:
    keys = layer_keys(1, 0, "source", 1)
    expected = kept(0.5, draw(keys, 0, 67, 61))
    for column in (0, 1):
        for place in range(64):
            flipped = keys.clone()
            flipped[0, column] ^= 1 << place if place < 63 else -(2**63)
            found = kept(0.5, draw(flipped, 0, 67, 61))
            assert 0.4 < float((found != expected).double().mean()) < 0.6, (column, place)


@pytest.mark.slow
def test_all_updates_of_a_run_have_masks_of_their_own() -> None:
    keys = torch.cat([layer_keys(1, update, "source", 1) for update in range(60_000)])

    def masks(keys: Tensor) -> int:
        """How many different masks the first token has in 61 features."""
        dropout, given, found = Dropout(0.5), draw(keys, 0, 1, 61), set()
        for dropout.number in range(len(keys)):
            found.add(tuple((dropout(torch.ones(1, 61), given) > 0).flatten().tolist()))
        return len(found)

    assert masks(keys) == 60_000
    assert masks(keys & 2**14 - 1) < 60_000  # control: with few bits of a key they meet


def test_keys_and_masks_never_change_so_that_a_run_can_go_on_under_a_later_version() -> None:
    assert layer_keys(1, 2, "source", 2).tolist() == KEYS
    assert torch.equal(layer_keys(1, 2, "source", 5)[:2], layer_keys(1, 2, "source", 2))
    mask = kept(0.5, bits(3, 5, "target", 1, first=7, tokens=4))
    assert ["".join("01"[int(bit)] for bit in row) for row in mask[:, :12]] == MASK
    places = ((1, 23, "source"), (12, 3, "source"), (123, 0, "source"), (1, 23, "target"))
    assert len({tuple(layer_keys(*place, 1)[0].tolist()) for place in places}) == 4


def test_nothing_is_dropped_in_evaluation_or_at_zero_and_training_without_bits_is_refused() -> None:
    x = torch.randn(7, 11)
    assert Dropout(0.0)(x) is x
    assert Dropout(0.9).eval()(x) is x
    with pytest.raises(AssertionError, match="seed and update"):
        Dropout(0.9)(x)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # by torch's compiler
def test_compiled_it_is_one_graph_with_the_same_mask_that_keeps_no_mask_for_the_backward_pass() -> None:
    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dropouts = torch.nn.ModuleList(Dropout(0.3) for _ in range(2))
            self.dropouts[1].number = 1

        def forward(self, x: Tensor, given: Randomness) -> Tensor:
            for dropout in self.dropouts:
                x = dropout(x.sin(), given)
            return x

    def measured(module: torch.nn.Module, update: int) -> tuple[Tensor, Tensor, int]:
        x = torch.linspace(1, 2, 67 * 61).view(67, 61).requires_grad_()
        kept: list[Tensor] = []

        def keep(tensor: Tensor) -> Tensor:
            kept.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            y = module(x, draw(layer_keys(1, update, "source", 2), 5, 67, 61))
        return y.detach(), torch.autograd.grad(y.sum(), x)[0], sum(tensor.numel() > 1000 for tensor in kept)

    torch._dynamo.reset()
    compiled = torch.compile(Twice(), backend="aot_eager_decomp_partition", fullgraph=True)
    for update in (1, 2):
        (y, gradient, plain), (found, found_gradient, fewer) = measured(Twice(), update), measured(compiled, update)
        torch.testing.assert_close(found, y)
        torch.testing.assert_close(found_gradient, gradient)
        assert (plain, fewer) == (4, 1)  # two masks and two inputs of a sine; the first input alone
    assert not torch.equal(y == 0, measured(Twice(), 1)[0] == 0)  # control: another update is another mask
