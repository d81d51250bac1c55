"""A stand-in for the variable-length kernel of GPUs: what its documentation says it computes, sentence by sentence."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from aiayn.paper import attention
from aiayn.paper.batch import Packing


def _attend(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, scale: float, causal: bool
) -> Tensor:
    for x in (q, k, v):  # it reads 16 bytes at once: 8 numbers of the types that it takes
        assert x.stride(2) == 1
        assert x.storage_offset() % 8 == x.stride(0) % 8 == x.stride(1) % 8 == 0
    result = torch.zeros_like(q)
    sentences = zip(itertools.pairwise(cu_q.tolist()), itertools.pairwise(cu_k.tolist()), strict=True)
    for (begin, end), (key_begin, key_end) in sentences:
        assert 0 <= end - begin <= max_q
        assert 0 <= key_end - key_begin <= max_k
        if end > begin and key_end > key_begin:
            scores = torch.einsum("qhd,khd->hqk", q[begin:end], k[key_begin:key_end]) * scale
            if causal:
                scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
            result[begin:end] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[key_begin:key_end])
    unowned = torch.ones(len(q), dtype=torch.bool)
    unowned[int(cu_q[0]) : int(cu_q[-1])] = False
    return result.masked_fill(unowned[:, None, None], torch.nan)  # the kernel leaves these rows as they were


_varlen = torch.library.custom_op("aiayn_tests::varlen", _attend, mutates_args=())


@_varlen.register_fake
def _(q: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(q)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        result = _attend(*inputs, *ctx.rest)
    return (*torch.autograd.grad(result, inputs, gradient), *(None,) * 6)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.rest = inputs[3:]


_varlen.register_autograd(_backward, setup_context=_setup)


def stand_in(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Lets attention take the kernel's way on this machine, for tensors of `dtype`."""

    def varlen_attn(
        q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, **options: Any
    ) -> Tensor:
        assert q.shape[1:] == k.shape[1:] == v.shape[1:]
        assert q.size(2) % 8 == 0
        assert cu_q.dtype == cu_k.dtype == torch.int32
        assert options["window_size"] in ((-1, 0), (-1, -1))
        return _varlen(q, k, v, cu_q, cu_k, max_q, max_k, options["scale"], options["window_size"] == (-1, 0))

    monkeypatch.setattr(Packing, "has_kernel", property(lambda packing: True, lambda *_: None), raising=False)
    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    monkeypatch.setattr(attention, "KERNEL_TYPES", {dtype})
