"""Label-smoothed cross entropy (section 5.4), with the product that makes the logits, which never exist all at once."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from aiayn.paper.batch import static_rows
from aiayn.paper.layers import product, transposed_product

# T target tokens of all sentences, packed; D d_model; V vocabulary; R rows of logits that exist at a time

CHUNK_ELEMENTS = {"cpu": 2**23, "cuda": 2**27}
"""Logits that exist at a time: 32 MB of float32, which glibc gives again, or on a GPU half a gigabyte."""


def label_smoothed_cross_entropy(
    hidden: Tensor, embedding: Tensor, target: Tensor, label_smoothing: float, *, compiled: bool = False
) -> tuple[Tensor, Tensor]:
    """Two sums over target (T,): the smoothed loss, and the nats -ln p(target) in float64, without gradient.

    The logits are hidden (T, D) times embedding (V, D) transposed (3.4). The smoothed loss expects 1 - label_smoothing
    of the probability on the target and the rest spread evenly over the V - 1 other tokens. `compiled` compiles what
    lies between the products.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    # Compiled for the first lengths it sees, it may sum in another order for others: a resumed run sees others first
    compiled = compiled and not torch.are_deterministic_algorithms_enabled()
    of_logits = _compiled() if compiled else nats_and_gradient
    with torch.autocast(device, enabled=False):
        return _ChunkedCrossEntropy.apply(hidden, embedding, target, label_smoothing, dtype, of_logits)  # type: ignore[no-any-return, no-untyped-call]


def nats_and_gradient(
    logits: Tensor, target: Tensor, share: float, extra: float, with_gradient: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """-ln p of the targets (R, 1), and of all tokens summed (R,), from logits (R, V); and p - expected (R, V).

    The last is the gradient, in the logits' type, or None. Expected: `share` of each token, `extra` more of the target.
    """
    # In bf16 a sum over the vocabulary would lose nearly all digits
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_probabilities = wide.log_softmax(1)
    nats, all_nats = -log_probabilities.gather(1, target), -log_probabilities.sum(1)
    if not with_gradient:
        return nats, all_nats, None
    gradient = log_probabilities.exp_().sub_(share)
    of_target = gradient.gather(1, target).sub_(extra)
    # Rounded first, so that compiled code never stores it in float32
    return nats, all_nats, gradient.to(logits.dtype).scatter_(1, target, of_target.to(logits.dtype))


def chunk_rows(device: str, vocab_size: int) -> int:
    """Rows of logits that exist at a time on such a device, but for the last ones."""
    return max(64, CHUNK_ELEMENTS[device] // vocab_size // 64 * 64)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Logits come in chunks that turn into their gradient at once: none is kept, and no product is done again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        embedding: Tensor,
        target: Tensor,
        label_smoothing: float,
        dtype: torch.dtype,  # of the products; gradients leave in that of what they are of
        of_logits: Callable[..., tuple[Tensor, Tensor, Tensor | None]],
    ) -> tuple[Tensor, Tensor]:
        with_gradient = any(ctx.needs_input_grad[:2])
        # Paper: silent on where epsilon_ls goes; the released code spreads it over the V - 1 other tokens
        share = label_smoothing / (len(embedding) - 1)  # expected of each token ...
        extra = 1 - label_smoothing - share  # ... and, on top of that, of the target
        narrow, weight = hidden.to(dtype), embedding.to(dtype)
        sums = torch.zeros(2, dtype=torch.float64, device=hidden.device)  # nats of the targets, and of all tokens
        grad_hidden = torch.empty_like(hidden) if with_gradient else None
        grad_embedding = torch.zeros_like(embedding) if with_gradient else None
        rows = chunk_rows(hidden.device.type, len(embedding))
        for start in range(0, len(target), rows):
            part, gold = narrow[start : start + rows], target[start : start + rows].unsqueeze(1)  # (R, D), (R, 1)
            tokens = len(gold)
            if hidden.device.type == "cpu":  # rows of zeros add nothing to the embedding's gradient
                part, gold = (F.pad(x, (0, 0, 0, static_rows(tokens) - tokens)) for x in (part, gold))
            nats, all_nats, gradient = of_logits(product(part, weight), gold, share, extra, with_gradient)
            sums += torch.stack((nats[:tokens].sum(dtype=torch.float64), all_nats[:tokens].sum(dtype=torch.float64)))
            if gradient is not None and grad_hidden is not None and grad_embedding is not None:
                grad_hidden[start : start + rows] = product(gradient, weight.t())[:tokens]
                grad_embedding += transposed_product(gradient, part)
        ctx.save_for_backward(grad_hidden, grad_embedding)
        nats_of_target, nats_of_all = sums
        ctx.mark_non_differentiable(nats_of_target)
        loss = extra * nats_of_target + share * nats_of_all
        return loss.to(torch.promote_types(embedding.dtype, torch.float32)), nats_of_target

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_embedding = ctx.saved_tensors
        return grad_hidden * grad_loss, grad_embedding * grad_loss, None, None, None, None


@cache
def _compiled() -> Callable[..., tuple[Tensor, Tensor, Tensor | None]]:
    # Two compilations, as the last chunk is shorter; a third if it is of one row
    return torch.compile(nats_and_gradient)
