"""Searches of many sentences: all of them, in order, in batches within their limit, with the bits of one thread."""

import dataclasses
import threading
from itertools import chain
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from table_model import BOS, EOS, Table, assert_same

from aiayn.config import compose
from aiayn.config.schema import Decoding, OutOfMemory
from aiayn.core.signals import Interrupted
from aiayn.evaluation import search
from aiayn.paper.beam_search import Hypothesis, beam_search
from aiayn.runs.models import trained

OPTIONS: dict[str, Any] = {"beam_size": 4, "length_penalty": 0.6, "max_extra": 5}
DECODING = Decoding(**OPTIONS, precision="full")
HARDWARE = compose.compose_row().hardware


@given(lengths=st.lists(st.integers(0, 11), max_size=17), limit=st.integers(1, 200), more=st.sampled_from([0, 5]))
@settings(max_examples=50, deadline=None)
def test_translations_come_back_in_order_from_full_batches(lengths: list[int], limit: int, more: int) -> None:
    random = np.random.default_rng(0)
    sources = [random.integers(4, 13, size=length).astype(np.int32) for length in lengths]
    model, counted, batches = Table(vocab_size=13), list[int](), list[list[int]]()
    start = model.start
    model.start = lambda source, offsets: batches.append(offsets.diff().tolist()) or start(source, offsets)
    hardware = dataclasses.replace(HARDWARE, accelerator="gpu" if more else "cpu", tokens_per_search=limit)
    ours = search.search(model, sources, DECODING, hardware, counted.append)
    assert sum(counted) == len(sources)
    assert 0 not in counted
    # Longest first, EOS counted, as many as fit and at least one
    assert [*chain(*batches)] == sorted((length + 1 for length in lengths if length), reverse=True)
    assert all(len(batch) == 1 or len(batch) * (batch[0] + more) <= limit for batch in batches)
    assert all((len(batch) + 1) * (batch[0] + more) > limit for batch in batches[:-1])
    for source, hypothesis in zip(sources, ours, strict=True):
        if len(source):
            ids = torch.tensor([*source.tolist(), EOS])
            (alone,) = beam_search(model, ids, torch.tensor([0, len(ids)]), **OPTIONS, bos=BOS, eos=EOS)
            assert_same(hypothesis, alone, tolerance=1e-12)
        else:
            assert hypothesis == Hypothesis([], 0.0, finished=True)


def test_a_signal_waits_for_no_thread_that_searches():
    """It comes to the main thread, while another is amid a step that takes minutes."""
    model, released, ended = Table(vocab_size=13), threading.Event(), list[bool]()
    start = model.start

    def slow(source: torch.Tensor, offsets: torch.Tensor) -> Any:
        if len(source) == 3:
            ended.append(released.wait(60))
        return start(source, offsets)

    model.start = slow
    sources, leave = [np.full(length, 5, np.int32) for length in (2, 9)], Mock(side_effect=Interrupted)
    with pytest.raises(Interrupted):
        search.search(model, sources, DECODING, dataclasses.replace(HARDWARE, tokens_per_search=1, threads=2), leave)
    assert ended == []
    released.set()


@pytest.fixture
def decoder_and_sources(finished):
    """The trained run, its decoder and the test set's sources."""
    run = compose.compose_row(*finished)
    model, dataset, *_ = trained(run)
    pairs = dataset.pairs("test")
    return run, search.decoder_of(model), [ids[:-1] for ids in np.split(pairs.source_ids, pairs.source_offsets[1:-1])]


def test_two_threads_find_the_bits_of_one(decoder_and_sources):
    (run, decoder, sources), counted, found = decoder_and_sources, [], []
    for threads in (1, 2):
        hardware = dataclasses.replace(run.hardware, tokens_per_search=31, threads=threads)
        found.append(search.search(decoder, sources, run.decoding, hardware, counted.append))
    assert found[0] == found[1]
    assert len({tuple(hypothesis.ids) for hypothesis in found[0]}) > 3
    assert sum(counted) == 2 * len(sources)
    decoding = dataclasses.replace(run.decoding, length_penalty=2.0)  # what the run says reaches the search
    assert search.search(decoder, sources, decoding, hardware) != found[0]


def test_a_search_in_fewer_bits_finds_almost_the_same(decoder_and_sources):
    run, decoder, sources = decoder_and_sources
    full, fewer = (
        search.search(decoder, sources, dataclasses.replace(run.decoding, precision=precision), run.hardware)
        for precision in (run.decoding.precision, "bf16")
    )
    # Near a tie, which bits decide, the beam keeps another hypothesis
    alike = [(one.score, other.score) for one, other in zip(full, fewer, strict=True) if one.ids == other.ids]
    assert len(alike) >= 0.8 * len(full)
    assert np.allclose(*zip(*alike, strict=True), rtol=0.1, atol=0.1)
    assert [one.score for one in full] != [other.score for other in fewer]  # control: it is another arithmetic


def test_on_a_gpu_outputs_count_too_and_memory_may_end(decoder_and_sources, monkeypatch):
    run, decoder, sources = decoder_and_sources
    monkeypatch.setattr(search, "beam_search", Mock(side_effect=torch.OutOfMemoryError))
    for accelerator, more in (("cpu", 1), ("gpu", 1 + run.decoding.max_extra)):
        hardware = dataclasses.replace(run.hardware, accelerator=accelerator, tokens_per_search=10**6)
        half = sum(len(ids) + more for ids in sources) // 2
        with pytest.raises(OutOfMemory, match=rf"^hardware\.tokens_per_search=1000000: .* give \S+={half}$"):
            search.search(decoder, sources, run.decoding, hardware)
