"""The sum of the gradients over the ranks."""

from collections.abc import Iterable

import torch
import torch.distributed
from torch import nn


def sum_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Puts the sum over all ranks in the place of each gradient; one that a rank does not have counts as zero.

    Sent at once, after the backward pass: a compiled stack hands over all its gradients at its end. torch's
    DistributedDataParallel rearranges its buckets after the first update, so that a resumed run has other bits; it
    averages where we sum; and it waits for a rank whose share of an update has no sentence left.
    """
    parameters = list(parameters)
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])
    torch.distributed.all_reduce(flat)
    for parameter, total in zip(parameters, torch.split(flat, [p.numel() for p in parameters]), strict=True):
        parameter.grad = total.view_as(parameter)
