from collections.abc import Iterator
from itertools import chain, islice

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aiayn.data import update_plan
from aiayn.data.dataset import Lengths, Pairs
from aiayn.data.sentencepiece_bpe import BOS, EOS
from aiayn.data.update_plan import epoch_plan, evaluation_batches, gather, micro_batches, rows_of_part, training_plan

BUDGET = 61


def sides(source: npt.ArrayLike, target: npt.ArrayLike) -> tuple[Lengths, Lengths]:
    return np.asarray(source, np.int64), np.asarray(target, np.int64)


lengths = st.lists(st.tuples(st.integers(1, 53), st.integers(1, 53)), min_size=1, max_size=199).map(
    lambda rows: sides(*zip(*rows, strict=True))
)


def random_lengths(count: int) -> tuple[Lengths, Lengths]:
    rng = np.random.default_rng(0)
    source = rng.integers(1, 48, count)
    return sides(source, np.clip(source + rng.integers(-3, 6, count), 1, 53))


def pairs_of(sentences: list[tuple[list[int], list[int]]]) -> Pairs:
    parts: list[npt.NDArray[np.integer]] = []
    for side in zip(*sentences, strict=True):
        parts.append(np.array([*chain(*([*ids, EOS] for ids in side))], dtype=np.uint16))
        parts.append(np.cumsum([0, *(len(ids) + 1 for ids in side)], dtype=np.int64))
    return Pairs(*parts)


def test_a_batch_holds_the_chosen_sentences_in_order() -> None:
    batch = gather(pairs_of([([5, 6], [7]), ([], [8, 9, 10]), ([11], [12, 13])]), np.array([2, 0]))
    assert batch.source.tolist() == [11, EOS, 5, 6, EOS]
    assert batch.source_offsets.tolist() == [0, 2, 5]
    assert batch.target.tolist() == [12, 13, EOS, 7, EOS]
    assert batch.target_offsets.tolist() == [0, 3, 5]
    assert {batch.source.dtype, batch.target.dtype, batch.target_offsets.dtype} == {torch.int64}


def test_the_decoder_input_is_the_target_offset_by_one() -> None:
    batch = gather(pairs_of([([5], [7, 8]), ([6], []), ([5], [9])]), np.array([0, 1, 2]))
    assert batch.target.tolist() == [7, 8, EOS, EOS, 9, EOS]
    assert batch.target_input.tolist() == [BOS, 7, 8, BOS, BOS, 9]


@given(lengths, st.integers(0, 2**32), st.integers(0, 97))
def test_an_epoch_has_every_sentence_once_within_the_budget(lengths, seed, epoch) -> None:
    plan = list(epoch_plan(*lengths, BUDGET, seed, epoch))
    assert sorted(np.concatenate(plan)) == list(range(len(lengths[0])))
    assert all(0 < side[update].sum() <= BUDGET for update in plan for side in lengths)


def test_the_plan_never_changes_with_the_version_of_a_library() -> None:
    plan = epoch_plan(*sides([3, 5, 2, 7, 3, 2, 5], [2, 5, 3, 7, 3, 2, 4]), 11, seed=3, epoch=2)
    assert [update.tolist() for update in plan] == [[1, 6], [5, 2, 4, 0], [3]]


