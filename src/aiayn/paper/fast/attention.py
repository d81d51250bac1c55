"""Attention between packed sentences as fast as each device has it; outputs equal `paper.attention`'s."""

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from aiayn.paper.attention import MemoryAttention, SelfAttention, merge_heads, split_heads
from aiayn.paper.batch import Packing, to_device

# T query tokens and S memory tokens of all sentences, packed; B sentences; L tokens of the longest one
# D d_model; H heads; K d_k; V d_v; P parts of the same width, such as queries, keys and values

FILLERS, FILLER_LENGTH = 128, 256
"""Empty sentences that take the rows after the last token, and their length if so many are enough."""
KERNEL_TYPES, KERNEL_WIDTH = {torch.bfloat16, torch.float16}, 256
"""What torch's flash attention supports."""


class HeadPacking(Packing):
    """A Packing that pads and splits into heads in one indexing, and has what variable-length kernels need."""

    def __init__(self, offsets: Tensor, rows: int | None = None, device: torch.device | None = None) -> None:
        super().__init__(offsets, rows, device)
        self._orders: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}
        # Flash attention: GPUs since Ampere
        self.has_kernel = self.device.type == "cuda" and torch.cuda.get_device_capability(self.device) >= (8, 0)

    @cached_property
    def borders(self) -> Tensor:
        """The offsets in 32 bits, and after them the rows that belong to no sentence as fillers (B + 1 + FILLERS,).

        So kernels that only know sentences leave no row undefined. They need equally many on both sides, wherever the
        tokens end: some fillers are empty.
        """
        fillers = self.tokens + self._filler_length * torch.arange(1, FILLERS + 1)
        return to_device(torch.cat((self.offsets, fillers.clamp(max=self.rows))).int(), self.device)

    @cached_property
    def bound(self) -> int:
        """No sentence is longer, fillers included; few different numbers, since a kernel is compiled for each."""
        return max(FILLER_LENGTH, 1 << (max(self.max_length, self._filler_length) - 1).bit_length())

    @property
    def _filler_length(self) -> int:
        return max(FILLER_LENGTH, -(-(self.rows - self.tokens) // FILLERS))

    def split(self, x: Tensor, num_heads: int, widths: Sequence[int]) -> list[Tensor]:
        """Packed (rows, H * (K + K' + ...)) as padded (B, H, L, K), (B, H, L, K'), ..., zero where no token is."""
        if len(set(widths)) > 1:
            parts = torch.split(x, [num_heads * width for width in widths], 1)
            return [self.split(part, num_heads, [width])[0] for part, width in zip(parts, widths, strict=True)]
        padded, _, empty = self._order(num_heads, len(widths))
        rows = x.reshape(-1, widths[0]).index_select(0, padded).index_fill_(0, empty, 0)
        return list(rows.view(len(widths), -1, num_heads, self.max_length, widths[0]))

    def merge(self, *parts: Tensor) -> Tensor:
        """The inverse of `split`: padded parts (P, B, H, L, K), each with its own K, as packed (rows, H * all K).

        Whatever stands where no token is gets lost; rows that belong to no sentence are zero.
        """
        if len(parts) > 1:
            return torch.cat([self.merge(part) for part in parts], 1)
        count, _, num_heads, _, width = parts[0].shape
        _, packed, _ = self._order(num_heads, count)
        rows = parts[0].new_empty(self.rows, count * num_heads * width)
        rows[self.tokens :] = 0
        torch.index_select(parts[0].view(-1, width), 0, packed, out=rows[: self.tokens].view(-1, width))
        return rows

    def _order(self, num_heads: int, parts: int) -> tuple[Tensor, Tensor, Tensor]:
        """Row numbers: of (tokens, P, H) in the order (P, B, H, L), the other way round, and of the padding."""
        if (num_heads, parts) not in self._orders:
            part, head = torch.arange(parts).unsqueeze(1), torch.arange(num_heads)
            shape = (parts, len(self.is_padding), num_heads, self.max_length)
            sentence, position = (x[:, None, None] for x in (self.sentence, self.position))
            packed = (((part * shape[1] + sentence) * num_heads + head) * self.max_length + position).flatten()
            padded = packed.new_zeros(shape).flatten()
            padded[packed] = torch.arange(packed.numel())
            empty = self.is_padding.unsqueeze(1).expand(shape).flatten().nonzero().squeeze(1)
            device = self.device
            self._orders[num_heads, parts] = (
                to_device(padded, device),
                to_device(packed, device),
                to_device(empty, device),
            )
        return self._orders[num_heads, parts]


def attend_to_self(self: SelfAttention, x: Tensor, packing: HeadPacking, *, causal: bool) -> Tensor:
    """What SelfAttention.forward returns."""
    sizes = (self.num_heads, self.d_k, self.d_v)
    heads = attention(self.query_key_value(x), None, packing, packing, sizes, causal=causal)
    return self.output(heads)  # type: ignore[no-any-return]


def attend_to_memory(
    self: MemoryAttention, x: Tensor, memory: Tensor, packing: HeadPacking, memory_packing: HeadPacking
) -> Tensor:
    """What MemoryAttention.forward returns."""
    sizes = (self.num_heads, self.d_k, self.d_v)
    heads = attention(self.query(x), self.key_value(memory), packing, memory_packing, sizes, causal=False)
    return self.output(heads)  # type: ignore[no-any-return]


def attention(
    queries: Tensor,
    keys_values: Tensor | None,
    packing: HeadPacking,
    memory_packing: HeadPacking,
    sizes: tuple[int, int, int],
    *,
    causal: bool,
) -> Tensor:
    """Eq. 1 sentence by sentence, from packed to packed (T, H * V); `sizes` are H, K and V.

    `queries` (T, H * K) look at `keys_values` (S, H * (K + V)); or, where these are None, queries, keys and values are
    all in the first (T, H * (2 K + V)).
    """
    num_heads, d_k, d_v = sizes
    if not packing.has_kernel or queries.dtype not in KERNEL_TYPES or max(d_k, d_v) > KERNEL_WIDTH:
        padded = PADDED["own" if queries.device.type == "cpu" else "torch"]
        return padded(queries, keys_values, packing, memory_packing, sizes, causal)
    from torch.nn.attention.varlen import varlen_attn  # loads torch.compile, which takes seconds

    parts = _parts(queries, keys_values, sizes)
    # The kernel wants one width, a multiple of 8: zeros change neither a product of query and key nor the other values
    width = -(-max(d_k, d_v) // 8) * 8
    # It reads 16 bytes at once. Parts of one product lie beside each other, and are aligned to that only where all
    # widths are multiples of 8; F.pad makes an aligned copy, even where it adds nothing
    aligned = d_k % 8 == d_v % 8 == 0
    heads = (part.view(len(part), num_heads, -1) for part in parts)
    q, k, v = (head if aligned and head.size(2) == width else F.pad(head, (0, width - head.size(2))) for head in heads)
    found: Tensor = varlen_attn(  # type: ignore[assignment]
        q,
        k,
        v,
        packing.borders,
        memory_packing.borders,
        packing.bound,
        memory_packing.bound,
        scale=d_k**-0.5,
        window_size=(-1, 0) if causal else (-1, -1),
    )
    return found[..., :d_v].flatten(1)


def _parts(queries: Tensor, keys_values: Tensor | None, sizes: tuple[int, int, int]) -> tuple[Tensor, ...]:
    """Queries (T, H * K), keys (S, H * K) and values (S, H * V)."""
    num_heads, d_k, d_v = sizes
    if keys_values is None:
        return torch.split(queries, [num_heads * width for width in (d_k, d_k, d_v)], 1)
    return queries, *torch.split(keys_values, [num_heads * d_k, num_heads * d_v], 1)


def _softmax_(scores: Tensor) -> Tensor:
    # On a CPU torch's softmax is several times slower on rows shorter than a vector register of 16 floats; so is its
    # exp where the result is nearly 0, but not exp2
    if scores.device.type != "cpu" or scores.size(-1) >= 16:
        return scores.softmax(-1)
    scores.sub_(scores.amax(-1, keepdim=True)).mul_(math.log2(math.e)).exp2_()
    return scores.div_(scores.sum(-1, keepdim=True))


def weigh(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """What `scaled_dot_product_attention` of the paper returns, with fewer new tensors; without gradient."""
    scores = torch.matmul(queries, keys.transpose(-2, -1)).mul_(queries.size(-1) ** -0.5)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if mask is not None:
        scores += mask
    weights = _softmax_(scores).to(values.dtype)
    return torch.matmul(weights, values), weights


class _Attention(torch.autograd.Function):
    """Eq. 1 from packed to packed with its gradient by hand.

    Torch's own takes several times as long on a CPU for short sentences, and undoing `split` row by row longer still.
    """

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,  # (T, H * K), or in self-attention queries, keys and values (T, H * (2 K + V))
        keys_values: Tensor | None,  # (S, H * (K + V)), or None in self-attention
        packing: HeadPacking,
        memory_packing: HeadPacking,
        sizes: tuple[int, int, int],  # H, K, V
        causal: bool,
    ) -> Tensor:
        num_heads, d_k, d_v = sizes
        mask = packing.causal_mask if causal else memory_packing.mask
        if keys_values is None:
            q, k, v = packing.split(queries, num_heads, (d_k, d_k, d_v))
        else:
            (q,) = packing.split(queries, num_heads, (d_k,))
            k, v = memory_packing.split(keys_values, num_heads, (d_k, d_v))
        heads, weights = weigh(q, k, v, mask)
        ctx.save_for_backward(q, k, v, weights)
        ctx.rest = keys_values is None, packing, memory_packing
        return packing.merge(heads.unsqueeze(0))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, weights = ctx.saved_tensors
        self_attention, packing, memory_packing = ctx.rest
        (to_heads,) = packing.split(gradient, q.size(1), (v.size(3),))
        to_scores = torch.matmul(to_heads, v.transpose(-2, -1)).mul_(weights)
        to_scores.addcmul_(weights, to_scores.sum(-1, keepdim=True), value=-1).mul_(q.size(3) ** -0.5)
        to_x, to_memory = (_room(q, k, v), []) if self_attention else (_room(q), _room(k, v))
        to_q, to_k, to_v = (part.flatten(0, 1) for room in (*to_x, *to_memory) for part in room)
        to_scores, weights = to_scores.flatten(0, 1), weights.flatten(0, 1)
        torch.bmm(to_scores, k.flatten(0, 1), out=to_q)
        torch.bmm(to_scores.transpose(1, 2), q.flatten(0, 1), out=to_k)
        torch.bmm(weights.transpose(1, 2), to_heads.flatten(0, 1), out=to_v)
        to_keys_values = memory_packing.merge(*to_memory) if to_memory else None
        return packing.merge(*to_x), to_keys_values, None, None, None, None


def _padded_attention_of_torch(
    queries: Tensor,
    keys_values: Tensor | None,
    packing: HeadPacking,
    memory_packing: HeadPacking,
    sizes: tuple[int, int, int],
    causal: bool,
) -> Tensor:
    """The same by torch's own kernels for padded sentences: of any width, in 32 bits too."""
    num_heads, d_k, d_v = sizes
    if keys_values is None:
        q, k, v = split_heads(queries, packing, num_heads, (d_k, d_k, d_v))
    else:
        (q,) = split_heads(queries, packing, num_heads, (d_k,))
        k, v = split_heads(keys_values, memory_packing, num_heads, (d_k, d_v))
    # Padding ends a sentence: `causal` hides it from every token
    mask = None if causal or memory_packing.mask is None else memory_packing.mask.to(q.dtype)
    return merge_heads(F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal), packing)


PADDED: dict[str, Callable[..., Tensor]] = {"own": _Attention.apply, "torch": _padded_attention_of_torch}
"""Attention between padded sentences: our own gradient, for a CPU, or torch's kernels."""


def leave_uncompiled() -> None:
    """Keeps torch.compile out of attention between padded sentences.

    Their shapes differ from batch to batch: it would compile for each, and what is around them too.
    """
    for name, function in PADDED.items():
        PADDED[name] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]


def _room(*parts: Tensor) -> list[Tensor]:
    """Room (P, B, H, L, K) for results as large as the parts, in one piece if they are of one width."""
    if len({part.shape for part in parts}) == 1:
        return [parts[0].new_empty(len(parts), *parts[0].shape)]
    return [part.new_empty(1, *part.shape) for part in parts]
