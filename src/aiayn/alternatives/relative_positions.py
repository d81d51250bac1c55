"""Clipped relative positions (Shaw, Uszkoreit and Vaswani 2018), without a vector for each pair of tokens."""

import torch
from torch import Tensor, nn

from aiayn.config.schema import MAX_DISTANCE

# H heads; Q query tokens; M tokens that they attend to; K d_k


class RelativePositions(nn.Module):
    """Scaled products of queries with a vector of each key's distance, to be added to the scores (their Eq. 4).

    Each head of each layer has vectors of its own, as in their base (4.1). None are added to values, which did not help
    (their Table 3).
    """

    def __init__(self, num_heads: int, d_k: int, max_distance: int = MAX_DISTANCE) -> None:
        super().__init__()
        self.max_distance = max_distance
        # Paper: silent on initialisation; here as every projection of the Transformer is drawn
        heads = [nn.init.xavier_uniform_(torch.empty(2 * max_distance + 1, d_k)) for _ in range(num_heads)]
        self.vectors = nn.Parameter(torch.stack(heads))  # (H, 2 * max_distance + 1, K)

    def forward(self, queries: Tensor, distance: Tensor) -> Tensor:
        """Queries (..., H, Q, K) and the distance (Q, M) of each key from each query as scores (..., H, Q, M)."""
        by_distance: Tensor = queries @ self.vectors.transpose(1, 2) * queries.size(-1) ** -0.5
        index = distance.clamp(-self.max_distance, self.max_distance) + self.max_distance
        return by_distance.gather(-1, index.expand(*by_distance.shape[:-1], -1))
