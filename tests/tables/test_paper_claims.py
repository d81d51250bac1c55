"""The claims against scipy's own tests, corrected for their number, and never from one seed."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats

from aiayn.config import compose
from aiayn.config.schema import Config
from aiayn.evaluation.metrics import paper_counts
from aiayn.tables import paper_claims
from aiayn.tables.paper_claims import CLAIMS, Claim, Finding
from aiayn.tables.table3 import Table
from tests.tables.test_formats import table as made_up

WORDS = ["der", "die", "das", "ein", "eine", "Licht", "Raum", "Haus", "Tür", "Fenster", "an", "aus", "auf", "zu"]


def differing(row: str, by: float, size: float, of_row: float = 1.0) -> Table:
    """Five seeds: perplexities equal but for noise, of one row `of_row` times as much and so many nats; equal BLEU."""
    random = np.random.default_rng(13)

    def ppl(config: Config, _: int) -> float:
        noise, is_row = random.normal(0, size), config.experiment == row
        return 30 * math.exp(noise * (of_row if is_row else 1) + by * is_row)

    return made_up(seeds=range(5), ppl=ppl, bleu=lambda *_: 20.0)


def like_the_paper(seeds: int, size: float = 0.002) -> Table:
    """The paper's own figures with a little noise."""
    random = np.random.default_rng(7)
    return made_up(
        seeds=range(1, seeds + 1),
        ppl=lambda row, _: row.paper.ppl * math.exp(random.normal(0, size)),
        bleu=lambda row, _: row.paper.bleu + random.normal(0, size),
    )


def counts_like(scores: Mapping[str, float]) -> dict[tuple[str, int], npt.NDArray[np.int64]]:
    """Of translations of 211 made-up sentences that lose words: the more BLEU, the fewer; each seed loses others."""
    random = np.random.default_rng(3)
    sentences, lots = random.choice(WORDS, size=(211, 17)), random.random((3, 211, 17))

    def counts(score: float, seed: int) -> npt.NDArray[np.int64]:
        kept = zip(sentences, lots[seed - 1] < 0.5 + score / 60, strict=True)
        return paper_counts([" ".join(line[mask]) for line, mask in kept], list(map(" ".join, sentences)), "de")

    return {(row, seed): counts(score, seed) for row, score in scores.items() for seed in (1, 2, 3)}


@pytest.fixture(scope="module")
def papers_counts() -> dict[tuple[str, int], npt.NDArray[np.int64]]:
    return counts_like({row: line.paper.bleu for row, line in compose.rows().items()})


def test_the_papers_figures_reproduce_every_claim(papers_counts) -> None:
    found = paper_claims.check(like_the_paper(3), papers_counts)
    undecided = {(f.claim.sentence, f.claim.metric) for f in found if f.verdict != "reproduced"}
    # Equality of BLEU asks for more sentences than these, every other claim is decided
    assert undecided <= {("Learned positions are as good as sinusoids", "BLEU")}


def test_the_contrary_contradicts_every_claim_in_perplexity() -> None:
    random, worse = np.random.default_rng(11), {"e_learned_positions": 1.5}
    turned = made_up(
        seeds=(1, 2, 3),
        ppl=lambda row, _: 25 / row.paper.ppl * math.exp(random.normal(0, 0.002)) * worse.get(row.experiment, 1),
    )
    assert {f.verdict for f in paper_claims.check(turned, {}) if f.claim.metric == "PPL"} == {"contradicted"}


def test_one_seed_is_no_verdict_however_large_the_effect(papers_counts) -> None:
    found = paper_claims.check(like_the_paper(1), papers_counts)
    assert {f.verdict for f in found} == {"undecided"}
    assert all("two seeds of each row" in f.because and f.p is None and f.effect is not None for f in found)
    assert "reproduced" in {f.verdict for f in paper_claims.check(like_the_paper(2), papers_counts)}  # control


def test_several_rows_are_compared_by_a_least_squares_slope() -> None:
    made = like_the_paper(3, 0.1)
    lines = {line.name: line for line in made.lines}
    layers = next(h for h in CLAIMS if h.size == "num_layers" and h.metric == "BLEU")
    x = np.log([lines[row].config.model.num_layers for row in layers.rows])
    y = [lines[row].measured("dev.bleu.paper").mean for row in layers.rows]  # type: ignore[union-attr]
    effect = next(f.effect for f in paper_claims.check(made, {}) if f.claim == layers)
    assert effect == pytest.approx(stats.linregress(x, y).slope * (x.max() - x.min()), rel=1e-9)


