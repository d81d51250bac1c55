"""Attention modules with drawn weights and packed inputs for them, that the tests of both ways share."""

import torch
from torch import Tensor, nn

from aiayn.paper.attention import SelfAttention

D, H, K, V = 22, 3, 5, 7
LENGTHS, MEMORY_LENGTHS = (4, 1, 6, 2), (3, 5, 1, 2)


def offsets(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def drawn(module: nn.Module) -> nn.Module:
    """The module in float64, with biases that are not the zeros they start as, which would hide a missing one."""
    random = torch.Generator().manual_seed(11)
    for parameter in module.double().parameters():
        nn.init.normal_(parameter, std=0.3, generator=random)
    return module


def self_attention(d_model: int = D, num_heads: int = H, d_k: int = K, d_v: int = V) -> nn.Module:
    return drawn(SelfAttention(d_model, num_heads, d_k, d_v))


def packed(lengths: tuple[int, ...], d_model: int = D, seed: int = 1) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(sum(lengths), d_model, generator=random, dtype=torch.float64, requires_grad=True)
