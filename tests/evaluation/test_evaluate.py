"""`aiayn evaluate`: every token of every sentence once, whatever the batches; the mean of checkpoints is a mean."""

import dataclasses
import json
import math
import shutil
from functools import partial

import numpy as np
import pytest
import torch

from aiayn.config import compose, folders, schema
from aiayn.core import storage
from aiayn.data.sentencepiece_bpe import EOS
from aiayn.data.update_plan import gather
from aiayn.evaluation import evaluate
from aiayn.runs import checkpoint, models
from aiayn.runs.models import trained
from aiayn.tables import table2


@pytest.fixture
def run(finished, tmp_path) -> compose.Config:
    """A copy of the trained run, to write into."""
    original = compose.compose_row(*finished)
    copy = dataclasses.replace(original, output=str(tmp_path / "runs"))
    shutil.copytree(folders.run_folder(original), folders.run_folder(copy))
    return copy


def test_the_nats_are_those_of_each_sentence_alone(run):
    model, dataset, *_ = trained(run)
    pairs, asked = dataset.pairs("dev"), list[int]()
    expected = 0.0  # one sentence at a time, through the whole softmax, in a plain sum
    for sentence in range(len(pairs)):
        batch = gather(pairs, np.array([sentence]))
        expected -= model.double()(batch).log_softmax(1)[range(len(batch.target)), batch.target].sum().item()
    model.train()  # measuring leaves that as it is, and drops nothing
    for tokens_per_batch in (1, 17, 100_000):
        check = partial(asked.append, tokens_per_batch)  # before each batch
        nats, tokens = evaluate.teacher_forced_nats(model, pairs, tokens_per_batch, check)
        assert nats == pytest.approx(expected, rel=1e-12)
        assert tokens == len(pairs.target_ids)
    assert model.training
    assert asked.count(1) == len(pairs) > asked.count(17) > asked.count(100_000) == 1
    other, _ = evaluate.teacher_forced_nats(model, dataset.pairs("test"), 100_000)
    assert other != pytest.approx(expected, rel=1e-3)  # control


def test_a_line_of_spaces_is_an_empty_sentence(run, monkeypatch):
    model, dataset, *_ = trained(run)
    _, before = evaluate.evaluate(model, dataset, "dev", run)
    texts = {side: dataset.texts("dev", side) for side in ("source", "target")}
    texts["source"] = ["  ", *texts["source"][1:]]
    monkeypatch.setattr(type(dataset), "texts", lambda self, split, side: texts[side])
    _, found = evaluate.evaluate(model, dataset, "dev", run)
    assert before[0] != ""  # control
    assert found == ["", *before[1:]]


def test_figures_of_an_unfinished_run_carry_their_update(run, capsys, monkeypatch):
    last = checkpoint.path_of(folders.run_folder(run) / "checkpoints", 300)
    saved, average, prepare = last.read_bytes(), checkpoint.average, models.prepare
    # As where training goes on: while the corpus is read, the checkpoint is removed
    monkeypatch.setattr(models, "prepare", lambda *given: last.unlink(missing_ok=True) or prepare(*given))
    # As where training goes on: the next checkpoint is there before the weights are loaded
    monkeypatch.setattr(checkpoint, "average", lambda paths: average(paths) if last.write_bytes(saved) else {})
    for path, updates, said in ((last.with_name("none"), 300, ""), (last, 200, ", after 200 of 300 updates")):
        path.unlink(missing_ok=True)
        _, name = evaluate.evaluate_trained(run)
        assert f"scale paper{said}:" in capsys.readouterr().out
        assert json.loads((folders.run_folder(run) / f"evaluation-{name}.json").read_text())["steps"] == updates


def test_figures_are_printed_where_they_cannot_be_written(run, capsys):
    path = folders.run_folder(run) / "evaluation-dev-average1.json"
    path.unlink(missing_ok=True)
    path.mkdir()  # as unwritable for root as for anyone
    with pytest.raises(storage.StorageError, match=r"cannot write .*evaluation-dev-average1\.json"):
        evaluate.evaluate_trained(run)
    assert "perplexity" in capsys.readouterr().out


