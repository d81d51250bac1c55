"""What does not suit is refused in one line that names the key, its value and the remedy."""

import dataclasses

import pytest

from aiayn.config import checks, compose, schema


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("experiment=s_rnn model.num_heads=4", "model.num_heads=4: not for model.kind=rnn; use model.num_heads=0, or "),
        ("model.kind=rnn", "model.positions=sinusoids: not for model.kind=rnn; use model.positions=none, or exp"),
        ("model.num_heads=0", "model.num_heads=0: must be at least 1 with model.kind=transformer"),
        ("model.positions=relative model.scores=additive", "model.scores=additive: .* use scaled"),
        ("experiment=f_no_positions model.residual=positions", "model.residual=positions: .* use model.positions=sin"),
        ("bench.neighbourhood=64", "^bench.neighbourhood=64: must be odd"),
        ("bench.d_model=100", "^bench.d_model=100: must be a multiple of 64"),
        ("bench.kind=layer", "^bench.kind='layer': must be one of .*layers$"),
        ("model.positions=true", "model.positions='True': must be one of sinusoids"),
        (
            "experiment=s_rnn_attention fidelity=released_code",
            "fidelity.sinusoids=halves: .* with model.kind=rnn_attention use fidelity=paper",
        ),
        ("experiment=s_rnn fidelity.zero_start=true", "fidelity.zero_start=true: .* use fidelity=paper"),
    ],
)
def test_a_part_that_does_not_suit_is_one_line(words, line):
    with pytest.raises(schema.ConfigError, match=line) as caught:
        compose.compose_row(*words.split())
    assert "\n" not in str(caught.value)


def test_what_suits_is_not_refused():  # control
    released = "experiment=f_additive fidelity=released_code"
    for words in ("experiment=s_rnn", "experiment=f_no_residual hardware=gpu", "hardware=gpu", released):
        compose.compose_row(*words.split())
    compose.compose_row("model.positions=learned", "model.residual=positions")
    compose.compose_row("model.positions=none", "model.scores=additive", "model.residual=none")


def test_an_unknown_row_is_refused_with_the_names_of_all():
    with pytest.raises(schema.ConfigError, match=r"one of base, .*, big, f_no_positions, .*, s_rnn_attention \(docs/"):
        checks.checked(dataclasses.replace(compose.compose_row(), experiment="f_none"))
