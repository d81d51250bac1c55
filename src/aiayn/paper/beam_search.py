"""Beam search with the length penalty of Wu et al. (2016), many sentences at a time (section 6.1)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from aiayn.paper.decoding import Decoder

# S source tokens, packed; B sentences still searched; W alive hypotheses of each, best first; C candidates to continue
# with, best first; V vocabulary; L most tokens of an output


@dataclass(frozen=True)
class Hypothesis:
    """One translation: tokens without BOS and EOS, and the score that it is ranked by (with EOS's, if finished)."""

    ids: list[int]
    score: float
    finished: bool


def penalty(length: Tensor | int, length_penalty: float) -> Tensor | float:
    """((5 + length) / 6) ** alpha, by which log probabilities are divided; the length counts EOS."""
    # Paper: names alpha = 0.6 and Wu et al. 2016, whose formula this is (6.1)
    return ((5 + length) / 6) ** length_penalty


class Beam:
    """The state of a search: of B sentences the W alive hypotheses, and the best finished one."""

    def __init__(self, limits: Tensor, beam_size: int, length_penalty: float, bos: int, eos: int) -> None:
        num_sentences, device = len(limits), limits.device
        self.beam_size, self.length_penalty, self.eos, self.limits = beam_size, length_penalty, eos, limits
        # Paper: silent; as in the released code 2W candidates, so that W go on even if W end, and greedy search for W=1
        self.num_candidates = 2 * beam_size if beam_size > 1 else 1
        self.longest_penalty = torch.as_tensor(penalty(limits, length_penalty))  # (B,)
        self.sentence = torch.arange(num_sentences, device=device)  # (B,) its number in the call
        self.length = 0
        self.alive = torch.zeros(num_sentences, 1, device=device)  # (B, W) log probabilities
        self.token = torch.full((num_sentences, 1), bos, device=device)  # (B, W) the last one of each
        self.parent = torch.zeros_like(self.token)  # (B, W) the hypothesis of the step before that it continues
        # (B, W, L) of each alive hypothesis, EOS after its end
        self.alive_ids = torch.full((num_sentences, 1, int(limits.max())), eos, device=device)
        # Only the best finished hypothesis matters: finished ones never take an alive one's place
        self.best_score = torch.full((num_sentences,), -torch.inf, device=device)  # (B,)
        self.best_ids = self.alive_ids[:, 0]  # (B, L)

    def extend(self, logits: Tensor) -> None:
        """Continues the alive hypotheses by one token with logits (B, W, V); those that end become finished."""
        self.length += 1
        # Paper: silent; as in the released code no token is forbidden
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        continued = (self.alive.unsqueeze(2) + logits.log_softmax(2)).flatten(1)  # (B, W * V)
        candidates, place = continued.topk(min(self.num_candidates, continued.size(1)))  # (B, C)
        parent, token = place // logits.size(2), place % logits.size(2)
        ended = token == self.eos
        if ended.is_cuda or ended.any():  # a GPU would be waited for
            self._finish(candidates.masked_fill(~ended, -torch.inf), parent)
            candidates, position = candidates.masked_fill(ended, -torch.inf).sort(1, descending=True)
            parent, token = parent.gather(1, position), token.gather(1, position)
        # Fewer than W go on only where too few candidates exist; the rest has log probability -inf and never returns
        self.alive, self.parent, self.token = (x[:, : self.beam_size] for x in (candidates, parent, token))
        if self.beam_size > 1:
            length = self.alive_ids.size(2)
            self.alive_ids = self.alive_ids.gather(1, self.parent.unsqueeze(2).expand(-1, -1, length))
        self.alive_ids[..., self.length - 1] = self.token

    def _finish(self, candidates: Tensor, parent: Tensor) -> None:
        """Keeps the best of the finished candidates (B, C) where it beats the best so far."""
        finished, position = candidates.max(1)  # (B,)
        score = finished / penalty(self.length, self.length_penalty)
        better = score > self.best_score
        self.best_score = score.where(better, self.best_score)
        row = torch.arange(len(parent), device=parent.device)  # (B,)
        ids = self.alive_ids[row, parent[row, position]]
        self.best_ids = ids.where(better.unsqueeze(1), self.best_ids)

    def is_decided(self) -> Tensor:
        """(B,): whether nothing alive can beat the best finished hypothesis, or the limit is reached."""
        # No continuation exceeds it: log probabilities only fall, and no penalty is larger
        reachable = self.alive[:, 0] / self.longest_penalty
        return (self.best_score >= reachable) | (self.limits == self.length)

    def hypotheses(self, rows: Tensor) -> list[tuple[int, Hypothesis]]:
        """Number and best hypothesis of the sentences in these rows; the best alive one where none has finished."""
        unfinished = self.best_score[rows].isneginf()
        score = self.alive[rows, 0] / penalty(self.length, self.length_penalty)
        score = score.where(unfinished, self.best_score[rows])
        ids = self.alive_ids[rows, 0].where(unfinished.unsqueeze(1), self.best_ids[rows])
        columns = (x.tolist() for x in (self.sentence[rows], ids, score, ~unfinished))
        return [
            (number, Hypothesis(tokens[: [*tokens, self.eos].index(self.eos)], *rest))
            for number, tokens, *rest in zip(*columns, strict=True)
        ]

    def keep(self, rows: Tensor) -> None:
        """Only the sentences in these rows (B',) stay."""
        of_sentences = ("limits", "longest_penalty", "sentence", "best_score", "best_ids")
        for name in (*of_sentences, "alive", "alive_ids", "parent", "token"):
            setattr(self, name, getattr(self, name)[rows])


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
    limits = (source_offsets.diff() + max_extra).to(source.device)  # (B,)
    beam = Beam(limits, beam_size, length_penalty, bos, eos)
    decoding = decoder.start(source, source_offsets)
    found: dict[int, Hypothesis] = {}
    while True:
        beam.extend(decoding.step(beam.token))
        decided = beam.is_decided()
        # One transfer to the host: a boolean mask would be counted again at each use, and a GPU waited for
        rows = decided.nonzero().squeeze(1)
        if len(rows):
            found.update(beam.hypotheses(rows))
            if len(found) == len(limits):
                return [found[number] for number in range(len(limits))]
            rest = (~decided).nonzero().squeeze(1)
            beam.keep(rest)
            decoding.keep(rest)
        if beam_size > 1:
            decoding.reorder(beam.parent)
