"""What the layers of encoder and decoder consist of besides attention (3.1, 3.3), and positional encodings (3.5)."""

from threading import Lock
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aiayn.paper.batch import to_device
from aiayn.paper.dropout import Dropout, Randomness

# T tokens of all sentences, packed; I inputs; O outputs; D d_model

NORM_EPSILON = 1e-6  # Paper: silent; as in the released code
ONEDNN = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


class Linear(nn.Linear):
    """A linear layer with Glorot-uniform weights and biases of zero."""

    def reset_parameters(self) -> None:
        """Draws new weights."""
        nn.init.xavier_uniform_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., I) as (..., O)."""
        return product(x, self.weight, self.bias)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., I) times weight (O, I) transposed, plus bias (O,), as (..., O).

    In float32 on a CPU by oneDNN, which torch asks in other types only. Where MKL, made by Intel, has no AVX-512 (AMD
    Zen 5, 2026-11-26), an update of base takes half the time: at the paper's size 2.3 s for 4.8.
    """
    # Under autocast and in other types torch asks oneDNN itself, or cannot
    if not ONEDNN or x.dtype != torch.float32 or x.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled():
        return _Product.apply(x, weight, bias)  # type: ignore[no-any-return, no-untyped-call]
    return _onednn(x, weight, bias)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _onednn(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        rows, grad_rows = x.flatten(0, -2), grad.flatten(0, -2)
        grad_bias = grad_rows.sum(0) if ctx.needs_input_grad[2] else None
        return _onednn(grad, weight.t()), transposed_product(grad_rows, rows), grad_bias


def transposed_product(x: Tensor, y: Tensor) -> Tensor:
    """x (T, I) transposed times y (T, O), as (I, O), without gradient."""
    # oneDNN copies a transposed first factor: let that be the narrower one
    return product(x.t(), y.t()) if x.size(1) <= y.size(1) else product(y.t(), x.t()).t()


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    # Private: torch's public products of float32 are MKL's
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]


class AddAndNorm(nn.Module):
    """LayerNorm(x + Dropout(Sublayer(x))) around every sub-layer (3.1, 5.4)."""

    def __init__(self, d_model: int, dropout: float) -> None:
        super().__init__()
        # The norm stands after the sum (3.1), so none ends a stack
        self.norm = nn.LayerNorm(d_model, eps=NORM_EPSILON)
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


_GROWING = Lock()  # threads of a search share a model: none may put a shorter table in the place of a longer one


class Sinusoids(nn.Module):
    """Positional encoding of section 3.5; its table grows to the longest sentence so far."""

    def __init__(self, d_model: int, in_halves: bool = False) -> None:
        super().__init__()
        assert d_model % 2 == 0, "sinusoids are pairs of sine and cosine"
        self.make = sinusoids_in_halves if in_halves else sinusoids
        self.register_buffer("table", torch.empty(0, d_model), persistent=False)
        self.table: Tensor

    def extend(self, length: int) -> None:
        """Computes the positions below `length`, and up to a power of two, that the table lacks."""
        with _GROWING:
            if length > len(self.table):
                table = self.make(1 << (length - 1).bit_length(), self.table.size(1))
                self.table = to_device(table.to(self.table.dtype), self.table.device)

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
