"""`aiayn evaluate`: every token of every sentence once, whatever the batches; the mean of checkpoints is a mean."""

import dataclasses
import json
import math
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from aiayn.config import compose, folders
from aiayn.data.sentencepiece_bpe import EOS
from aiayn.data.update_plan import gather
from aiayn.evaluation import evaluate, translate
from aiayn.runs import checkpoint
from aiayn.tables import table2


@pytest.fixture
def run(finished, tmp_path) -> compose.Config:
    """A copy of the trained run, to write into."""
    original = compose.compose_row(*finished)
    copy = dataclasses.replace(original, output=str(tmp_path / "runs"))
    shutil.copytree(folders.run_folder(original), folders.run_folder(copy))
    return copy


def nats_by_hand(model, pairs) -> float:
    """One sentence at a time, through the whole softmax, in a plain sum."""
    total = 0.0
    with torch.no_grad():
        for sentence in range(len(pairs)):
            batch = gather(pairs, np.array([sentence]))
            probabilities = F.log_softmax(model(batch).double(), 1)
            total -= sum(float(probabilities[i, token]) for i, token in enumerate(batch.target))
    return total


@pytest.mark.parametrize("split", ["dev", "test"])
def test_the_nats_are_those_of_each_sentence_alone_whatever_the_batch_size(run, split):
    model, dataset, _ = evaluate.trained(run)
    pairs = dataset.pairs(split)
    expected = nats_by_hand(model.double(), pairs)
    for tokens_per_batch in (1, 17, 64, 100_000):
        nats, tokens = evaluate.teacher_forced_nats(model, pairs, tokens_per_batch)
        assert nats == pytest.approx(expected, rel=1e-12)
        assert tokens == len(pairs.target_ids)
    shorter = evaluate.teacher_forced_nats(model, dataset.pairs("train"), 100_000)
    assert shorter[0] != pytest.approx(expected, rel=1e-3)  # control


def test_measuring_asks_before_each_batch_whether_to_go_on(run):
    model, dataset, _ = evaluate.trained(run)
    asked = {17: 0, 100_000: 0}
    for tokens in asked:

        def check(tokens=tokens):
            asked[tokens] += 1

        evaluate.teacher_forced_nats(model, dataset.pairs("dev"), tokens, check)
    assert asked[17] > 3
    assert asked[100_000] == 1  # control


def test_a_line_of_spaces_is_an_empty_sentence(run, monkeypatch):
    model, dataset, _ = evaluate.trained(run)
    _, before = evaluate.evaluate(model, dataset, "dev", run)
    texts = type(dataset).texts

    def spaces(self, split, side):
        return ["  ", *texts(self, split, side)[1:]] if side == "source" else texts(self, split, side)

    monkeypatch.setattr(type(dataset), "texts", spaces)
    _, found = evaluate.evaluate(model, dataset, "dev", run)
    assert before[0] != ""  # control
    assert found == ["", *before[1:]]


def test_a_run_that_is_not_finished_says_so_and_its_figures_carry_their_update(run, capsys):
    last = checkpoint.path_of(folders.run_folder(run) / "checkpoints", 300)
    for path, updates, said in ((last.with_name("none"), 300, ""), (last, 200, ", after 200 of 300 updates")):
        path.unlink(missing_ok=True)
        _, name = evaluate.evaluate_trained(run)
        assert f"scale paper{said}:" in capsys.readouterr().out
        assert json.loads((folders.run_folder(run) / f"evaluation-{name}.json").read_text())["steps"] == updates


def test_measuring_leaves_a_model_in_training_in_training_and_dropout_out_of_the_figure(run):
    model, dataset, _ = evaluate.trained(run)
    pairs = dataset.pairs("dev")
    figures = []
    for training in (True, False, True):
        model.train(training)
        figures.append(evaluate.teacher_forced_nats(model, pairs, 50))
        assert model.training == training
    assert figures[0] == figures[1] == figures[2]


