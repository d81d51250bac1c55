"""The numbers of the table against independent recipes and sacrebleu."""

from __future__ import annotations

import math
import re
from collections import Counter

import numpy as np
import pytest
import sacrebleu
import sacremoses

from aiayn.evaluation.metrics import bleu, bleu_of_counts, paper_counts, paper_tokens, perplexity

REFERENCES = [
    "Die Katze sitzt auf der alten Matte.",
    "Das ist ein Rich-Text-Format, nicht wahr?",
    'Er sagte: "Es regnet in Berlin-Mitte, z.B. heute & morgen."',
    "Wir haben 1.000,50 Euro bezahlt – leider zu viel.",
    "Licht im Wohnzimmer ein- oder ausschalten",
    "Der Ölpreis stieg am 3. März um 5 %.",
    "Gehen wir morgen früh gemeinsam zum Bahnhof?",
]
HYPOTHESES = [
    "Die Katze sitzt auf der Matte.",
    "Das ist ein Rich-Text-Format, oder?",
    'Er sagte: "Es regnet in Berlin-Mitte, z.B. heute."',
    "Wir haben 1.000,50 Euro bezahlt – leider zu wenig & spät.",
    "Licht im Wohnzimmer ein- und ausschalten",
    "Der Preis für Öl stieg um 5 %.",
    "",
]


def multi_bleu(hypotheses: list[str], references: list[str]) -> float:
    """The recipe of Papineni et al. (2002) on white space, unsmoothed."""
    matches, totals, sides = [0] * 4, [0] * 4, [0, 0]
    for hypothesis, reference in zip(hypotheses, references, strict=True):
        h, r = hypothesis.split(), reference.split()
        sides = [sides[0] + len(h), sides[1] + len(r)]
        for n in range(1, 5):
            h_grams = Counter(tuple(h[i : i + n]) for i in range(len(h) - n + 1))
            r_grams = Counter(tuple(r[i : i + n]) for i in range(len(r) - n + 1))
            matches[n - 1] += sum(min(count, r_grams[gram]) for gram, count in h_grams.items())
            totals[n - 1] += max(0, len(h) - n + 1)
    if 0 in matches:
        return 0.0
    precision = math.exp(sum(math.log(m / t) for m, t in zip(matches, totals, strict=True)) / 4)
    return 100 * precision * min(1.0, math.exp(1 - sides[1] / sides[0]))


def test_perplexity_of_uniform_and_diverged_models() -> None:
    for vocab_size in (2, 37_003):
        assert perplexity(101 * math.log(vocab_size), 101) == pytest.approx(vocab_size, rel=1e-13)
    assert perplexity(1e6, 13) == perplexity(math.inf, 13) == math.inf
    assert math.isnan(perplexity(math.nan, 13))


@pytest.mark.parametrize(
    ("language", "line", "expected"),
    [
        ("de", "Rich-Text-Format", "Rich ##AT##-##AT## Text ##AT##-##AT## Format"),
        # The search goes on behind a match: a single letter between two hyphens is split once, as in the authors' Perl
        ("de", "a-b-c", "a ##AT##-##AT## b-c"),
        ("de", "##AT##", "# # AT # #"),
        ("fr", "Aujourd'hui, dit-il : « a-b ».", "Aujourd' hui , dit-il : « a-b » ."),  # compounds stay
    ],
)
def test_paper_tokens_are_moses_tokens_with_compounds_split(language: str, line: str, expected: str) -> None:
    assert paper_tokens(line, language) == expected


def test_bleu_and_its_signature_are_those_of_the_target_language() -> None:
    references = ["L'ordinateur n'a pas l'air d'aller bien aujourd'hui.", "Le sous-menu s'ouvre-t-il ?"]
    hypotheses = ["L'ordinateur n'a pas l'heure d'aller mieux aujourd'hui.", "Est-ce que le sous-menu s'ouvre ?"]
    french, german = (bleu(hypotheses, references, language) for language in ("fr", "de"))
    moses = sacremoses.MosesTokenizer(lang="fr")
    sides = [[moses.tokenize(line, return_str=True, escape=False) for line in s] for s in (hypotheses, references)]
    assert french["bleu"]["paper"] == pytest.approx(multi_bleu(*sides), rel=1e-12)
    assert french["bleu"]["paper"] != pytest.approx(german["bleu"]["paper"], rel=1e-3)  # control
    assert french["signatures"]["paper"].endswith(f"|moses:sacremoses-{sacremoses.__version__}-fr")
    assert german["signatures"]["paper"].endswith(f"|moses:sacremoses-{sacremoses.__version__}-de-compounds")
    assert "tok:none|smooth:none" in french["signatures"]["paper"]
    for name, tokenizer in (("sacrebleu", "13a"), ("intl", "intl")):  # which know no language
        assert (french["bleu"][name], french["signatures"][name]) == (german["bleu"][name], german["signatures"][name])
        theirs = sacrebleu.corpus_bleu(hypotheses, [references], tokenize=tokenizer).score  # as its command has it
        assert french["bleu"][name] == pytest.approx(theirs, rel=1e-12)
        assert f"tok:{tokenizer}|smooth:exp|version:{sacrebleu.__version__}" in french["signatures"][name]
    summed = bleu_of_counts(paper_counts(hypotheses, references, "fr").sum(0))
    assert summed == pytest.approx(french["bleu"]["paper"], rel=1e-12)


