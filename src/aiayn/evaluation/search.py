"""The best translations of many sentences: batches of similar lengths, and a thread for each of a CPU's threads."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch

from aiayn.alternatives.recurrent import RecurrentDecoding, RecurrentModel, TranslationModel
from aiayn.config.schema import Decoding, Hardware
from aiayn.data.sentencepiece_bpe import BOS, EOS
from aiayn.paper.beam_search import Hypothesis, beam_search
from aiayn.paper.decoding import Decoder, TransformerDecoding
from aiayn.runs.models import within_memory


def decoder_of(model: TranslationModel) -> Decoder:
    """What a search asks for the model's next tokens; dropout is off from now on."""
    model.eval()
    if isinstance(model, RecurrentModel):
        return Decoder(model.embedding.weight.device, partial(RecurrentDecoding, model))
    return Decoder(model.embedding.weight.device, partial(TransformerDecoding, model))


def search(
    decoder: Decoder,
    sources: Sequence[np.ndarray],
    decoding: Decoding,
    hardware: Hardware,
    done: Callable[[int], None] | None = None,
) -> list[Hypothesis]:
    """The best hypothesis of each source's ids (without EOS), in order (section 6.1), whatever the hardware.

    Sentences of similar length are searched together, longest first, as many as `tokens_per_search` holds, at least
    one. `done` gets how many are done; an empty source is not asked about.
    """
    on_gpu, limit = hardware.accelerator == "gpu", hardware.tokens_per_search
    threads, done = 0 if on_gpu else hardware.threads, done or (lambda count: None)
    # What a GPU keeps of each hypothesis grows with its output, which may be long where the source is short
    more = 1 + (decoding.max_extra if on_gpu else 0)
    lengths = np.array([len(source) for source in sources], dtype=np.int64)
    rest, batches = np.argsort(-lengths, kind="stable")[: np.count_nonzero(lengths)], list[np.ndarray]()
    while len(rest):
        batch, rest = np.split(rest, [max(1, limit // (int(lengths[rest[0]]) + more))])
        batches.append(batch)

    options = {key: value for key, value in vars(decoding).items() if key != "precision"}

    def search_batch(batch: np.ndarray) -> list[Hypothesis]:
        packed = np.concatenate([part for number in batch for part in (sources[number], [EOS])])
        offsets = np.concatenate([[0], np.cumsum(lengths[batch] + 1)])
        ids = torch.from_numpy(packed).to(decoder.device)
        with torch.autocast(decoder.device.type, torch.bfloat16, enabled=decoding.precision == "bf16"):
            return beam_search(decoder, ids, torch.from_numpy(offsets), **options, bos=BOS, eos=EOS)

    hypotheses = [Hypothesis([], 0.0, finished=True)] * len(sources)
    if empty := int((lengths == 0).sum()):
        done(empty)
    # Each thread has its own setting. With threads=0 the calling thread searches, and a signal waits for its step
    pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) if threads else None
    holding = within_memory(hardware, "tokens_per_search", int(lengths.sum()) + more * len(lengths))
    try:
        with holding:
            for batch, best in zip(batches, (pool.map if pool else map)(search_batch, batches), strict=True):
                for number, hypothesis in zip(batch.tolist(), best, strict=True):
                    hypotheses[number] = hypothesis
                done(len(batch))
    finally:
        if pool:  # a signal comes to this thread, which waits for none that is amid a long step
            pool.shutdown(wait=False, cancel_futures=True)
    return hypotheses
