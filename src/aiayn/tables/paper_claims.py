"""What sections 5.4 and 6.2 of the paper claim of Table 3, each sentence as a claim tested over seeds."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import stats

from aiayn.evaluation.metrics import bleu_of_counts
from aiayn.tables.table3 import KEYS, METRICS, TOLERANCES, Line, Metric, Table

Verdict = Literal["reproduced", "contradicted", "undecided"]

# Of the verdicts on a page so large a share may be wrong; as often may a confidence interval miss.
ERROR_RATE = 0.05
RESAMPLES = 1000
RANK_RESAMPLES = 5000  # these cost less, and two decimals are printed
MIN_ROWS = 10  # fewer rows say little of the order of twenty

Samples = Mapping[str, Sequence[float]]  # a figure of each row's seeds
Spread = tuple[float, int]  # the variance of a figure over seeds, and its degrees of freedom
Interval = tuple[float, float]
Counts = Mapping[tuple[str, int], npt.NDArray[np.int64]]  # `metrics.paper_counts` of each (row, seed), same sentences
Resampled = Mapping[str, npt.NDArray[np.float64]]  # each row's BLEU, the mean over its seeds, in resamples
Correlation = tuple[float, float, float]  # Spearman's rho between the paper's figures and ours, its 95 % interval


class Claim(NamedTuple):
    """That quality rises along `rows`, from the worst to the best, or, if `equal`, that it is the same."""

    sentence: str
    metric: Metric
    rows: tuple[str, ...]
    size: str | None = None  # the field of the model by whose logarithm the rise is measured; None for two rows
    equal: bool = False
    not_worse: bool = False  # of two rows, the second
    share: float = 1.0  # of the second row's BLEU, below which the first stays

    @property
    def sign(self) -> int:
        """Larger is better after it."""
        return 1 if self.metric == "BLEU" else -1

    @property
    def region(self) -> Interval:
        """The bounds of the rise where the claim holds, in BLEU or in nats per token; 4.92 is the paper's base."""
        margin = TOLERANCES["BLEU"] if self.metric == "BLEU" else math.log1p(TOLERANCES["PPL"] / 4.92)
        return -margin if self.equal or self.not_worse else 0.0, margin if self.equal else math.inf

    def weights(self, lines: Mapping[str, Line]) -> dict[str, float]:
        """What each row's mean counts for in the rise: of two rows their difference, of more the least-squares line."""
        if self.size is None:
            return dict(zip(self.rows, (-1.0, self.share), strict=True))
        x = np.log([getattr(lines[row].config.model, self.size) for row in self.rows])
        centred = x - x.mean()
        return dict(zip(self.rows, (centred / (centred @ centred) * (x.max() - x.min())).tolist(), strict=True))


def both(sentence: str, *rows: str, **fields: Any) -> list[Claim]:
    """The same claim of perplexity and of BLEU."""
    return [Claim(sentence, metric, rows, **fields) for metric in METRICS]


CLAIMS = (
    # 6.2: "While single-head attention is 0.9 BLEU worse than the best setting", which is base's, "quality also drops"
    Claim("Single-head attention is worse than the best number of heads", "BLEU", ("a_h1", "base")),
    *both("Quality drops off with too many heads", "a_h32", "base"),
    *both("A smaller attention key size d_k hurts", "b_dk16", "b_dk32", "base", size="d_k"),
    *both("Bigger is better: more layers N", "c_n2", "c_n4", "base", "c_n8", size="num_layers"),
    *both("Bigger is better: a wider d_model", "c_dmodel256", "base", "c_dmodel1024", size="d_model"),
    *both("Bigger is better: a wider d_ff", "c_dff1024", "base", "c_dff4096", size="d_ff"),
    *both("Dropout helps", "d_dropout00", "base"),
    # 5.4: "This hurts perplexity ... but improves accuracy and BLEU score"
    Claim("Label smoothing hurts perplexity", "PPL", ("base", "d_smoothing00")),
    Claim("Label smoothing helps BLEU", "BLEU", ("d_smoothing00", "base")),
    *both("Learned positions are as good as sinusoids", "base", "e_learned_positions", equal=True),
)


class Finding(NamedTuple):
    """What became of a claim. Effects are in BLEU or in nats per token, larger is better."""

    claim: Claim
    paper: float | None
    effect: float | None
    interval: Interval | None  # over seeds
    sentences: Interval | None  # BLEU only: paired bootstrap on the same sentences
    p: float | None  # after correction for the number of claims
    verdict: Verdict
    because: str

    @property
    def texts(self) -> dict[str, str]:
        """In words and figures, as a page or a table prints it: a gain in BLEU, or in percent of perplexity."""
        claim = self.claim

        def gain(*effects: float | None) -> str:
            known = [effect for effect in effects if effect is not None]
            percent = [f"{100 * -math.expm1(-effect):+.1f} %".replace("-", "−") for effect in known]
            return " to ".join(map(signed, known) if claim.metric == "BLEU" else percent) or "–"

        *lower, last = claim.rows
        sign = " = " if claim.equal else " ≤ " if claim.not_worse else " < "
        return {
            "sentence": claim.sentence,
            "rows": sign.join([*lower, last if claim.share == 1 else f"{claim.share:g} {last}"]),
            "metric": claim.metric,
            "paper": gain(self.paper),
            "ours": gain(self.effect),
            "interval": gain(*self.interval or ()),
            "sentences": gain(*self.sentences or ()) + (" (90 %)" if claim.equal and self.sentences else ""),
            "p": "–" if self.p is None else "< 0.001" if self.p < 0.001 else f"{self.p:.3f}",
            "verdict": self.verdict,
            "because": self.because,
        }


