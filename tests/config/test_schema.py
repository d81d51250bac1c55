"""Every knob: each number has a range, each key is either part of a run's meaning or harmless."""

import dataclasses

import pytest

from aiayn.config import compose, schema

KEYS = [key for key, _, _ in schema.leaves(schema.Config())]


def test_every_number_has_a_range():
    for key, _, meta in schema.leaves(schema.Config()):
        if not meta.keys() - {"meaning"}:
            assert key.rpartition(".")[2] in {
                *(
                    "target_space",
                    "zero_start",
                    "compile",
                    "deterministic",
                    "project",
                    "entity",
                    "output",
                    "prepared",
                    "params_millions",
                    "where",
                    "source",
                ),
                *(f"{split}_{side}" for split in ("train", "dev", "test") for side in ("source", "target")),
            }, key


def undecided(keys: list[str]) -> set[str]:
    return set(keys) ^ (schema.MEANING | schema.HARMLESS)


def test_every_key_is_either_part_of_the_meaning_of_a_run_or_harmless():
    """A new key fails here until someone decides."""
    assert undecided(KEYS) == set()
    assert not schema.MEANING & schema.HARMLESS
    assert undecided([*KEYS, "model.new"]) == {"model.new"}  # control
    with pytest.raises(TypeError, match="meaning"):  # where a field is declared, too
        schema._number(1)


def test_the_meaning_of_a_run_holds_exactly_those_keys_with_their_values():
    run = compose.compose_row("experiment=a_h1", "seed=7")
    found = schema.meaning(run)
    assert set(found) == schema.MEANING
    assert (found["experiment"], found["seed"], found["model.num_heads"]) == ("a_h1", 7, 1)
    harmless = dataclasses.replace(run, hardware=dataclasses.replace(run.hardware, threads=5), output="elsewhere")
    assert schema.meaning(harmless) == found
    assert schema.meaning(dataclasses.replace(run, seed=8)) != found  # control


@pytest.mark.parametrize("key", ["model.num_layer", "num_layers", "trainng.max_steps"])
def test_a_misspelt_key_is_answered_with_the_nearest(key):
    assert schema.nearest(key).startswith("did you mean ")
    assert "--cfg job" in schema.nearest("qqqqqq")
