"""Searches of many sentences: all of them, in order, in batches within their limit, with the bits of one thread."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from table_model import BOS, EOS, Table, TableDecoding, assert_same
from torch import Tensor

from aiayn.config import compose
from aiayn.evaluation import search
from aiayn.paper.beam_search import Hypothesis, beam_search
from aiayn.runs.models import trained

OPTIONS: dict[str, Any] = {"beam_size": 4, "length_penalty": 0.6, "max_extra": 5, "bos": BOS, "eos": EOS}


def translate(model: Table, sources: list[np.ndarray], tokens_per_batch: int, **changed: Any) -> list[Hypothesis]:
    return search.translate_ids(model, sources, tokens_per_batch=tokens_per_batch, **OPTIONS | changed)


def search_alone(model: Table, source: list[int]) -> Hypothesis:
    (found,) = beam_search(model, torch.tensor(source), torch.tensor([0, len(source)]), **OPTIONS)
    return found


@given(lengths=st.lists(st.integers(0, 11), max_size=17), tokens_per_batch=st.integers(1, 200))
@settings(max_examples=50, deadline=None)
def test_translations_come_back_in_order_for_any_batches(lengths: list[int], tokens_per_batch: int) -> None:
    random = np.random.default_rng(0)
    sources = [random.integers(4, 13, size=length).astype(np.int32) for length in lengths]
    model, counted = Table(vocab_size=13), list[int]()
    ours = translate(model, sources, tokens_per_batch, done=counted.append)
    assert sum(counted) == len(sources)
    assert 0 not in counted
    for source, hypothesis in zip(sources, ours, strict=True):
        if len(source):
            assert_same(hypothesis, search_alone(model, [*source.tolist(), EOS]), tolerance=1e-12)
        else:
            assert hypothesis == Hypothesis([], 0.0, 0.0, finished=True)


def test_no_batch_of_several_sentences_exceeds_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = [np.full(length, 5, dtype=np.uint16) for length in (3, 19, 2, 7, 0, 5, 5, 1, 1, 1)]
    batches: list[list[int]] = []
    start = Table.start

    def spy(model: Table, source: Tensor, source_offsets: Tensor) -> TableDecoding:
        assert source[source_offsets[1:] - 1].eq(EOS).all()
        batches.append(source_offsets.diff().tolist())
        return start(model, source, source_offsets)

    monkeypatch.setattr(Table, "start", spy)
    translate(Table(vocab_size=13), sources, 23)
    assert batches == [[20], [8, 6], [6, 4, 3], [2, 2, 2]]
    assert all(len(batch) * max(batch) <= 23 for batch in batches)
    batches.clear()
    translate(Table(vocab_size=13), sources, 1)
    assert all(len(batch) == 1 for batch in batches)


def sources_of(dataset) -> list[np.ndarray]:
    pairs = dataset.pairs("test")
    return [pairs.source_ids[i : j - 1] for i, j in zip(pairs.source_offsets, pairs.source_offsets[1:], strict=False)]


def test_two_threads_find_the_bits_of_one(finished):
    run = compose.compose_row(*finished)
    model, dataset, _ = trained(run)
    counted: list[int] = []
    one, two = (
        search.search(
            model,
            sources_of(dataset),
            run.decoding,
            dataclasses.replace(run.hardware, tokens_per_search=31, threads=threads),
            counted.append,
        )
        for threads in (1, 2)
    )
    assert one == two
    assert len({tuple(hypothesis.ids) for hypothesis in one}) > 3
    assert sum(counted) == 2 * len(one)


def test_a_search_in_fewer_bits_finds_almost_the_same(finished):
    run = compose.compose_row(*finished)
    model, dataset, _ = trained(run)
    sources = sources_of(dataset)
    full = search.search(model, sources, run.decoding, run.hardware)
    fewer = search.search(model, sources, dataclasses.replace(run.decoding, precision="bf16"), run.hardware)
    # Near a tie, which bits decide, the beam keeps another hypothesis
    alike = [(one.score, other.score) for one, other in zip(full, fewer, strict=True) if one.ids == other.ids]
    assert len(alike) >= 0.8 * len(full)
    assert np.allclose(*zip(*alike, strict=True), rtol=0.1, atol=0.1)
    assert [one.score for one in full] != [other.score for other in fewer]  # control: it is another arithmetic
