"""Attention by indexing, variable-length kernels and torch's padded kernels against the paper's own."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from attention_inputs import LENGTHS, MEMORY_LENGTHS, D, H, drawn, offsets, packed
from kernel import stand_in
from torch import Tensor, nn
from torch.nn.attention import varlen

from aiayn.paper.attention import MemoryAttention, SelfAttention
from aiayn.paper.fast import attention
from aiayn.paper.fast.attention import HeadPacking, attend_to_memory, attend_to_self


def modules(d_k: int, d_v: int) -> tuple[nn.Module, nn.Module]:
    """Attention among a side's tokens and to the other side's, accelerated, with drawn weights."""
    alone, across = drawn(SelfAttention(D, H, d_k, d_v)), drawn(MemoryAttention(D, H, d_k, d_v))
    alone.forward, across.forward = attend_to_self.__get__(alone), attend_to_memory.__get__(across)
    return alone, across


@pytest.mark.parametrize("widths", [(2, 2, 2), (3, 3, 5), (4,)])
def test_splitting_pads_with_zeros_and_merging_undoes_it(widths: tuple[int, ...]) -> None:
    heads = 11
    packing, x = HeadPacking(offsets(LENGTHS), 17), packed((*LENGTHS, 4), heads * sum(widths)).detach()
    parts = packing.split(x, heads, widths)
    for padded, packed_part, width in zip(parts, x.split([heads * w for w in widths], 1), widths, strict=True):
        assert padded.shape == (len(LENGTHS), heads, max(LENGTHS), width)
        for number, (begin, end) in enumerate(pairwise(offsets(LENGTHS).tolist())):
            expected = packed_part[begin:end].unflatten(1, (heads, width)).transpose(0, 1)
            assert torch.equal(padded[number, :, : end - begin], expected)
            assert not padded[number, :, end - begin :].any()
    garbage = [padded.masked_fill(padded == 0, torch.nan).unsqueeze(0) for padded in parts]
    merged = packing.merge(*garbage) if len(set(widths)) > 1 else packing.merge(torch.cat(garbage))
    assert torch.equal(merged[:13], x[:13])
    assert not merged[13:].any()


@pytest.mark.parametrize(("d_k", "d_v"), [(7, 7), (3, 11), (17, 8), (3, 8), (8, 3)])
def test_the_variable_length_kernel_is_given_what_makes_it_equal_the_padded_way(
    d_k: int, d_v: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, across = modules(d_k, d_v)
    # More rows than tokens, on one side by more than a filler holds
    rows, memory_rows = sum(LENGTHS) + 307, sum(MEMORY_LENGTHS) + 3
    x, memory = packed((*LENGTHS, 307)), packed((*MEMORY_LENGTHS, 3), seed=2)

    def results() -> list[Tensor]:
        here, there = HeadPacking(offsets(LENGTHS), rows), HeadPacking(offsets(MEMORY_LENGTHS), memory_rows)
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


def test_the_borders_cover_every_row_with_sentences_of_bounded_length() -> None:
    for tokens, rows in ((5, 5), (5, 8), (1025, 2048), (1000, 1024), (7, 25088), (7, 50176)):
        packing = HeadPacking(offsets((2, tokens - 2)), rows)
        borders = packing.borders
        assert (borders[:3].tolist(), int(borders[-1]), borders.dtype) == ([0, 2, tokens], rows, torch.int32)
        assert len(borders) == 3 + attention.FILLERS  # on both sides as many
        assert 0 <= borders.diff().min() <= borders.diff().max() <= packing.bound
    assert {HeadPacking(offsets((n,))).bound for n in (1, 7, 255, 256)} == {256}
    assert HeadPacking(offsets((257,))).bound == 512


@pytest.mark.parametrize(("d_k", "d_v"), [(7, 7), (3, 11), (17, 8)])
@pytest.mark.parametrize("memory_lengths", [MEMORY_LENGTHS, (3, 3, 3, 3)])
def test_torch_s_padded_kernels_give_the_outputs_and_gradients_of_ours(
    d_k: int, d_v: int, memory_lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, across = modules(d_k, d_v)
    rows, memory_rows = sum(LENGTHS) + 5, sum(memory_lengths) + 3
    x, memory = packed((*LENGTHS, 5)), packed((*memory_lengths, 3), seed=2)
    here, there = HeadPacking(offsets(LENGTHS), rows), HeadPacking(offsets(memory_lengths), memory_rows)

    def results() -> list[Tensor]:
        outputs = [alone(x, here, causal=True), alone(x, here, causal=False), across(x, memory, here, there)]
        total = sum(output.square().sum() for output in outputs)
        return [*outputs, *torch.autograd.grad(total, [x, memory, *alone.parameters(), *across.parameters()])]

    expected = results()
    monkeypatch.setitem(attention.PADDED, "own", attention.PADDED["torch"])
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

    monkeypatch.setattr(varlen, "varlen_attn", variable_length)
    monkeypatch.setitem(attention.PADDED, "torch", padded)
    packing = HeadPacking(offsets((2, 3)), device=torch.device("meta"))
    packing.has_kernel = True
    x = torch.ones(5, 3 * width, dtype=dtype, device="meta")
    found = attention.attention(x, None, packing, packing, (1, width, width), causal=True)
    assert found.shape == (5, width)
    assert taken == [expected]
