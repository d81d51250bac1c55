"""What does not suit is refused in one line that names the key, its value and the remedy."""

import dataclasses
import os
from operator import attrgetter

import pytest

from aiayn.config import checks, compose, schema


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("model.kind=rnn", "model.positions=sinusoids: not for model.kind=rnn; use model.positions=none, or exp"),
        ("model.num_heads=0", "model.num_heads=0: must be at least 1 with model.kind=transformer"),
        ("model.positions=relative model.scores=additive", "model.scores=additive: .* use scaled"),
        ("experiment=f_no_positions model.residual=positions", "model.residual=positions: .* use model.positions=sin"),
        ("bench.output=figures.md", r"^bench.output=figures.md: .*\.json"),
        ("scale.width=1e6", "model.d_model=512, 512000000 once scaled: must be at least 2 and at most 65536"),
        (f"hardware.tokens_per_search=1{'0' * 20}", r"hardware.tokens_per_search.* at most 1e\+12"),
        ("experiment=s_rnn fidelity.zero_start=true", "fidelity.zero_start=true: .* use fidelity=paper"),
        ("model.dropout=1.0", "model.dropout=1.0: .* below 1"),
        (f"training.max_steps=1{'0' * 400}", r"training.max_steps.* at most 1e\+12"),
        ("model.d_model=517", "model.d_model=517, 129 once scaled: must be even"),
        ("model.d_model=511", "model.d_model=511, 128 once scaled, like base's own 512; leave it out"),
        ("training.tokens_per_update=100", "training.tokens_per_update=.* data.max_length"),
        ("+model.num_layer=3", r"model.num_layer.* did you mean model.num_layers\?"),
        ("hardware.compile=true", "hardware.compile=true: must be false on a CPU"),
        ("output=2024_11_23", "output=20241123.* must be text"),
        ("training.max_steps=1e5", "^training.max_steps=100000.0: must be a whole number: training.max_steps=100000$"),
        ("seed=1.5", "seed=1.5: must be a whole number$"),
        ("data.test_target=mine.de", r"data.test_target=mine.de: .* data.train_source.*\(data=files\)"),
    ],
)
def test_a_wrong_value_is_one_line_with_key_value_and_remedy(words, line):
    with pytest.raises(schema.ConfigError, match=line) as caught:
        compose.compose_row(*words.split())
    assert "\n" not in str(caught.value)


def test_a_key_that_another_choice_has_is_named_with_it():
    hints = [schema.nearest(key).partition(",")[0] for key in ("data.train", "published.bleu", "data.trian")]
    assert hints == ["only with data=files", "only with a row beyond Table 3", "did you mean data.train?"]


def test_every_path_may_begin_with_a_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home of/ü")
    paths = [key for key, _, meta in schema.leaves(schema.Config()) if "path" in meta]
    prefixes = {"data.train", "data.dev", "data.test"}
    assert {*paths} == schema.PATHS | prefixes | {"data.source", "output", "prepared", "bench.output"}
    for named in ({*paths} - prefixes, prefixes):
        languages = ("data.source_language=is", "data.target_language=fi")
        run = compose.compose_row("data=files", *languages, *(f"{key}='~/{key} 1.json'" for key in named))
        assert [attrgetter(key)(run) for key in named] == [f"/home of/ü/{key} 1.json" for key in named]
    assert compose.compose_row("output='~root/x'").output == os.path.expanduser("~root/x") != "~root/x"


def test_no_text_is_empty_but_for_what_a_corpus_does_without():
    text = {key for key, value, _ in schema.leaves(compose.compose_row()) if isinstance(value, str)} - schema.PATHS
    for key in text - {"data.train", "data.dev", "data.test", "experiment", "data.source", "published.where"}:
        with pytest.raises(schema.ConfigError, match=f"^{key}=''"):
            compose.compose_row(f"{key}=''")


def test_what_suits_is_not_refused():  # control
    learned = "model.positions=learned model.residual=positions"
    released = "experiment=f_additive fidelity=released_code"
    for words in ("experiment=s_rnn", "experiment=f_no_residual hardware=gpu", released, learned):
        compose.compose_row(*words.split())


def test_an_unknown_row_is_refused_with_the_names_of_all():
    with pytest.raises(schema.ConfigError, match=r"one of base, .*, big, f_no_positions, .*, s_rnn_attention \(docs/"):
        checks.checked(dataclasses.replace(compose.compose_row(), experiment="f_none"))