@pytest.mark.parametrize(
    ("apart", "verdict"), [(0.0, "reproduced"), (0.028, "reproduced"), (0.036, "contradicted"), (-0.1, "contradicted")]
)
def test_equality_is_tested_as_such(apart: float, verdict: str) -> None:
    made = differing("e_learned_positions", apart, 0.0005)
    (found,) = (f for f in paper_claims.check(made, {}) if f.claim.equal and f.claim.metric == "PPL")
    assert found.verdict == verdict


@pytest.mark.parametrize("alike", [True, False])
def test_a_p_value_is_two_sided_and_welchs_if_rows_differ(alike: bool) -> None:
    """Of two rows alone, so that one claim is tested and nothing is corrected."""
    made = differing("d_dropout00", 0.04, 0.02) if alike else differing("d_dropout00", 0.4, 0.02, 7)
    seeds = {"d_dropout00": 4, "base": 5}
    kept = tuple(dataclasses.replace(line, runs=line.runs[: seeds.get(line.name, 0)]) for line in made.lines)
    (found,) = [f for f in paper_claims.check(dataclasses.replace(made, lines=kept), {}) if f.p is not None]
    base, row = ([math.log(ppl) for ppl in line.values("dev.ppl")] for line in kept if line.runs)
    theirs = stats.ttest_ind(row, base, equal_var=alike)
    assert (stats.bartlett(row, base).pvalue > 0.05) == alike
    assert 0.001 < theirs.pvalue < 0.5
    assert found.p == pytest.approx(theirs.pvalue, rel=1e-9)
    assert found.interval == pytest.approx(tuple(theirs.confidence_interval(0.95)), rel=1e-9)


def test_the_seeds_of_all_rows_tell_how_far_seeds_spread() -> None:
    *lines, big = like_the_paper(2, 0.05).lines
    made = dataclasses.replace(like_the_paper(2, 0.05), lines=(*lines, dataclasses.replace(big, runs=big.runs[:1] * 2)))
    found = next(f for f in paper_claims.check(made, {}) if f.claim.rows == ("d_dropout00", "base"))
    logs = {line.name: np.log(line.values("dev.ppl")) for line in made.lines}
    squares = sum(((values - values.mean()) ** 2).sum() for values in logs.values())
    half = stats.t(19).ppf(0.975) * math.sqrt(squares / 19 * (1 / 2 + 1 / 2))  # big's seeds, all alike, do not count
    effect = logs["d_dropout00"].mean() - logs["base"].mean()
    assert found.interval == pytest.approx((effect - half, effect + half), rel=1e-9)


def test_p_values_are_corrected_for_their_number() -> None:
    made = like_the_paper(3, 0.05)
    found = [f for f in paper_claims.check(made, {}) if f.p is not None]
    alone = [paper_claims.check(made, {}, [f.claim])[0].p for f in found]
    assert [f.p for f in found] == pytest.approx(stats.false_discovery_control(alone).tolist())
    assert [f.p for f in found] != pytest.approx(alone)  # control


@pytest.mark.parametrize(("claim", "outside"), [(CLAIMS[0], 2.5), (CLAIMS[-1], 5.0)])
def test_interval_over_sentences_is_95_and_for_equality_90(papers_counts, claim, outside) -> None:
    """Two one-sided tests at 5 % each leave out 5 % on either side."""
    assert (claim.metric, claim.equal) == ("BLEU", outside == 5.0)
    found = next(f for f in paper_claims.check(like_the_paper(3), papers_counts) if f.claim == claim)
    number = len(papers_counts["base", 1])
    draws = np.random.default_rng(37).multinomial(number, np.full(number, 1 / number), 4000)

    def resampled(row: str) -> npt.NDArray[np.float64]:
        of_seeds = [[paper_claims.bleu_of_counts(n @ papers_counts[row, seed]) for n in draws] for seed in (1, 2, 3)]
        return np.mean(of_seeds, 0)

    worse, better = map(resampled, claim.rows)
    widths = {share: np.ptp(np.percentile(better - worse, [share, 100 - share])) for share in (2.5, 5.0)}
    assert np.ptp(found.sentences) == pytest.approx(widths[outside], rel=0.07)
    assert np.ptp(found.sentences) != pytest.approx(widths[7.5 - outside], rel=0.07)  # control: they can be told apart


