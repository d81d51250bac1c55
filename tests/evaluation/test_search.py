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
from aiayn.config.schema import OutOfMemory
from aiayn.core.signals import Interrupted
from aiayn.evaluation import search
from aiayn.paper.beam_search import Hypothesis, beam_search
from aiayn.runs.models import trained

OPTIONS: dict[str, Any] = {"beam_size": 4, "length_penalty": 0.6, "max_extra": 5, "bos": BOS, "eos": EOS}


@given(lengths=st.lists(st.integers(0, 11), max_size=17), tokens_per_batch=st.integers(1, 200), more=st.integers(0, 7))
@settings(max_examples=50, deadline=None)
def test_translations_come_back_in_order_from_full_batches(
    lengths: list[int], tokens_per_batch: int, more: int
) -> None:
    random = np.random.default_rng(0)
    sources = [random.integers(4, 13, size=length).astype(np.int32) for length in lengths]
    model, counted, batches = Table(vocab_size=13), list[int](), list[list[int]]()
    start = model.start
    model.start = lambda source, offsets: batches.append(offsets.diff().tolist()) or start(source, offsets)
    options = OPTIONS | {"tokens_per_batch": tokens_per_batch, "output_tokens": more}
    ours = search.translate_ids(model, sources, done=counted.append, **options)
    assert sum(counted) == len(sources)
    assert 0 not in counted
    # Longest first, EOS counted, as many as fit and at least one
    assert [*chain(*batches)] == sorted((length + 1 for length in lengths if length), reverse=True)
    assert all(len(batch) == 1 or len(batch) * (batch[0] + more) <= tokens_per_batch for batch in batches)
    assert all((len(batch) + 1) * (batch[0] + more) > tokens_per_batch for batch in batches[:-1])
    for source, hypothesis in zip(sources, ours, strict=True):
        if len(source):
            ids = torch.tensor([*source.tolist(), EOS])
            (alone,) = beam_search(model, ids, torch.tensor([0, len(ids)]), **OPTIONS)
            assert_same(hypothesis, alone, tolerance=1e-12)
        else:
            assert hypothesis == Hypothesis([], 0.0, 0.0, finished=True)


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
        search.translate_ids(model, sources, tokens_per_batch=1, threads=2, done=leave, **OPTIONS)
    assert ended == []
    released.set()


@pytest.fixture
def model_and_sources(finished):
    """The trained run, its model and the test set's sources."""
    run = compose.compose_row(*finished)
    model, dataset, *_ = trained(run)
    pairs = dataset.pairs("test")
    return run, model, [ids[:-1] for ids in np.split(pairs.source_ids, pairs.source_offsets[1:-1])]


def test_two_threads_find_the_bits_of_one(model_and_sources):
    run, model, sources = model_and_sources
    counted, found, decoder = [], [], search.TransformerDecoder(model)
    for threads in (1, 2):
        hardware = dataclasses.replace(run.hardware, tokens_per_search=31, threads=threads)
        found.append(search.search(model, sources, run.decoding, hardware, counted.append))
    assert found[0] == found[1]
    assert len({tuple(hypothesis.ids) for hypothesis in found[0]}) > 3
    assert sum(counted) == 2 * len(sources)
    for alpha in (run.decoding.length_penalty, 2.0):  # what the run says reaches the search
        decoding = dataclasses.replace(run.decoding, length_penalty=alpha)
        said = {key: value for key, value in vars(decoding).items() if key != "precision"}
        alone = search.translate_ids(decoder, sources, tokens_per_batch=31, threads=1, bos=BOS, eos=EOS, **said)
        assert search.search(model, sources, decoding, hardware) == alone
        assert (alone == found[0]) == (alpha != 2.0)


def test_a_search_in_fewer_bits_finds_almost_the_same(model_and_sources):
    run, model, sources = model_and_sources
    full, fewer = (
        search.search(model, sources, dataclasses.replace(run.decoding, precision=precision), run.hardware)
        for precision in (run.decoding.precision, "bf16")
    )
    # Near a tie, which bits decide, the beam keeps another hypothesis
    alike = [(one.score, other.score) for one, other in zip(full, fewer, strict=True) if one.ids == other.ids]
    assert len(alike) >= 0.8 * len(full)
    assert np.allclose(*zip(*alike, strict=True), rtol=0.1, atol=0.1)
    assert [one.score for one in full] != [other.score for other in fewer]  # control: it is another arithmetic


def test_on_a_gpu_outputs_count_too_and_memory_may_end(model_and_sources, monkeypatch):
    run, model, sources = model_and_sources

    def translate_ids(*_, output_tokens, **options):
        raise torch.OutOfMemoryError(f"CUDA out of memory; {output_tokens} more tokens")

    monkeypatch.setattr(search, "translate_ids", translate_ids)
    for hardware, more in ((run.hardware, 0), (compose.compose_row("hardware=gpu").hardware, run.decoding.max_extra)):
        with pytest.raises(OutOfMemory, match=r"^hardware\.tokens_per_search=\d+: .* give") as caught:
            search.search(model, sources, run.decoding, hardware)
        assert f"; {more} more" in str(caught.value.__cause__)