def test_evaluating_again_gives_the_figures_of_the_result_and_its_translations(run):
    folder = folders.run_folder(run)
    model, dataset, _ = evaluate.trained(run)
    figures, translations = evaluate.evaluate(model, dataset, "dev", run)
    result = json.loads((folder / "result.json").read_text())["dev"]
    assert json.loads(json.dumps(figures)) == result
    assert "".join(line + "\n" for line in translations) == (folder / "translations.txt").read_text()


def test_the_figures_follow_from_nats_tokens_and_characters(run):
    model, dataset, _ = evaluate.trained(run)
    figures, translations = evaluate.evaluate(model, dataset, "test", run)
    references = dataset.texts("test", "target")
    assert len(translations) == len(references) == 43
    assert figures["ppl"] == pytest.approx(math.exp(figures["nats"] / figures["tokens"]))
    assert figures["bits_per_character"] == pytest.approx(figures["nats"] / math.log(2) / len("".join(references)))


def test_the_mean_of_two_checkpoints_is_the_mean_of_their_weights(run):
    newest, before = checkpoint.newest(folders.run_folder(run) / "checkpoints", 2)
    states = [checkpoint.load(path)["state_dict"] for path in (newest, before)]
    averaged, _, _ = evaluate.trained(dataclasses.replace(run, average=2))
    last, _, _ = evaluate.trained(run)
    for name, weight in averaged.state_dict().items():
        one, other = (state[f"transformer.{name}"] for state in states)
        assert torch.allclose(weight, (one + other) / 2, rtol=0, atol=1e-7), name
        assert torch.equal(last.state_dict()[name], one), name
    assert not torch.allclose(averaged.embedding.weight, last.embedding.weight, atol=1e-4)  # control


def test_evaluating_the_mean_equals_evaluating_averaged_weights(run, capsys):
    asked = dataclasses.replace(run, average=2, split="test")
    table2.main(asked)
    folder = folders.run_folder(run)
    found = json.loads((folder / "evaluation-test-average2.json").read_text())
    model, dataset, _ = evaluate.trained(run)
    states = [checkpoint.load(path)["state_dict"] for path in checkpoint.newest(folder / "checkpoints", 2)]
    last = nats_by_hand(model, dataset.pairs("test"))
    model.load_state_dict({name[12:]: (weight + states[1][name]) / 2 for name, weight in states[0].items()})
    assert found["nats"] == pytest.approx(nats_by_hand(model, dataset.pairs("test")), rel=1e-5)
    assert found["nats"] != pytest.approx(last, rel=1e-4)  # control
    assert len((folder / "translations-test-average2.txt").read_bytes().split(b"\n")) == 44
    printed = capsys.readouterr().out
    assert (
        f"perplexity {found['ppl']:.3f} per token ({found['tokens']} tokens, 25 subwords, tokenizer=sentencepiece)"
        in printed
    )
    assert "digits test, scale paper" in printed


@pytest.mark.parametrize(("kept", "remedy"), [(3, "train with training.keep_checkpoints=4"), (5, "train longer, or")])
def test_more_checkpoints_than_there_are_is_an_error_that_says_so(run, kept, remedy):
    asked = dataclasses.replace(run, average=4, training=dataclasses.replace(run.training, keep_checkpoints=kept))
    with pytest.raises(compose.ConfigError, match=rf"average=4: .* keeps only 3; {remedy}"):
        evaluate.trained(asked)


def test_a_run_that_was_never_trained_is_an_error_that_names_its_folder(run):
    with pytest.raises(compose.ConfigError, match=r"experiment=base: nothing is trained in .*seed2"):
        evaluate.trained(dataclasses.replace(run, seed=2))