def test_a_verdict_on_bleu_needs_enough_sentences(papers_counts) -> None:
    few = {key: counts[:5] for key, counts in papers_counts.items()}
    contrary = made_up(seeds=(1, 2, 3), bleu=lambda row, seed: 50 - row.paper.bleu + 0.01 * seed)
    for made in (like_the_paper(3), contrary):
        found = [f for f in paper_claims.check(made, few) if f.claim.metric == "BLEU"]
        assert any(f.verdict == "undecided" and "larger dev set" in f.because for f in found)
        assert "contradicted" not in {f.verdict for f in found}


def test_missing_translations_give_no_interval_over_sentences(papers_counts) -> None:
    claims = [CLAIMS[0], CLAIMS[2]]
    assert [(claim.metric, claim.rows) for claim in claims] == [("BLEU", ("a_h1", "base")), ("BLEU", ("a_h32", "base"))]
    torn = {key: counts for key, counts in papers_counts.items() if key != ("a_h1", 2)}
    for counts, known in ((torn, False), (papers_counts, True)):  # the second is the control
        single_head, many_heads = paper_claims.check(like_the_paper(3), counts, claims)
        assert (single_head.sentences is not None) is known
        assert single_head.verdict == ("reproduced" if known else "undecided")
        assert many_heads.sentences is not None


def test_spearmans_rho_with_ties_is_the_one_counted_by_hand() -> None:
    paper = [1.0, 1.0, 2.0, 3.0, 4.0, 5.0, 5.0, 5.0, 6.0, 7.0]
    ours = [2.0, 1.0, 3.0, 3.0, 9.0, 4.0, 5.0, 6.0, 8.0, 7.0]
    # Ranks 1.5 1.5 3 4 5 7 7 7 9 10 and 2 1 3.5 3.5 10 5 6 7 9 8. Around their mean 5.5 the products sum to
    # 14 + 18 + 5 + 3 - 2.25 - 0.75 + 0.75 + 2.25 + 12.25 + 11.25 = 63.5, the squares to 80 and 82
    rho, *_ = paper_claims.correlation(paper, [[value] for value in ours])
    assert rho == pytest.approx(63.5 / math.sqrt(80 * 82), rel=1e-12)
    assert rho != pytest.approx(1 - 6 * 35 / 990, abs=1e-3)  # control: the formula that knows no ties


def test_only_seeds_that_differ_widen_the_interval() -> None:
    paper = np.array([row.paper.ppl for row in compose.rows().values()])
    means = paper + np.random.default_rng(41).normal(0, 0.2, len(paper))
    one, copies, spread = (
        np.ptp(paper_claims.correlation(paper.tolist(), np.add.outer(means, shifts).tolist())[1:])
        for shifts in ((0.0,), (0.0, 0.0, 0.0), (-1.0, 0.0, 1.0))
    )
    assert copies == pytest.approx(one, abs=0.02)
    assert spread > one + 0.05


def test_a_claims_effect_is_in_bleu_or_percent_of_perplexity() -> None:
    expected: dict[Any, list[str]] = {
        "BLEU": ["+0.50", "+0.10", "−0.10 to +0.30", "+0.05 to +0.15", "< 0.001"],
        # Of a perplexity of 100, what is gained by so many nats: 100 (1 - exp(-0.5)) = 39.3, and so on
        "PPL": ["+39.3 %", "+9.5 %", "−10.5 % to +25.9 %", "+4.9 % to +13.9 %", "< 0.001"],
    }
    for metric, texts in expected.items():
        claim = Claim("", metric, ("c_n2", "base"))
        found = Finding(claim, 0.5, 0.1, (-0.1, 0.3), (0.05, 0.15), 0.0009, "reproduced", "")
        assert [found.texts[key] for key in ("paper", "ours", "interval", "sentences", "p")] == texts
