"""The layers of encoder and decoder (sections 3.1 and 3.3), and their positional encodings (3.5)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aiayn.paper.attention import Linear, MemoryAttention, SelfAttention
from aiayn.paper.batch import Packing
from aiayn.paper.dropout import Dropout, Randomness

# S source tokens, T target tokens of all sentences, packed; D d_model


class AddAndNorm(nn.Module):
    """LayerNorm(x + Dropout(Sublayer(x))) around every sub-layer (3.1, 5.4)."""

    def __init__(self, d_model: int, dropout: float) -> None:
        super().__init__()
        # Paper: silent on epsilon; 1e-6 in the released code. The norm stands after the sum (3.1), so none ends a stack
        self.norm = nn.LayerNorm(d_model, eps=1e-6)
        self.dropout = Dropout(dropout)
        self.residual = True  # beyond Table 3: False, and x is not added

    def forward(self, x: Tensor, sublayer_of_x: Tensor, randomness: Randomness | None) -> Tensor:
        """The input of a sub-layer and its output, added and normalised."""
        dropped = self.dropout(sublayer_of_x, randomness)
        return self.norm(x + dropped if self.residual else dropped)  # type: ignore[no-any-return]


class FeedForward(nn.Sequential):
    """max(0, x W1 + b1) W2 + b2, Eq. 2 (3.3)."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        # Paper: residual dropout only (5.4), so none between the two layers
        super().__init__(Linear(d_model, d_ff), nn.ReLU(inplace=True), Linear(d_ff, d_model))


class EncoderLayer(nn.Module):
    """Self-attention, then the feed-forward network (3.1)."""

    def __init__(self, d_model: int, d_ff: int, num_heads: int, d_k: int, d_v: int, dropout: float) -> None:
        super().__init__()
        self.self_attention = SelfAttention(d_model, num_heads, d_k, d_v)
        self.feed_forward = FeedForward(d_model, d_ff)
        self.after_self_attention = AddAndNorm(d_model, dropout)
        self.after_feed_forward = AddAndNorm(d_model, dropout)

    def forward(self, x: Tensor, packing: Packing, randomness: Randomness | None = None) -> Tensor:
        """x (S, D) to (S, D)."""
        x = self.after_self_attention(x, self.self_attention(x, packing, causal=False), randomness)
        return self.after_feed_forward(x, self.feed_forward(x), randomness)  # type: ignore[no-any-return]


class DecoderLayer(nn.Module):
    """Masked self-attention, attention to the encoder's output, then the feed-forward network (3.1)."""

    def __init__(self, d_model: int, d_ff: int, num_heads: int, d_k: int, d_v: int, dropout: float) -> None:
        super().__init__()
        self.self_attention = SelfAttention(d_model, num_heads, d_k, d_v)
        self.memory_attention = MemoryAttention(d_model, num_heads, d_k, d_v)
        self.feed_forward = FeedForward(d_model, d_ff)
        self.after_self_attention = AddAndNorm(d_model, dropout)
        self.after_memory_attention = AddAndNorm(d_model, dropout)
        self.after_feed_forward = AddAndNorm(d_model, dropout)

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        packing: Packing,
        memory_packing: Packing,
        randomness: Randomness | None = None,
    ) -> Tensor:
        """x (T, D) and the encoder's output (S, D) to (T, D)."""
        x = self.after_self_attention(x, self.self_attention(x, packing, causal=True), randomness)
        attended = self.memory_attention(x, memory, packing, memory_packing)
        x = self.after_memory_attention(x, attended, randomness)
        return self.after_feed_forward(x, self.feed_forward(x), randomness)  # type: ignore[no-any-return]


class Sinusoids(nn.Module):
    """Positional encoding of section 3.5; its table grows to the longest sentence so far."""

    def __init__(self, d_model: int, in_halves: bool = False) -> None:
        super().__init__()
        if d_model % 2:
            raise ValueError(f"model.d_model is {d_model}, but sinusoids are pairs of sine and cosine: make it even")
        self.d_model = d_model
        self.make = sinusoids_in_halves if in_halves else sinusoids
        self.register_buffer("table", torch.empty(0, d_model), persistent=False)
        self.table: Tensor

    def extend(self, length: int) -> None:
        """Computes the positions below `length` that the table lacks."""
        if length > len(self.table):
            self.table = self.make(length, self.d_model).to(self.table)

    def forward(self, positions: Tensor) -> Tensor:
        """Positions (...) within the table as (..., D)."""
        return F.embedding(positions, self.table)


def sinusoids(length: int, d_model: int) -> Tensor:
    """PE(pos, 2i) = sin(pos / 10000^(2i / d_model)), PE(pos, 2i + 1) = the cosine (3.5), as (length, D) float64."""
    wavelengths = 10000 ** (torch.arange(0, d_model, 2, dtype=torch.float64) / d_model)
    angles = torch.arange(length, dtype=torch.float64).unsqueeze(1) / wavelengths
    # Paper: sines and cosines alternate (3.5); the released code has all sines first, and wavelengths a little longer
    return torch.stack((angles.sin(), angles.cos()), -1).flatten(1)


def sinusoids_in_halves(length: int, d_model: int) -> Tensor:
    """The same as the released code has them: all sines, then all cosines; the last wavelength is 10000 * 2 pi."""
    # Paper: the exponent 2i / d_model never reaches 1 (3.5), though the text beside it says 10000 * 2 pi as well
    wavelengths = torch.logspace(0, 4, d_model // 2, dtype=torch.float64)
    angles = torch.arange(length, dtype=torch.float64).unsqueeze(1) / wavelengths
    return torch.cat((angles.sin(), angles.cos()), 1)


class LearnedPositions(nn.Embedding):
    """Row E of Table 3: one learned vector for each position."""

    def extend(self, length: int) -> None:
        """Nothing: the table has a fixed length."""

    def forward(self, positions: Tensor) -> Tensor:
        """Positions (...) as (..., D)."""
        # Paper: silent on positions beyond the table; here they share its last row
        return super().forward(positions.clamp(max=self.num_embeddings - 1))


class NoPositions(nn.Module):
    """Beyond Table 3: nothing in the place of a positional encoding."""

    def extend(self, length: int) -> None:
        """Nothing: there is no table."""

    def forward(self, positions: Tensor) -> Tensor:
        """Zero, to be added to (..., D)."""
        return torch.zeros((), device=positions.device)


def positional_encoding(
    name: str, max_length: int, d_model: int, sinusoids_in_halves: bool
) -> Sinusoids | LearnedPositions | NoPositions:
    """What is added to the embedding: `sinusoids` or `learned`; nothing for another name."""
    if name == "sinusoids":
        return Sinusoids(d_model, sinusoids_in_halves)
    return LearnedPositions(max_length, d_model) if name == "learned" else NoPositions()
