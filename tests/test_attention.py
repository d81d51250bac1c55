"""Attention against Eq. 1 token by token, torch.nn.MultiheadAttention, numbers by hand and finite differences."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernel import stand_in
from torch import Tensor, nn

import aiayn.attention
from aiayn.attention import MemoryAttention, SelfAttention, Sentences, scaled_dot_product_attention

D, H, K, V = 22, 3, 5, 7
LENGTHS, MEMORY_LENGTHS = (4, 1, 6, 2), (3, 5, 1, 2)


def offsets(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def drawn(module: nn.Module) -> nn.Module:
    """The module in float64, with biases that are not the zeros they start as, which would hide a missing one."""
    random = torch.Generator().manual_seed(11)
    for parameter in module.double().parameters():
        nn.init.normal_(parameter, std=0.3, generator=random)
    return module


def self_attention(d_model: int = D, num_heads: int = H, d_k: int = K, d_v: int = V) -> nn.Module:
    return drawn(SelfAttention(d_model, num_heads, d_k, d_v))


def packed(lengths: tuple[int, ...], d_model: int = D, seed: int = 1) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(sum(lengths), d_model, generator=random, dtype=torch.float64, requires_grad=True)


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


def test_eq_1_by_hand() -> None:
    # d_k = 4, so scores are halved: 0 and ln 3, weights 1/4 and 3/4
    queries = torch.tensor([[2.0, 0.0, 0.0, 0.0]])
    keys = torch.tensor([[0.0, 5.0, 5.0, 5.0], [math.log(3), 7.0, 7.0, 7.0]])
    values = torch.tensor([[4.0, 0.0, 8.0], [8.0, 4.0, 0.0]])
    expected = torch.tensor([[7.0, 3.0, 2.0]])
    torch.testing.assert_close(scaled_dot_product_attention(queries, keys, values, None)[0], expected)
    # Without the second key only the first value is left
    mask = torch.tensor([[0.0, -torch.inf]])
    torch.testing.assert_close(scaled_dot_product_attention(queries, keys, values, mask)[0], values[:1])


@pytest.mark.parametrize("num_keys", [1, 2, 13, 15, 16, 17, 37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_eq_1_equals_torch_for_short_and_long_rows(num_keys: int, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(3)
    shapes = ((2, 3, 5, K), (2, 3, num_keys, K), (2, 3, num_keys, V))
    inputs = [torch.randn(shape, generator=random, dtype=dtype) for shape in shapes]
    mask = torch.zeros(2, 1, 1, num_keys, dtype=dtype)
    mask[1, ..., 1:] = -torch.inf
    ours, weights = scaled_dot_product_attention(*inputs, mask)
    torch.testing.assert_close(ours, F.scaled_dot_product_attention(*inputs, mask))
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 5, dtype=dtype))


@pytest.mark.parametrize("num_keys", [3, 17])
@pytest.mark.parametrize("score", [1e4, -1e4])
def test_huge_scores_stay_finite(num_keys: int, score: float) -> None:
    queries, keys = torch.full((2, 1), score), torch.ones(num_keys, 1)
    values = torch.arange(float(num_keys)).unsqueeze(1)
    result, _ = scaled_dot_product_attention(queries, keys, values, None)
    torch.testing.assert_close(result, torch.full((2, 1), (num_keys - 1) / 2))


@pytest.mark.parametrize("widths", [(2, 2, 2), (3, 3, 5), (4,)])
def test_splitting_pads_with_zeros_and_merging_undoes_it(widths: tuple[int, ...]) -> None:
    heads = 11
    sentences, x = Sentences(offsets(LENGTHS), 17), packed((*LENGTHS, 4), heads * sum(widths)).detach()
    parts = sentences.split(x, heads, widths)
    for padded, packed_part, width in zip(parts, x.split([heads * w for w in widths], 1), widths, strict=True):
        assert padded.shape == (len(LENGTHS), heads, max(LENGTHS), width)
        for number, (begin, end) in enumerate(pairwise(offsets(LENGTHS).tolist())):
            expected = packed_part[begin:end].unflatten(1, (heads, width)).transpose(0, 1)
            assert torch.equal(padded[number, :, : end - begin], expected)
            assert not padded[number, :, end - begin :].any()
    garbage = [padded.masked_fill(padded == 0, torch.nan).unsqueeze(0) for padded in parts]
    merged = sentences.merge(*garbage) if len(set(widths)) > 1 else sentences.merge(torch.cat(garbage))
    assert torch.equal(merged[:13], x[:13])
    assert not merged[13:].any()


def test_positions_and_mask_follow_the_sentences() -> None:
    sentences = Sentences(offsets((2, 3)))
    assert sentences.positions.tolist() == [0, 1, 0, 1, 2]
    assert sentences.mask is not None
    assert sentences.mask.tolist() == [[[[0, 0, -torch.inf]]], [[[0, 0, 0]]]]
    assert Sentences(offsets((3, 3))).mask is None
    assert Sentences(offsets((2, 3)), 7).positions.tolist() == [0, 1, 0, 1, 2, 0, 0]


def test_the_causal_mask_hides_only_what_comes_later() -> None:
    hidden = Sentences(offsets((1, 3))).causal_mask == -torch.inf
    assert hidden.tolist() == [[False, True, True], [False, False, True], [False, False, False]]


@pytest.mark.parametrize("causal", [False, True])
def test_self_attention_equals_its_definition_sentence_by_sentence(causal: bool) -> None:
    module, x, sentences = self_attention(), packed(LENGTHS), Sentences(offsets(LENGTHS))
    ours = module(x, sentences, causal=causal)
    parts = x.split(LENGTHS)
    expected = torch.cat([by_definition(module, part, part, causal) for part in parts])
    torch.testing.assert_close(ours, expected)
    gradient = packed(LENGTHS, seed=2).detach()
    inputs = [x, *module.parameters()]
    assert_same_gradients(ours, expected, inputs, gradient)
    # Control: the wrong mask is noticed
    assert not torch.allclose(module(x, sentences, causal=not causal), expected)


def test_attention_to_another_side_equals_its_definition() -> None:
    module, x, memory = drawn(MemoryAttention(D, H, K, V)), packed(LENGTHS), packed(MEMORY_LENGTHS, seed=2)
    memory_sentences = Sentences(offsets(MEMORY_LENGTHS))
    ours = module(x, memory, Sentences(offsets(LENGTHS)), memory_sentences)
    pairs = zip(x.split(LENGTHS), memory.split(MEMORY_LENGTHS), strict=True)
    expected = torch.cat([by_definition(module, *pair, causal=False) for pair in pairs])
    torch.testing.assert_close(ours, expected)
    gradient = packed(LENGTHS, seed=3).detach()
    inputs = [x, memory, *module.parameters()]
    assert_same_gradients(ours, expected, inputs, gradient)
    # Control: without the mask the padding takes part
    memory_sentences.mask = None
    unmasked = module(x, memory, Sentences(offsets(LENGTHS)), memory_sentences)
    assert not torch.allclose(unmasked, expected)


@pytest.mark.parametrize("causal", [False, True])
def test_with_d_k_equal_to_d_v_it_is_torch_s_multihead_attention(causal: bool) -> None:
    d_model, heads = 21, 3
    ours = self_attention(d_model, heads, 7, 7)
    theirs = nn.MultiheadAttention(d_model, heads, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(ours.query_key_value.weight)
        theirs.in_proj_bias.copy_(ours.query_key_value.bias)
        theirs.out_proj.load_state_dict(ours.output.state_dict())
    x, sentences = packed(LENGTHS, d_model), Sentences(offsets(LENGTHS))
    padded = nn.utils.rnn.pad_sequence(x.split(LENGTHS), batch_first=True)
    padding = torch.arange(max(LENGTHS)) >= torch.tensor(LENGTHS).unsqueeze(1)
    later = torch.ones(max(LENGTHS), max(LENGTHS), dtype=torch.bool).triu(1)
    expected, _ = theirs(padded, padded, padded, key_padding_mask=padding, attn_mask=later if causal else None)
    torch.testing.assert_close(ours(x, sentences, causal=causal), expected[~padding])


def test_a_sentence_is_the_same_alone_and_among_others() -> None:
    module, x, sentences = self_attention(), packed(LENGTHS), Sentences(offsets(LENGTHS))
    together = module(x, sentences, causal=False).split(LENGTHS)
    for part, expected in zip(x.split(LENGTHS), together, strict=True):
        alone = Sentences(offsets((len(part),)))
        torch.testing.assert_close(module(part, alone, causal=False), expected)
    # Control: another boundary, another result
    wrong = Sentences(offsets((4, 2, 5, 2)))
    assert not torch.allclose(module(x, wrong, causal=False), torch.cat(together))


@pytest.mark.parametrize("num_keys", [3, 17])
def test_the_gradients_equal_finite_differences(num_keys: int) -> None:
    lengths, memory_lengths = (2, 1), (num_keys, 1)
    sentences, memory_sentences = Sentences(offsets(lengths), 5), Sentences(offsets(memory_lengths))
    x, memory = packed((*lengths, 2), 4), packed(memory_lengths, 4)
    alone, across = drawn(SelfAttention(4, 2, 1, 3)), drawn(MemoryAttention(4, 2, 1, 3))
    assert torch.autograd.gradcheck(lambda x: alone(x, sentences, causal=True), (x,))
    assert torch.autograd.gradcheck(lambda x, memory: across(x, memory, sentences, memory_sentences), (x, memory))


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


@pytest.mark.parametrize(("d_k", "d_v"), [(7, 7), (3, 11), (17, 8)])
def test_the_variable_length_kernel_is_given_what_makes_it_equal_the_padded_way(
    d_k: int, d_v: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, across = drawn(SelfAttention(D, H, d_k, d_v)), drawn(MemoryAttention(D, H, d_k, d_v))
    # More rows than tokens, on one side by more than a filler holds
    rows, memory_rows = sum(LENGTHS) + 307, sum(MEMORY_LENGTHS) + 3
    x, memory = packed((*LENGTHS, 307)), packed((*MEMORY_LENGTHS, 3), seed=2)

    def results() -> list[Tensor]:
        here, there = Sentences(offsets(LENGTHS), rows), Sentences(offsets(MEMORY_LENGTHS), memory_rows)
        outputs = [alone(x, here, causal=True), alone(x, here, causal=False), across(x, memory, here, there)]
        assert all(bool(output.isfinite().all()) for output in outputs)
        total = sum(output[: sum(LENGTHS)].square().sum() for output in outputs)
        inputs = [x, memory, *alone.parameters(), *across.parameters()]
        gradients = torch.autograd.grad(total, inputs)
        return [output[: sum(LENGTHS)] for output in outputs] + list(gradients)

    expected = results()
    stand_in(monkeypatch, torch.float64)
    for ours, theirs in zip(results(), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    # Control: heads wider than the kernel takes go the padded way
    monkeypatch.setattr(aiayn.attention, "KERNEL_WIDTH", max(d_k, d_v) - 1)
    monkeypatch.setattr(aiayn.attention, "varlen_attn", None)
    results()


def test_the_borders_cover_every_row_with_sentences_of_bounded_length() -> None:
    for tokens, rows in ((5, 5), (5, 8), (1025, 2048), (1000, 1024), (7, 25088), (7, 50176)):
        sentences = Sentences(offsets((2, tokens - 2)), rows)
        borders = sentences.borders
        assert (borders[:3].tolist(), int(borders[-1]), borders.dtype) == ([0, 2, tokens], rows, torch.int32)
        assert len(borders) == 3 + aiayn.attention.FILLERS  # on both sides as many
        assert 0 <= borders.diff().min() <= borders.diff().max() <= sentences.bound
    assert {Sentences(offsets((n,))).bound for n in (1, 7, 255, 256)} == {256}
    assert Sentences(offsets((257,))).bound == 512


@pytest.mark.parametrize(("d_k", "d_v"), [(7, 7), (3, 11), (17, 8)])
@pytest.mark.parametrize("memory_lengths", [MEMORY_LENGTHS, (3, 3, 3, 3)])
def test_torch_s_padded_kernels_give_the_outputs_and_gradients_of_ours(
    d_k: int, d_v: int, memory_lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, across = drawn(SelfAttention(D, H, d_k, d_v)), drawn(MemoryAttention(D, H, d_k, d_v))
    rows, memory_rows = sum(LENGTHS) + 5, sum(memory_lengths) + 3
    x, memory = packed((*LENGTHS, 5)), packed((*memory_lengths, 3), seed=2)
    here, there = Sentences(offsets(LENGTHS), rows), Sentences(offsets(memory_lengths), memory_rows)

    def results() -> list[Tensor]:
        outputs = [alone(x, here, causal=True), alone(x, here, causal=False), across(x, memory, here, there)]
        total = sum(output.square().sum() for output in outputs)
        return [*outputs, *torch.autograd.grad(total, [x, memory, *alone.parameters(), *across.parameters()])]

    expected = results()
    monkeypatch.setattr(aiayn.attention, "_padded_attention", aiayn.attention._padded_attention_of_torch)
    for ours, theirs in zip(results(), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    # Control: without the mask the padding takes part
    here.mask = None
    assert not torch.allclose(results()[1], expected[1])


@pytest.mark.parametrize(
    ("dtype", "width", "expected"),
    [
        (torch.bfloat16, 256, "variable length"),
        (torch.bfloat16, 512, "padded"),
        (torch.float16, 8, "variable length"),
        (torch.float32, 8, "padded"),
    ],
)
def test_sentences_are_padded_where_the_variable_length_kernel_cannot_hold_the_heads(
    dtype: torch.dtype, width: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []

    def variable_length(q: Tensor, *_: Any, **__: Any) -> Tensor:
        taken.append("variable length")
        return torch.zeros_like(q)

    def padded(queries: Tensor, *_: Any) -> Tensor:
        taken.append("padded")
        return queries[:, :width]

    monkeypatch.setattr(aiayn.attention, "varlen_attn", variable_length)
    monkeypatch.setattr(aiayn.attention, "_padded_attention_of_torch", padded)
    sentences = Sentences(offsets((2, 3)), device=torch.device("meta"))
    sentences.has_kernel = True
    x = torch.ones(5, 3 * width, dtype=dtype, device="meta")
    found = aiayn.attention.attention(x, None, sentences, sentences, (1, width, width), causal=True)
    assert found.shape == (5, width)
    assert taken == [expected]