def signed(value: float) -> str:
    """A figure with its sign and two digits."""
    return f"{value:+.2f}".replace("-", "−")


def check(table: Table, counts: Counts, claims: Sequence[Claim] = CLAIMS) -> list[Finding]:
    """A finding on each claim about the rows; we judge a claim only if every row in it has at least two seeds."""
    lines = {line.name: line for line in table.lines}
    claims = [claim for claim in claims if lines.keys() >= set(claim.rows)]
    spreads = {metric: common_spread(table, metric) for metric in METRICS}
    rises = [rise(_samples(claim, lines), claim.weights(lines), spreads[claim.metric]) for claim in claims]
    evidence = [found and _p_values(claim, found) for claim, found in zip(claims, rises, strict=True)]
    # Two-sided and corrected together (Benjamini and Hochberg): of the verdicts at most 5 % are expected to be wrong
    known = [min(1.0, 2 * min(pair)) for pair in evidence if pair is not None]
    corrected = iter(stats.false_discovery_control(known).tolist() if known else [])
    runs = [(line.name, run.seed) for line in table.lines for run in line.runs if run.result]
    lacking = {key[0] for key in runs if key not in counts}
    resampled = _resampled({key: of_run for key, of_run in counts.items() if key[0] not in lacking})
    findings = []
    for claim, found, pair in zip(claims, rises, evidence, strict=True):
        weights, samples = claim.weights(lines), _samples(claim, lines)
        effect = _weighted(weights, samples) if all(samples.values()) else None
        sentences = _sentence_interval(claim, weights, resampled)
        paper, p = paper_effect(claim, lines), next(corrected) if pair else None
        interval = found and tuple(map(float, found.interval(1 - ERROR_RATE)))
        verdict = _verdict(claim, samples, pair, p, sentences)
        findings.append(Finding(claim, paper, effect, interval, sentences, p, *verdict))
    return findings


def rank_correlation(table: Table, metric: Metric) -> Correlation | None:
    """Spearman's rho between the paper's figures and ours over the finished rows; None below `MIN_ROWS` of them."""
    finished = [line for line in table.lines if line.values(KEYS[metric])]
    return correlation([line.papers(metric) for line in finished], [line.values(KEYS[metric]) for line in finished])


def correlation(paper: Sequence[float], samples: Sequence[Sequence[float]]) -> Correlation | None:
    """Spearman's rho of each row's value and its seeds' mean; None below `MIN_ROWS` rows, and where all are equal."""
    means = np.array([np.mean(sample) for sample in samples])
    if len(means) < MIN_ROWS or len(set(paper)) == 1 or len(set(means.tolist())) == 1:
        return None
    random = np.random.default_rng(0)  # percentile bootstrap over rows and, of each row drawn, its seeds
    rows = random.integers(len(means), size=(RANK_RESAMPLES, len(means)))
    # Each draw of a row draws its seeds anew: one column for each place in the resample
    drawn = np.empty(rows.shape)
    for row, sample in enumerate(samples):
        places = rows == row
        seeds = random.integers(len(sample), size=(int(places.sum()), len(sample)))
        drawn[places] = np.array(sample)[seeds].mean(1)
    ranks = [stats.zscore(stats.rankdata(values, axis=1), axis=1) for values in (np.array(paper)[rows], drawn)]
    resampled = (ranks[0] * ranks[1]).mean(1)  # NaN where a resample has one row alone, and so no order
    low, high = np.nanpercentile(resampled, [100 * ERROR_RATE / 2, 100 * (1 - ERROR_RATE / 2)])
    rho = float(stats.spearmanr(paper, means).statistic)
    # A row that is drawn twice is a tie, which pulls all resamples of a rho near 1 below it
    return rho, min(float(low), rho), max(float(high), rho)


def common_spread(table: Table, metric: Metric) -> Spread | None:
    """The spread of BLEU, or of ln PPL, that the rows share; None where Bartlett's test at 5 % denies that they do."""
    # Not of rows whose seeds are all alike, as at 0.0 BLEU
    samples = [sample for line in table.lines if len(set(sample := figures(line, metric))) > 1]
    variances, freedoms = [float(np.var(sample, ddof=1)) for sample in samples], [len(sample) - 1 for sample in samples]
    alike = len(samples) > 1 and stats.bartlett(*samples).pvalue >= ERROR_RATE
    return (float(np.average(variances, weights=freedoms)), sum(freedoms)) if alike else None


