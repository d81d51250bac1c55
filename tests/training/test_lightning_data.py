"""The stream of updates: every rank its share, every sentence once, the same wherever it is cut."""

import os
import signal
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiayn.core import signals
from aiayn.core.signals import Interrupted, StopFlag
from aiayn.data.dataset import Pairs
from aiayn.data.update_plan import training_plan
from aiayn.training import lightning_data
from aiayn.training.lightning_data import Update

PER_UPDATE, PER_MICRO_BATCH, SENTENCES = 61, 23, 97


def corpus() -> Pairs:
    """Every token of a sentence is the number of the sentence, so that a batch tells which sentences it holds."""
    draw = np.random.default_rng(5)
    sides = []
    for _ in range(2):
        lengths = draw.integers(1, 20, SENTENCES)
        sides += [np.repeat(np.arange(SENTENCES), lengths).astype(np.int32), np.concatenate([[0], np.cumsum(lengths)])]
    return Pairs(*sides)


PAIRS = corpus()


def stream(start: int = 0, **changes: int):
    sizes = {"tokens_per_update": PER_UPDATE, "tokens_per_micro_batch": PER_MICRO_BATCH, "seed": 3}
    return lightning_data.updates(PAIRS, start=start, **{**sizes, **changes})


def held(update: Update) -> list[tuple[int, list[int]]]:
    """The micro-batches of an update: (number of its first target token, its sentences)."""
    return [(batch.first_target, batch.source[batch.source_offsets[:-1]].tolist()) for batch in update.batches]


@pytest.mark.parametrize(("ranks", "per_micro_batch"), [(1, 61), (3, 23), (8, 19)])
def test_ranks_together_hold_each_sentence_of_an_update_once(ranks, per_micro_batch):
    """The same sentences on any hardware, in micro-batches within the budget, none of them empty."""
    plan = training_plan(PAIRS.source_lengths, PAIRS.target_lengths, PER_UPDATE, 3, 0)
    shares = [stream(rank=rank, ranks=ranks, tokens_per_micro_batch=per_micro_batch) for rank in range(ranks)]
    for (number, sentences), *updates in islice(zip(plan, *shares, strict=True), 40):
        parts = sorted(part for update in updates for part in held(update))
        assert [sentence for _, part in parts for sentence in part] == sentences.tolist()
        # Tokens are numbered through, on each side by itself
        batches = sorted(
            (batch for update in updates for batch in update.batches), key=lambda batch: batch.first_target
        )
        for side in ("source", "target"):
            sizes = [len(getattr(batch, side)) for batch in batches]
            assert 0 < min(sizes) <= max(sizes) <= per_micro_batch
            assert [getattr(batch, f"first_{side}") for batch in batches] == [0, *np.cumsum(sizes)[:-1]]
        for update in updates:
            assert update.number == number
            assert update.source_tokens == PAIRS.source_lengths[sentences].sum()
            assert update.target_tokens == PAIRS.target_lengths[sentences].sum()
            assert abs(len(update.batches) - len(updates[0].batches)) <= 1


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 150), st.integers(1, 3), st.integers(0, 5))
def test_the_stream_from_any_update_is_the_tail_of_the_whole_one(start, ranks, seed):
    """Beyond one epoch: 97 sentences make about 20 updates."""
    whole = islice(stream(ranks=ranks, seed=seed), start, start + 7)
    for one, other in zip(whole, islice(stream(start, ranks=ranks, seed=seed), 7), strict=True):
        assert (one.number, held(one)) == (other.number, held(other))
    assert other.number == start + 6


def test_another_seed_is_another_stream_and_epochs_differ():  # control
    one, other = ([held(update) for update in islice(stream(seed=seed), 20)] for seed in (3, 4))
    assert one != other
    assert len({str(part) for part in one}) == 20


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_signal_while_an_epoch_is_planned(ranks):
    """It interrupts a single process at once; ranks, which would wait for each other, go on and end together."""
    planned = []

    def planning():
        os.kill(os.getpid(), signal.SIGTERM)
        planned.append(True)
        yield from range(3)

    with signals.interrupting(), StopFlag() as stop:
        given = lightning_data.interruptible(planning(), stop, ranks)
        if ranks == 1:
            with pytest.raises(Interrupted, match="stopped by SIGTERM"):
                next(given)
            assert planned == []
        else:
            assert list(given) == [0, 1, 2]
            assert stop.asked == "SIGTERM"
