"""Attention (section 3.2) between packed sentences: the one place that knows where a sentence ends."""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from aiayn.linear import Linear, sent

# T query tokens and S memory tokens of all sentences, packed; B sentences; L tokens of the longest one
# D d_model; H heads; K d_k; V d_v; P parts of the same width, such as queries, keys and values

FILLERS, FILLER_LENGTH = 128, 256
"""Sentences of nothing that fill up the rows after the last token, and how long they are if so many are enough."""
KERNEL_TYPES, KERNEL_WIDTH = {torch.bfloat16, torch.float16}, 256
"""What flash attention takes, the kernel that torch has."""


class Sentences:
    """Where the sentences of one packed side lie; made once per batch, used by every layer.

    `offsets` (B + 1,) says where each sentence begins and ends with the number of tokens; no sentence is empty. Packed
    are as many rows as there are tokens, or `rows`: the ones after the last token belong to no sentence. Everything is
    computed here, on the host, from offsets that lie there; what `device` needs is sent, and it is asked for nothing.
    """

    def __init__(self, offsets: Tensor, rows: int | None = None, device: torch.device | None = None) -> None:
        assert offsets.device.type == "cpu"
        self._offsets, self._lengths, self._device = offsets, offsets.diff(), device or offsets.device
        self.max_length = int(self._lengths.max())
        self._number = torch.repeat_interleave(self._lengths)  # (tokens,) the sentence each token belongs to
        self._position = torch.arange(len(self._number)) - offsets[self._number]  # (tokens,) in its sentence
        self.tokens = len(self._number)
        self.rows = rows or self.tokens
        self.positions = sent(F.pad(self._position, (0, self.rows - self.tokens)), self._device)
        self._orders: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}
        # Flash attention: GPUs since Ampere
        self.has_kernel = self._device.type == "cuda" and torch.cuda.get_device_capability(self._device) >= (8, 0)

    def fill(self, tokens: Tensor) -> Tensor:
        """As many tokens as there are rows."""
        return F.pad(tokens, (0, self.rows - self.tokens))

    @cached_property
    def mask(self) -> Tensor | None:
        """(B, 1, 1, L): 0 where a token is, -inf where none is; None when all sentences are equally long."""
        return sent(_forbid(self._padding[:, None, None]), self._device) if bool(self._padding.any()) else None

    @cached_property
    def causal_mask(self) -> Tensor:
        """(L, L): -inf where the key comes after the query, so that position i sees only positions up to i (3.2.3).

        Padding ends a sentence, so this hides it from every token.
        """
        length = self.max_length
        return sent(_forbid(torch.ones(length, length, dtype=torch.bool).triu_(1)), self._device)

    @cached_property
    def borders(self) -> Tensor:
        """The offsets in 32 bits, and after them the rows that belong to no sentence as fillers (B + 1 + FILLERS,).

        So that kernels which only know sentences leave nothing undefined. They want as many on both sides, wherever
        their tokens end: some fillers are empty.
        """
        fillers = self.tokens + self._filler_length * torch.arange(1, FILLERS + 1)
        return sent(torch.cat((self._offsets, fillers.clamp(max=self.rows))).int(), self._device)

    @cached_property
    def bound(self) -> int:
        """No sentence is longer, fillers included; few different numbers, since a kernel is compiled for each."""
        return max(FILLER_LENGTH, 1 << (max(self.max_length, self._filler_length) - 1).bit_length())

    @property
    def _filler_length(self) -> int:
        return max(FILLER_LENGTH, -(-(self.rows - self.tokens) // FILLERS))

    @cached_property
    def _cells(self) -> Tensor:
        """(tokens,) the number of each token's cell among B * L padded ones."""
        return sent(self._number * self.max_length + self._position, self._device)

    def pad(self, x: Tensor, num_heads: int) -> Tensor:
        """Packed (rows, H * K) as padded (B, H, L, K), zero where no token is; torch derives its gradient."""
        shape = len(self._lengths), self.max_length
        cells = x.new_zeros(shape[0] * shape[1], x.size(1)).index_copy(0, self._cells, x[: self.tokens])
        return cells.view(*shape, num_heads, -1).transpose(1, 2)

    def pack(self, heads: Tensor) -> Tensor:
        """The inverse of `pad`: (B, H, L, K) as (rows, H * K), zero after the last token."""
        rows = heads.transpose(1, 2).flatten(2).flatten(0, 1).index_select(0, self._cells)
        return F.pad(rows, (0, 0, 0, self.rows - self.tokens))

    @cached_property
    def _padding(self) -> Tensor:
        return torch.arange(self.max_length) >= self._lengths.unsqueeze(1)  # (B, L)

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
            shape = (parts, len(self._padding), num_heads, self.max_length)
            sentence, position = (x[:, None, None] for x in (self._number, self._position))
            packed = (((part * shape[1] + sentence) * num_heads + head) * self.max_length + position).flatten()
            padded = packed.new_zeros(shape).flatten()
            padded[packed] = torch.arange(packed.numel())
            empty = self._padding.unsqueeze(1).expand(shape).flatten().nonzero().squeeze(1)
            there = self._device
            self._orders[num_heads, parts] = sent(padded, there), sent(packed, there), sent(empty, there)
        return self._orders[num_heads, parts]


def _forbid(where: Tensor) -> Tensor:
    return torch.zeros(where.shape).masked_fill_(where, -torch.inf)


def scaled_dot_product_attention(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """softmax(Q K^T / sqrt(d_k)) V, Eq. 1 (section 3.2.1), and the softmax, the attention weights.

    Queries (..., Q, K), keys (..., M, K), values (..., M, V) give (..., Q, V) and (..., Q, M). The mask, 0 or -inf, is
    added to the scores before the softmax; it leaves each query at least one key.
    """
    scores = torch.matmul(queries, keys.transpose(-2, -1)).mul_(queries.size(-1) ** -0.5)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if mask is not None:
        scores += mask
    weights = _softmax_(scores).to(values.dtype)
    return torch.matmul(weights, values), weights


def _softmax_(scores: Tensor) -> Tensor:
    # On a CPU torch's softmax is several times slower on rows shorter than a vector register of 16 floats; so is its
    # exp where the result is nearly 0, but not exp2
    if scores.device.type != "cpu" or scores.size(-1) >= 16:
        return scores.softmax(-1)
    scores.sub_(scores.amax(-1, keepdim=True)).mul_(math.log2(math.e)).exp2_()
    return scores.div_(scores.sum(-1, keepdim=True))


def attention(
    queries: Tensor,
    keys_values: Tensor | None,
    sentences: Sentences,
    memory_sentences: Sentences,
    sizes: tuple[int, int, int],
    *,
    causal: bool,
) -> Tensor:
    """Eq. 1 sentence by sentence, from packed to packed (T, H * V); `sizes` are H, K and V.

    `queries` (T, H * K) look at `keys_values` (S, H * (K + V)); or, where these are None, queries, keys and values are
    all in the first (T, H * (2 K + V)).
    """
    num_heads, d_k, d_v = sizes
    if not sentences.has_kernel or queries.dtype not in KERNEL_TYPES or max(d_k, d_v) > KERNEL_WIDTH:
        padded = _padded_attention if queries.device.type == "cpu" else _padded_attention_of_torch
        return padded(queries, keys_values, sentences, memory_sentences, sizes, causal)  # type: ignore[no-any-return]
    parts = _parts(queries, keys_values, sizes)
    # The kernel wants one width, a multiple of 8: zeros change neither a product of query and key nor the other values
    width = -(-max(d_k, d_v) // 8) * 8
    heads = (part.view(len(part), num_heads, -1) for part in parts)
    # To pad by nothing would still be a copy
    q, k, v = (head if head.size(2) == width else F.pad(head, (0, width - head.size(2))) for head in heads)
    found: Tensor = varlen_attn(  # type: ignore[assignment]
        q,
        k,
        v,
        sentences.borders,
        memory_sentences.borders,
        sentences.bound,
        memory_sentences.bound,
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


class _Attention(torch.autograd.Function):
    """Eq. 1 from packed to packed with its gradient by hand.

    Torch's own takes several times as long on a CPU for short sentences, and undoing `split` row by row longer still.
    """

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,  # (T, H * K), or in self-attention queries, keys and values (T, H * (2 K + V))
        keys_values: Tensor | None,  # (S, H * (K + V)), or None in self-attention
        sentences: Sentences,
        memory_sentences: Sentences,
        sizes: tuple[int, int, int],  # H, K, V
        causal: bool,
    ) -> Tensor:
        num_heads, d_k, d_v = sizes
        mask = sentences.causal_mask if causal else memory_sentences.mask
        if keys_values is None:
            q, k, v = sentences.split(queries, num_heads, (d_k, d_k, d_v))
        else:
            (q,) = sentences.split(queries, num_heads, (d_k,))
            k, v = memory_sentences.split(keys_values, num_heads, (d_k, d_v))
        heads, weights = scaled_dot_product_attention(q, k, v, mask)
        ctx.save_for_backward(q, k, v, weights)
        ctx.rest = keys_values is None, sentences, memory_sentences
        return sentences.merge(heads.unsqueeze(0))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, weights = ctx.saved_tensors
        self_attention, sentences, memory_sentences = ctx.rest
        (to_heads,) = sentences.split(gradient, q.size(1), (v.size(3),))
        to_scores = torch.matmul(to_heads, v.transpose(-2, -1)).mul_(weights)
        to_scores.addcmul_(weights, to_scores.sum(-1, keepdim=True), value=-1).mul_(q.size(3) ** -0.5)
        to_x, to_memory = (_room(q, k, v), []) if self_attention else (_room(q), _room(k, v))
        to_q, to_k, to_v = (part.flatten(0, 1) for room in (*to_x, *to_memory) for part in room)
        to_scores, weights = to_scores.flatten(0, 1), weights.flatten(0, 1)
        torch.bmm(to_scores, k.flatten(0, 1), out=to_q)
        torch.bmm(to_scores.transpose(1, 2), q.flatten(0, 1), out=to_k)
        torch.bmm(weights.transpose(1, 2), to_heads.flatten(0, 1), out=to_v)
        to_keys_values = memory_sentences.merge(*to_memory) if to_memory else None
        return sentences.merge(*to_x), to_keys_values, None, None, None, None


# Padded shapes differ from batch to batch: a compiler would be asked for ever new ones, and what is around them too
_padded_attention = torch.compiler.disable(_Attention.apply)  # type: ignore[no-untyped-call]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _padded_attention_of_torch(
    queries: Tensor,
    keys_values: Tensor | None,
    sentences: Sentences,
    memory_sentences: Sentences,
    sizes: tuple[int, int, int],
    causal: bool,
) -> Tensor:
    """The same by torch's own kernels for padded sentences: of any width, in 32 bits too."""
    q, k, v = (
        side.pad(part, sizes[0])
        for side, part in zip(
            (sentences, memory_sentences, memory_sentences), _parts(queries, keys_values, sizes), strict=True
        )
    )
    # Padding ends a sentence: `causal` hides it from every token
    mask = None if causal or memory_sentences.mask is None else memory_sentences.mask.to(q.dtype)
    return sentences.pack(F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal))


def _room(*parts: Tensor) -> list[Tensor]:
    """Room (P, B, H, L, K) for results as large as the parts, in one piece if they are of one width."""
    if len({part.shape for part in parts}) == 1:
        return [parts[0].new_empty(len(parts), *parts[0].shape)]
    return [part.new_empty(1, *part.shape) for part in parts]


class SelfAttention(nn.Module):
    """Section 3.2.2 among the tokens of a sentence: h heads; queries and keys of width d_k, values of width d_v."""

    def __init__(self, d_model: int, num_heads: int, d_k: int, d_v: int) -> None:
        super().__init__()
        self.num_heads, self.d_k, self.d_v = num_heads, d_k, d_v
        # Paper: silent on initialisation; the released code draws query, key and value as one matrix in self-attention,
        # key and value as one in attention to the encoder. Silent on biases; the released code has them.
        self.query_key_value = Linear(d_model, num_heads * (2 * d_k + d_v))
        self.output = Linear(num_heads * d_v, d_model)

    def forward(self, x: Tensor, sentences: Sentences, *, causal: bool) -> Tensor:
        """x (T, D) after looking at itself, sentence by sentence, as (T, D); `causal`: and only at what came before."""
        sizes = (self.num_heads, self.d_k, self.d_v)
        heads = attention(self.query_key_value(x), None, sentences, sentences, sizes, causal=causal)
        return self.output(heads)  # type: ignore[no-any-return]


class MemoryAttention(nn.Module):
    """Section 3.2.2 from the decoder's tokens to the encoder's output, the memory."""

    def __init__(self, d_model: int, num_heads: int, d_k: int, d_v: int) -> None:
        super().__init__()
        self.num_heads, self.d_k, self.d_v = num_heads, d_k, d_v
        self.query = Linear(d_model, num_heads * d_k)
        self.key_value = Linear(d_model, num_heads * (d_k + d_v))
        self.output = Linear(num_heads * d_v, d_model)

    def forward(self, x: Tensor, memory: Tensor, sentences: Sentences, memory_sentences: Sentences) -> Tensor:
        """x (T, D) after looking at memory (S, D), sentence by sentence, as (T, D)."""
        sizes = (self.num_heads, self.d_k, self.d_v)
        heads = attention(self.query(x), self.key_value(memory), sentences, memory_sentences, sizes, causal=False)
        return self.output(heads)  # type: ignore[no-any-return]

    def keys_and_values(self, memory: Tensor, sentences: Sentences) -> tuple[Tensor, Tensor]:
        """What queries look at: memory (S, D) as padded keys (B, H, L, K) and values (B, H, L, V)."""
        keys, values = sentences.split(self.key_value(memory), self.num_heads, (self.d_k, self.d_v))
        return keys, values
