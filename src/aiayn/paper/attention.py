"""Attention (section 3.2): Eq. 1, and several heads of it between packed sentences."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aiayn.paper.batch import Packing
from aiayn.paper.layers import Linear

# T query tokens and S memory tokens of all sentences, packed; B sentences; Q query tokens and M memory tokens of the
# longest one; D d_model; H heads; K d_k; V d_v

Scores = Callable[[Tensor, Tensor], Tensor]
"""How well each key answers each query: queries (..., H, Q, K) and keys (..., H, M, K) give (..., H, Q, M)."""
Bias = Callable[[Tensor, Tensor], Tensor]
"""What is added to the scores: queries (..., H, Q, K) and distances, key minus query, (Q, M) give (..., H, Q, M)."""

KERNEL_TYPES, KERNEL_WIDTH = {torch.bfloat16, torch.float16}, 256
"""What torch's flash attention supports."""


def scaled_dot_products(queries: Tensor, keys: Tensor) -> Tensor:
    """Q K^T / sqrt(d_k), the Scores of Eq. 1 (section 3.2.1): `attend` has the rest of it."""
    return queries @ keys.transpose(-2, -1) * queries.size(-1) ** -0.5  # type: ignore[no-any-return]


def attend(scores: Tensor, values: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The softmax of the scores times the values, and the softmax, the attention weights.

    Scores (..., Q, M) and values (..., M, V) give (..., Q, V) and (..., Q, M). The mask is true where a query may
    attend, and leaves each query at least one key.
    """
    # The gradient of a softmax is made of its weights, which bf16 would round: on a GPU autocast does the same
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if mask is not None:
        scores.masked_fill_(~mask, -torch.inf)
    weights = scores.softmax(-1).to(values.dtype)
    return weights @ values, weights


class MultiHeadAttention(nn.Module):
    """Section 3.2.2: h heads; queries and keys of width d_k, values of width d_v."""

    def __init__(self, num_heads: int, d_k: int, d_v: int) -> None:
        super().__init__()
        self.num_heads, self.d_k, self.d_v = num_heads, d_k, d_v
        self.scores: Scores | None = None  # beyond Table 3: in place of the scaled dot products of Eq. 1
        self.bias: Bias | None = None  # beyond Table 3: added to the scores

    def attend_packed(
        self, queries: Tensor, keys_values: Tensor | None, packing: Packing, memory_packing: Packing, *, causal: bool
    ) -> Tensor:
        """Packed heads (T, H * V), sentence by sentence, of queries (T, H * K) to keys and values (S, H * (K + V)).

        Where these are None, queries, keys and values are all in the first (T, H * (2 K + V)).
        """
        kernel_fits = queries.dtype in KERNEL_TYPES and max(self.d_k, self.d_v) <= KERNEL_WIDTH
        if packing.has_kernel and kernel_fits and self.scores is None and self.bias is None:
            q, k, v = (x.view(len(x), self.num_heads, -1) for x in self._split(queries, keys_values))
            return variable_length_attention(q, k, v, packing, memory_packing, causal)
        return self._attend_padded(queries, keys_values, packing, memory_packing, causal)

    # The sizes of padded sentences differ from batch to batch: torch.compile would compile for each
    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _attend_padded(
        self, queries: Tensor, keys_values: Tensor | None, packing: Packing, memory_packing: Packing, causal: bool
    ) -> Tensor:
        keys_values = None if keys_values is None else memory_packing.pad(keys_values)
        q, k, v = (split_heads(x, self.num_heads) for x in self._split(packing.pad(queries), keys_values))
        mask = packing.causal_mask if causal else memory_packing.mask
        return packing.unpad(merge_heads(self.heads(q, k, v, mask, distances(q, k), causal=causal)))

    def _split(self, queries: Tensor, keys_values: Tensor | None) -> tuple[Tensor, ...]:
        """Queries (..., H * K), keys (..., H * K) and values (..., H * V)."""
        key, value = self.num_heads * self.d_k, self.num_heads * self.d_v
        if keys_values is None:
            return torch.split(queries, [key, key, value], -1)
        return queries, *torch.split(keys_values, [key, value], -1)

    def heads(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        distance: Tensor | None,
        *,
        causal: bool = False,
    ) -> Tensor:
        """Queries (B, H, Q, K), keys (B, H, M, K) and values (B, H, M, V) as heads (B, H, Q, V).

        The mask is true where a query may attend; `causal`, where it is that of section 3.2.3. A `distance` (Q, M) of
        each key from each query is only read by a bias.
        """
        # On a CPU torch's kernel takes longer than Eq. 1 written out for few queries: short sentences, and a search
        few = queries.size(2) <= 16 and queries.device.type == "cpu"
        if self.scores is None and self.bias is None and not few:
            # Eq. 1; torch's kernel never writes the weights down
            return F.scaled_dot_product_attention(queries, keys, values, None if causal else mask, is_causal=causal)
        heads, _ = self.heads_and_weights(queries, keys, values, mask, distance)
        return heads

    def heads_and_weights(
        self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, distance: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The heads as `heads` has them, and the attention weights (B, H, Q, M)."""
        scores = (self.scores or scaled_dot_products)(queries, keys)
        if self.bias is not None:
            assert distance is not None
            scores = scores + self.bias(queries, distance)
        return attend(scores, values, mask)


class SelfAttention(MultiHeadAttention):
    """Section 3.2.2 among the tokens of a sentence."""

    def __init__(self, d_model: int, num_heads: int, d_k: int, d_v: int) -> None:
        super().__init__(num_heads, d_k, d_v)
        # Paper: silent on initialisation; the released code draws query, key and value as one matrix in self-attention,
        # key and value as one in attention to the encoder. Silent on biases; the released code has them.
        self.query_key_value = Linear(d_model, num_heads * (2 * d_k + d_v))
        self.output = Linear(num_heads * d_v, d_model)

    def forward(self, x: Tensor, packing: Packing, *, causal: bool) -> Tensor:
        """x (T, D) after attention among the tokens of each sentence, as (T, D); `causal`: to no later token."""
        heads = self.attend_packed(self.query_key_value(x), None, packing, packing, causal=causal)
        return self.output(heads)  # type: ignore[no-any-return]

    def project(self, x: Tensor) -> list[Tensor]:
        """x (B, Q, D) as queries (B, H, Q, K), keys (B, H, Q, K) and values (B, H, Q, V)."""
        return [split_heads(part, self.num_heads) for part in self._split(self.query_key_value(x), None)]


class MemoryAttention(MultiHeadAttention):
    """Section 3.2.2 from the decoder's tokens to the encoder's output, the memory."""

    def __init__(self, d_model: int, num_heads: int, d_k: int, d_v: int) -> None:
        super().__init__(num_heads, d_k, d_v)
        self.query = Linear(d_model, num_heads * d_k)
        self.key_value = Linear(d_model, num_heads * (d_k + d_v))
        self.output = Linear(num_heads * d_v, d_model)

    def forward(self, x: Tensor, memory: Tensor, packing: Packing, memory_packing: Packing) -> Tensor:
        """x (T, D) after attention to the memory (S, D) of each sentence, as (T, D)."""
        heads = self.attend_packed(self.query(x), self.key_value(memory), packing, memory_packing, causal=False)
        return self.output(heads)  # type: ignore[no-any-return]

    def project(self, x: Tensor) -> Tensor:
        """x (B, Q, D) as queries (B, H, Q, K)."""
        return split_heads(self.query(x), self.num_heads)

    def project_memory(self, memory: Tensor) -> list[Tensor]:
        """The padded memory (B, M, D) as keys (B, H, M, K) and values (B, H, M, V)."""
        return [split_heads(part, self.num_heads) for part in self._split(memory, self.key_value(memory))[1:]]


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """(B, Q, H * K) as (B, H, Q, K)."""
    return x.view(*x.shape[:2], num_heads, -1).transpose(1, 2)


def merge_heads(heads: Tensor) -> Tensor:
    """(B, H, Q, V) as (B, Q, H * V)."""
    return heads.transpose(1, 2).flatten(2)


def distances(queries: Tensor, keys: Tensor) -> Tensor:
    """How far after each query (B, H, Q, K) each key (B, H, M, K) of the same sentence stands, as (Q, M)."""
    positions = torch.arange(max(queries.size(2), keys.size(2)), device=queries.device)
    return positions[: keys.size(2)] - positions[: queries.size(2), None]


def variable_length_attention(
    queries: Tensor, keys: Tensor, values: Tensor, packing: Packing, memory_packing: Packing, causal: bool
) -> Tensor:
    """Eq. 1 by torch's kernel for packed sentences: (T, H, K), (S, H, K) and (S, H, V) as (T, H * V)."""
    from torch.nn.attention.varlen import varlen_attn  # loads torch.compile, which takes seconds

    d_k, d_v = queries.size(2), values.size(2)
    # The kernel wants one width, a multiple of 8: zeros change neither a product of query and key nor the other values
    width = -(-max(d_k, d_v) // 8) * 8
    # It reads 16 bytes at once. Parts of one product lie beside each other, and are aligned to that only where all
    # widths are multiples of 8; F.pad makes an aligned copy, even where it adds nothing
    aligned = d_k % 8 == d_v % 8 == 0
    q, k, v = (
        x if aligned and x.size(2) == width else F.pad(x, (0, width - x.size(2))) for x in (queries, keys, values)
    )
    heads: Tensor = varlen_attn(  # type: ignore[assignment]
        q,
        k,
        v,
        packing.kernel_offsets,
        memory_packing.kernel_offsets,
        packing.max_position,
        memory_packing.max_position,
        scale=d_k**-0.5,
        window_size=(-1, 0) if causal else (-1, -1),
    )
    return heads[..., :d_v].flatten(1)
