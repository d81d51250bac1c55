"""Beam search against enumeration, a slow search without caches, and teacher forcing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import SIZES, VOCAB, batch, pack
from table_model import BOS, EOS, Table, assert_same

from aiayn.evaluation.search import decoder_of
from aiayn.paper.beam_search import Beam, Hypothesis, beam_search
from aiayn.paper.transformer import Transformer

SOURCES = [[5, 7, EOS], [11, EOS], [4, 4, 6, 5, 9, EOS], [8, 10, 12, 13, EOS], [7, EOS]]
LogProbabilities = Callable[[Sequence[int], Sequence[int]], list[float]]  # of the next token, given source and prefix


def search(model: Any, sources: Sequence[Sequence[int]], beam_size: int, alpha: float, extra: int) -> list[Hypothesis]:
    return beam_search(
        model, *pack(sources), beam_size=beam_size, length_penalty=alpha, max_extra=extra, bos=BOS, eos=EOS
    )


def penalised(log_probability: float, length: int, alpha: float) -> float:
    return log_probability / ((5 + length) / 6) ** alpha


def teacher_forced(model: LogProbabilities, source: Sequence[int], tokens: Sequence[int]) -> float:
    return sum(model(source, tokens[:i])[token] for i, token in enumerate(tokens))


def slow_search(model: LogProbabilities, source: Sequence[int], width: int, alpha: float, extra: int) -> Hypothesis:
    """The algorithm as written down: one sentence, lists, no cache, no early stop; of width 1 greedy."""
    alive, finished = [(0.0, [])], []
    for _ in range(len(source) + extra):
        candidates: list[tuple[float, list[int]]] = []
        for log_probability, ids in alive:
            candidates += [(log_probability + p, [*ids, token]) for token, p in enumerate(model(source, ids))]
        candidates = sorted(candidates, reverse=True)[: 2 * width if width > 1 else 1]
        finished += [(penalised(p, len(ids), alpha), ids) for p, ids in candidates if ids[-1] == EOS]
        alive = [candidate for candidate in candidates if candidate[1][-1] != EOS][:width]
    if not finished:
        log_probability, ids = alive[0]
        return Hypothesis(ids, penalised(log_probability, len(ids), alpha), finished=False)
    score, ids = max(finished)
    return Hypothesis(ids[:-1], score, finished=True)


@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
def test_a_wide_beam_finds_what_enumeration_finds(alpha: float) -> None:
    sources, beaten = [[1, EOS], [0, EOS], [1, 2, EOS]], 0
    for model in (Table(vocab_size=4, seed=seed) for seed in range(5)):
        wide, narrow = (search(model, sources, width, alpha, 3) for width in (3**6, 1))
        for source, ours, other in zip(sources, wide, narrow, strict=True):
            outputs = []
            for ids in (ids for length in range(len(source) + 3) for ids in itertools.product(range(3), repeat=length)):
                p = teacher_forced(model.log_probabilities, source, [*ids, EOS])
                outputs.append(Hypothesis([*ids], penalised(p, len(ids) + 1, alpha), finished=True))
            best = max(outputs, key=lambda output: output.score)
            assert_same(ours, best)
            beaten += other.ids != best.ids
    assert beaten  # control: a narrow beam does not find it


@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
@pytest.mark.parametrize(("beam_size", "vocab_size"), [(1, 17), (2, 13), (7, 13), (31, 4)])
def test_the_search_equals_a_slow_one(beam_size: int, vocab_size: int, alpha: float) -> None:
    for seed, eos_bias in itertools.product(range(3), (-30.0, -3.0, 1.0, 4.0)):
        model = Table(vocab_size, seed, eos_bias)
        for source, ours in zip(SOURCES, search(model, SOURCES, beam_size, alpha, 5), strict=True):
            assert_same(ours, slow_search(model.log_probabilities, source, beam_size, alpha, 5))


@given(seed=st.integers(0, 99), beam_size=st.integers(1, 5), alpha=st.sampled_from([0.0, 0.6, 1.5]))
@settings(max_examples=30, deadline=None)
def test_the_score_is_the_penalised_log_probability(seed: int, beam_size: int, alpha: float) -> None:
    model = Table(vocab_size=11, seed=seed, eos_bias=-2.0)
    for source, ours in zip(SOURCES, search(model, SOURCES, beam_size, alpha, 3), strict=True):
        tokens = ours.ids + [EOS] * ours.finished
        log_probability = teacher_forced(model.log_probabilities, source, tokens)
        assert ours.score == pytest.approx(penalised(log_probability, len(tokens), alpha), rel=1e-5)


def test_stopping_early_changes_nothing_but_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def outputs() -> tuple[list[list[Hypothesis]], int]:
        models = [Table(vocab_size=13, seed=seed, eos_bias=bias) for seed in range(11) for bias in (0.0, 3.0)]
        return [search(model, SOURCES, 4, 2.0, 5) for model in models], sum(model.rows for model in models)

    early, early_work = outputs()
    monkeypatch.setattr(Beam, "is_decided", lambda beam: beam.limits == beam.length)
    full, full_work = outputs()
    assert early == full
    assert early_work < 0.9 * full_work
    # Control: a bound without the penalty of longer outputs stops too soon
    monkeypatch.setattr(Beam, "is_decided", lambda b: (b.best_score >= b.alive[:, 0]) | (b.limits == b.length))
    wrong, wrong_work = outputs()
    assert wrong != full
    assert wrong_work < early_work


def test_the_transformers_search_equals_the_slow_one() -> None:
    """Of a model that has begun to learn an ambiguous task: a new one repeats its last token, which tests nothing."""
    torch.manual_seed(7)
    model = Transformer(**{**SIZES, "dropout": 0.0}, positions="learned", max_length=11, vocab_size=VOCAB)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    random = np.random.default_rng(7)
    for _ in range(61):
        sources = [random.integers(4, VOCAB - 2, size=length).tolist() for length in random.integers(1, 7, size=31)]
        targets = [[token + random.integers(3) for token in source] for source in sources]
        pairs = batch([[*source, EOS] for source in sources], [[*target, EOS] for target in targets])
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(pairs), pairs.target).backward()
        optimizer.step()
    model.double().eval()

    def log_probabilities(source: Sequence[int], prefix: Sequence[int]) -> list[float]:
        """From a whole forward pass, without caches."""
        with torch.no_grad():
            return model(batch([source], [[*prefix, EOS]]))[-1].log_softmax(-1).tolist()

    sources = [[*random.integers(4, VOCAB, size=length).tolist(), EOS] for length in (1, 3, 5, 7, 9, 11)]
    one, two, four = (search(decoder_of(model), sources, width, 0.6, 3) for width in (1, 2, 4))
    for width, found in ((2, two), (4, four)):
        for source, ours in zip(sources, found, strict=True):
            assert_same(ours, slow_search(log_probabilities, source, width, 0.6, 3))
    # Control: greedy search does not find all of this, nor is the same token always the best
    assert any(a.score < b.score for a, b in zip(one, four, strict=True))
    assert any(hypothesis.finished and len(set(hypothesis.ids)) > 1 for hypothesis in four)
    # A model that has translated can still be trained
    model.train()(pairs).sum().backward()
