"""Linear layers, and the matrix products under them: on a CPU oneDNN's, twice as fast as MKL's on some."""

import ctypes
import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# T rows, one a token; I inputs; O outputs

STEP = 64
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # as malloc.h numbers them
KEPT = 2**25 - 2**12
"""Bytes of the largest tensor whose memory glibc keeps when it is freed: that of larger ones is new each time."""
ONEDNN = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


def compute_with(threads: int) -> None:
    """Lets this process's products use so many threads, and their results the memory of those before them."""
    torch.set_num_threads(threads)
    gc.freeze()  # what is imported by now stays: the collector need not look through it again and again
    # glibc gives back to the system what was freed, and asks it for zeroed pages again: a fifth of the time of decoding
    # M_MMAP_MAX=0 would keep pieces of any size, but small ones then settle in their place: 4 GB more in 240 updates
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(M_MMAP_THRESHOLD, 2**25)  # no more is taken
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def static_rows(tokens: int) -> int:
    """The number of rows to give `tokens` tokens, so that the products of many batches have few different shapes.

    oneDNN compiles a kernel for each new shape, in about a millisecond: hence powers of two up to 64, then multiples of
    64, past 1023 tokens of 128, past 2047 of 256, and so on.
    """
    if tokens <= STEP:
        return 1 << (tokens - 1).bit_length()
    step = max(STEP, 1 << tokens.bit_length() >> 4)
    return -(-tokens // step) * step


def sent(x: Tensor, device: torch.device | str) -> Tensor:
    """x on the device; a GPU fetches it when it comes to it, and nobody waits for what it computes until then."""
    # From memory that may be swapped out, the copy would begin, and this call end, after all that was asked for before
    return x.pin_memory().to(device, non_blocking=True) if torch.device(device).type == "cuda" else x.to(device)


def fetched(x: Tensor) -> tuple[Tensor, Callable[[], None]]:
    """x on the host, and what waits until it is there: for x alone, not for what a GPU is asked for after it."""
    if x.device.type != "cuda":
        return x, lambda: None
    there, event = x.to("cpu", non_blocking=True), torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return there, event.synchronize


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
    """The same product of x (T, I) for a weight that stays as it is, faster on few rows; without gradient."""
    if _suits_onednn(weight):
        # Laid out for as many rows as these, it suits any other number. Torch has no public name for oneDNN's products
        laid_out = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), STEP)
        return lambda x: _onednn(x, laid_out, bias)
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


class Linear(nn.Linear):
    """A linear layer with Glorot-uniform weights and biases of zero."""

    def reset_parameters(self) -> None:
        """Draws the weights anew."""
        nn.init.xavier_uniform_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., I) as (..., O)."""
        return product(x, self.weight, self.bias)


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
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]


def _suits_onednn(x: Tensor) -> bool:
    # Under autocast and in other types torch asks oneDNN itself, or cannot
    return ONEDNN and x.dtype == torch.float32 and x.device.type == "cpu" and not torch.is_autocast_enabled("cpu")
