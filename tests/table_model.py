"""A model whose every logit is known, for tests of searches."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from aiayn.paper.beam_search import Hypothesis

BOS, EOS = 2, 3


def prefix_hash(tokens: Sequence[int], state: int = 1) -> int:
    for token in tokens:
        state = (state * 31 + token + 7) % 10_007
    return state


class Table(torch.nn.Module):
    """A model that looks the next token's logits up by a hash of the source and the whole prefix."""

    def __init__(self, vocab_size: int, seed: int = 0, eos_bias: float = 0.0) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        self.table = torch.nn.Parameter(2 * torch.randn(10_007, vocab_size, generator=random, dtype=torch.float64))
        with torch.no_grad():
            self.table[:, EOS] += eos_bias
        self.steps = self.rows = 0
        self.device = self.table.device

    def start(self, source: Tensor, source_offsets: Tensor) -> TableDecoding:
        sentences = source.tensor_split(source_offsets[1:-1])
        return TableDecoding(self, torch.tensor([[prefix_hash(sentence.tolist())] for sentence in sentences]))

    def log_probabilities(self, source: Sequence[int], prefix: Sequence[int]) -> list[float]:
        logits = self.table[prefix_hash([BOS, *prefix], prefix_hash(source))]
        return logits.detach().log_softmax(-1).tolist()


class TableDecoding:
    def __init__(self, model: Table, state: Tensor) -> None:
        self.model, self.state = model, state  # (B, W)

    def step(self, tokens: Tensor) -> Tensor:
        assert tokens.shape == self.state.shape
        self.model.steps, self.model.rows = self.model.steps + 1, self.model.rows + len(tokens)
        self.state = (self.state * 31 + tokens + 7) % 10_007
        return self.model.table[self.state]

    def reorder(self, parents: Tensor) -> None:
        self.state = self.state.gather(1, parents)

    def keep(self, rows: Tensor) -> None:
        self.state = self.state[rows]


def assert_same(ours: Hypothesis, expected: Hypothesis, tolerance: float = 1e-5) -> None:
    assert (ours.ids, ours.finished) == (expected.ids, expected.finished)
    assert ours.score == pytest.approx(expected.score, rel=tolerance)
