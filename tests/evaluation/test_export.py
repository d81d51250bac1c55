"""`aiayn export`: what others make of the weights equals ours, or the row is refused in one line."""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from aiayn import cli
from aiayn.alternatives.parts import transformer
from aiayn.bench.contestants import endless
from aiayn.config import compose, schema
from aiayn.core import storage
from aiayn.data.encoded import Pairs
from aiayn.data.sentencepiece_bpe import BOS, EOS, Tokenizer
from aiayn.data.update_plan import gather
from aiayn.evaluation import evaluate, export
from aiayn.evaluation.search import translate_ids
from aiayn.paper.beam_search import Hypothesis
from aiayn.paper.fast.decoding import FastDecoder
from aiayn.paper.fast.model import accelerate
from aiayn.paper.transformer import Transformer

VOCABULARY = 101
LENGTH = 7  # of every source, EOS included, so that all outputs have one limit
LIMIT = 18
SUBWORDS = [f"subword{number}" for number in range(VOCABULARY)]


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
    return accelerate(endless(model).eval())


def smoke(name: str) -> schema.Config:
    return compose.compose_row(f"experiment={name}", "scale=smoke")


SOURCES = list(np.random.default_rng(5).integers(EOS + 1, VOCABULARY, (13, LENGTH - 1)))
TARGETS = list(np.random.default_rng(7).integers(EOS + 1, VOCABULARY, (13, 5)))


def searched(model: Transformer, beam_size: int, sources: list = SOURCES) -> list[Hypothesis]:
    """By log probability alone: neither CTranslate2 nor transformers has the length penalty of Wu et al."""
    return translate_ids(
        FastDecoder(model),
        sources,
        tokens_per_batch=1000,
        beam_size=beam_size,
        length_penalty=0.0,
        max_extra=LIMIT - LENGTH,
        bos=BOS,
        eos=EOS,
    )


def translator(folder: Path):
    ctranslate2 = pytest.importorskip("ctranslate2", reason="needs the extra: pip install -e '.[export]'")
    return ctranslate2.Translator(str(folder), device="cpu", compute_type="float32", intra_threads=1)


def translated(folder: Path, beam_size: int) -> list:
    return translator(folder).translate_batch(
        [[SUBWORDS[token] for token in source] for source in SOURCES],
        beam_size=beam_size,
        length_penalty=0,
        max_decoding_length=LIMIT,
        min_decoding_length=0,
    )


def numbers(subwords: list[str]) -> list[int]:
    return [SUBWORDS.index(subword) for subword in subwords]


def generated(model, beam_size: int, sources: list = SOURCES) -> list[list[int]]:
    ids = torch.tensor(np.array([[*source, EOS] for source in sources]))
    options = {"length_penalty": 0.0, "early_stopping": False} if beam_size > 1 else {}
    output = model.generate(ids, num_beams=beam_size, do_sample=False, max_new_tokens=LIMIT, **options)
    return [row[: [*row, EOS].index(EOS)] for row in output[:, 1:].tolist()]


def our_log_probabilities(model: Transformer) -> torch.Tensor:
    """Of each token of TARGETS and the EOS after it, given SOURCES, as (sentences, tokens)."""
    sides = [[np.append(sentence, EOS) for sentence in side] for side in (SOURCES, TARGETS)]
    offsets = [np.concatenate([[0], np.cumsum([len(sentence) for sentence in side])]) for side in sides]
    pairs = Pairs(np.concatenate(sides[0]), offsets[0], np.concatenate(sides[1]), offsets[1])
    batch = gather(pairs, np.arange(len(SOURCES)))
    with torch.no_grad():
        return model(batch).log_softmax(-1).gather(1, batch.target.unsqueeze(1)).view(len(SOURCES), -1)


def ctranslate2_log_probabilities(folder: Path) -> torch.Tensor:
    subwords = [[[SUBWORDS[token] for token in sentence] for sentence in side] for side in (SOURCES, TARGETS)]
    return torch.tensor([result.log_probs for result in translator(folder).score_batch(*subwords)])


def marian_log_probabilities(model) -> torch.Tensor:
    source, target = (torch.tensor(np.array([[*x, EOS] for x in side])) for side in (SOURCES, TARGETS))
    shifted = torch.cat((torch.full((len(target), 1), BOS), target[:, :-1]), 1)
    with torch.no_grad():
        logits = model(input_ids=source, decoder_input_ids=shifted).logits
    return logits.log_softmax(-1).gather(2, target.unsqueeze(2)).squeeze(2)


