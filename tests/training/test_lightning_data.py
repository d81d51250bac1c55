"""The stream of updates: every rank its share, every sentence once, from any update on."""

import os
import signal
from itertools import islice

import numpy as np
import pytest
import torch

from aiayn.core import signals
from aiayn.core.signals import Interrupted, StopFlag
from aiayn.data.dataset import Pairs
from aiayn.data.update_plan import training_plan
from aiayn.training import lightning_data

PER_UPDATE, SENTENCES = 61, 97


@pytest.fixture
def pairs() -> Pairs:
    """Every token of a sentence is the number of the sentence, so that a batch tells which sentences it holds."""
    draw = np.random.default_rng(5)
    sides = []
    for _ in range(2):
        lengths = draw.integers(1, 20, SENTENCES)
        sides += [np.repeat(np.arange(SENTENCES), lengths).astype(np.int32), np.concatenate([[0], np.cumsum(lengths)])]
    return Pairs(*sides)


@pytest.mark.parametrize(("ranks", "per_micro_batch", "start"), [(1, 61, 0), (3, 23, 57), (8, 19, 0)])
def test_ranks_together_hold_each_sentence_of_an_update_once(ranks, per_micro_batch, start, pairs):
    """The same sentences on any hardware, in micro-batches within the budget, none empty; from any update on."""
    plan = training_plan(pairs.source_lengths, pairs.target_lengths, PER_UPDATE, 3, start)
    sizes = {"tokens_per_update": PER_UPDATE, "tokens_per_micro_batch": per_micro_batch, "ranks": ranks}
    shares = [lightning_data.updates(pairs, **sizes, seed=3, start=start, rank=rank) for rank in range(ranks)]
    for (number, sentences), *updates in islice(zip(plan, *shares, strict=True), 40):
        batches = sorted((batch for one in updates for batch in one.batches), key=lambda batch: batch.first_target)
        held = [batch.source[batch.source_offsets[:-1]] for batch in batches]
        assert torch.cat(held).tolist() == sentences.tolist()
        for side in ("source", "target"):  # on each of which tokens are numbered through
            counts = [len(getattr(batch, side)) for batch in batches]
            assert 0 < min(counts) <= max(counts) <= per_micro_batch
            assert [getattr(batch, f"first_{side}") for batch in batches] == [0, *np.cumsum(counts)[:-1]]
        for update in updates:
            assert update.number == number
            assert update.source_tokens == pairs.source_lengths[sentences].sum()
            assert update.target_tokens == pairs.target_lengths[sentences].sum()
            assert abs(len(update.batches) - len(updates[0].batches)) <= 1


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
