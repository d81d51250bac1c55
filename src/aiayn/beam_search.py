"""Beam search with the length penalty of Wu et al. (2016), many sentences at a time (section 6.1)."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from aiayn import kernels
from aiayn.decoding import Decoder

# S source tokens, packed; B sentences still searched; W alive hypotheses of each, best first; C candidates to go on
# with, best first; V vocabulary; L most tokens of an output

Batch = np.ndarray  # the numbers of sentences that are searched together
BLOCK = 100  # neighbours in the vocabulary; most vocabularies are multiples of it, and need no padding


@dataclass(frozen=True)
class Hypothesis:
    """One translation: tokens without BOS and EOS, log probability (of EOS too, if finished), score it is ranked by."""

    ids: list[int]
    log_probability: float
    score: float
    finished: bool


def penalty(length: Tensor | int, length_penalty: float) -> Tensor | float:
    """((5 + length) / 6) ** alpha, by which log probabilities are divided; the length counts EOS."""
    return ((5 + length) / 6) ** length_penalty


def best_reachable_score(log_probability: Tensor, longest_penalty: Tensor) -> Tensor:
    """Scores (B,) that no continuation exceeds: log probabilities only fall, no penalty is larger than (B,)."""
    return log_probability / longest_penalty


def best_continuations(logits: Tensor, alive: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `count` best of all continuations (B, W, V), or all if fewer: log probabilities, hypotheses, tokens (B, C).

    `alive` (B, W) are the log probabilities of what is continued.
    """
    width, words = logits.shape[1:]
    if words % BLOCK:
        logits = F.pad(logits, (0, -words % BLOCK), value=-torch.inf)
    blocks = logits.view(len(logits), width, -1, BLOCK)
    maxima = blocks.amax(3)  # (B, W, blocks)
    top = maxima.amax(2, keepdim=True)
    # On a CPU torch's exp takes four times as long as its exp2
    sums = (logits - top).mul_(math.log2(math.e)).exp2_().sum(2, keepdim=True)
    offsets = alive.unsqueeze(2) - top - sums.log()  # (B, W, 1) from logits to log probabilities of it all
    # The best pairs lie in the blocks with the best maxima: topk is slow on a CPU, so it sees these, not all pairs
    reached = (maxima + offsets).flatten(1)  # (B, W * blocks)
    chosen = reached.topk(min(count, reached.size(1)), sorted=False).indices  # (B, blocks chosen)
    of = chosen // maxima.size(2)
    pairs = blocks.flatten(1, 2).gather(1, chosen.unsqueeze(2).expand(-1, -1, BLOCK))
    pairs = (pairs + offsets.gather(1, of.unsqueeze(2))).flatten(1)
    best, position = pairs.topk(min(count, width * words))
    block = position // BLOCK
    tokens = chosen.gather(1, block) % maxima.size(2) * BLOCK + position % BLOCK
    # Of hypotheses that no longer count, all pairs are equal, those beyond the vocabulary too
    return best, of.gather(1, block), tokens.clamp_(max=words - 1)


