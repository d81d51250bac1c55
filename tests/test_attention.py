"""Attention against Eq. 1 token by token, torch.nn.MultiheadAttention, numbers by hand and finite differences."""

import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aiayn.attention import MultiHeadAttention, Sentences, causal_mask, scaled_dot_product_attention

D, H, K, V = 22, 3, 5, 7
LENGTHS, MEMORY_LENGTHS = (4, 1, 6, 2), (3, 5, 1, 2)


def offsets(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def attention(
    self_attention: bool, d_model: int = D, num_heads: int = H, d_k: int = K, d_v: int = V
) -> MultiHeadAttention:
    torch.manual_seed(11)
    module = MultiHeadAttention(d_model, num_heads, d_k, d_v, self_attention=self_attention).double()
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):  # they start as zeros, which would hide a missing one
            nn.init.normal_(parameter)
    return module


def packed(lengths: tuple[int, ...], d_model: int = D, seed: int = 1) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(sum(lengths), d_model, generator=random, dtype=torch.float64, requires_grad=True)


def assert_same_gradients(ours: Tensor, theirs: Tensor, inputs: list[Tensor], gradient: Tensor) -> None:
    for a, b in zip(*(torch.autograd.grad(y, inputs, gradient) for y in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b)


def by_definition(module: MultiHeadAttention, x: Tensor, memory: Tensor, causal: bool) -> Tensor:
    """Section 3.2 for one sentence x (T, D) and its memory (S, D): a loop over heads and queries."""
    rows = []
    queries, keys, values = (
        module.query(x).chunk(H, 1),
        module.key(memory).chunk(H, 1),
        module.value(memory).chunk(H, 1),
    )
    for t in range(len(x)):
        heads = []
        for h in range(H):
            seen = t + 1 if causal else len(memory)
            scores = torch.stack([queries[h][t] @ keys[h][s] / math.sqrt(K) for s in range(seen)])
            heads.append(sum(weight * values[h][s] for s, weight in enumerate(scores.exp() / scores.exp().sum())))
        rows.append(module.output(torch.cat(heads)))
    return torch.stack(rows)


def test_eq_1_by_hand() -> None:
    # d_k = 4, so scores are halved: 0 and ln 3, weights 1/4 and 3/4
    queries = torch.tensor([[2.0, 0.0, 0.0, 0.0]])
    keys = torch.tensor([[0.0, 5.0, 5.0, 5.0], [math.log(3), 7.0, 7.0, 7.0]])
    values = torch.tensor([[4.0, 0.0, 8.0], [8.0, 4.0, 0.0]])
    expected = torch.tensor([[7.0, 3.0, 2.0]])
    torch.testing.assert_close(scaled_dot_product_attention(queries, keys, values, None), expected)
    # Without the second key only the first value is left
    mask = torch.tensor([[0.0, -torch.inf]])
    torch.testing.assert_close(scaled_dot_product_attention(queries, keys, values, mask), values[:1])


@pytest.mark.parametrize("num_keys", [1, 2, 13, 15, 16, 17, 37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_eq_1_and_its_gradient_equal_torch_for_short_and_long_rows(num_keys: int, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(3)
    shapes = ((2, 3, 5, K), (2, 3, num_keys, K), (2, 3, num_keys, V))
    inputs = [torch.randn(shape, generator=random, dtype=dtype, requires_grad=True) for shape in shapes]
    mask = torch.zeros(2, 1, 1, num_keys, dtype=dtype)
    mask[1, ..., 1:] = -torch.inf
    ours = scaled_dot_product_attention(*inputs, mask)
    theirs = F.scaled_dot_product_attention(*inputs, mask)
    torch.testing.assert_close(ours, theirs)
    gradient = torch.randn(ours.shape, generator=random, dtype=dtype)
    assert_same_gradients(ours, theirs, inputs, gradient)


@pytest.mark.parametrize("num_keys", [3, 17])
@pytest.mark.parametrize("score", [1e4, -1e4])
def test_huge_scores_stay_finite(num_keys: int, score: float) -> None:
    queries, keys = torch.full((2, 1), score), torch.ones(num_keys, 1)
    values = torch.arange(float(num_keys)).unsqueeze(1)
    result = scaled_dot_product_attention(queries, keys, values, None)
    torch.testing.assert_close(result, torch.full((2, 1), (num_keys - 1) / 2))


@pytest.mark.parametrize("num_keys", [3, 17])
def test_the_gradient_of_eq_1_equals_finite_differences(num_keys: int) -> None:
    shapes = ((2, 3, 2), (2, num_keys, 2), (2, num_keys, 3))
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    mask = causal_mask(num_keys, torch.device("cpu"))[:3].double()
    assert torch.autograd.gradcheck(lambda q, k, v: scaled_dot_product_attention(q, k, v, mask), inputs)


def test_splitting_pads_with_zeros_and_merging_undoes_it() -> None:
    sentences, x = Sentences(offsets(LENGTHS)), packed(LENGTHS)
    padded = sentences.split_heads(x, 11)
    assert padded.shape == (len(LENGTHS), 11, max(LENGTHS), 2)
    for number, (begin, end) in enumerate(pairwise(offsets(LENGTHS).tolist())):
        heads = x[begin:end].unflatten(1, (11, 2)).transpose(0, 1)
        assert torch.equal(padded[number, :, : end - begin], heads)
        assert not padded[number, :, end - begin :].any()
    assert torch.equal(sentences.merge_heads(padded), x)
    garbage = padded.masked_fill(padded == 0, torch.nan)
    assert torch.equal(sentences.merge_heads(garbage), x)


def test_the_gradients_of_splitting_and_merging_equal_finite_differences() -> None:
    sentences = Sentences(offsets((2, 1, 3)))
    x = packed((2, 1, 3), 4)
    padded = torch.randn(3, 2, 3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: sentences.split_heads(x, 2), (x,))
    assert torch.autograd.gradcheck(lambda x: sentences.merge_heads(x), (padded,))


def test_positions_and_mask_follow_the_sentences() -> None:
    sentences = Sentences(offsets((2, 3)))
    assert sentences.positions.tolist() == [0, 1, 0, 1, 2]
    assert sentences.mask is not None
    assert sentences.mask.tolist() == [[[[0, 0, -torch.inf]]], [[[0, 0, 0]]]]
    assert Sentences(offsets((3, 3))).mask is None


def test_the_causal_mask_hides_only_what_comes_later() -> None:
    hidden = causal_mask(3, torch.device("cpu")) == -torch.inf
    assert hidden.tolist() == [[False, True, True], [False, False, True], [False, False, False]]


@pytest.mark.parametrize("causal", [False, True])
def test_self_attention_equals_its_definition_sentence_by_sentence(causal: bool) -> None:
    module, x, sentences = attention(True), packed(LENGTHS), Sentences(offsets(LENGTHS))
    mask = causal_mask(sentences.max_length, x.device) if causal else sentences.mask
    ours = module(x, x, sentences, sentences, mask)
    parts = x.split(LENGTHS)
    expected = torch.cat([by_definition(module, part, part, causal) for part in parts])
    torch.testing.assert_close(ours, expected)
    gradient = packed(LENGTHS, seed=2).detach()
    inputs = [x, *module.parameters()]
    assert_same_gradients(ours, expected, inputs, gradient)
    # Control: the wrong mask is noticed
    other = sentences.mask if causal else causal_mask(sentences.max_length, x.device)
    assert not torch.allclose(module(x, x, sentences, sentences, other), expected)


def test_attention_to_another_side_equals_its_definition() -> None:
    module, x, memory = attention(False), packed(LENGTHS), packed(MEMORY_LENGTHS, seed=2)
    memory_sentences = Sentences(offsets(MEMORY_LENGTHS))
    ours = module(x, memory, Sentences(offsets(LENGTHS)), memory_sentences, memory_sentences.mask)
    pairs = zip(x.split(LENGTHS), memory.split(MEMORY_LENGTHS), strict=True)
    expected = torch.cat([by_definition(module, *pair, causal=False) for pair in pairs])
    torch.testing.assert_close(ours, expected)
    gradient = packed(LENGTHS, seed=3).detach()
    inputs = [x, memory, *module.parameters()]
    assert_same_gradients(ours, expected, inputs, gradient)
    # Control: without the mask the padding takes part
    unmasked = module(x, memory, Sentences(offsets(LENGTHS)), memory_sentences, None)
    assert not torch.allclose(unmasked, expected)


@pytest.mark.parametrize("causal", [False, True])
def test_with_d_k_equal_to_d_v_it_is_torch_s_multihead_attention(causal: bool) -> None:
    d_model, heads = 21, 3
    ours = attention(True, d_model, heads, 7, 7)
    theirs = nn.MultiheadAttention(d_model, heads, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([ours.query.weight, ours.key.weight, ours.value.weight]))
        theirs.in_proj_bias.copy_(torch.cat([ours.query.bias, ours.key.bias, ours.value.bias]))
        theirs.out_proj.load_state_dict(ours.output.state_dict())
    x, sentences = packed(LENGTHS, d_model), Sentences(offsets(LENGTHS))
    padded = nn.utils.rnn.pad_sequence(x.split(LENGTHS), batch_first=True)
    padding = torch.arange(max(LENGTHS)) >= torch.tensor(LENGTHS).unsqueeze(1)
    later = torch.ones(max(LENGTHS), max(LENGTHS), dtype=torch.bool).triu(1)
    expected, _ = theirs(padded, padded, padded, key_padding_mask=padding, attn_mask=later if causal else None)
    mask = causal_mask(sentences.max_length, x.device) if causal else sentences.mask
    torch.testing.assert_close(ours(x, x, sentences, sentences, mask), expected[~padding])


def test_a_sentence_is_the_same_alone_and_among_others() -> None:
    module, x, sentences = attention(True), packed(LENGTHS), Sentences(offsets(LENGTHS))
    together = module(x, x, sentences, sentences, sentences.mask).split(LENGTHS)
    for part, expected in zip(x.split(LENGTHS), together, strict=True):
        alone = Sentences(offsets((len(part),)))
        torch.testing.assert_close(module(part, part, alone, alone, alone.mask), expected)
    # Control: another boundary, another result
    wrong = Sentences(offsets((4, 2, 5, 2)))
    assert not torch.allclose(module(x, x, wrong, wrong, wrong.mask), torch.cat(together))


def test_looking_back_token_by_token_equals_causal_self_attention() -> None:
    module, x = attention(True), packed((5,))
    alone = Sentences(offsets((5,)))
    expected = module(x, x, alone, alone, causal_mask(5, x.device))
    keys, values = torch.zeros(1, 1, H, 0, K).double(), torch.zeros(1, 1, H, 0, V).double()
    for t in range(5):
        result, keys, values = module.look_back(x[None, t : t + 1], keys, values)
        torch.testing.assert_close(result[0, 0], expected[t])
    assert (keys.shape, values.shape) == ((1, 1, H, 5, K), (1, 1, H, 5, V))


def test_weights_are_glorot_uniform_over_the_fused_matrices_and_biases_zero() -> None:
    d_model, heads, d_k, d_v = 101, 7, 13, 29
    query, value = heads * d_k, heads * d_v
    for self_attention, fan_outs in (
        (True, {"query": 2 * query + value, "key": 2 * query + value, "value": 2 * query + value}),
        (False, {"query": query, "key": query + value, "value": query + value}),
    ):
        module = MultiHeadAttention(d_model, heads, d_k, d_v, self_attention=self_attention)
        fans = {name: (d_model, fan_out) for name, fan_out in fan_outs.items()} | {"output": (value, d_model)}
        for name, fan in fans.items():
            layer = module.get_submodule(name)
            bound = math.sqrt(6 / sum(fan))
            assert 0.99 * bound < float(layer.weight.detach().abs().max()) <= bound * (1 + 1e-6), name
            assert float(layer.weight.detach().std()) == pytest.approx(bound / math.sqrt(3), rel=0.03), name
            assert not layer.bias.any(), name
