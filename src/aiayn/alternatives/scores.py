"""Scores of attention other than the paper's scaled dot products (3.2.1)."""

import torch
from torch import Tensor, nn

# Q query tokens; M tokens that they attend to; H heads; K d_k


def dot_products(queries: Tensor, keys: Tensor) -> Tensor:
    """Q K^T, not scaled: queries (..., Q, K) and keys (..., M, K) give (..., Q, M)."""
    return queries @ keys.transpose(-2, -1)


class AdditiveScores(nn.Module):
    """v^T tanh(W q + U k) for each head (Bahdanau, Cho and Bengio 2015, A.1.2).

    W and U are the head's own projections of queries and keys (3.2.2), so that v is all that is new.
    """

    def __init__(self, num_heads: int, d_k: int) -> None:
        super().__init__()
        # Paper: Bahdanau et al. begin with v = 0; here as a projection from d_k to 1 of the Transformer is drawn
        bound = (6 / (d_k + 1)) ** 0.5
        self.v = nn.Parameter(nn.init.uniform_(torch.empty(num_heads, d_k), -bound, bound))

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Queries (..., H, Q, K) and keys (..., H, M, K), both projected, as scores (..., H, Q, M)."""
        hidden = (queries.unsqueeze(-2) + keys.unsqueeze(-3)).tanh()  # (..., H, Q, M, K)
        return (hidden @ self.v[:, None, :, None]).squeeze(-1)
