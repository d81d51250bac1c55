"""Label-smoothed cross entropy (5.4) fused with the product that makes the logits, which never exist all at once."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from aiayn.paper.fast.process import LARGEST_REUSED
from aiayn.paper.fast.products import STEP, product, transposed_product

# T target tokens of all sentences, packed; D d_model; V vocabulary; R rows of logits that exist at a time


def label_smoothed_cross_entropy(
    hidden: Tensor, embedding: Tensor, target: Tensor, label_smoothing: float, *, fused: bool = False
) -> tuple[Tensor, Tensor]:
    """Two sums over target (T,): the smoothed loss, and the nats -ln p(target) in float64, without gradient.

    The logits are hidden (T, D) times embedding (V, D) transposed. The smoothed loss expects 1 - label_smoothing of
    the probability on the target and the rest spread evenly over the V - 1 other tokens. `fused` compiles what lies
    between the products.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    # Compiled for the first lengths it sees, it may sum in another order for others: a resumed run sees others first
    fused = fused and not torch.are_deterministic_algorithms_enabled()
    of_logits = _fused() if fused else _a_few_at_a_time if device == "cpu" else _of_logits
    with torch.autocast(device, enabled=False):
        loss, nats = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
            hidden, embedding, target, label_smoothing, torch.is_grad_enabled(), dtype, of_logits
        )
    return loss, nats


class _CrossEntropy(torch.autograd.Function):
    """Logits come in chunks that stay in the cache and turn into their gradient in place: none is kept or redone."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        embedding: Tensor,
        target: Tensor,
        label_smoothing: float,
        with_gradient: bool,
        dtype: torch.dtype,  # of the products; gradients leave in that of what they are of
        of_logits: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor | None]],
    ) -> tuple[Tensor, Tensor]:
        vocab_size = len(embedding)
        # Paper: silent on where epsilon_ls goes; the released code spreads it over the V - 1 other tokens
        share = label_smoothing / (vocab_size - 1)  # expected of each token ...
        extra = 1 - label_smoothing - share  # ... and, on top of that, of the target
        wide = torch.promote_types(embedding.dtype, torch.float32)
        # (D, 1): a row's logits summed without reading them, and before they are rounded
        summed = embedding.sum(0, dtype=wide).unsqueeze(1)
        hidden, embedding, whole = hidden.to(dtype), embedding.to(dtype), hidden
        nats = torch.zeros((), dtype=torch.float64, device=hidden.device)
        all_nats = torch.zeros_like(nats)  # of every token of the vocabulary, not only of the target
        if with_gradient:
            to_hidden = torch.empty_like(whole)
            to_embedding = torch.zeros_like(embedding, dtype=wide)
        rows, words = _chunk(embedding)
        for start in range(0, len(target), rows):
            part = hidden[start : start + rows]  # (R, D)
            gold = target[start : start + rows].unsqueeze(1)  # (R, 1)
            logits, row_sums = product(part, embedding), torch.matmul(part.to(wide), summed)  # (R, V), (R, 1)
            nats_of_part, all_nats_of_part, total, gradient = of_logits(
                logits, row_sums, gold, share, extra, with_gradient
            )
            nats += nats_of_part
            all_nats += all_nats_of_part
            if gradient is not None:  # the row's total leaves with the narrower side
                to_hidden[start : start + rows] = product(gradient, embedding.t()) / total
                part = (part / total).to(dtype)
                for word in range(0, vocab_size, words):
                    some = slice(word, word + words)
                    to_embedding[some] += transposed_product(gradient[:, some].contiguous(), part)
        if with_gradient:
            ctx.save_for_backward(to_hidden, to_embedding)
        ctx.mark_non_differentiable(nats)
        return (extra * nats + share * all_nats).to(wide), nats

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None, None, None, None, None]:
        to_hidden, to_embedding = ctx.saved_tensors
        return to_hidden * gradient, to_embedding * gradient, None, None, None, None, None


def _chunk(embedding: Tensor) -> tuple[int, int]:
    """How many rows of logits to have at a time, and of how many words the embedding's gradient."""
    vocab_size, d_model = embedding.shape
    if embedding.device.type != "cpu":
        return 4096, vocab_size
    if embedding.numel() < 2**19:
        return 128, vocab_size  # all in its cache
    # No block larger than what is reused, those in float32 included: to get new memory takes longer than to fill it
    rows = LARGEST_REUSED // (embedding.itemsize * vocab_size)
    return max(STEP, rows // STEP * STEP), max(1, LARGEST_REUSED // (max(embedding.itemsize, 4) * d_model))


def _of_logits(
    logits: Tensor, row_sums: Tensor, gold: Tensor, share: float, extra: float, with_gradient: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Nats of the gold tokens and of all, total (R, 1), and p(token) - expected(token) times the total (R, V)."""
    dtype = logits.dtype
    logits = logits.to(row_sums.dtype)
    highest = logits.amax(1, keepdim=True)
    logits -= highest
    of_gold, of_all = logits.gather(1, gold), row_sums - highest * logits.size(1)
    total = logits.exp_().sum(1, keepdim=True)
    log_total = total.log()
    nats = (log_total - of_gold).sum(dtype=torch.float64)
    all_nats = (log_total * logits.size(1) - of_all).sum(dtype=torch.float64)
    if not with_gradient:
        return nats, all_nats, total, None
    gradient = logits.sub_(share * total)
    of_gold = gradient.gather(1, gold) - extra * total
    # Not added where it is wide: a compiler would then have to write out all of it in float32
    return nats, all_nats, total, gradient.to(dtype).scatter_(1, gold, of_gold.to(dtype))


def _a_few_at_a_time(
    logits: Tensor, row_sums: Tensor, gold: Tensor, share: float, extra: float, with_gradient: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The same, of as many rows at a time as a CPU's cache holds; the gradient stands where the logits stood."""
    few = max(1, 2**20 // logits.size(1))
    if len(logits) <= few:
        return _of_logits(logits, row_sums, gold, share, extra, with_gradient)
    nats, all_nats = (torch.zeros((), dtype=torch.float64) for _ in range(2))
    totals = []
    for start in range(0, len(logits), few):
        part, sums, of_part = (x[start : start + few] for x in (logits, row_sums, gold))
        nats_of_part, all_nats_of_part, total, gradient = _of_logits(part, sums, of_part, share, extra, with_gradient)
        nats += nats_of_part
        all_nats += all_nats_of_part
        totals.append(total)
        if gradient is not None and part.dtype != sums.dtype:  # or else it stands there already
            part.copy_(gradient)
    return nats, all_nats, torch.cat(totals), logits if with_gradient else None


@cache
def _fused() -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor | None]]:
    # Two compilations, as the last chunk is shorter; a third if it is of one row
    return torch.compile(_of_logits)
