"""Dropout (5.4) with masks that are a function of the seed, the update, the layer, the token and the feature alone."""

import hashlib
from typing import NamedTuple

import torch
from torch import Tensor, nn

# M dropout layers; T tokens; D features


class Randomness(NamedTuple):
    """Random 32-bit integers from which each of the M dropout layers on one side of the model makes its mask."""

    tokens: Tensor  # (M, T, 1)
    features: Tensor  # (M, 1, D)


def layer_keys(seed: int, update: int, side: str, layers: int) -> Tensor:
    """The keys (M, 2) in 64 bits, for tokens and for features, of the M dropout layers on one side of the model."""
    digest = hashlib.shake_128(f"{seed} {update} {side}".encode()).digest(16 * layers)
    return torch.frombuffer(bytearray(digest), dtype=torch.int64).view(layers, 2)


def draw(keys: Tensor, first: int, tokens: int, features: int) -> Randomness:
    """The randomness, in layers with these keys (M, 2), of the tokens numbered from `first` on in an update."""
    numbers = torch.arange(first, first + tokens, device=keys.device)
    columns = torch.arange(features, device=keys.device)
    return Randomness(_random(keys[:, :1], numbers).unsqueeze(2), _random(keys[:, 1:], columns).unsqueeze(1))


def _random(key: Tensor, number: Tensor) -> Tensor:
    """SplitMix64, as 32 bits of its output: element `number` of the sequence that starts at `key`."""
    x = key + number * -0x61C8864680B583EB  # as a signed integer; the multipliers below too
    x = (x ^ _shifted(x, 30, 64)) * -0x40A7B892E31B1A47
    x = (x ^ _shifted(x, 27, 64)) * -0x6B2FB644ECCEEE15
    return (x ^ _shifted(x, 31, 64)).to(torch.int32)


def _shifted(x: Tensor, places: int, width: int) -> Tensor:
    # torch shifts signed integers arithmetically
    return (x >> places).bitwise_and_(2 ** (width - places) - 1)


class Dropout(nn.Module):
    """Zeroes elements with a probability, rounded to 32 bits, and scales up the others so that their mean stays."""

    def __init__(self, probability: float, number: int = 0) -> None:
        super().__init__()
        self.probability = probability
        self.number = number  # among the dropout layers of its side; the Transformer sets it

    def forward(self, x: Tensor, randomness: Randomness | None = None) -> Tensor:
        """x (T, D) as it is, or in training each element zeroed or scaled, in float32 at least."""
        if not self.training or self.probability == 0:
            return x
        assert randomness is not None, "dropout is a function of seed and update: give both"
        # The two multiplications and the shift between them are those of the hash lowbias32 (Chris Wellons)
        word = (randomness.tokens[self.number] ^ randomness.features[self.number]).mul_(0x7FEB352D)
        word.bitwise_xor_(_shifted(word, 15, 32)).mul_(-0x7B935975)
        dropped = min(max(round(self.probability * 2**32), 1), 2**32 - 1)
        least = dropped - 2**31  # that is kept; what follows is 0 or 1, and takes half the time of a comparison
        keep = word.clamp_(least - 1, least).sub_(least - 1)
        # The scale would be 0.2 % too small in bfloat16, at a probability of 0.1
        mask = keep.to(torch.promote_types(x.dtype, torch.float32))
        return x * mask.mul_(2**32 / (2**32 - dropped))
