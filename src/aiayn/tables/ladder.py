"""Table 3 at several scales: each row's effect against the FLOPs of its training, beside the paper's own."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from aiayn.cost import flops
from aiayn.runs.records import look_up
from aiayn.tables.paper_claims import Finding, figures, rise
from aiayn.tables.table2 import papers_compute
from aiayn.tables.table3 import Line, Metric, Table

MIN_UPDATES = 100  # of base: with fewer the warm-up has hardly begun, and an effect says nothing

_MOST_TOKENS = 10**18  # a count beyond it is none of training


@dataclass(frozen=True)
class Effect:
    """A row's figure minus base's: in nats a token (ln PPL, lower is better) or in BLEU."""

    value: float
    interval: tuple[float, float] | None  # 95 % over seeds; None with fewer than two seeds of the row or of base
    compute: float | None  # mean FLOPs of training over the row's seeds; None when a run has no count of tokens


@dataclass(frozen=True)
class Rung:
    """The table of one scale and corpus, and what becomes of the paper's claims there."""

    table: Table
    subwords: int  # of the vocabulary
    lengths: tuple[float, float]  # token-weighted means of source and target sentences: what counts in attention
    findings: Sequence[Finding]

    @property
    def name(self) -> str:
        """Scale and corpus: `mini, tiny`."""
        return f"{self.table.scale.name}, {self.table.data}"

    @property
    def planned(self) -> float:
        """What the training of base computes in FLOPs, finished or not: a rung's place in the ladder."""
        training = self.table.base.trained.training
        tokens = training.max_steps * training.tokens_per_update
        return self._flops(self.table.base, tokens, tokens)

    def compute(self, line: Line) -> float | None:
        """What a row's training computed in FLOPs, from the tokens its updates held; the mean over its seeds."""
        tokens = [(look_up(result, "source_tokens"), look_up(result, "target_tokens")) for result in line.finished]
        counts = [count for pair in tokens for count in pair]
        if not counts or not all(isinstance(count, int) and 0 < count < _MOST_TOKENS for count in counts):
            return None
        return float(np.mean([self._flops(line, *pair) for pair in tokens]))

    def effect(self, line: Line, metric: Metric) -> Effect | None:
        """A row's effect; None of base itself, and where the row or base has no finished seed."""
        base = self.table.base
        samples = {row.name: figures(row, metric) for row in (line, base)}
        if line is base or not all(samples.values()):
            return None
        found = rise(samples, {base.name: -1.0, line.name: 1.0})
        value = float(np.mean(samples[line.name]) - np.mean(samples[base.name]))
        return Effect(value, found.interval if found else None, self.compute(line))

    def _flops(self, line: Line, source_tokens: float, target_tokens: float) -> float:
        rows = line.trained.fidelity.rows(self.subwords)
        return flops.training_flops(line.trained.model, rows, source_tokens, target_tokens, *self.lengths)


@dataclass(frozen=True)
class Ladder:
    """The rungs in the order of their compute."""

    rungs: tuple[Rung, ...]
    left_out: tuple[Rung, ...]  # base trains for fewer than `MIN_UPDATES`

    @classmethod
    def of(cls, rungs: Sequence[Rung]) -> "Ladder":
        """The ladder of these tables."""
        kept, left_out = list[Rung](), list[Rung]()
        for rung in sorted(rungs, key=lambda rung: rung.planned):
            (left_out if rung.table.base.trained.training.max_steps < MIN_UPDATES else kept).append(rung)
        return cls(tuple(kept), tuple(left_out))


def papers_effect(line: Line, base: Line, metric: Metric) -> Effect:
    """The effect in the paper's own figures, at the compute of the paper's own training."""
    own, theirs = line.papers(metric), base.papers(metric)
    value = math.log(own / theirs) if metric == "PPL" else own - theirs
    return Effect(value, None, papers_compute(line.config))
