"""Attention (section 3.2) between packed sentences: the one place that knows where a sentence ends."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# T query tokens and S memory tokens of all sentences, packed; B sentences; L tokens of the longest one
# D d_model; H heads; K d_k; V d_v


class Sentences:
    """Where the sentences of one packed side lie; made once per batch, used by every layer.

    `offsets` (B + 1,) says where each sentence begins and ends with the number of tokens; no sentence is empty.
    """

    def __init__(self, offsets: Tensor) -> None:
        lengths = offsets.diff()
        self.max_length = int(lengths.max())
        self._number = torch.repeat_interleave(lengths)  # (tokens,) the sentence each token belongs to
        self.positions = torch.arange(len(self._number), device=offsets.device) - offsets[self._number]
        self._padding = torch.arange(self.max_length, device=offsets.device) >= lengths.unsqueeze(1)  # (B, L)
        self.mask: Tensor | None = None
        """(B, 1, 1, L): 0 where a token is, -inf where none is; None when all sentences are equally long."""
        if bool(self._padding.any()):
            self.mask = _forbid(self._padding[:, None, None])
        self._rows: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def split_heads(self, x: Tensor, num_heads: int) -> Tensor:
        """Packed (tokens, H * K) as padded (B, H, L, K), zero where no token is."""
        return _SplitHeads.apply(x, self, num_heads)  # type: ignore[no-any-return, no-untyped-call]

    def merge_heads(self, x: Tensor) -> Tensor:
        """Padded (B, H, L, K) as packed (tokens, H * K), whatever stands where no token is."""
        return _MergeHeads.apply(x, self)  # type: ignore[no-any-return, no-untyped-call]

    def rows(self, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
        """Row numbers: of (tokens, H) in the order (B, H, L), of (B, H, L) in the order (tokens, H), of the padding."""
        if num_heads not in self._rows:
            heads = torch.arange(num_heads, device=self._number.device)
            padded = (self._number.unsqueeze(1) * num_heads + heads) * self.max_length + self.positions.unsqueeze(1)
            shape = (len(self._padding), num_heads, self.max_length)
            packed = padded.new_zeros(shape).flatten()
            packed[padded.flatten()] = torch.arange(padded.numel(), device=packed.device)
            empty = self._padding.unsqueeze(1).expand(shape).flatten().nonzero().squeeze(1)
            self._rows[num_heads] = packed, padded.flatten(), empty
        return self._rows[num_heads]


# Copying whole rows by number pads and moves the heads at once; each of the two is the other's gradient,
# where autograd would add row by row.


def _split_heads(x: Tensor, sentences: Sentences, num_heads: int) -> Tensor:
    packed, _, empty = sentences.rows(num_heads)
    rows = x.reshape(len(x) * num_heads, -1).index_select(0, packed).index_fill_(0, empty, 0)
    return rows.view(-1, num_heads, sentences.max_length, rows.size(1))


def _merge_heads(x: Tensor, sentences: Sentences) -> Tensor:
    _, padded, _ = sentences.rows(x.size(1))
    return x.reshape(-1, x.size(3)).index_select(0, padded).view(len(sentences.positions), -1)


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sentences: Sentences, num_heads: int) -> Tensor:
        ctx.sentences = sentences
        return _split_heads(x, sentences, num_heads)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _merge_heads(gradient, ctx.sentences), None, None


class _MergeHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sentences: Sentences) -> Tensor:
        ctx.sentences, ctx.num_heads = sentences, x.size(1)
        return _merge_heads(x, sentences)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _split_heads(gradient, ctx.sentences, ctx.num_heads), None


def _forbid(where: Tensor) -> Tensor:
    return torch.zeros(where.shape, device=where.device).masked_fill_(where, -torch.inf)


def causal_mask(length: int, device: torch.device) -> Tensor:
    """(L, L): -inf where the key comes after the query, so that position i sees only positions up to i (3.2.3)."""
    return _forbid(torch.ones(length, length, dtype=torch.bool, device=device).triu_(1))


def scaled_dot_product_attention(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(Q K^T / sqrt(d_k)) V, Eq. 1 (section 3.2.1).

    Queries (..., Q, K), keys (..., M, K), values (..., M, V) give (..., Q, V). The mask, 0 or -inf, is added to the
    scores (..., Q, M) before the softmax; it leaves each query at least one key.
    """
    if queries.device.type == "cpu":
        return _Attention.apply(queries, keys, values, mask)  # type: ignore[no-any-return, no-untyped-call]
    return F.scaled_dot_product_attention(queries, keys, values, None if mask is None else mask.to(queries.dtype))


