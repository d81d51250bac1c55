"""Which sentences each update and each micro-batch holds, and how they become one packed `Batch`."""

import itertools
from bisect import bisect_left
from collections.abc import Iterator
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from aiayn.data.dataset import Lengths, Pairs
from aiayn.data.sentencepiece_bpe import BOS
from aiayn.paper.batch import Batch

# S source tokens of all sentences, packed; T target tokens; B sentences

Sentences = npt.NDArray[np.int64]  # (B,) numbers of sentence pairs
POOL = 2**23  # about how many sentences are planned together: WMT14's English-German corpus is one pool
ROW_STEP = 128  # rows that a GPU multiplies together

_running_sum = partial(np.cumulative_sum, include_initial=True)


def gather(pairs: Pairs, sentences: Sentences, first_source: int = 0, first_target: int = 0) -> Batch:
    """The pairs numbered `sentences`, in that order, as one Batch of int64 tensors."""
    source, source_offsets = _take(pairs.source_ids, pairs.source_offsets, sentences)
    target, target_offsets = _take(pairs.target_ids, pairs.target_offsets, sentences)
    target_input = torch.empty_like(target)
    target_input[1:] = target[:-1]
    # Paper: "offset by one position" (3.1), silent on the first input; the released code feeds zeros, we a BOS token
    target_input[target_offsets[:-1]] = BOS
    return Batch(source, target, target_input, source_offsets, target_offsets, first_source, first_target)


def _take(
    ids: npt.NDArray[np.integer], offsets: npt.NDArray[np.int64], sentences: Sentences
) -> tuple[torch.Tensor, torch.Tensor]:
    starts = offsets[sentences]
    lengths = offsets[sentences + 1] - starts
    taken = _running_sum(lengths)
    where = np.arange(taken[-1]) + np.repeat(starts - taken[:-1], lengths)
    return torch.from_numpy(ids[where].astype(np.int64)), torch.from_numpy(taken)


def epoch_plan(
    source_lengths: Lengths, target_lengths: Lengths, tokens_per_update: int, seed: int, epoch: int
) -> Iterator[Sentences]:
    """The updates of one epoch, as arrays of sentence numbers: every sentence once, each side within the budget.

    Section 5.1: sentences of about the same length share an update. A corpus of more than POOL is dealt at random into
    pools, planned one after the other. A pure function of its arguments under every numpy version.
    """
    longest = np.maximum(source_lengths, target_lengths)
    # Paper: only that lengths in a batch are similar (5.1); the released code has buckets too, its later versions
    # growing by 1.1 from 8, here from 1
    bounds = [1]
    while bounds[-1] < tokens_per_update:
        bounds.append(max(bounds[-1] + 1, bounds[-1] * 11 // 10))
    pools = -(-len(longest) // POOL)
    for number in range(pools):
        # Corpora stand in a training text one after the other. Scaled, not the remainder, which takes ten times as long
        drawn = _random(seed, epoch, pools).random_raw(len(longest)) >> np.uint64(32)
        pool = np.flatnonzero(drawn * np.uint64(pools) >> np.uint64(32) == number)
        random = _random(seed, epoch, number)
        bucket = np.searchsorted(bounds, longest[pool]).astype(np.uint64)
        key = bucket << np.uint64(48) | random.random_raw(len(pool)) >> np.uint64(16)
        order = pool[np.argsort(key, kind="stable")]
        # Paper: "approximately" so many tokens (5.1); the released code counts padding too, here the tokens alone
        cuts = _cuts(_running_sum(source_lengths[order]), _running_sum(target_lengths[order]), tokens_per_update)
        for update in np.argsort(random.random_raw(len(cuts) - 1), kind="stable"):
            yield order[cuts[update] : cuts[update + 1]].copy()  # a view would keep all of its pool


def _random(seed: int, epoch: int, stream: int) -> np.random.Philox:
    # Raw bits, because numpy may change what its shuffles draw from them, but never the bits of Philox
    return np.random.Philox(key=np.array([seed, epoch], np.uint64), counter=np.array([0, 0, 0, stream], np.uint64))


def micro_batches(
    sentences: Sentences, source_lengths: Lengths, target_lengths: Lengths, tokens_per_micro_batch: int, ranks: int
) -> list[Sentences]:
    """The sentences of one update, in order, in K parts of at most `tokens_per_micro_batch` tokens a side.

    K is the smallest multiple of `ranks` that is enough; rank r takes parts r, r + ranks, ... The largest part is as
    small as K allows; unneeded ones are empty, at the end.
    """
    source_ends = _running_sum(source_lengths[sentences])
    target_ends = _running_sum(target_lengths[sentences])
    longest = max(int(np.diff(ends).max(initial=1)) for ends in (source_ends, target_ends))
    fewest = len(_cuts(source_ends, target_ends, tokens_per_micro_batch)) - 1
    parts = ranks * max(1, -(-fewest // ranks))
    limits = range(longest, tokens_per_micro_batch)
    # The larger a limit, the fewer parts it makes
    enough = bisect_left(limits, -parts, key=lambda limit: 1 - len(_cuts(source_ends, target_ends, limit)))
    cuts = _cuts(source_ends, target_ends, longest + enough)
    cuts += [len(sentences)] * (parts + 1 - len(cuts))
    return np.split(sentences, cuts[1:-1])


def rows_of_part(tokens_per_update: int, tokens_per_micro_batch: int, ranks: int) -> int:
    """So many rows hold nearly every part that `micro_batches` makes of an update, on either side."""
    parts = ranks * -(-tokens_per_update // (ranks * tokens_per_micro_batch))
    # Parts are not cut inside a sentence
    spare = 0 if parts == 1 else ROW_STEP
    return -(-(tokens_per_update // parts + spare) // ROW_STEP) * ROW_STEP


def training_plan(
    source_lengths: Lengths, target_lengths: Lengths, tokens_per_update: int, seed: int, start: int
) -> Iterator[tuple[int, Sentences]]:
    """The updates of a training, without end: (number, sentences) from update `start` on, as an uncut run sees them."""
    epochs = (epoch_plan(source_lengths, target_lengths, tokens_per_update, seed, epoch) for epoch in itertools.count())
    return itertools.islice(enumerate(itertools.chain.from_iterable(epochs)), start, None)


def evaluation_batches(source_lengths: Lengths, target_lengths: Lengths, tokens: int) -> list[Sentences]:
    """Every sentence once, from short to long, in batches of at most `tokens` a side; a longer one stands alone."""
    order = np.argsort(np.maximum(source_lengths, target_lengths), kind="stable")
    cuts = _cuts(_running_sum(source_lengths[order]), _running_sum(target_lengths[order]), tokens)
    return [order[start:end] for start, end in itertools.pairwise(cuts)]


def _cuts(source_ends: npt.NDArray[np.int64], target_ends: npt.NDArray[np.int64], limit: int) -> list[int]:
    """Where parts begin, and the end: each part takes as many sentences as fit both limits, and at least one."""
    cuts = [0]
    while (start := cuts[-1]) < len(source_ends) - 1:
        source_end = source_ends.searchsorted(source_ends[start] + limit, side="right")
        target_end = target_ends.searchsorted(target_ends[start] + limit, side="right")
        cuts.append(max(start + 1, int(min(source_end, target_end)) - 1))
    return cuts
