"""Matrix products on a CPU by oneDNN, for some shapes twice as fast as MKL."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# T rows, one a token; I inputs; O outputs

STEP = 64
ONEDNN = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


def static_rows(tokens: int) -> int:
    """The number of rows to give `tokens` tokens, so that the products of many batches have few different shapes.

    oneDNN compiles a kernel for each new shape, in about a millisecond: hence powers of two up to 64, then multiples of
    64, past 1023 tokens of 128, past 2047 of 256, and so on.
    """
    if tokens <= STEP:
        return 1 << (tokens - 1).bit_length()
    step = max(STEP, 1 << tokens.bit_length() >> 4)
    return -(-tokens // step) * step


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., I) times weight (O, I) transposed, plus bias (O,), as (..., O)."""
    if not _suits_onednn(x) or x.dim() != 2:
        return F.linear(x, weight, bias)
    if len(x) % STEP == 0:
        return _Product.apply(x, weight, bias)  # type: ignore[no-any-return, no-untyped-call]
    if torch.is_grad_enabled():
        return F.linear(x, weight, bias)
    rows = F.pad(x, (0, 0, 0, static_rows(len(x)) - len(x)))
    return _onednn(rows, weight, bias)[: len(x)]


def fixed_product(weight: Tensor, bias: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """The same product of x (T, I) for a weight that no longer changes, faster on few rows; without gradient."""
    if _suits_onednn(weight):
        # Private: torch has no public prepacking. Prepacked for so many rows, it suits any other number
        prepacked = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), STEP)
        return lambda x: _onednn(x, prepacked, bias)
    kind = weight.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    return partial(F.linear, weight=weight, bias=bias)


def transposed_product(x: Tensor, y: Tensor) -> Tensor:
    """x (T, I) transposed times y (T, O), as (I, O), without gradient."""
    if not _suits_onednn(x) or len(x) % STEP:
        return x.t() @ y
    # oneDNN copies a transposed first factor: let that be the narrower one
    return _onednn(x.t(), y.t()) if x.size(1) <= y.size(1) else _onednn(y.t(), x.t()).t()


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return _onednn(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        to_bias = gradient.sum(0) if ctx.has_bias else None
        return _onednn(gradient, weight.t()), transposed_product(gradient, x), to_bias


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    # Private: torch's public products of float32 are MKL's, half as fast here
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]


def _suits_onednn(x: Tensor) -> bool:
    # Under autocast and in other types torch asks oneDNN itself, or cannot
    return ONEDNN and x.dtype == torch.float32 and x.device.type == "cpu" and not torch.is_autocast_enabled("cpu")