def planned_one_by_one(source: list[int], target: list[int], seed: int, epoch: int, pool: int) -> Iterator[list[int]]:
    """Independent reference: Python's integers, one sentence after the other."""
    pools = -(-len(source) // pool)
    bounds = [1]
    while bounds[-1] < BUDGET:
        bounds.append(max(bounds[-1] + 1, bounds[-1] * 11 // 10))

    def drawn(stream: int, count: int) -> list[int]:
        key, counter = np.array([seed, epoch], np.uint64), np.array([0, 0, 0, stream], np.uint64)
        return [int(bits) for bits in np.random.Philox(key=key, counter=counter).random_raw(count)]

    place = [bits // 2**32 * pools // 2**32 for bits in drawn(pools, len(source))]
    for number in range(pools):
        members = [i for i in range(len(source)) if place[i] == number]
        bits = drawn(number, 2 * len(members))
        buckets = [sum(bound < max(source[i], target[i]) for bound in bounds) for i in members]
        updates: list[list[int]] = []
        for at in sorted(range(len(members)), key=lambda at: (buckets[at], bits[at] >> 16)):
            fuller = [*(updates[-1] if updates else []), members[at]]
            if len(fuller) > 1 and all(sum(side[i] for i in fuller) <= BUDGET for side in (source, target)):
                updates[-1] = fuller
            else:
                updates.append([members[at]])
        for update in sorted(range(len(updates)), key=lambda update: bits[len(members) + update]):
            yield updates[update]


@pytest.mark.parametrize("pool", [997, 251])
def test_pools_are_planned_as_an_independent_reference_does(pool, monkeypatch) -> None:
    both = random_lengths(997)
    monkeypatch.setattr(update_plan, "POOL", pool)
    expected = list(planned_one_by_one(*(side.tolist() for side in both), 5, 7, pool))
    assert [update.tolist() for update in epoch_plan(*both, BUDGET, 5, 7)] == expected


@given(lengths, st.integers(53, 97), st.sampled_from([1, 2, 3, 4, 8]))
def test_ranks_share_an_update_with_nothing_twice_or_missing(lengths, tokens, ranks) -> None:
    for update in epoch_plan(*lengths, 3 * BUDGET, seed=1, epoch=0):
        parts = micro_batches(update, *lengths, tokens, ranks)
        shares = [parts[rank::ranks] for rank in range(ranks)]
        assert len({len(share) for share in shares}) == 1
        assert np.array_equal(np.concatenate(parts), update)
        assert all(side[part].sum() <= tokens for part in parts for side in lengths)
        filled = [len(part) > 0 for part in parts]
        assert filled == sorted(filled, reverse=True)


def fewest_parts(source: list[int], target: list[int], limit: int) -> int:
    """Independent reference: one sentence after the other."""
    parts, source_sum, target_sum = 1, 0, 0
    for s, t in zip(source, target, strict=True):
        if source_sum + s > limit or target_sum + t > limit:
            parts, source_sum, target_sum = parts + 1, 0, 0
        source_sum, target_sum = source_sum + s, target_sum + t
    return parts


@given(lengths, st.integers(53, 97), st.sampled_from([1, 2, 3]))
@settings(max_examples=50)
def test_micro_batches_are_as_few_and_equal_as_order_allows(lengths, tokens, ranks) -> None:
    source, target = lengths
    parts = micro_batches(np.arange(len(source)), *lengths, tokens, ranks)
    largest = max(int(side[part].sum()) for part in parts for side in (source, target))
    assert len(parts) - ranks < fewest_parts(source.tolist(), target.tolist(), tokens) <= len(parts)
    if largest > max(source.max(), target.max()):
        assert fewest_parts(source.tolist(), target.tolist(), largest - 1) > len(parts)


@given(st.integers(0, 97))
@settings(max_examples=30)
def test_updates_cut_anywhere_go_on_as_the_uncut_sequence(start) -> None:
    uncut = list(islice(training_plan(*random_lengths(71), 257, seed=5, start=0), 113))
    rest = list(islice(training_plan(*random_lengths(71), 257, seed=5, start=start), 113 - start))
    assert [number for number, _ in uncut] == list(range(113))
    assert [(number, list(update)) for number, update in rest] == [(n, list(u)) for n, u in uncut[start:]]


@given(lengths, st.integers(1, 97))
def test_evaluation_sees_every_sentence_once_a_long_one_alone(lengths, tokens) -> None:
    batches = evaluation_batches(*lengths, tokens)
    assert sorted(np.concatenate(batches)) == list(range(len(lengths[0])))
    assert all(len(batch) == 1 or side[batch].sum() <= tokens for batch in batches for side in lengths)
    longest = np.maximum(*lengths)[np.concatenate(batches)]
    assert np.array_equal(longest, np.sort(longest))


def test_rows_of_part_are_nearly_full_and_hold_every_part() -> None:
    """What a GPU is compiled for, at the paper's size and with lengths like a corpus's."""
    draw = np.random.default_rng(7)
    source = np.clip(np.rint(draw.lognormal(np.log(28) - 0.18, 0.6, 30_011)), 2, 250).astype(np.int64)
    target = np.clip(np.rint(source * draw.lognormal(0, 0.2, len(source))), 2, 250).astype(np.int64)
    plan = list(epoch_plan(source, target, 25_000, 3, 0))
    for micro_batch, ranks in ((25_600, 1), (25_600, 8), (4096, 3)):
        rows = rows_of_part(25_000, micro_batch, ranks)
        parts = [part for update in plan[:20] for part in micro_batches(update, source, target, micro_batch, ranks)]
        largest = max(max(source[part].sum(), target[part].sum()) for part in parts)
        assert 0.9 * rows < largest <= rows
