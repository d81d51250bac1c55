"""The best continuations of a beam by blocks of the vocabulary: topk over all of it is slow on a CPU."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

# B sentences still searched; W alive hypotheses of each; V vocabulary; C candidates to continue with

BLOCK = 100  # neighbours in the vocabulary; most vocabularies are multiples of it, and need no padding


def best_continuations(logits: Tensor, alive: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `count` best of all continuations (B, W, V), or all if fewer: log probabilities, parents, tokens (B, C).

    `alive` (B, W) are the log probabilities of the hypotheses that are continued, their parents.
    """
    width, words = logits.shape[1:]
    if words % BLOCK:
        logits = F.pad(logits, (0, -words % BLOCK), value=-torch.inf)
    blocks = logits.view(len(logits), width, -1, BLOCK)
    maxima = blocks.amax(3)  # (B, W, blocks)
    top = maxima.amax(2, keepdim=True)
    # On a CPU torch's exp takes four times as long as its exp2
    sums = (logits - top).mul_(math.log2(math.e)).exp2_().sum(2, keepdim=True)
    offsets = alive.unsqueeze(2) - top - sums.log()  # (B, W, 1) from logits to log probabilities of it all
    # The best pairs lie in the blocks with the best maxima: topk is slow on a CPU, so it sees these, not all pairs
    reached = (maxima + offsets).flatten(1)  # (B, W * blocks)
    chosen = reached.topk(min(count, reached.size(1)), sorted=False).indices  # (B, blocks chosen)
    of = chosen // maxima.size(2)
    pairs = blocks.flatten(1, 2).gather(1, chosen.unsqueeze(2).expand(-1, -1, BLOCK))
    pairs = (pairs + offsets.gather(1, of.unsqueeze(2))).flatten(1)
    best, position = pairs.topk(min(count, width * words))
    block = position // BLOCK
    tokens = chosen.gather(1, block) % maxima.size(2) * BLOCK + position % BLOCK
    # Of hypotheses that no longer count, all pairs are equal, those beyond the vocabulary too
    return best, of.gather(1, block), tokens.clamp_(max=words - 1)