@pytest.mark.parametrize("name", schema.ROWS)
def test_ctranslate2_computes_and_finds_what_we_do_for_every_row_of_the_table(name, tmp_path):
    pytest.importorskip("ctranslate2", reason="needs the extra: pip install -e '.[export]'")
    model = random_model(smoke(name))
    if name == "c_n2":
        model.double()  # as a run in 64 bits has it; it is written in 32
    export.export(model, SUBWORDS, "ctranslate2", tmp_path)
    # Its exponential function is an approximation
    torch.testing.assert_close(
        ctranslate2_log_probabilities(tmp_path), our_log_probabilities(model), atol=5e-3, rtol=1e-3
    )
    for beam_size in (1, 4):
        found = [numbers(result.hypotheses[0]) for result in translated(tmp_path, beam_size)]
        assert found == [hypothesis.ids for hypothesis in searched(model, beam_size)]


@pytest.mark.parametrize("name", [name for name in schema.ROWS if name != "e_learned_positions"])
def test_marian_computes_and_finds_what_we_do_for_every_row_with_sinusoids(name):
    pytest.importorskip("transformers", reason="needs the extra: pip install -e '.[export]'")
    model = random_model(smoke(name))
    theirs = export.marian(model)
    torch.testing.assert_close(marian_log_probabilities(theirs), our_log_probabilities(model), atol=1e-4, rtol=1e-4)
    for beam_size in (1, 4):
        assert generated(theirs, beam_size) == [hypothesis.ids for hypothesis in searched(model, beam_size)]


def test_queries_of_another_width_need_another_scale(tmp_path, monkeypatch):  # control
    pytest.importorskip("transformers", reason="needs the extra: pip install -e '.[export]'")
    model = random_model(smoke("b_dk16"))
    expected, right = our_log_probabilities(model), export.projections
    monkeypatch.setattr(export, "projections", lambda attention, width, scale=1.0: right(attention, width))
    assert (marian_log_probabilities(export.marian(model)) - expected).abs().max() > 0.05
    monkeypatch.setattr(export, "projections", lambda attention, width: right(attention, width, 2.0))
    export.export(model, SUBWORDS, "ctranslate2", tmp_path)
    assert (ctranslate2_log_probabilities(tmp_path) - expected).abs().max() > 0.05


@pytest.fixture
def exported(finished, tmp_path):
    """Exports the trained run, from a copy of its folder: gives its model, its tokenizer and the folder written."""

    def run(format: str):
        pytest.importorskip(export.LIBRARIES[format], reason="needs the extra: pip install -e '.[export]'")
        original = compose.compose_row(*finished)
        shutil.copytree(original.output, tmp_path / "runs")
        copied = compose.compose_row(*finished, f"output={tmp_path}/runs", f"format={format}")
        export.main(copied)
        model, dataset, folder = evaluate.trained(copied)
        return model, dataset, folder / f"export-{format}"

    return run


def test_the_exported_run_translates_text_as_ours_with_ctranslate2_and_sentencepiece(exported):
    model, dataset, folder = exported("ctranslate2")
    lines = dataset.texts("dev", "source")
    tokenizer = Tokenizer(folder / "tokenizer.model")
    ids = tokenizer.encode(lines)
    results = translator(folder).translate_batch(
        [[tokenizer.subwords[token] for token in sentence] for sentence in ids],
        beam_size=1,
        max_decoding_length=50,
        min_decoding_length=0,
    )
    found = [[tokenizer.subwords.index(subword) for subword in result.hypotheses[0]] for result in results]
    expected = translate_ids(
        FastDecoder(model), ids, tokens_per_batch=500, beam_size=1, length_penalty=0.0, max_extra=50, bos=BOS, eos=EOS
    )
    assert found == [hypothesis.ids[:50] for hypothesis in expected]  # their limit knows no source length
    assert tokenizer.decode(found) == dataset.tokenizer.decode([hypothesis.ids[:50] for hypothesis in expected])
    assert sum(hypothesis.finished for hypothesis in expected) > 20


def test_a_saved_marian_comes_back_with_the_same_outputs_and_nearly_the_same_logits(exported):
    model, dataset, folder = exported("marian")
    import transformers

    loaded = transformers.MarianMTModel.from_pretrained(folder).eval()
    ids = [sentence for sentence in dataset.tokenizer.encode(dataset.texts("dev", "source")) if len(sentence) == 5]
    assert len(ids) > 2
    assert generated(loaded, 1, ids) == [
        found.ids
        for found in translate_ids(
            FastDecoder(model),
            ids,
            tokens_per_batch=500,
            beam_size=1,
            length_penalty=0.0,
            max_extra=LIMIT - 6,
            bos=BOS,
            eos=EOS,
        )
    ]
    source = torch.tensor(np.array([[*sentence, EOS] for sentence in ids]))
    inputs = {"input_ids": source, "decoder_input_ids": source}
    with torch.no_grad():
        saved, exact = loaded(**inputs).logits, export.marian(model)(**inputs).logits
    torch.testing.assert_close(saved, exact, atol=1e-3, rtol=0)
    assert not torch.equal(saved, exact)  # control: the norms' epsilon did change


