"""The training data as Lightning takes it: an endless stream of updates, each with this rank's micro-batches."""

from collections.abc import Iterator

import numpy as np
import torch

from aiayn.core.signals import StopFlag
from aiayn.data.dataset import Pairs
from aiayn.data.update_plan import gather, micro_batches, training_plan
from aiayn.paper.batch import Batch


class Update:
    """One optimiser step: its token counts over all ranks, and this rank's micro-batches."""

    # Not a dataclass: Lightning takes those apart and rebuilds them, field by field, at every step
    def __init__(self, number: int, source_tokens: int, target_tokens: int, batches: list[Batch]) -> None:
        self.number, self.source_tokens, self.target_tokens = number, source_tokens, target_tokens
        self.batches = batches

    def to(self, device: torch.device) -> "Update":
        """The same update on another device."""
        batches = [batch.to(device) for batch in self.batches]
        return Update(self.number, self.source_tokens, self.target_tokens, batches)


def updates(
    pairs: Pairs,
    *,
    tokens_per_update: int,
    tokens_per_micro_batch: int,
    seed: int,
    start: int,
    rank: int = 0,
    ranks: int = 1,
) -> Iterator[Update]:
    """Updates `start`, `start` + 1, ... of a run: each a function of the corpus, the seed and its number alone.

    Rank r of R takes every R-th micro-batch; fillers without sentences are left out, so that they weigh nothing.
    """
    source, target = pairs.source_lengths, pairs.target_lengths
    for number, sentences in training_plan(source, target, tokens_per_update, seed, start):
        batches, source_tokens, target_tokens = [], 0, 0
        for index, part in enumerate(micro_batches(sentences, source, target, tokens_per_micro_batch, ranks)):
            if index % ranks == rank and len(part):
                batches.append(gather(pairs, part, source_tokens, target_tokens))
            source_tokens += int(np.sum(source[part]))
            target_tokens += int(np.sum(target[part]))
        yield Update(number, source_tokens, target_tokens, batches)


def interruptible(stream: Iterator[Update], stop: StopFlag, ranks: int) -> Iterator[Update]:
    """The same updates; until the first is there, a signal interrupts a single process at once."""
    # Planning an epoch takes seconds, and nothing is lost by then; a rank that left alone would fail the others
    if ranks == 1:
        stop.check()
        stop.restore()
    first = next(stream)
    stop.listen()  # again: Lightning has put its own handler of SIGTERM in the place of ours
    yield first
    yield from stream
