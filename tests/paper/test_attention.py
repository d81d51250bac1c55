"""Attention against Eq. 1 token by token, torch.nn.MultiheadAttention, numbers by hand and finite differences."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from attention_inputs import LENGTHS, MEMORY_LENGTHS, D, H, K, V, drawn, offsets, packed, self_attention
from torch import Tensor, nn

from aiayn.paper.attention import MemoryAttention, SelfAttention, scaled_dot_product_attention
from aiayn.paper.batch import Packing
from aiayn.paper.fast.attention import HeadPacking, attend_to_memory, attend_to_self, weigh

EQ_1 = pytest.mark.parametrize("eq_1", [scaled_dot_product_attention, weigh], ids=["plain", "fast"])
WAYS = pytest.mark.parametrize("fast", [False, True], ids=["plain", "fast"])
Eq1 = Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]


def in_its_way(module: nn.Module, fast: bool) -> nn.Module:
    """The module, its forward replaced as `accelerate` does it if `fast`."""
    if fast:
        attend = attend_to_self if isinstance(module, SelfAttention) else attend_to_memory
        module.forward = attend.__get__(module)
    return module


def packing_of(lengths: tuple[int, ...], rows: int | None = None, *, fast: bool) -> Packing:
    return (HeadPacking if fast else Packing)(offsets(lengths), rows)


def assert_same_gradients(ours: Tensor, theirs: Tensor, inputs: list[Tensor], gradient: Tensor) -> None:
    for a, b in zip(*(torch.autograd.grad(y, inputs, gradient) for y in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b)


def by_definition(module: nn.Module, x: Tensor, memory: Tensor, causal: bool) -> Tensor:
    """Section 3.2 for one sentence x (T, D) and its memory (S, D): a loop over heads and queries."""
    rows = []
    if isinstance(module, SelfAttention):
        queries, keys, values = module.query_key_value(x).split((H * K, H * K, H * V), 1)
    else:
        queries, (keys, values) = module.query(x), module.key_value(memory).split((H * K, H * V), 1)
    queries, keys, values = (part.chunk(H, 1) for part in (queries, keys, values))
    for t in range(len(x)):
        heads = []
        for h in range(H):
            seen = t + 1 if causal else len(memory)
            scores = torch.stack([queries[h][t] @ keys[h][s] / math.sqrt(K) for s in range(seen)])
            heads.append(sum(weight * values[h][s] for s, weight in enumerate(scores.exp() / scores.exp().sum())))
        rows.append(module.output(torch.cat(heads)))
    return torch.stack(rows)


@EQ_1
def test_eq_1_by_hand(eq_1: Eq1) -> None:
    # d_k = 4, so scores are halved: 0 and ln 3, weights 1/4 and 3/4
    queries = torch.tensor([[2.0, 0.0, 0.0, 0.0]])
    keys = torch.tensor([[0.0, 5.0, 5.0, 5.0], [math.log(3), 7.0, 7.0, 7.0]])
    values = torch.tensor([[4.0, 0.0, 8.0], [8.0, 4.0, 0.0]])
    expected = torch.tensor([[7.0, 3.0, 2.0]])
    torch.testing.assert_close(eq_1(queries, keys, values, None)[0], expected)
    # Without the second key only the first value is left
    mask = torch.tensor([[0.0, -torch.inf]])
    torch.testing.assert_close(eq_1(queries, keys, values, mask)[0], values[:1])


@EQ_1
@pytest.mark.parametrize("num_keys", [1, 2, 13, 15, 16, 17, 37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_eq_1_equals_torch_for_short_and_long_rows(eq_1: Eq1, num_keys: int, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(3)
    shapes = ((2, 3, 5, K), (2, 3, num_keys, K), (2, 3, num_keys, V))
    inputs = [torch.randn(shape, generator=random, dtype=dtype) for shape in shapes]
    mask = torch.zeros(2, 1, 1, num_keys, dtype=dtype)
    mask[1, ..., 1:] = -torch.inf
    ours, weights = eq_1(*inputs, mask)
    torch.testing.assert_close(ours, F.scaled_dot_product_attention(*inputs, mask))
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 5, dtype=dtype))


@EQ_1
@pytest.mark.parametrize("num_keys", [3, 17])
@pytest.mark.parametrize("score", [1e4, -1e4])
def test_huge_scores_stay_finite(eq_1: Eq1, num_keys: int, score: float) -> None:
    queries, keys = torch.full((2, 1), score), torch.ones(num_keys, 1)
    values = torch.arange(float(num_keys)).unsqueeze(1)
    result, _ = eq_1(queries, keys, values, None)
    torch.testing.assert_close(result, torch.full((2, 1), (num_keys - 1) / 2))


@WAYS
@pytest.mark.parametrize("causal", [False, True])
def test_self_attention_equals_its_definition_sentence_by_sentence(fast: bool, causal: bool) -> None:
    module, x, packing = in_its_way(self_attention(), fast), packed(LENGTHS), packing_of(LENGTHS, fast=fast)
    ours = module(x, packing, causal=causal)
    parts = x.split(LENGTHS)
    expected = torch.cat([by_definition(module, part, part, causal) for part in parts])
    torch.testing.assert_close(ours, expected)
    gradient = packed(LENGTHS, seed=2).detach()
    inputs = [x, *module.parameters()]
    assert_same_gradients(ours, expected, inputs, gradient)
    # Control: the wrong mask is noticed
    assert not torch.allclose(module(x, packing, causal=not causal), expected)


@WAYS
def test_attention_to_another_side_equals_its_definition(fast: bool) -> None:
    module, x, memory = (
        in_its_way(drawn(MemoryAttention(D, H, K, V)), fast),
        packed(LENGTHS),
        packed(MEMORY_LENGTHS, seed=2),
    )
    memory_packing = packing_of(MEMORY_LENGTHS, fast=fast)
    ours = module(x, memory, packing_of(LENGTHS, fast=fast), memory_packing)
    pairs = zip(x.split(LENGTHS), memory.split(MEMORY_LENGTHS), strict=True)
    expected = torch.cat([by_definition(module, *pair, causal=False) for pair in pairs])
    torch.testing.assert_close(ours, expected)
    gradient = packed(LENGTHS, seed=3).detach()
    inputs = [x, memory, *module.parameters()]
    assert_same_gradients(ours, expected, inputs, gradient)
    # Control: without the mask the padding takes part
    memory_packing.mask = None
    unmasked = module(x, memory, packing_of(LENGTHS, fast=fast), memory_packing)
    assert not torch.allclose(unmasked, expected)


@WAYS
@pytest.mark.parametrize("causal", [False, True])
def test_with_d_k_equal_to_d_v_it_is_torch_s_multihead_attention(fast: bool, causal: bool) -> None:
    d_model, heads = 21, 3
    ours = in_its_way(self_attention(d_model, heads, 7, 7), fast)
    theirs = nn.MultiheadAttention(d_model, heads, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(ours.query_key_value.weight)
        theirs.in_proj_bias.copy_(ours.query_key_value.bias)
        theirs.out_proj.load_state_dict(ours.output.state_dict())
    x, packing = packed(LENGTHS, d_model), packing_of(LENGTHS, fast=fast)
    padded = nn.utils.rnn.pad_sequence(x.split(LENGTHS), batch_first=True)
    padding = torch.arange(max(LENGTHS)) >= torch.tensor(LENGTHS).unsqueeze(1)
    later = torch.ones(max(LENGTHS), max(LENGTHS), dtype=torch.bool).triu(1)
    expected, _ = theirs(padded, padded, padded, key_padding_mask=padding, attn_mask=later if causal else None)
    torch.testing.assert_close(ours(x, packing, causal=causal), expected[~padding])


@WAYS
def test_a_sentence_is_the_same_alone_and_among_others(fast: bool) -> None:
    module, x, packing = in_its_way(self_attention(), fast), packed(LENGTHS), packing_of(LENGTHS, fast=fast)
    together = module(x, packing, causal=False).split(LENGTHS)
    for part, expected in zip(x.split(LENGTHS), together, strict=True):
        alone = packing_of((len(part),), fast=fast)
        torch.testing.assert_close(module(part, alone, causal=False), expected)
    # Control: another boundary, another result
    wrong = packing_of((4, 2, 5, 2), fast=fast)
    assert not torch.allclose(module(x, wrong, causal=False), torch.cat(together))


@WAYS
@pytest.mark.parametrize("num_keys", [3, 17])
def test_the_gradients_equal_finite_differences(fast: bool, num_keys: int) -> None:
    lengths, memory_lengths = (2, 1), (num_keys, 1)
    packing, memory_packing = packing_of(lengths, 5, fast=fast), packing_of(memory_lengths, fast=fast)
    x, memory = packed((*lengths, 2), 4), packed(memory_lengths, 4)
    alone, across = (
        in_its_way(drawn(module), fast) for module in (SelfAttention(4, 2, 1, 3), MemoryAttention(4, 2, 1, 3))
    )
    assert torch.autograd.gradcheck(lambda x: alone(x, packing, causal=True), (x,))
    assert torch.autograd.gradcheck(lambda x, memory: across(x, memory, packing, memory_packing), (x, memory))


def test_weights_are_glorot_uniform_over_the_fused_matrices_and_biases_zero() -> None:
    d_model, heads, d_k, d_v = 101, 7, 13, 29
    query, value = heads * d_k, heads * d_v
    for module, fan_outs in (
        (SelfAttention(d_model, heads, d_k, d_v), {"query_key_value": 2 * query + value}),
        (MemoryAttention(d_model, heads, d_k, d_v), {"query": query, "key_value": query + value}),
    ):
        fans = {name: (d_model, fan_out) for name, fan_out in fan_outs.items()} | {"output": (value, d_model)}
        for name, fan in fans.items():
            layer = module.get_submodule(name)
            bound = math.sqrt(6 / sum(fan))
            assert 0.99 * bound < float(layer.weight.detach().abs().max()) <= bound * (1 + 1e-6), name
            assert float(layer.weight.detach().std()) == pytest.approx(bound / math.sqrt(3), rel=0.03), name
            assert not layer.bias.any(), name
