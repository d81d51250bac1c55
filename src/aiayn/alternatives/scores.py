"""Scores of attention other than the paper's scaled dot products (3.2.1), and what relative positions add to those."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from aiayn.config.schema import MAX_DISTANCE

# B sentences; Q query tokens; M tokens that they attend to; H heads; K d_k

CHUNK_ELEMENTS = {"cuda": 2**27, "cpu": 2**19}
"""Hidden numbers of additive scores in a part: on a GPU a quarter of a gigabyte, on a CPU what its cache holds."""


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
        size = max(1, CHUNK_ELEMENTS[queries.device.type] // (queries[0].numel() * keys.size(-2)))
        parts = zip(torch.split(queries, size), torch.split(keys, size), strict=True)
        # Those of a micro-batch would take over 100 GB of a GPU: there they are computed again in the backward pass
        again = partial(checkpoint, self._scores, use_reentrant=False, preserve_rng_state=False)
        return torch.cat([(again if queries.is_cuda else self._scores)(*part) for part in parts])

    def _scores(self, queries: Tensor, keys: Tensor) -> Tensor:
        hidden = (queries.unsqueeze(-2) + keys.unsqueeze(-3)).tanh()  # (..., H, Q, M, K)
        return (hidden.flatten(-3, -2) @ self.v.unsqueeze(-1)).view(hidden.shape[:-1])


class RelativePositions(nn.Module):
    """Clipped relative positions (Shaw, Uszkoreit and Vaswani 2018), without a vector for each pair of tokens.

    Scaled products of queries with a vector of each key's distance, to be added to the scores (their Eq. 4).
    Each head of each layer has its own vectors, as in their base (4.1). Values get none, which did not help (Table 3).
    """

    def __init__(self, num_heads: int, d_k: int) -> None:
        super().__init__()
        # Paper: silent on initialisation; here as every projection of the Transformer is drawn
        heads = [nn.init.xavier_uniform_(torch.empty(2 * MAX_DISTANCE + 1, d_k)) for _ in range(num_heads)]
        self.vectors = nn.Parameter(torch.stack(heads))  # (H, 2 * MAX_DISTANCE + 1, K)

    def forward(self, queries: Tensor, distance: Tensor) -> Tensor:
        """Queries (..., H, Q, K) and the distance (Q, M) of each key from each query as scores (..., H, Q, M)."""
        by_distance: Tensor = queries @ self.vectors.transpose(1, 2) * queries.size(-1) ** -0.5
        index = distance.clamp(-MAX_DISTANCE, MAX_DISTANCE) + MAX_DISTANCE
        return by_distance.gather(-1, index.expand(*by_distance.shape[:-1], -1))
