"""Attention (section 3.2): Eq. 1, and several heads of it between packed sentences."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from aiayn.paper.batch import Packing

# T query tokens and S memory tokens of all sentences, packed; B sentences; L tokens of the longest one
# D d_model; H heads; K d_k; V d_v

Scores = Callable[[Tensor, Tensor], Tensor]
"""How well each key answers each query: queries (..., H, Q, K) and keys (..., H, M, K) give (..., H, Q, M).

Queries in self-attention are those of the last Q of the M tokens.
"""


def scaled_dot_product_attention(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """softmax(Q K^T / sqrt(d_k)) V, Eq. 1 (section 3.2.1), and the softmax: see `attend`."""
    return attend(scaled_dot_products(queries, keys), values, mask)


def scaled_dot_products(queries: Tensor, keys: Tensor) -> Tensor:
    """Q K^T / sqrt(d_k), the Scores of Eq. 1."""
    return queries @ keys.transpose(-2, -1) * queries.size(-1) ** -0.5  # type: ignore[no-any-return]


def attend(scores: Tensor, values: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The softmax of the scores times the values, and the softmax, the attention weights.

    Scores (..., Q, M) and values (..., M, V) give (..., Q, V) and (..., Q, M). The mask, 0 or -inf, is added to the
    scores before the softmax; it leaves each query at least one key.
    """
    # In bf16 the scores of long sentences would lose their order
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if mask is not None:
        scores = scores + mask
    weights = scores.softmax(-1).to(values.dtype)
    return weights @ values, weights


class Linear(nn.Linear):
    """A linear layer with Glorot-uniform weights and biases of zero."""

    def reset_parameters(self) -> None:
        """Draws new weights."""
        nn.init.xavier_uniform_(self.weight)
        nn.init.zeros_(self.bias)


class SelfAttention(nn.Module):
    """Section 3.2.2 among the tokens of a sentence: h heads; queries and keys of width d_k, values of width d_v."""

    def __init__(self, d_model: int, num_heads: int, d_k: int, d_v: int) -> None:
        super().__init__()
        self.num_heads, self.d_k, self.d_v = num_heads, d_k, d_v
        self.scores: Scores = scaled_dot_products
        # Paper: silent on initialisation; the released code draws query, key and value as one matrix in self-attention,
        # key and value as one in attention to the encoder. Silent on biases; the released code has them.
        self.query_key_value = Linear(d_model, num_heads * (2 * d_k + d_v))
        self.output = Linear(num_heads * d_v, d_model)

    def forward(self, x: Tensor, packing: Packing, *, causal: bool) -> Tensor:
        """x (T, D) after attention among the tokens of each sentence, as (T, D); `causal`: to no later token."""
        widths = (self.d_k, self.d_k, self.d_v)
        queries, keys, values = split_heads(self.query_key_value(x), packing, self.num_heads, widths)
        mask = packing.causal_mask if causal else packing.mask
        heads, _ = attend(self.scores(queries, keys), values, mask)
        return self.output(merge_heads(heads, packing))  # type: ignore[no-any-return]


class MemoryAttention(nn.Module):
    """Section 3.2.2 from the decoder's tokens to the encoder's output, the memory."""

    def __init__(self, d_model: int, num_heads: int, d_k: int, d_v: int) -> None:
        super().__init__()
        self.num_heads, self.d_k, self.d_v = num_heads, d_k, d_v
        self.scores: Scores = scaled_dot_products
        self.query = Linear(d_model, num_heads * d_k)
        self.key_value = Linear(d_model, num_heads * (d_k + d_v))
        self.output = Linear(num_heads * d_v, d_model)

    def forward(self, x: Tensor, memory: Tensor, packing: Packing, memory_packing: Packing) -> Tensor:
        """x (T, D) after attention to the memory (S, D) of each sentence, as (T, D)."""
        (queries,) = split_heads(self.query(x), packing, self.num_heads, (self.d_k,))
        keys, values = self.keys_and_values(memory, memory_packing)
        heads, _ = attend(self.scores(queries, keys), values, memory_packing.mask)
        return self.output(merge_heads(heads, packing))  # type: ignore[no-any-return]

    def keys_and_values(self, memory: Tensor, memory_packing: Packing) -> tuple[Tensor, Tensor]:
        """The memory (S, D) as padded keys (B, H, L, K) and values (B, H, L, V)."""
        keys, values = split_heads(self.key_value(memory), memory_packing, self.num_heads, (self.d_k, self.d_v))
        return keys, values


def split_heads(x: Tensor, packing: Packing, num_heads: int, widths: tuple[int, ...]) -> list[Tensor]:
    """Packed (T, H * (K + K' + ...)) as padded (B, H, L, K), (B, H, L, K'), ..., zero where no token is."""
    parts = torch.split(packing.pad(x), [num_heads * width for width in widths], -1)  # (B, L, H * K), ...
    return [part.view(*part.shape[:2], num_heads, -1).transpose(1, 2) for part in parts]


def merge_heads(heads: Tensor, packing: Packing) -> Tensor:
    """Padded (B, H, L, V) as packed (T, H * V)."""
    return packing.unpad(heads.transpose(1, 2).flatten(2))
