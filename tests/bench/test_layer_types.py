"""Table 1's layers: each is what its name says, and connects the ends of a sequence by as many steps."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from aiayn.bench import layer_types
from aiayn.config import compose
from aiayn.config.schema import Bench

D, R, K = 64, 7, 3
KINDS = layer_types.layer_types(
    Bench("layers", 5.0, 1, 1, d_model=D, neighbourhood=R, kernel_width=K, max_length=64, sequences=2, output="")
)


@pytest.mark.parametrize("length", [1, 2, 3, 17, 24])
def test_attention_in_blocks_equals_a_band_mask(length) -> None:
    parts = torch.randn(3, 5, 2, length, D, requires_grad=True)
    probe, positions = torch.randn(5, 2, length, D), torch.arange(length)
    gap = (positions[:, None] - positions).abs()
    ours = layer_types.attend_nearby(*parts, radius=R // 2)
    expected, wider = (
        nn.functional.scaled_dot_product_attention(*parts, attn_mask=gap <= radius) for radius in (R // 2, R // 2 + 1)
    )
    torch.testing.assert_close(ours, expected)
    gradients = [torch.autograd.grad(output, parts, probe)[0] for output in (ours, expected)]
    torch.testing.assert_close(*gradients)
    assert torch.allclose(ours, wider, atol=1e-5) == (length <= R // 2 + 1)  # control


def test_attention_is_torchs_own() -> None:
    ours, theirs = layer_types.Attention(2 * D), nn.MultiheadAttention(2 * D, 2, batch_first=True)
    theirs.in_proj_weight.data = ours.query_key_value.weight.data
    theirs.in_proj_bias.data = ours.query_key_value.bias.data
    theirs.out_proj.load_state_dict(ours.output.state_dict())
    x = torch.randn(3, 11, 2 * D)
    torch.testing.assert_close(ours(x), theirs(x, x, x)[0])


@pytest.mark.parametrize("dilation", [1, 5])
def test_a_convolution_sums_its_own_token_and_those_before_it(dilation) -> None:
    layer = layer_types.Convolution(7, K, dilation)
    x = torch.randn(2, 13, 7)
    weight, bias = layer.convolution.weight, layer.convolution.bias
    for position in range(13):
        seen = [(tap, position - (K - 1 - tap) * dilation) for tap in range(K)]
        expected = bias + sum(x[:, at] @ weight[:, :, tap].T for tap, at in seen if at >= 0)
        torch.testing.assert_close(layer(x)[:, position], expected)


def connected(build: Callable[[int, int], nn.Module], length: int, depth: int) -> Tensor:
    """Which outputs (N,) depend on which inputs (N,) through so many layers."""
    x = torch.randn(1, length, 2, requires_grad=True)
    y = x
    for below in range(depth):
        layer = build(2, below)
        y = layer(y)[0] if isinstance(layer, nn.LSTM) else layer(y)
    rows = [torch.autograd.grad(y[0, position].sum(), x, retain_graph=True)[0][0] for position in range(length)]
    return torch.stack(rows).ne(0).any(-1)


# Layers until N tokens are connected
DEPTHS = (
    lambda n: 1,
    lambda n: 1,  # whose path leads through tokens, not layers
    lambda n: math.ceil((n - 1) / (K - 1)),
    lambda n: next(layers for layers in range(n) if K**layers >= n),
    lambda n: math.ceil((n - 1) / (R // 2)),
)


@pytest.mark.parametrize("length", [2, 9, 10])
@pytest.mark.parametrize("number", range(5), ids=[name for name, *_ in KINDS])
def test_a_path_is_as_long_as_the_shallowest_connecting_stack(number, length) -> None:
    everything = torch.ones(length, length, dtype=torch.bool)
    if number in (1, 2, 3):  # these see earlier tokens alone
        everything = everything.tril()
    depth, build = DEPTHS[number](length), KINDS[number][-1]
    assert torch.equal(connected(build, length, depth), everything)
    assert depth == 1 or not torch.equal(connected(build, length, depth - 1), everything)


def test_every_type_is_measured_at_every_length(toy) -> None:
    run = compose.compose_row(*toy, "bench.max_length=127", f"bench.d_model={D}", "bench.rounds=2", "bench.sequences=3")
    part = layer_types.layers(run)
    assert part["lengths"] == [16, 32, 64]
    assert [line["name"] for line in part["layers"]] == [name for name, *_ in KINDS]
    for line in part["layers"]:
        rounds = np.array(line["seconds_per_round"])
        assert (rounds.shape, line["seconds_per_token"]) == ((3, 2), pytest.approx(rounds.mean(1) / (3 * 64)))
