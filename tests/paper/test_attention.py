"""Attention against Eq. 1 token by token, torch.nn.MultiheadAttention and numbers by hand."""

import math

import pytest
import torch
import torch.nn.functional as F
from kernel import stand_in
from models import attend_by_definition
from torch import Tensor, nn
from torch.nn.attention import varlen

from aiayn.paper import attention
from aiayn.paper.attention import MemoryAttention, SelfAttention, attend, scaled_dot_products
from aiayn.paper.batch import FILLERS, Packing

D, H, K, V = 22, 3, 5, 7
LENGTHS, MEMORY_LENGTHS = (4, 1, 6, 2), (3, 5, 1, 2)


def drawn(module: nn.Module) -> nn.Module:
    """The module in float64, with biases that are not the zeros they start as, which would hide a missing one."""
    random = torch.Generator().manual_seed(11)
    for parameter in module.double().parameters():
        nn.init.normal_(parameter, std=0.3, generator=random)
    return module


def packed(lengths: tuple[int, ...], seed: int = 1) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(sum(lengths), D, generator=random, dtype=torch.float64, requires_grad=True)


def packing_of(lengths: tuple[int, ...], rows: int | None = None) -> Packing:
    return Packing(torch.tensor([0, *lengths]).cumsum(0), rows)


def assert_same(ours: Tensor, theirs: Tensor, inputs: list[Tensor]) -> None:
    """The values, and the gradients of the inputs for a drawn one of the values."""
    torch.testing.assert_close(ours, theirs)
    gradient = torch.randn_like(ours)
    torch.testing.assert_close(*(torch.autograd.grad(y, inputs, gradient) for y in (ours, theirs)))


def test_eq_1_by_hand() -> None:
    # d_k = 4, so scores are halved: 0 and ln 3, weights 1/4 and 3/4
    queries = torch.tensor([[2.0, 0.0, 0.0, 0.0]])
    keys = torch.tensor([[0.0, 5.0, 5.0, 5.0], [math.log(3), 7.0, 7.0, 7.0]])
    values = torch.tensor([[4.0, 0.0, 8.0], [8.0, 4.0, 0.0]])
    expected = torch.tensor([[7.0, 3.0, 2.0]])
    torch.testing.assert_close(attend(scaled_dot_products(queries, keys), values, None)[0], expected)
    # Without the second key only the first value is left
    mask = torch.tensor([[True, False]])
    torch.testing.assert_close(attend(scaled_dot_products(queries, keys), values, mask)[0], values[:1])


def test_bf16_scores_have_the_gradient_of_an_unrounded_softmax() -> None:
    narrow, values = torch.randn(2, 17, 61).bfloat16().requires_grad_(), torch.randn(2, 61, 7).bfloat16()
    wide = narrow.detach().float().requires_grad_()
    of_narrow, of_wide = (torch.autograd.grad(attend(x, values, None)[0].sum(), x)[0] for x in (narrow, wide))
    assert torch.equal(of_narrow, of_wide.bfloat16())


# Eq. 1 written out for short sentences, torch's kernel for long ones
@pytest.mark.parametrize("lengths", [LENGTHS, (4, 1, 19, 2)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_self_attention_equals_its_definition(causal: bool, lengths: tuple[int, ...]) -> None:
    module, x, packing = drawn(SelfAttention(D, H, K, V)), packed(lengths), packing_of(lengths)
    ours = module(x, packing, causal=causal)
    expected = torch.cat([attend_by_definition(module, part, None, causal) for part in x.split(lengths)])
    assert_same(ours, expected, [x, *module.parameters()])
    # Control: the wrong mask is noticed
    assert not torch.allclose(module(x, packing, causal=not causal), expected)


def test_attention_to_another_side_equals_its_definition() -> None:
    module, x, memory = drawn(MemoryAttention(D, H, K, V)), packed(LENGTHS), packed(MEMORY_LENGTHS, seed=2)
    memory_packing = packing_of(MEMORY_LENGTHS)
    ours = module(x, memory, packing_of(LENGTHS), memory_packing)
    pairs = zip(x.split(LENGTHS), memory.split(MEMORY_LENGTHS), strict=True)
    expected = torch.cat([attend_by_definition(module, *pair, causal=False) for pair in pairs])
    assert_same(ours, expected, [x, memory, *module.parameters()])
    memory_packing.mask = None  # control: the padding takes part
    assert not torch.allclose(module(x, memory, packing_of(LENGTHS), memory_packing), expected)


def test_weights_are_glorot_uniform_over_fused_matrices() -> None:
    for kind, number in ((SelfAttention, 2), (MemoryAttention, 3)):
        layers = dict(kind(101, 7, 13, 29).named_children())
        assert len(layers) == number
        for name, layer in layers.items():
            bound = math.sqrt(6 / sum(layer.weight.shape))
            assert 0.99 * bound < float(layer.weight.detach().abs().max()) <= bound * (1 + 1e-6), name
            assert float(layer.weight.detach().std()) == pytest.approx(bound / math.sqrt(3), rel=0.03), name
            assert not layer.bias.any(), name


@pytest.mark.parametrize(("d_k", "d_v"), [(7, 7), (3, 11), (17, 8), (8, 3)])
def test_the_kernel_is_given_what_makes_it_equal_padding(d_k: int, d_v: int, monkeypatch: pytest.MonkeyPatch) -> None:
    alone, across = drawn(SelfAttention(D, H, d_k, d_v)), drawn(MemoryAttention(D, H, d_k, d_v))
    # More rows than tokens, on one side by more than a filler holds
    rows, memory_rows = sum(LENGTHS) + 307, sum(MEMORY_LENGTHS) + 3
    x, memory = packed((*LENGTHS, 307)), packed((*MEMORY_LENGTHS, 3), seed=2)

    def results() -> list[Tensor]:
        here, there = packing_of(LENGTHS, rows), packing_of(MEMORY_LENGTHS, memory_rows)
        outputs = [alone(x, here, causal=True), alone(x, here, causal=False), across(x, memory, here, there)]
        assert all(bool(output.isfinite().all()) for output in outputs)
        total = sum(output[: sum(LENGTHS)].square().sum() for output in outputs)
        gradients = torch.autograd.grad(total, [x, memory, *alone.parameters(), *across.parameters()])
        return [output[: sum(LENGTHS)] for output in outputs] + list(gradients)

    expected = results()
    stand_in(monkeypatch, torch.float64)
    torch.testing.assert_close(results(), expected)
    # Control: heads wider than the kernel takes go the padded way
    monkeypatch.setattr(attention, "KERNEL_WIDTH", max(d_k, d_v) - 1)
    monkeypatch.setattr(varlen, "varlen_attn", None)
    results()


def test_kernel_offsets_cover_every_row() -> None:
    for tokens, rows in ((5, 5), (5, 8), (1025, 2048), (7, 50176)):
        packing = packing_of((2, tokens - 2), rows)
        given = packing.kernel_offsets
        assert (given[:3].tolist(), int(given[-1]), given.dtype) == ([0, 2, tokens], rows, torch.int32)
        assert len(given) == 3 + FILLERS  # on both sides as many
        assert 0 <= given.diff().min() <= given.diff().max() <= packing.max_position
    assert [packing_of((length,)).max_position for length in (1, 256, 257)] == [256, 256, 512]


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
    SelfAttention(7, 1, width, width).to(dtype)(torch.ones(19, 7, dtype=dtype), packing, causal=True)
    assert taken == [expected]
