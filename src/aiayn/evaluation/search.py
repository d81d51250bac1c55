"""The best translations of many sentences: batches of similar lengths, and a thread for each of a CPU's threads."""

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from aiayn.alternatives.recurrent import RecurrentDecoder, RecurrentModel, TranslationModel
from aiayn.config.schema import Decoding, Hardware
from aiayn.data.sentencepiece_bpe import BOS, EOS
from aiayn.paper.beam_search import Hypothesis, beam_search
from aiayn.paper.decoding import Decoder, TransformerDecoder
from aiayn.runs.models import within_memory


def search(
    model: TranslationModel,
    sources: Sequence[np.ndarray],
    decoding: Decoding,
    hardware: Hardware,
    done: Callable[[int], None] | None = None,
) -> list[Hypothesis]:
    """The best translation of each sentence's ids, in order (section 6.1), whatever the hardware."""
    options = dataclasses.asdict(decoding)
    precision = options.pop("precision")
    model.eval()
    decoder: Decoder = RecurrentDecoder(model) if isinstance(model, RecurrentModel) else TransformerDecoder(model)
    options |= {"bf16": precision == "bf16", "tokens_per_batch": hardware.tokens_per_search, "bos": BOS, "eos": EOS}
    options["threads"] = 0 if hardware.accelerator == "gpu" else hardware.threads
    # What a GPU keeps of each hypothesis grows with its output, which may be long where the source is short
    options["output_tokens"] = decoding.max_extra if hardware.accelerator == "gpu" else 0
    with within_memory(hardware, "tokens_per_search", sum(len(ids) + 1 + options["output_tokens"] for ids in sources)):
        return translate_ids(decoder, sources, **options, done=done)


def translate_ids(
    decoder: Decoder,
    sources: Sequence[np.ndarray],
    *,
    tokens_per_batch: int,
    eos: int,
    output_tokens: int = 0,
    bf16: bool = False,
    threads: int = 0,
    done: Callable[[int], None] | None = None,
    **options: Any,
) -> list[Hypothesis]:
    """The best hypothesis of each source (ids without EOS), in order; an empty source is not asked about.

    Sentences of similar length are searched together, longest first, as many as `tokens_per_batch` source tokens hold,
    EOS, padding and `output_tokens` counted, at least one. `done` gets how many are done; `options` are the search's.
    """
    lengths = np.array([len(source) for source in sources], dtype=np.int64)
    rest, batches = np.argsort(-lengths, kind="stable")[: np.count_nonzero(lengths)], list[np.ndarray]()
    while len(rest):
        batch, rest = np.split(rest, [max(1, tokens_per_batch // (int(lengths[rest[0]]) + output_tokens + 1))])
        batches.append(batch)

    def search_batch(batch: np.ndarray) -> list[Hypothesis]:
        packed = np.concatenate([part for number in batch for part in (sources[number], [eos])])
        offsets = np.concatenate([[0], np.cumsum(lengths[batch] + 1)])
        ids = torch.from_numpy(packed).to(decoder.device)
        with torch.autocast(decoder.device.type, torch.bfloat16, enabled=bf16):
            return beam_search(decoder, ids, torch.from_numpy(offsets), eos=eos, **options)

    hypotheses = [Hypothesis([], 0.0, 0.0, finished=True)] * len(sources)
    if done is not None and (empty := int((lengths == 0).sum())):
        done(empty)
    # Each thread has its own setting. With threads=0 the calling thread searches, and a signal waits for its step
    pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) if threads else None
    try:
        for batch, best in zip(batches, (pool.map if pool else map)(search_batch, batches), strict=True):
            for number, hypothesis in zip(batch.tolist(), best, strict=True):
                hypotheses[number] = hypothesis
            if done is not None:
                done(len(batch))
    finally:
        if pool:  # a signal comes to this thread, which waits for none that is amid a long step
            pool.shutdown(wait=False, cancel_futures=True)
    return hypotheses