class _Attention(torch.autograd.Function):
    """Eq. 1 with its gradient by hand: on a CPU, torch's attention takes several times as long for short sentences."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        ctx.scale = queries.size(-1) ** -0.5
        scores = torch.matmul(queries, keys.transpose(-2, -1)).mul_(ctx.scale)
        if mask is not None:
            scores += mask
        weights = _softmax_(scores)
        ctx.save_for_backward(queries, keys, values, weights)
        return torch.matmul(weights, values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        queries, keys, values, weights = ctx.saved_tensors
        to_values = torch.matmul(weights.transpose(-2, -1), gradient)
        to_scores = torch.matmul(gradient, values.transpose(-2, -1)).mul_(weights)
        to_scores.addcmul_(weights, to_scores.sum(-1, keepdim=True), value=-1).mul_(ctx.scale)
        return torch.matmul(to_scores, keys), torch.matmul(to_scores.transpose(-2, -1), queries), to_values, None


def _softmax_(scores: Tensor) -> Tensor:
    # torch's softmax is several times slower on rows shorter than a vector register of 16 floats; so is its exp
    # where the result is nearly 0, but not exp2
    if scores.size(-1) >= 16:
        return scores.softmax(-1)
    scores.sub_(scores.amax(-1, keepdim=True)).mul_(math.log2(math.e)).exp2_()
    return scores.div_(scores.sum(-1, keepdim=True))


def linear(inputs: int, outputs: int, fan_out: int | None = None) -> nn.Linear:
    """A linear layer with Glorot-uniform weights and biases of zero.

    `fan_out` is the width of the fused matrix that this one is a part of.
    """
    layer = nn.Linear(inputs, outputs)
    bound = (6 / (inputs + (fan_out or outputs))) ** 0.5
    nn.init.uniform_(layer.weight, -bound, bound)
    nn.init.zeros_(layer.bias)
    return layer


class MultiHeadAttention(nn.Module):
    """Section 3.2.2: h heads; queries and keys of width d_k, values of width d_v.

    Self-attention is called with `memory` = `x`; attention to the encoder with its output as `memory`.
    """

    def __init__(self, d_model: int, num_heads: int, d_k: int, d_v: int, *, self_attention: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        # Paper: silent on initialisation; the released code draws each fused matrix as one: query, key and value
        # in self-attention, key and value in attention to the encoder. Silent on biases; the released code has them.
        key_value = num_heads * (d_k + d_v)
        query_key_value = num_heads * d_k + key_value
        self.query = linear(d_model, num_heads * d_k, query_key_value if self_attention else None)
        self.key = linear(d_model, num_heads * d_k, query_key_value if self_attention else key_value)
        self.value = linear(d_model, num_heads * d_v, query_key_value if self_attention else key_value)
        self.output = linear(num_heads * d_v, d_model)

    def forward(
        self, x: Tensor, memory: Tensor, x_sentences: Sentences, memory_sentences: Sentences, mask: Tensor | None
    ) -> Tensor:
        """x (T, D) after looking at memory (S, D), sentence by sentence, as (T, D)."""
        queries = x_sentences.split_heads(self.query(x), self.num_heads)  # (B, H, Q, K)
        keys, values = self.keys_and_values(memory, memory_sentences)
        heads = scaled_dot_product_attention(queries, keys, values, mask)  # (B, H, Q, V)
        return self.output(x_sentences.merge_heads(heads))  # type: ignore[no-any-return]

    def keys_and_values(self, memory: Tensor, sentences: Sentences) -> tuple[Tensor, Tensor]:
        """What queries look at: memory (S, D) as padded keys (B, H, L, K) and values (B, H, L, V)."""
        keys = sentences.split_heads(self.key(memory), self.num_heads)
        return keys, sentences.split_heads(self.value(memory), self.num_heads)

    def look_back(self, x: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Self-attention of one more token x (B, W, D) of W hypotheses a sentence: the result, all keys, all values.

        `keys` (B, W, H, t, K) and `values` (B, W, H, t, V) are those of the t tokens before, as returned for them.
        """
        keys = torch.cat((keys, self._heads(self.key(x)).unsqueeze(-2)), -2)
        values = torch.cat((values, self._heads(self.value(x)).unsqueeze(-2)), -2)
        queries = self._heads(self.query(x)).unsqueeze(-2)  # (B, W, H, 1, K)
        heads = scaled_dot_product_attention(queries, keys, values, None)  # (B, W, H, 1, V)
        return self.output(heads.flatten(2)), keys, values

    def look_at(self, x: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Attention of x (B, W, D) to the `keys_and_values` of each sentence, shared by its W hypotheses."""
        queries = self._heads(self.query(x)).transpose(1, 2)  # (B, H, W, K)
        heads = scaled_dot_product_attention(queries, keys, values, mask)  # (B, H, W, V)
        return self.output(heads.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.num_heads, -1)
