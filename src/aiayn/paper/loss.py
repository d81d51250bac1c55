"""Label-smoothed cross entropy (section 5.4)."""

import torch
from torch import Tensor

# T target tokens of all sentences, packed; V vocabulary


def label_smoothed_cross_entropy(logits: Tensor, target: Tensor, label_smoothing: float) -> tuple[Tensor, Tensor]:
    """Two sums over target (T,): the smoothed loss, and the nats -ln p(target) in float64, without gradient.

    The smoothed loss expects 1 - label_smoothing of the probability on the target and the rest spread evenly over the
    V - 1 other tokens of the logits (T, V).
    """
    nats = -logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(1)  # (T, V)
    of_target = nats.gather(1, target.unsqueeze(1)).sum()
    # Paper: silent on where epsilon_ls goes; the released code spreads it over the V - 1 other tokens
    share = label_smoothing / (logits.size(1) - 1)
    loss = (1 - label_smoothing - share) * of_target + share * nats.sum()
    return loss, of_target.detach().double()
