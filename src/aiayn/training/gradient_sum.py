"""The sum of the gradients over the ranks."""

from collections.abc import Iterable

import torch
import torch.distributed
from torch import nn

BUCKET_BYTES = 2**24


def sum_gradients(parameters: Iterable[nn.Parameter], bucket_bytes: int = BUCKET_BYTES) -> None:
    """Puts the sum over all ranks in the place of each gradient; one that a rank does not have counts as zero.

    Sent after the backward pass, in buckets of about so many bytes: a compiled stack hands over all its gradients at
    its end. torch's DistributedDataParallel rearranges its buckets after the first update, so that a resumed run has
    other bits; it averages where we sum; and it waits for a rank whose share of an update has no sentence left.
    """
    buckets: list[list[nn.Parameter]] = [[]]
    for parameter in parameters:
        if sum(waiting.nbytes for waiting in buckets[-1]) >= bucket_bytes:
            buckets.append([])
        buckets[-1].append(parameter)
    sent = []
    for bucket in buckets:
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in bucket])
        sent.append((flat, torch.distributed.all_reduce(flat, async_op=True)))
    for bucket, (flat, work) in zip(buckets, sent, strict=True):
        work.wait()
        for parameter, total in zip(bucket, torch.split(flat, [p.numel() for p in bucket]), strict=True):
            parameter.grad = total.view_as(parameter)
