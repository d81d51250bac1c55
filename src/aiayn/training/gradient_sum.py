"""The sum of the gradients over the ranks, while the backward pass still computes those of earlier layers."""

from collections.abc import Iterable
from functools import partial

import torch
import torch.distributed
from torch import Tensor, nn

BUCKET_BYTES = 2**24


class GradientSum:
    """Adds up the gradients of parameters over all ranks, a bucket of them at a time, the last parameters first.

    A bucket is sent as soon as the backward pass has filled it and those before it. torch's DistributedDataParallel
    rearranges its buckets after the first update, so that a resumed run has other bits; it averages where we sum; and
    it waits for a rank whose share of an update has no sentence left.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], bucket_bytes: int = BUCKET_BYTES) -> None:
        self.buckets: list[list[nn.Parameter]] = [[]]
        capacity = bucket_bytes
        for parameter in reversed([*parameters]):
            if capacity <= 0:
                self.buckets.append([])
                capacity = bucket_bytes
            self.buckets[-1].append(parameter)
            capacity -= parameter.nbytes
            filled = partial(self._filled, len(self.buckets) - 1)
            parameter.register_post_accumulate_grad_hook(filled)  # type: ignore[no-untyped-call]
        self.missing: list[int] = []  # gradients of each bucket that the last backward pass has still to give
        self.reductions: list[tuple[Tensor, torch.distributed.Work]] = []

    def expect(self) -> None:
        """The next backward pass is this rank's last one of the update."""
        self.missing = [len(bucket) for bucket in self.buckets]

    def finish(self) -> None:
        """Puts the sums in the gradients' place; a gradient that this rank does not have counts as zero."""
        while len(self.reductions) < len(self.buckets):
            self._send()
        for bucket, (flat, work) in zip(self.buckets, self.reductions, strict=True):
            work.wait()
            for parameter, total in zip(bucket, torch.split(flat, [p.numel() for p in bucket]), strict=True):
                parameter.grad = total.view_as(parameter)
        self.missing, self.reductions = [], []

    def _filled(self, number: int, parameter: Tensor) -> None:
        if not self.missing:  # another backward pass will add to it
            return
        self.missing[number] -= 1
        while len(self.reductions) < len(self.buckets) and not self.missing[len(self.reductions)]:
            self._send()

    def _send(self) -> None:
        bucket = self.buckets[len(self.reductions)]
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in bucket])
        self.reductions.append((flat, torch.distributed.all_reduce(flat, async_op=True)))
