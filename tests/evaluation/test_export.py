"""`aiayn export`: what others make of the weights equals ours, or the row is refused in one line."""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from models import batch

from aiayn.alternatives.parts import transformer
from aiayn.bench.cases import endless
from aiayn.config import compose, schema
from aiayn.core import storage
from aiayn.data.sentencepiece_bpe import EOS, Tokenizer
from aiayn.evaluation import export
from aiayn.evaluation.search import decoder_of, search
from aiayn.paper.beam_search import Hypothesis
from aiayn.paper.transformer import Transformer
from aiayn.runs.models import trained

VOCABULARY = 101
LENGTH = 7  # of every source, EOS included, so that all outputs have one limit
LIMIT = 18
SUBWORDS = [f"subword{number}" for number in range(VOCABULARY)]
SOURCES = list(np.random.default_rng(5).integers(EOS + 1, VOCABULARY, (13, LENGTH - 1)))
TARGETS = list(np.random.default_rng(7).integers(EOS + 1, VOCABULARY, (13, 5)))
NAMES = [[[SUBWORDS[token] for token in sentence] for sentence in side] for side in (SOURCES, TARGETS)]


def random_model(row: schema.Config) -> Transformer:
    """The row's sizes, with weights, biases and norms that all matter and outputs that go up to the limit.

    Where EOS is unlikely searches are comparable: others let only the best W of 2 W candidates end, we all of them.
    """
    torch.manual_seed(3)
    model = transformer(**dataclasses.asdict(row.model), max_length=11, vocab_size=VOCABULARY)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(2.5 if parameter.dim() == 2 and "embedding" not in name else 1)
            parameter.add_(0.1 * torch.randn_like(parameter))
    return endless(model).eval()


def smoke(name: str) -> schema.Config:
    return compose.compose_row(f"experiment={name}", "scale=smoke")


def searched(model: Transformer, sources: list[np.ndarray], beam_size: int, max_extra: int) -> list[Hypothesis]:
    """By log probability alone: CTranslate2 does not have the length penalty of Wu et al."""
    options = schema.Decoding(beam_size=beam_size, length_penalty=0.0, max_extra=max_extra, precision="full")
    return search(decoder_of(model), sources, options, compose.compose_row("hardware.tokens_per_search=500").hardware)


def translator(folder: Path):
    ctranslate2 = pytest.importorskip("ctranslate2", reason="needs the extra: pip install -e '.[export]'")
    return ctranslate2.Translator(str(folder), device="cpu", compute_type="float32", intra_threads=1)


def translated(folder: Path, sources: list[list[str]], names: list[str], beam_size: int, limit: int) -> list[list[int]]:
    limits = {"max_decoding_length": limit, "min_decoding_length": 0}
    results = translator(folder).translate_batch(sources, beam_size=beam_size, length_penalty=0, **limits)
    return [[names.index(name) for name in result.hypotheses[0]] for result in results]


def our_log_probabilities(model: Transformer) -> torch.Tensor:
    """Of each token of TARGETS and the EOS after it, given SOURCES, as (sentences, tokens)."""
    given = batch(*([[*sentence, EOS] for sentence in side] for side in (SOURCES, TARGETS)))
    with torch.no_grad():
        return model(given).log_softmax(-1).gather(1, given.target.unsqueeze(1)).view(len(SOURCES), -1)


def ctranslate2_log_probabilities(folder: Path) -> torch.Tensor:
    return torch.tensor([result.log_probs for result in translator(folder).score_batch(*NAMES)])


@pytest.mark.parametrize("name", schema.ROWS)
def test_ctranslate2_computes_what_we_do_for_every_row(name, tmp_path):
    pytest.importorskip("ctranslate2", reason="needs the extra: pip install -e '.[export]'")
    model = random_model(smoke(name))
    if name == "c_n2":
        model.double()  # as a run in 64 bits has it; it is written in 32
    export.write(model, SUBWORDS, "ctranslate2", tmp_path)
    found, expected = ctranslate2_log_probabilities(tmp_path), our_log_probabilities(model)
    torch.testing.assert_close(found, expected, atol=5e-3, rtol=1e-3)  # its exponential function is an approximation
    for beam_size in (1, 4):
        found = translated(tmp_path, NAMES[0], SUBWORDS, beam_size, LIMIT)
        assert found == [hypothesis.ids for hypothesis in searched(model, SOURCES, beam_size, LIMIT - LENGTH)]


def test_queries_of_another_width_need_another_scale(tmp_path, monkeypatch):  # control
    model = random_model(smoke("b_dk16"))
    expected, right = our_log_probabilities(model), export.projections

    def scaled(attention, width):
        query, *rest = right(attention, width)
        query.weight.data *= 2
        query.bias.data *= 2
        return query, *rest

    monkeypatch.setattr(export, "projections", scaled)
    export.write(model, SUBWORDS, "ctranslate2", tmp_path)
    assert (ctranslate2_log_probabilities(tmp_path) - expected).abs().max() > 0.05


@pytest.mark.parametrize("format", export.FORMATS)
def test_an_exported_run_is_ours_to_the_bit_and_the_word(finished, tmp_path, format):
    pytest.importorskip(format, reason="needs the extra: pip install -e '.[export]'")
    shutil.copytree(compose.compose_row(*finished).output, tmp_path / "runs")
    run = compose.compose_row(*finished, f"output={tmp_path}/runs", f"format={format}", "average=2")
    export.main(run)
    model, dataset, folder, _ = trained(run)
    folder = folder / f"export-{format}-average2"
    if format == "safetensors":
        from safetensors.torch import load_file

        again = transformer(**storage.json.loads((folder / "aiayn.json").read_text()))
        assert not torch.equal(again.embedding.weight, model.embedding.weight)  # control
        again.load_state_dict(load_file(folder / "model.safetensors"))
        for (name, there), ours in zip(again.state_dict().items(), model.state_dict().values(), strict=True):
            assert torch.equal(there, ours), name
        return
    tokenizer = Tokenizer(folder / "tokenizer.model")
    ids = tokenizer.encode(dataset.texts("dev", "source"))
    sources = [[tokenizer.subwords[token] for token in sentence] for sentence in ids]
    expected = searched(model, ids, 1, 50)
    # Their limit knows no source length
    assert translated(folder, sources, tokenizer.subwords, 1, 50) == [hypothesis.ids[:50] for hypothesis in expected]
    assert sum(hypothesis.finished for hypothesis in expected) > 20


REFUSED = {
    "format=md": "needs format=ctranslate2 or format=safetensors",
    "format=ctranslate2 model.positions=relative": r"^format=ctranslate2: holds models of Table 3's parts.*=safet",
    "format=ctranslate2 model.scores=dot": "holds models of Table 3's parts",
    "format=safetensors model.residual=none": "nothing is trained",  # control: it holds them
    "format=safetensors fidelity=released_code": "export runs of fidelity=paper",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_exported_is_refused(finished, tmp_path, words):
    with pytest.raises(schema.ConfigError, match=REFUSED[words]):
        export.main(compose.compose_row(*finished, *words.split(), f"output={tmp_path}/runs"))
    assert not list(tmp_path.iterdir())


def test_a_missing_library_is_named(finished, monkeypatch):
    monkeypatch.setattr(export, "find_spec", lambda name: None)
    with pytest.raises(schema.ConfigError, match=r"pip install 'aiayn\[export\]'"):
        export.main(compose.compose_row(*finished, "format=ctranslate2"))
