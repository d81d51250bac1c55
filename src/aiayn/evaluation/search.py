"""The best translations of many sentences: batches of similar lengths, and a process for each thread of a CPU."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from aiayn.alternatives.recurrent import RecurrentDecoder, RecurrentModel, TranslationModel
from aiayn.config.schema import ConfigError, Decoding, Hardware
from aiayn.core import process_pool
from aiayn.data.sentencepiece_bpe import BOS, EOS
from aiayn.paper.beam_search import Hypothesis, beam_search
from aiayn.paper.fast import kernels
from aiayn.paper.fast.decoding import FastDecoder
from aiayn.paper.fast.model import can_accelerate
from aiayn.paper.fast.search import best_continuations
from aiayn.paper.incremental_decoding import Decoder, IncrementalDecoder

Indices = np.ndarray  # of sentences that are searched together


def can_search(decoding: Decoding) -> None:
    """Raises ConfigError where a C compiler is asked for and none works."""
    if decoding.compile:
        try:
            kernels.library()
        except ValueError as error:  # its own, of the compiler
            raise ConfigError(str(error)) from error


def search(
    model: TranslationModel,
    sources: list[Any],
    decoding: Decoding,
    hardware: Hardware,
    done: Callable[[int], None] | None = None,
) -> list[Hypothesis]:
    """The best translation of each sentence's ids, in order (section 6.1), whatever the hardware.

    One for each of a CPU's threads may search at once: as processes, with the bits of one. Raises what `can_search`
    does.
    """
    can_search(decoding)
    how = dataclasses.asdict(decoding)
    precision, compiled = how.pop("precision"), how.pop("compile")
    model.eval()
    kind = model.embedding.weight.device.type
    with torch.autocast(kind, torch.bfloat16, enabled=precision == "bf16"):
        if isinstance(model, RecurrentModel):
            decoder: Decoder = RecurrentDecoder(model)
        else:
            decoder = FastDecoder(model, compiled=compiled) if can_accelerate(model) else IncrementalDecoder(model)
        return translate_ids(
            decoder,
            sources,
            **how,
            continuations=kernels.best_continuations if compiled else best_continuations,
            tokens_per_batch=hardware.tokens_per_search,
            bos=BOS,
            eos=EOS,
            done=done,
            of_each=partial(process_pool.forked, processes=1 if hardware.accelerator == "gpu" else hardware.threads),
        )


def translate_ids(
    decoder: Decoder,
    sources: Sequence[np.ndarray],
    *,
    tokens_per_batch: int,
    eos: int,
    done: Callable[[int], None] | None = None,
    of_each: Callable[[Callable[[Indices], list[Hypothesis]], list[Indices]], Iterable[list[Hypothesis]]] = map,
    **how: Any,
) -> list[Hypothesis]:
    """The best hypothesis of each source (ids without EOS), in order; an empty source is not asked about.

    Sentences of similar length are searched together, longest first, as many as `tokens_per_batch` source tokens hold,
    EOS and padding counted, but always one. `done` gets how many more sentences are done; `of_each` is `map`, or does
    what it does in another way; `how` is for `beam_search`.
    """
    lengths = np.array([len(source) for source in sources], dtype=np.int64)
    batches = _batches(lengths, tokens_per_batch)

    def search(batch: Indices) -> list[Hypothesis]:
        packed = np.concatenate([part for number in batch for part in (sources[number], [eos])])
        offsets = np.concatenate([[0], np.cumsum(lengths[batch] + 1)])
        ids = torch.from_numpy(packed).to(decoder.device)
        return beam_search(decoder, ids, torch.from_numpy(offsets), eos=eos, **how)

    hypotheses = [Hypothesis([], 0.0, 0.0, finished=True)] * len(sources)
    empty = len(sources) - int(np.count_nonzero(lengths))
    if done is not None and empty:
        done(empty)
    for batch, found in zip(batches, of_each(search, batches), strict=True):
        for number, hypothesis in zip(batch.tolist(), found, strict=True):
            hypotheses[number] = hypothesis
        if done is not None:
            done(len(batch))
    return hypotheses


def _batches(lengths: np.ndarray, tokens_per_batch: int) -> list[Indices]:
    order = np.argsort(-lengths, kind="stable")[: np.count_nonzero(lengths)]
    batches, position = [], 0
    while position < len(order):
        longest = int(lengths[order[position]]) + 1
        batches.append(order[position : position + max(1, tokens_per_batch // longest)])
        position += len(batches[-1])
    return batches
