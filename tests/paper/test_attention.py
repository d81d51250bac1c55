"""Attention against Eq. 1 token by token, torch.nn.MultiheadAttention, numbers by hand and finite differences."""

import math

import pytest
import torch
import torch.nn.functional as F
from attention_inputs import LENGTHS, MEMORY_LENGTHS, D, H, K, V, drawn, offsets, packed, self_attention
from kernel import stand_in
from torch import Tensor, nn
from torch.nn.attention import varlen

from aiayn.paper import attention
from aiayn.paper.attention import MemoryAttention, SelfAttention, scaled_dot_product_attention
from aiayn.paper.batch import FILLERS, Packing


def packing_of(lengths: tuple[int, ...], rows: int | None = None) -> Packing:
    return Packing(offsets(lengths), rows)


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
    mask = torch.tensor([[True, False]])
    torch.testing.assert_close(scaled_dot_product_attention(queries, keys, values, mask)[0], values[:1])


@pytest.mark.parametrize("num_keys", [1, 2, 13, 15, 16, 17, 37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_eq_1_equals_torch_for_short_and_long_rows(num_keys: int, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(3)
    shapes = ((2, 3, 5, K), (2, 3, num_keys, K), (2, 3, num_keys, V))
    inputs = [torch.randn(shape, generator=random, dtype=dtype) for shape in shapes]
    mask = torch.ones(2, 1, 1, num_keys, dtype=torch.bool)
    mask[1, ..., 1:] = False
    ours, weights = scaled_dot_product_attention(*inputs, mask)
    torch.testing.assert_close(ours, F.scaled_dot_product_attention(*inputs, mask))
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 5, dtype=dtype))


@pytest.mark.parametrize("written_out", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_self_attention_equals_its_definition(causal: bool, written_out: bool) -> None:
    module, x, packing = self_attention(), packed(LENGTHS), packing_of(LENGTHS)
    module.scores = attention.scaled_dot_products if written_out else None
    ours = module(x, packing, causal=causal)
    parts = x.split(LENGTHS)
    expected = torch.cat([by_definition(module, part, part, causal) for part in parts])
    torch.testing.assert_close(ours, expected)
    gradient = packed(LENGTHS, seed=2).detach()
    inputs = [x, *module.parameters()]
    assert_same_gradients(ours, expected, inputs, gradient)
    # Control: the wrong mask is noticed
    assert not torch.allclose(module(x, packing, causal=not causal), expected)


def test_attention_to_another_side_equals_its_definition() -> None:
    module, x, memory = drawn(MemoryAttention(D, H, K, V)), packed(LENGTHS), packed(MEMORY_LENGTHS, seed=2)
    memory_packing = packing_of(MEMORY_LENGTHS)
    ours = module(x, memory, packing_of(LENGTHS), memory_packing)
    pairs = zip(x.split(LENGTHS), memory.split(MEMORY_LENGTHS), strict=True)
    expected = torch.cat([by_definition(module, *pair, causal=False) for pair in pairs])
    torch.testing.assert_close(ours, expected)
    gradient = packed(LENGTHS, seed=3).detach()
    inputs = [x, memory, *module.parameters()]
    assert_same_gradients(ours, expected, inputs, gradient)
    # Control: without the mask the padding takes part
    memory_packing.mask = None
    unmasked = module(x, memory, packing_of(LENGTHS), memory_packing)
    assert not torch.allclose(unmasked, expected)


def test_weights_are_glorot_uniform_over_fused_matrices() -> None:
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


@pytest.mark.parametrize(("d_k", "d_v"), [(7, 7), (3, 11), (17, 8), (3, 8), (8, 3)])
def test_the_kernel_is_given_what_makes_it_equal_padding(d_k: int, d_v: int, monkeypatch: pytest.MonkeyPatch) -> None:
    alone, across = drawn(SelfAttention(D, H, d_k, d_v)), drawn(MemoryAttention(D, H, d_k, d_v))
    # More rows than tokens, on one side by more than a filler holds
    rows, memory_rows = sum(LENGTHS) + 307, sum(MEMORY_LENGTHS) + 3
    x, memory = packed((*LENGTHS, 307)), packed((*MEMORY_LENGTHS, 3), seed=2)

    def results() -> list[Tensor]:
        here, there = Packing(offsets(LENGTHS), rows), Packing(offsets(MEMORY_LENGTHS), memory_rows)
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
    monkeypatch.setattr(attention, "KERNEL_WIDTH", max(d_k, d_v) - 1)
    monkeypatch.setattr(varlen, "varlen_attn", None)
    results()


def test_kernel_offsets_cover_every_row() -> None:
    for tokens, rows in ((5, 5), (5, 8), (1025, 2048), (1000, 1024), (7, 25088), (7, 50176)):
        packing = Packing(offsets((2, tokens - 2)), rows)
        given = packing.kernel_offsets
        assert (given[:3].tolist(), int(given[-1]), given.dtype) == ([0, 2, tokens], rows, torch.int32)
        assert len(given) == 3 + FILLERS  # on both sides as many
        assert 0 <= given.diff().min() <= given.diff().max() <= packing.max_position
    assert {Packing(offsets((n,))).max_position for n in (1, 7, 255, 256)} == {256}
    assert Packing(offsets((257,))).max_position == 512


@pytest.mark.parametrize(
    ("dtype", "width", "expected"),
    [(torch.bfloat16, 256, "kernel"), (torch.bfloat16, 512, "padded"), (torch.float32, 8, "padded")],
)
def test_sentences_are_padded_where_the_kernel_does_not_fit(
    dtype: torch.dtype, width: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []
    for way, owner, name in (("kernel", varlen, "varlen_attn"), ("padded", F, "scaled_dot_product_attention")):
        monkeypatch.setattr(owner, name, lambda q, *_, way=way, **__: taken.append(way) or torch.zeros_like(q))
    packing = packing_of((2, 17))
    packing.has_kernel = True
    module = SelfAttention(7, 1, width, width).to(dtype)
    module(torch.ones(19, 7, dtype=dtype), packing, causal=True)
    assert taken == [expected]
