"""The numbers of the table: perplexity, bits per character, and BLEU in three tokenizations."""

import functools
import math
import re
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import numpy as np
import numpy.typing as npt
import sacrebleu

from aiayn.config.schema import language as primary
from aiayn.data.moses_bpe import moses

# Written without blanks between words: their Moses tokens are whole clauses
_UNSPACED = ("zh", "ja", "th", "lo", "km", "my", "bo")


def perplexity(nats: float, tokens: int) -> float:
    """exp(nats / tokens): nats summed over target tokens, EOS included; infinite where a float overflows."""
    # Paper: "per-wordpiece" (Table 3), so it depends on the tokenizer; bits per character do not
    try:
        return math.exp(nats / tokens)
    except OverflowError:
        return math.inf


@functools.lru_cache(maxsize=2**16)  # every run of a sweep has the same references
def paper_tokens(line: str, language: str) -> str:
    """The line as the authors scored it: Moses tokens; hyphenated compounds of German split as `a ##AT##-##AT## b`."""
    # Paper: silent; the recipe is that of the early get_ende_bleu.sh of tensor2tensor: tokenizer.perl, compounds split
    # on both sides, multi-bleu.perl. Later versions put replace-unicode-punctuation.perl first, which changes how
    # quotation marks and dashes beyond ASCII score. XML escapes would change no score
    tokens: str = moses("Tokenizer", language).tokenize(line, return_str=True, escape=False)
    # The released code has the splitting for German alone, "comparable to papers like GNMT"
    return re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", tokens) if language == "de" else tokens


def bleu(hypotheses: Sequence[str], references: Sequence[str], language: str) -> dict[str, Any]:
    """Corpus BLEU (0 to 100) of detokenised, cased text, as `result.json` has it.

    `bleu` has `paper`, of Moses tokens of `language`, `sacrebleu` and `intl`; `signatures` says how each is made;
    `bleu_ci95` is the bootstrap interval of sacreBLEU's own.
    """
    assert len(hypotheses) == len(references) > 0
    language = primary(language)
    tokenized = [[paper_tokens(line, language) for line in lines] for lines in (hypotheses, references)]
    scores, signatures = {}, {}
    paper: dict[str, Any] = {"tokenize": "none", "smooth_method": "none"}  # multi-bleu does not smooth
    kinds = {"paper": paper, "sacrebleu": {"trg_lang": language}, "intl": {"tokenize": "intl"}}
    for kind, options in kinds.items():
        scorer = sacrebleu.BLEU(**options, force=True)  # it would take text with blanks before full stops for tokens
        ours, theirs = tokenized if kind == "paper" else (hypotheses, references)
        scores[kind] = scorer.corpus_score(ours, [theirs]).score
        signatures[kind] = str(scorer.get_signature())
    compounds = "-compounds" if language == "de" else ""
    signatures["paper"] += f"|moses:sacremoses-{metadata.version('sacremoses')}-{language}{compounds}"
    if language in _UNSPACED:
        del scores["paper"]
        signatures["paper"] = f"none: it counts words between blanks, which {language} is written without"
    interval = _confidence_interval(hypotheses, references, language)
    return {"bleu": scores, "bleu_ci95": interval, "signatures": signatures}


def _confidence_interval(hypotheses: Sequence[str], references: Sequence[str], language: str) -> list[float]:
    """The 2.5th and 97.5th percentile of sacreBLEU's over 1000 resamples of the sentences; always the same two."""
    # sacrebleu's own bootstrap gives a symmetric interval
    counts = _counts(hypotheses, references, trg_lang=language)
    random = np.random.default_rng(0)
    resamples = (counts[random.integers(len(counts), size=len(counts))].sum(0) for _ in range(1000))
    scores = [bleu_of_counts(sums, smooth_method="exp") for sums in resamples]
    return [float(percentile) for percentile in np.percentile(scores, [2.5, 97.5])]


def paper_counts(hypotheses: Sequence[str], references: Sequence[str], language: str) -> npt.NDArray[np.int64]:
    """(sentences, 10): what adds up over sentences to the numbers that `paper` BLEU is made of."""
    tokenized = ([paper_tokens(line, primary(language)) for line in lines] for lines in (hypotheses, references))
    return _counts(*tokenized, tokenize="none")


def bleu_of_counts(sums: npt.NDArray[np.int64], smooth_method: str = "none") -> float:
    """BLEU (0 to 100) of counts that are added up over sentences."""
    numbers = sums.tolist()
    score = sacrebleu.BLEU.compute_bleu(numbers[:4], numbers[4:8], numbers[8], numbers[9], smooth_method).score
    return float(score)


def _counts(hypotheses: Sequence[str], references: Sequence[str], **options: Any) -> npt.NDArray[np.int64]:
    # No count depends on effective_order, which silences advice
    sentence_bleu = sacrebleu.BLEU(**options, effective_order=True, force=True)
    sentences = [sentence_bleu.sentence_score(h, [r]) for h, r in zip(hypotheses, references, strict=True)]
    return np.array([[*s.counts, *s.totals, s.sys_len, s.ref_len] for s in sentences])