def test_safetensors_hold_every_weight_to_the_bit(exported):
    model, _, folder = exported("safetensors")
    import safetensors.torch

    sizes = storage.json.loads((folder / "aiayn.json").read_text())
    again = transformer(**sizes)
    assert not torch.equal(again.embedding.weight, model.embedding.weight)  # control
    again.load_state_dict(safetensors.torch.load_file(folder / "model.safetensors"))
    for (name, there), ours in zip(again.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(there, ours), name


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["experiment=e_learned_positions"], "model.positions=learned: Marian has sinusoids only"),
        (["model.d_k=1000"], "which cannot hold this row"),
        (["model.num_heads=3"], "which cannot hold this row"),
    ],
)
def test_marian_refuses_in_one_line_what_it_cannot_hold(overrides, words):
    pytest.importorskip("transformers", reason="needs the extra: pip install -e '.[export]'")
    with pytest.raises(schema.ConfigError, match=words) as refused:
        export.marian(random_model(compose.compose_row(*overrides, "scale=smoke")))
    assert "format=ctranslate2" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_refused_export_writes_nothing(finished, tmp_path, monkeypatch):
    pytest.importorskip("transformers", reason="needs the extra: pip install -e '.[export]'")
    run = compose.compose_row(*finished)
    monkeypatch.setattr(export, "trained", lambda config: (learned, evaluate.trained(run)[1], tmp_path))
    learned = random_model(compose.compose_row("experiment=e_learned_positions", "scale=smoke"))
    with pytest.raises(schema.ConfigError, match="Marian has sinusoids only"):
        export.main(dataclasses.replace(run, format="marian"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("tokenizer", "said"), [("sentencepiece", "SentencePiece's own"), ("paper", "JSON with the")])
def test_an_export_says_what_its_tokenizer_file_is(tokenizer, said, finished, tmp_path, monkeypatch, capsys):
    pytest.importorskip("safetensors", reason="needs the extra: pip install -e '.[export]'")
    run = compose.compose_row(*finished)
    model, dataset, _ = evaluate.trained(run)
    monkeypatch.setattr(export, "trained", lambda config: (model, dataset, tmp_path))
    export.main(dataclasses.replace(run, tokenizer=tokenizer, format="safetensors"))
    assert f"tokenizer.model is {said}" in capsys.readouterr().out


@pytest.mark.parametrize("format", ["ctranslate2", "marian"])
@pytest.mark.parametrize("part", ["positions=relative", "positions=none", "scores=dot", "residual=none"])
def test_parts_from_beyond_table_3_are_refused_by_formats_that_have_none(finished, format, part, tmp_path):
    words = [*finished, f"model.{part}", f"output={tmp_path}/runs"]
    with pytest.raises(
        schema.ConfigError, match=f"^format={format}: holds models of Table 3's parts.*use format=safet"
    ):
        export.main(compose.compose_row(*words, f"format={format}"))
    with pytest.raises(schema.ConfigError, match="nothing is trained"):  # control
        export.main(compose.compose_row(*words, "format=safetensors"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["f_relative_positions", "f_additive", "f_no_residual_positions"])
def test_safetensors_hold_parts_from_beyond_table_3(name, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch", reason="needs the extra: pip install -e '.[export]'")
    row = smoke(name)
    sizes = {**dataclasses.asdict(row.model), "max_length": 11, "vocab_size": VOCABULARY}
    torch.manual_seed(3)
    model, again = transformer(**sizes), transformer(**sizes)
    export.export(model, SUBWORDS, "safetensors", tmp_path / "out")
    again.load_state_dict(safetensors.load_file(tmp_path / "out" / "model.safetensors"))
    assert not torch.equal(transformer(**sizes).embedding.weight, model.embedding.weight)  # control
    for key, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[key])


def test_a_format_of_another_command_and_a_library_that_is_missing_are_refused(finished, monkeypatch):
    for format in ("terminal", "md"):
        with pytest.raises(
            schema.ConfigError, match="needs one of format=ctranslate2, format=safetensors, format=marian"
        ):
            export.main(compose.compose_row(*finished, f"format={format}"))
    for fidelity in ("fidelity=released_code", "fidelity.zero_start=true", "fidelity.sinusoids=halves"):
        with pytest.raises(schema.ConfigError, match="export runs of fidelity=paper"):
            export.main(compose.compose_row(*finished, "format=safetensors", fidelity))
    monkeypatch.setattr(export, "find_spec", lambda name: None)
    with pytest.raises(schema.ConfigError, match=r"pip install .* '\.\[export\]'") as refused:
        export.main(compose.compose_row(*finished, "format=marian"))
    assert cli.explained(refused.value)[0] == 2
