"""Every knob: each number has a range, each key is either result-affecting or a runtime key."""

import dataclasses

import pytest

from aiayn.config import compose, schema


def test_every_number_has_a_range():
    for section in (schema.Config(), *vars(schema.Config()).values()):
        for item in dataclasses.fields(section) if dataclasses.is_dataclass(section) else ():
            assert item.type not in (int, float) or item.metadata.keys() >= {"low", "high", "below"}, item.name


def test_every_key_is_result_affecting_or_a_runtime_key():
    """A new key fails here until someone decides."""
    runtime = {key for key, _, meta in schema.leaves(schema.Config()) if not meta["affects_result"]}
    assert not any(key.startswith(("model.", "fidelity.", "scale.", "decoding.")) for key in runtime)
    when = {"training.dev_every", "training.checkpoint_every", "training.keep_checkpoints"}
    assert {key for key in runtime if key.startswith("training.")} == when
    assert not runtime & {"experiment", "seed", "tokenizer", "hardware.precision"}
    for declared in (schema._number, schema._one_of, schema._any):  # control: where a field is declared, too
        with pytest.raises(TypeError, match="affects_result"):
            declared(1) if declared is schema._number else declared()


def test_the_result_affecting_keys_come_with_their_values():
    run = compose.compose_row("experiment=a_h1", "seed=7")
    found = schema.result_affecting(run)
    assert set(found) == schema.RESULT_AFFECTING
    assert (found["experiment"], found["seed"], found["model.num_heads"]) == ("a_h1", 7, 1)
    elsewhere = schema.vary(run, hardware={"threads": 5}, wandb={"project": "elsewhere"})
    assert schema.result_affecting(elsewhere) == found
    assert schema.result_affecting(dataclasses.replace(run, seed=8)) != found  # control