@pytest.mark.parametrize("language", ["zh", "zh-CN", "zho_Hans", "th"])
def test_languages_without_spaces_have_sacrebleus_own_tokens(language: str) -> None:
    references = ["红色的大房子很旧。", "蓝色的小房子很新!", "他说:绿色慢"]
    hypotheses = [line.replace("很", "不") for line in references]
    ours, theirs = bleu(hypotheses, references, language), sacrebleu.BLEU(trg_lang=language[:2])
    assert ours["bleu"]["sacrebleu"] == pytest.approx(theirs.corpus_score(hypotheses, [references]).score, rel=1e-12)
    assert ours["signatures"]["sacrebleu"] == str(theirs.get_signature())
    assert ours["bleu_ci95"][0] <= ours["bleu"]["sacrebleu"] <= ours["bleu_ci95"][1]
    assert (ours["bleu"]["sacrebleu"] > 30) == (language != "th")  # control: 13a sees whole clauses
    assert "paper" not in ours["bleu"]
    assert re.match(f"none: .* {language[:2]} is written without", ours["signatures"]["paper"])
    assert bleu(HYPOTHESES, REFERENCES, "deu_AT")["signatures"] == bleu(HYPOTHESES, REFERENCES, "de")["signatures"]
    german, austrian, french = (paper_counts(HYPOTHESES, REFERENCES, to).tolist() for to in ("de", "deu_AT", "fr"))
    assert austrian == german != french


def test_paper_bleu_equals_unsmoothed_bleu_of_the_paper_tokens() -> None:
    ours = bleu(HYPOTHESES, REFERENCES, "de")["bleu"]["paper"]
    sides = [[paper_tokens(line, "de") for line in lines] for lines in (HYPOTHESES, REFERENCES)]
    assert ours == pytest.approx(multi_bleu(*sides), rel=1e-12)
    # Control: without the compounds, or with smoothing where four-grams are missing, the number is another one
    whole = [[tokens.replace(" ##AT##-##AT## ", "-") for tokens in side] for side in sides]
    assert ours != pytest.approx(multi_bleu(*whole), rel=1e-3)
    assert ours != pytest.approx(multi_bleu(HYPOTHESES, REFERENCES), rel=1e-3)
    missing = bleu(["ein kleiner Test heute"], ["ein kleiner Versuch heute"], "de")["bleu"]
    assert missing["paper"] == 0.0
    assert missing["sacrebleu"] > 0.0


def test_the_interval_is_the_percentiles_of_resampled_corpora() -> None:
    low, high = bleu(HYPOTHESES, REFERENCES, "de")["bleu_ci95"]
    assert [low, high] == bleu(HYPOTHESES, REFERENCES, "de")["bleu_ci95"]
    random, scores = np.random.default_rng(1), []
    for _ in range(1000):
        chosen = random.integers(len(REFERENCES), size=len(REFERENCES))
        sides = [[lines[i] for i in chosen] for lines in (HYPOTHESES, REFERENCES)]
        scores.append(sacrebleu.corpus_bleu(sides[0], [sides[1]]).score)
    # Another random stream: some 13 scores of the 1000 on either side of a percentile are within its noise
    scores.sort()
    assert scores[12] <= low <= scores[38]
    assert scores[961] <= high <= scores[987]


def test_a_perfect_translation_scores_100_and_empty_ones_0() -> None:
    assert bleu(REFERENCES, REFERENCES, "de")["bleu"] == pytest.approx({"paper": 100, "sacrebleu": 100, "intl": 100})
    empty = bleu([""] * 3, REFERENCES[:3], "de")
    assert empty["bleu"] == {"paper": 0.0, "sacrebleu": 0.0, "intl": 0.0}
    assert empty["bleu_ci95"] == [0.0, 0.0]
