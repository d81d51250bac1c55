"""What `--help` prints: every command, row and key, with the values of conf/."""

import re

import pytest
import yaml

from aiayn import manual
from aiayn.config import compose, schema


def test_the_manual_of_the_whole_names_every_command_and_row():
    printed = manual.manual()
    rows, _, beyond = printed.partition("Rows of Table 3 (experiment=NAME):")[2].partition("Beyond it: ")
    assert rows.split() == list(schema.ROWS)
    assert beyond.partition("\n\n")[0].split() == list(schema.BEYOND)
    assert all(f"\n  {command} " in printed for command in manual.COMMANDS)


@pytest.mark.parametrize("command", manual.COMMANDS)
def test_a_manual_has_examples_and_keys_with_their_values(command):
    printed = manual.manual_of(command)
    examples = printed.partition("Examples:\n")[2].partition("\n\n")[0].splitlines()
    assert examples
    assert all(line.startswith("  # ") for line in examples[::2])
    assert all(line.startswith(f"  aiayn {command}") for line in examples[1::2])
    listed = printed.partition("multiplies them:\n")[2].partition("\n\n")[0].splitlines()
    known = {key: value for key, value, _ in schema.leaves(compose.compose_row("scale=paper"))}
    for line in filter(lambda line: not line.strip().startswith("#"), listed):
        key, _, value = line.partition("#")[0].strip().partition("=")
        assert key in known
        assert key.startswith("data.") or yaml.safe_load(value) == known[key], key  # data.* are those of data=files
    for name in manual.COMMANDS[command].keys.split():
        assert any(re.match(rf"  {re.escape(name)}[.=]", line) for line in listed), name


def test_every_key_of_no_group_is_in_the_manual_of_a_command():
    printed = "\n".join(map(manual.manual_of, manual.COMMANDS))
    listed = {key for key in manual.documented_keys() if f"\n  {key}=" in printed}
    groups = ("experiment", "scale.", "fidelity.", "paper.", "published.")
    assert {key for key, _, _ in schema.leaves(schema.Config()) if not key.startswith(groups)} == listed
