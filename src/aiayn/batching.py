"""Which sentences each update and each micro-batch holds, and how they become one packed `Batch`."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aiayn.dataset import Pairs
from aiayn.linear import sent
from aiayn.tokenizer import BOS

# S source tokens of all sentences, packed; T target tokens; B sentences

Sentences = npt.NDArray[np.int64]
"""Numbers of sentence pairs, (B,)."""

ROW_STEP = 128
"""Rows that a GPU multiplies together."""

Lengths = npt.NDArray[np.int64]
"""Tokens of each sentence of one side, its EOS included."""


@dataclass(frozen=True)
class Batch:
    """B sentence pairs, packed: their tokens one after the other, without padding; B may be 0."""

    source: Tensor  # (S,) every sentence ends with EOS
    target: Tensor  # (T,) the tokens to predict; every sentence ends with EOS
    target_input: Tensor  # (T,) the tokens the decoder sees: BOS, then the target without its EOS
    source_offsets: Tensor  # (B + 1,) where each sentence begins; the last one is S
    target_offsets: Tensor  # (B + 1,) where each sentence begins; the last one is T

    def to(self, device: torch.device | str) -> "Batch":
        """The same tokens on `device`; the offsets stay here, where their sizes are asked for."""
        return replace(
            self, **{name: sent(getattr(self, name), device) for name in ("source", "target", "target_input")}
        )


def gather(pairs: Pairs, sentences: Sentences) -> Batch:
    """The pairs numbered `sentences`, in that order, as one Batch of int64 tensors."""
    source, source_offsets = _take(pairs.source_ids, pairs.source_offsets, sentences)
    target, target_offsets = _take(pairs.target_ids, pairs.target_offsets, sentences)
    target_input = np.empty_like(target)
    target_input[1:] = target[:-1]
    # Paper: "offset by one position" (3.1), silent on the first input; the released code feeds zeros, we a BOS token
    target_input[target_offsets[:-1]] = BOS
    return Batch(*map(torch.from_numpy, (source, target, target_input, source_offsets, target_offsets)))


def _take(
    ids: npt.NDArray[np.integer], offsets: npt.NDArray[np.int64], sentences: Sentences
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    starts = offsets[sentences]
    lengths = offsets[sentences + 1] - starts
    taken = _running_sum(lengths)
    where = np.arange(taken[-1]) + np.repeat(starts - taken[:-1], lengths)
    return ids[where].astype(np.int64), taken


def epoch_plan(
    source_lengths: Lengths, target_lengths: Lengths, tokens_per_update: int, seed: int, epoch: int
) -> list[Sentences]:
    """The updates of one epoch, as arrays of sentence numbers: every sentence once, each side within the budget.

    Section 5.1: sentences of about the same length share an update. A pure function of its arguments, the same under
    every numpy version. Raises ValueError when a sentence alone is over the budget.
    """
    longest = np.maximum(source_lengths, target_lengths)
    _refuse_longer(longest, tokens_per_update, "training.tokens_per_update")
    # Raw bits, because numpy may change what its shuffles draw from them, but never the bits of Philox
    random = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64))
    # Paper: silent on how pairs are grouped; the released code's buckets grow by 1.1
    bucket = np.searchsorted(_bucket_bounds(tokens_per_update), longest).astype(np.uint64)
    del longest  # a plan of 50 million pairs is made in the memory that its order takes three times
    key = random.random_raw(len(bucket))
    key >>= np.uint64(16)
    bucket <<= np.uint64(48)
    key |= bucket
    del bucket
    order = np.argsort(key, kind="stable")
    del key
    updates = _cut(order, source_lengths, target_lengths, tokens_per_update)
    return [updates[i] for i in np.argsort(random.random_raw(len(updates)), kind="stable")]


def micro_batches(
    sentences: Sentences, source_lengths: Lengths, target_lengths: Lengths, tokens_per_micro_batch: int, ranks: int
) -> list[Sentences]:
    """The sentences of one update, in order, in K parts of at most `tokens_per_micro_batch` tokens a side.

    K is the smallest multiple of `ranks` that is enough; rank r takes parts r, r + ranks, ... The largest part is as
    small as K allows; parts that are not needed are empty and stand at the end. Raises ValueError when a sentence alone
    is over the budget.
    """
    source_ends = _running_sum(source_lengths[sentences])
    target_ends = _running_sum(target_lengths[sentences])
    longest = np.maximum(source_lengths[sentences], target_lengths[sentences])
    _refuse_longer(longest, tokens_per_micro_batch, "hardware.tokens_per_micro_batch")
    fewest = len(_borders(source_ends, target_ends, tokens_per_micro_batch)) - 1
    parts = ranks * max(1, -(-fewest // ranks))
    too_small, enough = int(longest.max(initial=1)) - 1, tokens_per_micro_batch
    while enough - too_small > 1:
        limit = (too_small + enough) // 2
        if len(_borders(source_ends, target_ends, limit)) - 1 <= parts:
            enough = limit
        else:
            too_small = limit
    borders = _borders(source_ends, target_ends, enough)
    borders += [len(sentences)] * (parts + 1 - len(borders))
    return np.split(sentences, borders[1:-1])


def rows_of_part(tokens_per_update: int, tokens_per_micro_batch: int, ranks: int) -> int:
    """So many rows hold nearly every part that `micro_batches` makes of an update, on either side."""
    parts = ranks * -(-tokens_per_update // (ranks * tokens_per_micro_batch))
    # Parts are not cut inside a sentence
    spare = 0 if parts == 1 else ROW_STEP
    return -(-(tokens_per_update // parts + spare) // ROW_STEP) * ROW_STEP


class Updates:
    """The updates of a whole training, without end: (number, sentences) from update `start` on, epoch after epoch.

    Whatever `start` is, what follows is what an uncut run would have seen.
    """

    def __init__(
        self, source_lengths: Lengths, target_lengths: Lengths, tokens_per_update: int, seed: int, start: int
    ) -> None:
        if len(source_lengths) == 0:
            raise ValueError("the training data holds no sentence: nothing can be learned from it")
        self.source_lengths = source_lengths
        self.target_lengths = target_lengths
        self.tokens_per_update = tokens_per_update
        self.seed = seed
        self.start = start

    def __iter__(self) -> Iterator[tuple[int, Sentences]]:
        number, epoch = 0, 0
        while True:
            for sentences in epoch_plan(
                self.source_lengths, self.target_lengths, self.tokens_per_update, self.seed, epoch
            ):
                if number >= self.start:
                    yield number, sentences
                number += 1
            epoch += 1


def evaluation_batches(source_lengths: Lengths, target_lengths: Lengths, tokens: int) -> list[Sentences]:
    """Every sentence once, from short to long, in batches of at most `tokens` a side; a longer one stands alone."""
    order = np.argsort(np.maximum(source_lengths, target_lengths), kind="stable")
    return _cut(order, source_lengths, target_lengths, tokens)


def _cut(order: Sentences, source_lengths: Lengths, target_lengths: Lengths, limit: int) -> list[Sentences]:
    borders = _borders(_running_sum(source_lengths[order]), _running_sum(target_lengths[order]), limit)
    return [order[start:end] for start, end in pairwise(borders)]


def _borders(source_ends: npt.NDArray[np.int64], target_ends: npt.NDArray[np.int64], limit: int) -> list[int]:
    """Where parts begin, and the end: each part takes as many sentences as fit both limits, and at least one."""
    borders = [0]
    while (start := borders[-1]) < len(source_ends) - 1:
        source_end = source_ends.searchsorted(source_ends[start] + limit, side="right")
        target_end = target_ends.searchsorted(target_ends[start] + limit, side="right")
        borders.append(max(start + 1, int(min(source_end, target_end)) - 1))
    return borders


def _bucket_bounds(longest: int) -> npt.NDArray[np.int64]:
    bounds = [1]
    while bounds[-1] < longest:
        bounds.append(max(bounds[-1] + 1, bounds[-1] * 11 // 10))
    return np.array(bounds)


def _running_sum(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])


def _refuse_longer(lengths: Lengths, limit: int, field: str) -> None:
    if len(lengths) and (longest := int(lengths.max())) > limit:
        raise ValueError(
            f"{field} is {limit}, but a sentence has {longest} tokens: raise it to {longest} or lower data.max_length"
        )