def test_evaluating_again_gives_the_result_s_figures(run):
    folder = folders.run_folder(run)
    model, dataset, *_ = trained(run)
    figures, translations = evaluate.evaluate(model, dataset, "dev", run)
    assert json.loads(json.dumps(figures)) == json.loads((folder / "result.json").read_text())["dev"]
    assert "".join(line + "\n" for line in translations) == (folder / "translations.txt").read_text()
    assert figures["ppl"] == pytest.approx(math.exp(figures["nats"] / figures["tokens"]))
    characters = len("".join(dataset.texts("dev", "target")))
    assert figures["bits_per_character"] == pytest.approx(figures["nats"] / math.log(2) / characters)


@pytest.mark.parametrize("more", [0, 1])
def test_more_than_1_percent_unseen_characters_is_a_warning(run, capsys, more):
    model, dataset, *_ = trained(run)
    unseen = len("".join(dataset.texts("dev", "target"))) // 100 + more
    dataset.manifest["splits"]["dev"]["target_unknown"] = unseen
    evaluate.evaluate(model, dataset, "dev", run)
    assert (f"warning: dev has {unseen} target characters" in capsys.readouterr().out) == bool(more)


def test_averaging_is_the_mean_of_the_weights(run):
    newest, before = checkpoint.newest(folders.run_folder(run) / "checkpoints", 2)
    states = [checkpoint.load(path)["state_dict"] for path in (newest, before)]
    averaged, *_ = trained(dataclasses.replace(run, average=2))
    last, *_ = trained(run)
    for name, weight in averaged.state_dict().items():
        one, other = (state[f"transformer.{name}"] for state in states)
        assert torch.allclose(weight, (one + other) / 2, rtol=0, atol=1e-7), name
        assert torch.equal(last.state_dict()[name], one), name
    assert not torch.allclose(averaged.embedding.weight, last.embedding.weight, atol=1e-4)  # control


REFUSED = {
    "of other values": ({}, {"scale": {"width": 3.0}}, r"scale\.width=3.0: .* holds a run with scale\.width=1.0"),
    "keeps too few": ({"average": 4}, {"training": {"keep_checkpoints": 3}}, "average=4: .*train with .*=4 and a s"),
    "too short": ({"average": 4}, {"training": {"keep_checkpoints": 5}}, r"average=4: .* only 3; train with a small"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_a_run_cannot_give_is_refused_with_the_remedy(run, why):
    values, sections, refusal = REFUSED[why]
    with pytest.raises(compose.ConfigError, match=refusal):
        trained(dataclasses.replace(schema.vary(run, **sections), **values))


def test_a_run_without_checkpoints_or_of_other_text_is_refused(run, monkeypatch):
    (folders.run_folder(run) / "data.sha256").write_text("0" * 64)
    with pytest.raises(compose.ConfigError, match=r"data\.name: .* was begun on data with SHA-256 000000000000"):
        trained(run)
    monkeypatch.setattr(checkpoint, "newest", lambda folder, count: [])
    with pytest.raises(compose.ConfigError, match="is finished, but its checkpoints are not here; delete the folder"):
        trained(run)


def test_another_beam_search_finds_the_row_s_run(run, capsys):
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


def test_a_translation_may_be_longer_by_max_extra(run, monkeypatch):
    model, dataset, *_ = trained(run)
    norm, eos = model.decoder[-1].after_feed_forward.norm, model.embedding.weight[EOS]
    with torch.no_grad():  # the end is the least probable token everywhere
        norm.weight.zero_()
        norm.bias.copy_(-1000 * eos)
        model.embedding.weight[:EOS] = model.embedding.weight[EOS + 1 :] = 0.0
    search, found = evaluate.search, []

    def watched(model, sources, *rest):
        hypotheses = search(model, sources, *rest)
        found.extend(len(hypothesis.ids) - len(source) for source, hypothesis in zip(sources, hypotheses, strict=True))
        return hypotheses

    monkeypatch.setattr(evaluate, "search", watched)
    for extra in (3, 11):
        found.clear()
        decoding = dataclasses.replace(run.decoding, max_extra=extra)
        evaluate.evaluate(model, dataset, "dev", dataclasses.replace(run, decoding=decoding))
        assert set(found) == {extra + 1}  # both sides are counted with their ends, and no translation has one