def test_a_finished_run_without_its_checkpoints_is_an_error_that_says_how_to_get_them(run, monkeypatch):
    monkeypatch.setattr(evaluate.checkpoint, "newest", lambda folder, count: [])
    with pytest.raises(compose.ConfigError, match="is finished, but its checkpoints are not here; delete the folder"):
        evaluate.trained(run)


def test_a_run_of_another_meaning_is_refused_before_its_weights_are_read(run):
    other = dataclasses.replace(run, scale=dataclasses.replace(run.scale, width=3.0))
    with pytest.raises(compose.ConfigError, match=r"scale\.width=3.0: .* holds a run with scale\.width=1.0"):
        evaluate.trained(other)


def test_our_bleu_of_the_translations_is_that_of_the_sacrebleu_command(run, tmp_path):
    model, dataset, _ = evaluate.trained(run)
    figures, translations = evaluate.evaluate(model, dataset, "test", run)
    for name, lines in (("ours", translations), ("references", dataset.texts("test", "target"))):
        (tmp_path / name).write_text("".join(line + "\n" for line in lines))
    command = ["sacrebleu", tmp_path / "references", "-i", tmp_path / "ours", "-b", "-w", "6", "--force"]
    done = subprocess.run([sys.executable, "-m", *map(str, command)], capture_output=True, text=True, check=True)
    assert float(done.stdout) == pytest.approx(figures["bleu"]["sacrebleu"], abs=1e-5)


def test_another_beam_search_finds_the_rows_own_run_and_leaves_its_figures_alone(run, capsys):
    folder = folders.run_folder(run)
    table2.main(run)
    before = (folder / "evaluation-dev-average1.json").read_bytes()
    greedy = dataclasses.replace(run, decoding=dataclasses.replace(run.decoding, beam_size=1))
    assert folders.run_folder(greedy) != folder
    table2.main(greedy)
    (other,) = folder.glob("evaluation-dev-average1+*.json")
    assert json.loads(other.read_bytes())["nats"] == json.loads(before)["nats"]
    assert (folder / "evaluation-dev-average1.json").read_bytes() == before
    assert not folders.run_folder(greedy).exists()


def test_other_text_than_the_run_was_trained_on_is_refused(run):
    (folders.run_folder(run) / "data.sha256").write_text("0" * 64)
    with pytest.raises(compose.ConfigError, match=r"data\.name: .* was begun on data with SHA-256 000000000000"):
        evaluate.trained(run)


@pytest.mark.parametrize("command", ["evaluate", "translate"])
def test_a_translation_may_be_longer_than_its_source_by_as_much_as_the_configuration_says(run, monkeypatch, command):
    model, dataset, _ = evaluate.trained(run)
    norm, eos = model.decoder[-1].after_feed_forward.norm, model.embedding.weight[EOS]
    with torch.no_grad():  # the end is the least probable token everywhere
        norm.weight.zero_()
        norm.bias.copy_(-1000 * eos)
        model.embedding.weight[:EOS] = model.embedding.weight[EOS + 1 :] = 0.0
    search, found = evaluate.search, []

    def watched(model, sources, *rest):
        hypotheses = search(model, sources, *rest)
        found.extend((len(source), len(hypothesis.ids)) for source, hypothesis in zip(sources, hypotheses, strict=True))
        return hypotheses

    for module in (evaluate, translate):
        monkeypatch.setattr(module, "search", watched)
    lengths = {}
    for extra in (3, 11):
        found.clear()
        decoding = dataclasses.replace(run.decoding, max_extra=extra)
        if command == "evaluate":
            evaluate.evaluate(model, dataset, "dev", dataclasses.replace(run, decoding=decoding))
        else:
            list(translate.translate(model, dataset, decoding, run.hardware, [b"1 2 3\n", b"4 5\n"], pytest.fail))
        # Both sides are counted with their ends, and no translation has one
        assert {of_hypothesis - of_source for of_source, of_hypothesis in found} == {extra + 1}
        lengths[extra] = list(found)
    assert lengths[3] != lengths[11]
