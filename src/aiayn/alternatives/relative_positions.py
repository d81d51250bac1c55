"""Clipped relative positions (Shaw, Uszkoreit and Vaswani 2018), without a vector for each pair of tokens."""

import torch
from torch import Tensor, nn

from aiayn.config.schema import MAX_DISTANCE

# H heads; Q query tokens; M tokens that they look at; K d_k


class RelativeScores(nn.Module):
    """Scaled dot products of queries with keys to which a vector of their distance is added (their Eq. 4).

    Each head of each layer has vectors of its own, as in their base (4.1). None are added to values, which did not help
    (their Table 3).
    """

    def __init__(self, num_heads: int, d_k: int, max_distance: int = MAX_DISTANCE) -> None:
        super().__init__()
        self.max_distance = max_distance
        # Paper: silent on initialisation; here as every projection of the Transformer is drawn
        heads = [nn.init.xavier_uniform_(torch.empty(2 * max_distance + 1, d_k)) for _ in range(num_heads)]
        self.vectors = nn.Parameter(torch.stack(heads))  # (H, 2 * max_distance + 1, K)

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Queries (..., H, Q, K) of the last Q of the M tokens, with keys (..., H, M, K), as scores (..., H, Q, M)."""
        distances = torch.arange(1 - keys.size(-2), queries.size(-2) + 1, device=queries.device)  # (M + Q,)
        numbers = distances.clamp(-self.max_distance, self.max_distance) + self.max_distance
        by_distance = (queries @ self.vectors.transpose(1, 2)).index_select(-1, numbers)  # (..., H, Q, M + Q)
        scores = queries @ keys.transpose(-2, -1) + skewed(by_distance)
        return scores * queries.size(-1) ** -0.5  # type: ignore[no-any-return]


def skewed(by_distance: Tensor) -> Tensor:
    """What each query scores at distances from 1 - M to Q, (..., Q, M + Q), as its scores of the M keys, (..., Q, M).

    Rows of one element less move each row one place further to the left than the row below it (Huang et al. 2018,
    "Music Transformer", section 3.4.1). The last query stands at the last key.
    """
    rows, columns = by_distance.shape[-2:]
    kept = by_distance.flatten(-2)[..., rows - 1 : -1]
    return kept.view(*by_distance.shape[:-1], columns - 1)[..., : columns - rows]
