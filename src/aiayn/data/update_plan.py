"""Which sentences each update and each micro-batch holds, and how they become one packed `Batch`."""

import itertools
from bisect import bisect_left
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from aiayn.config.schema import ConfigError
from aiayn.data import dataset
from aiayn.data.dataset import Lengths, Pairs
from aiayn.data.parallel_text import DataError
from aiayn.data.sentencepiece_bpe import BOS
from aiayn.paper.batch import Batch

# S source tokens of all sentences, packed; T target tokens; B sentences

Sentences = npt.NDArray[np.int64]
"""Numbers of sentence pairs, (B,)."""

POOL = 2**23
"""About how many sentences are planned together, in 40 bytes each: WMT14's English-German corpus is one pool."""
ROW_STEP = 128
"""Rows that a GPU multiplies together."""


def gather(pairs: Pairs, sentences: Sentences, first_source: int = 0, first_target: int = 0) -> Batch:
    """The pairs numbered `sentences`, in that order, as one Batch of int64 tensors."""
    source, source_offsets = _take(pairs.source_ids, pairs.source_offsets, sentences)
    target, target_offsets = _take(pairs.target_ids, pairs.target_offsets, sentences)
    target_input = np.empty_like(target)
    target_input[1:] = target[:-1]
    # Paper: "offset by one position" (3.1), silent on the first input; the released code feeds zeros, we a BOS token
    target_input[target_offsets[:-1]] = BOS
    return Batch(
        torch.from_numpy(source),
        torch.from_numpy(target),
        torch.from_numpy(target_input),
        torch.from_numpy(source_offsets),
        torch.from_numpy(target_offsets),
        first_source,
        first_target,
    )


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
) -> Iterator[Sentences]:
    """The updates of one epoch, as arrays of sentence numbers: every sentence once, each side within the budget.

    Section 5.1: sentences of about the same length share an update. A corpus of more than POOL is dealt at random into
    pools, planned one after the other: memory does not grow with it. A pure function of its arguments under every numpy
    version. Raises ConfigError, before the first update, when a sentence alone is over the budget.
    """
    longest = (int(part.max()) for lengths in (source_lengths, target_lengths) for part in lengths.parts())
    _refuse_longer(max(longest, default=0), tokens_per_update, "training.tokens_per_update")
    count = len(source_lengths)
    pools = -(-count // POOL)
    return itertools.chain.from_iterable(
        _pool_plan(
            _dealt(count, pool, pools, _random(seed, epoch, pools)),
            source_lengths,
            target_lengths,
            tokens_per_update,
            _random(seed, epoch, pool),
        )
        for pool in range(pools)
    )


def _random(seed: int, epoch: int, stream: int) -> np.random.Philox:
    # Raw bits, because numpy may change what its shuffles draw from them, but never the bits of Philox
    return np.random.Philox(key=np.array([seed, epoch], np.uint64), counter=np.array([0, 0, 0, stream], np.uint64))


def _dealt(count: int, pool: int, pools: int, random: np.random.Philox) -> Sentences:
    """The sentences of one of so many pools, in order: corpora stand in a training text one after the other."""
    dealt = []
    for start in range(0, count, dataset.SENTENCES_AT_ONCE):
        drawn = random.random_raw(min(dataset.SENTENCES_AT_ONCE, count - start)) >> np.uint64(32)
        # Scaled, not the remainder, which takes ten times as long
        dealt.append(start + np.flatnonzero(drawn * np.uint64(pools) >> np.uint64(32) == pool))
    return np.concatenate(dealt)


def _pool_plan(
    pool: Sentences, source_lengths: Lengths, target_lengths: Lengths, tokens_per_update: int, random: np.random.Philox
) -> Iterator[Sentences]:
    # Paper: only that lengths in a batch are similar (5.1); the released code has buckets too, its later versions
    # growing by 1.1 from 8, here from 1
    bounds = _bucket_bounds(tokens_per_update)
    key = np.empty(len(pool), np.uint64)
    for start in range(0, len(pool), dataset.SENTENCES_AT_ONCE):
        some = slice(start, start + dataset.SENTENCES_AT_ONCE)
        longest = np.maximum(source_lengths[pool[some]], target_lengths[pool[some]])
        bucket = np.searchsorted(bounds, longest).astype(np.uint64)
        key[some] = bucket << np.uint64(48) | random.random_raw(len(longest)) >> np.uint64(16)
    order = np.argsort(key, kind="stable")
    del key
    order = pool[order]
    del pool
    # Paper: "approximately" so many tokens (5.1); the released code counts padding too, here the tokens alone
    cuts = _cuts_of_order(order, source_lengths, target_lengths, tokens_per_update)
    for update in np.argsort(random.random_raw(len(cuts) - 1), kind="stable"):
        yield order[cuts[update] : cuts[update + 1]].copy()  # a view would keep all of its pool


def micro_batches(
    sentences: Sentences, source_lengths: Lengths, target_lengths: Lengths, tokens_per_micro_batch: int, ranks: int
) -> list[Sentences]:
    """The sentences of one update, in order, in K parts of at most `tokens_per_micro_batch` tokens a side.

    K is the smallest multiple of `ranks` that is enough; rank r takes parts r, r + ranks, ... The largest part is as
    small as K allows; unneeded ones are empty, at the end. ConfigError when a sentence alone is over the budget.
    """
    source_ends = _running_sum(source_lengths[sentences])
    target_ends = _running_sum(target_lengths[sentences])
    longest = max(int(np.diff(ends).max(initial=1)) for ends in (source_ends, target_ends))
    _refuse_longer(longest, tokens_per_micro_batch, "hardware.tokens_per_micro_batch")
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
    """The updates of a whole training, without end: (number, sentences) from update `start` on, epoch after epoch.

    Whatever `start` is, what follows is what an uncut run would have seen. Raises DataError where there is no sentence.
    """
    if len(source_lengths) == 0:
        raise DataError("the training data holds no sentence: nothing can be trained on it")
    epochs = (epoch_plan(source_lengths, target_lengths, tokens_per_update, seed, epoch) for epoch in itertools.count())
    return itertools.islice(enumerate(itertools.chain.from_iterable(epochs)), start, None)


def evaluation_batches(source_lengths: Lengths, target_lengths: Lengths, tokens: int) -> list[Sentences]:
    """Every sentence once, from short to long, in batches of at most `tokens` a side; a longer one stands alone."""
    order = np.argsort(np.maximum(source_lengths[:], target_lengths[:]), kind="stable")
    cuts = _cuts_of_order(order, source_lengths, target_lengths, tokens)
    return [order[start:end] for start, end in itertools.pairwise(cuts)]


def _cuts_of_order(order: Sentences, source_lengths: Lengths, target_lengths: Lengths, limit: int) -> list[int]:
    """Where parts begin, and the end, as `_cuts` has it, with the lengths of a few sentences at a time."""
    cuts = [0]
    while (start := cuts[-1]) < len(order):
        some = order[start : start + limit + dataset.SENTENCES_AT_ONCE]  # more than a part: each has a token
        new = _cuts(_running_sum(source_lengths[some]), _running_sum(target_lengths[some]), limit)
        if start + len(some) < len(order):
            new.pop()  # the last part goes on
        cuts += [start + cut for cut in new[1:]]
    return cuts


def _cuts(source_ends: npt.NDArray[np.int64], target_ends: npt.NDArray[np.int64], limit: int) -> list[int]:
    """Where parts begin, and the end: each part takes as many sentences as fit both limits, and at least one."""
    cuts = [0]
    while (start := cuts[-1]) < len(source_ends) - 1:
        source_end = source_ends.searchsorted(source_ends[start] + limit, side="right")
        target_end = target_ends.searchsorted(target_ends[start] + limit, side="right")
        cuts.append(max(start + 1, int(min(source_end, target_end)) - 1))
    return cuts


def _bucket_bounds(longest: int) -> npt.NDArray[np.int64]:
    bounds = [1]
    while bounds[-1] < longest:
        bounds.append(max(bounds[-1] + 1, bounds[-1] * 11 // 10))
    return np.array(bounds)


def _running_sum(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])


def _refuse_longer(longest: int, limit: int, field: str) -> None:
    if longest > limit:
        raise ConfigError(
            f"{field} is {limit}, but a sentence has {longest} tokens: raise it to {longest} or lower data.max_length"
        )