def rise(samples: Samples, weights: Mapping[str, float], common: Spread | None) -> Any:
    """Student's t, Welch's without a common spread, of the weighted sum of the samples' means; None without variance.

    Its `cdf(bound)` is the p-value against the sum being at most `bound`, `sf(bound)` that against at least.
    """
    if any(len(samples[row]) < 2 for row in weights) or all(len(set(samples[row])) == 1 for row in weights):
        return None
    spreads = {row: common or (float(np.var(samples[row], ddof=1)), len(samples[row]) - 1) for row in weights}
    parts = {row: weight**2 * spreads[row][0] / len(samples[row]) for row, weight in weights.items()}
    variance = sum(parts.values())
    # Welch and Satterthwaite: rows need not vary alike
    freedom = common[1] if common else variance**2 / sum(part**2 / spreads[row][1] for row, part in parts.items())
    return stats.t(freedom, _weighted(weights, samples), math.sqrt(variance))


def _weighted(weights: Mapping[str, float], samples: Samples) -> float:
    return sum(weight * float(np.mean(samples[row])) for row, weight in weights.items())


def unit(value: float, metric: Metric) -> float:
    """BLEU as it is, of PPL the logarithm: the same factor counts the same at every scale and with every vocabulary."""
    return value if metric == "BLEU" else math.log(max(value, 1e-9))


def figures(line: Line, metric: Metric) -> list[float]:
    """BLEU, or ln PPL, of each finished seed of a row."""
    return [unit(value, metric) for value in line.values(KEYS[metric])]


def _samples(claim: Claim, lines: Mapping[str, Line]) -> dict[str, list[float]]:
    return {row: [claim.sign * value for value in figures(lines[row], claim.metric)] for row in claim.rows}


def _p_values(claim: Claim, t: Any) -> tuple[float, float]:
    """For the paper's claim and for its contrary: to be between two bounds is to be above one and below the other."""
    low, high = claim.region
    inside, outside = max(t.cdf(low), t.sf(high)), min(t.sf(low), t.cdf(high))
    return float(inside), min(1.0, float(outside) * (2 if claim.equal else 1))


def paper_effect(claim: Claim, lines: Mapping[str, Line]) -> float | None:
    """The rise in published figures; None where one is missing, or where not all stand in one paper."""
    sources = {lines[row].source.partition(",")[0] for row in claim.rows}
    found = {row: lines[row].published(claim.metric) for row in claim.rows}
    known = {row: [claim.sign * unit(value, claim.metric)] for row, value in found.items() if value}
    return _weighted(claim.weights(lines), known) if len(sources) == 1 and len(known) == len(found) else None


def _verdict(
    claim: Claim, samples: Samples, evidence: tuple[float, float] | None, p: float | None, sentences: Interval | None
) -> tuple[Verdict, str]:
    if evidence is None or p is None:
        short = ", ".join(f"{row} has {len(of) or 'none'}" for row, of in samples.items() if len(of) < 2)
        needs = f"needs two seeds of each row: {short}"
        return "undecided", needs if short else "the seeds do not differ at all"
    for_it, seeds = evidence[0] < evidence[1], f"{min(map(len, samples.values()))} seeds a row"
    if p >= ERROR_RATE:
        return "undecided", f"{seeds} differ too much"
    if claim.metric == "BLEU" and sentences is None:
        return "undecided", "the prepared corpus, or the translations of some run, are not here to be resampled"
    if sentences is not None:
        (low, high), (least, most) = claim.region, sentences
        if not (low < least and most < high if for_it else most < low or least > high):
            return "undecided", "seeds decide, but not on this many sentences: a larger dev set would be needed"
    return "reproduced" if for_it else "contradicted", seeds


def _resampled(counts: Counts) -> Resampled:
    """In resamples of the sentences that are the same for all rows."""
    if not counts:
        return {}
    number = len(next(iter(counts.values())))
    draws = np.random.default_rng(0).multinomial(number, np.full(number, 1 / number), RESAMPLES)  # (R, sentences)
    rows: dict[str, list[list[float]]] = {}
    for (row, _seed), of_run in counts.items():
        rows.setdefault(row, []).append([bleu_of_counts(sums) for sums in draws @ of_run])
    return {row: np.mean(scores, 0) for row, scores in rows.items()}


def _sentence_interval(claim: Claim, weights: Mapping[str, float], resampled: Resampled) -> Interval | None:
    if claim.metric != "BLEU" or any(row not in resampled for row in weights):
        return None
    effects = np.sum([weight * resampled[row] for row, weight in weights.items()], 0)
    # An equivalence test at 5 % asks for the interval of 90 %
    outside = 100 * ERROR_RATE / (1 if claim.equal else 2)
    low, high = np.percentile(effects, [outside, 100 - outside])
    return float(low), float(high)