@torch.inference_mode()
def beam_search(
    decoder: Decoder,
    source: Tensor,
    source_offsets: Tensor,
    *,
    beam_size: int,
    length_penalty: float,
    max_extra: int,
    bos: int,
    eos: int,
) -> list[Hypothesis]:
    """The best hypothesis of each sentence of `source` (S,), in order; `source_offsets` is (B + 1,).

    A sentence is left when nothing alive can beat its best finished hypothesis, so stopping early changes no result.
    Where none has finished at the limit, the best alive one is returned.
    """
    assert min(beam_size - 1, length_penalty, max_extra) >= 0, "alpha < 0, too, would make the early stop inexact"
    # Paper: "input length + 50" (6.1) is silent about EOS: counted on both sides, as in the released code
    limits = source_offsets.diff() + max_extra  # (B,)
    longest = int(limits.max())
    limits = limits.to(source.device)
    # Paper: silent; as in the released code 2W candidates, so that W go on even if W end, and greedy search for W = 1
    num_candidates = 2 * beam_size if beam_size > 1 else 1

    num_sentences, device = len(limits), source.device
    longest_penalty = torch.as_tensor(penalty(limits, length_penalty))  # (B,)
    continuations = kernels.best_continuations if decoder.compiled else best_continuations
    decoding = decoder.start(source, source_offsets)
    sentence = torch.arange(num_sentences, device=device)  # (B,) of the call, as sentences leave
    alive = torch.zeros(num_sentences, 1, device=device)  # (B, W) log probabilities
    token = torch.full((num_sentences, 1), bos, device=device)  # (B, W) the last one of each
    alive_ids = torch.full((num_sentences, 1, longest), eos, device=device)  # (B, W, L) EOS wherever nothing stands yet
    # Only the best finished hypothesis matters: finished ones never take an alive one's place
    best = torch.full((num_sentences,), -torch.inf, device=device)  # (B,) log probability
    best_score = best.clone()  # (B,)
    best_ids = alive_ids[:, 0]  # (B, L)
    result: dict[int, Hypothesis] = {}

    for length in range(1, longest + 1):
        logits = decoding.step(token)  # (B, W, V)
        # Paper: silent; as in the released code no token is forbidden
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        candidates, parent, token = continuations(logits, alive, num_candidates)
        ended = token == eos
        if ended.any():
            finished, position = candidates.masked_fill(~ended, -torch.inf).max(1)  # (B,)
            score = finished / penalty(length, length_penalty)
            better = score > best_score
            best_score, best = score.where(better, best_score), finished.where(better, best)
            row = torch.arange(len(sentence), device=device)  # (B,)
            best_ids = alive_ids[row, parent[row, position]].where(better.unsqueeze(1), best_ids)
            candidates, position = candidates.masked_fill(ended, -torch.inf).sort(1, descending=True)
            parent, token = parent.gather(1, position), token.gather(1, position)
        # Fewer than W go on only where too few candidates exist; the rest has log probability -inf and never returns
        alive, parent, token = candidates[:, :beam_size], parent[:, :beam_size], token[:, :beam_size]  # (B, W)
        if beam_size > 1:
            alive_ids = alive_ids.gather(1, parent.unsqueeze(2).expand(-1, -1, longest))
        alive_ids[..., length - 1] = token

        leaves = (best_score >= best_reachable_score(alive[:, 0], longest_penalty)) | (limits == length)
        gone = leaves.nonzero().squeeze(1)  # asked once: a mask would be counted anew, and a GPU waited for, each time
        if len(gone):
            unfinished = best_score[gone].isneginf()
            log_probability = alive[gone, 0].where(unfinished, best[gone])
            score = (alive[gone, 0] / penalty(length, length_penalty)).where(unfinished, best_score[gone])
            ids = alive_ids[gone, 0].where(unfinished.unsqueeze(1), best_ids[gone])
            columns = (x.tolist() for x in (sentence[gone], ids, log_probability, score, ~unfinished))
            for number, tokens, *rest in zip(*columns, strict=True):
                result[number] = Hypothesis(tokens[: [*tokens, eos].index(eos)], *rest)
            if len(result) == num_sentences:
                break
            stays = (~leaves).nonzero().squeeze(1)
            decoding.keep(stays)
            limits, longest_penalty, sentence, best, best_score = (
                x[stays] for x in (limits, longest_penalty, sentence, best, best_score)
            )
            best_ids, alive, alive_ids, parent, token = (x[stays] for x in (best_ids, alive, alive_ids, parent, token))
        if beam_size > 1:
            decoding.reorder(parent)
    return [result[number] for number in range(num_sentences)]


def translate_ids(
    decoder: Decoder,
    sources: Sequence[np.ndarray],
    *,
    tokens_per_batch: int,
    beam_size: int,
    length_penalty: float,
    max_extra: int,
    bos: int,
    eos: int,
    progress: Callable[[int], None] | None = None,
    of_each: Callable[[Callable[[Batch], list[Hypothesis]], list[Batch]], Iterable[list[Hypothesis]]] = map,
) -> list[Hypothesis]:
    """The best hypothesis of each source (ids without EOS), in order; an empty source is not asked about.

    Sentences of similar length are searched together, longest first, as many as `tokens_per_batch` source tokens hold,
    EOS and padding counted, but always one. `progress` is told how many more sentences are done; `of_each` is `map`,
    or does what it does in another way.
    """
    lengths = np.array([len(source) for source in sources], dtype=np.int64)
    batches = _batches(lengths, tokens_per_batch)

    def search(batch: Batch) -> list[Hypothesis]:
        packed = np.concatenate([part for number in batch for part in (sources[number], [eos])])
        offsets = np.concatenate([[0], np.cumsum(lengths[batch] + 1)])
        return beam_search(
            decoder,
            torch.from_numpy(packed).to(decoder.device),
            torch.from_numpy(offsets),
            beam_size=beam_size,
            length_penalty=length_penalty,
            max_extra=max_extra,
            bos=bos,
            eos=eos,
        )

    hypotheses = [Hypothesis([], 0.0, 0.0, finished=True)] * len(sources)
    empty = len(sources) - int(np.count_nonzero(lengths))
    if progress is not None and empty:
        progress(empty)
    for batch, found in zip(batches, of_each(search, batches), strict=True):
        for number, hypothesis in zip(batch.tolist(), found, strict=True):
            hypotheses[number] = hypothesis
        if progress is not None:
            progress(len(batch))
    return hypotheses


def _batches(lengths: np.ndarray, tokens_per_batch: int) -> list[Batch]:
    order = np.argsort(-lengths, kind="stable")[: np.count_nonzero(lengths)]
    batches, position = [], 0
    while position < len(order):
        longest = int(lengths[order[position]]) + 1
        batches.append(order[position : position + max(1, tokens_per_batch // longest)])
        position += len(batches[-1])
    return batches
