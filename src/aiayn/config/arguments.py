"""The words behind a command: refused in one line, or as Hydra takes them."""

import argparse
import dataclasses
import os
import re
import sys
from collections.abc import Iterable

from aiayn.config.compose import read_folder
from aiayn.config.schema import Config, ConfigError

SHOW_ALL = ("table", "report", "dashboard")  # the commands that read every run of a folder
# A name, several, or a sweep over all; no path, which leads out of the package, nor keys, which Hydra would ignore
FILE = re.compile(r"(?![\[{])[^/\\]+")
GROUPS = ("experiment", "data", "scale", "fidelity", "hardware", "hydra/launcher")
SECTIONS = {field.name for field in dataclasses.fields(Config) if dataclasses.is_dataclass(field.type)} - {*GROUPS}
FLAGS = "-cn NAME, -m, --cfg job|hydra|all"
# Keys of Hydra that other programs have, with their place here
INSTEAD = {
    ("hydra/sweeper", "hydra.sweeper", "hydra.mode"): "sweeps are grids: -m training.learning_rate_factor=0.5,1,2",
    ("hydra.run", "hydra.sweep", "hydra.output"): "runs go where output=FOLDER says",
    ("hydra",): "of Hydra's keys only hydra/launcher and hydra.launcher.* are read",
}


def for_hydra(command: str, words: list[str]) -> list[str]:
    """The words, flags first, since Hydra takes no words on both sides of a flag; ConfigError names a wrong one."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("-cn", "--config-name", choices=sorted(read_folder("sweeps")))
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("-m", "--multirun", action="store_true")
    modes.add_argument("-c", "--cfg", choices=("job", "hydra", "all"))
    try:
        flags, overrides = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error}; the flags are {FLAGS}") from error
    for word in overrides:
        _check(command, word, flags.multirun)
    given = {f"--{name.replace('_', '-')}": value for name, value in vars(flags).items() if value}
    return [*(flag if value is True else f"{flag}={value}" for flag, value in given.items()), *map(_quoted, overrides)]


def _check(command: str, word: str, multirun: bool) -> None:
    """ConfigError for a word without a value, or with a configuration from elsewhere: Hydra creates what that names."""
    key, equals, value = word.partition("=")
    key = key.strip().lstrip("+").strip()
    if word.startswith("-"):
        raise ConfigError(f"{key} is no flag of this program: {FLAGS}")
    if key.startswith("~"):
        raise ConfigError(f"{word}: no key can be removed; without it {key[1:].strip()} has its default")
    if key in SECTIONS and not value.strip().startswith("{"):
        raise ConfigError(f"{word}: is a section; give {key}.KEY=...")
    if not value.strip():
        raise ConfigError(
            f"{word!r}: must be KEY=VALUE, without blanks" + "; is a shell variable empty?" * bool(equals)
        )
    if key in GROUPS and not FILE.fullmatch(value):
        raise ConfigError(f"{word}: must be the name of a file of this program's own")
    if key.startswith("hydra") and not key.startswith(("hydra/launcher", "hydra.launcher.")):
        hint = next(hint for prefixes, hint in INSTEAD.items() if key.startswith(prefixes))
        raise ConfigError(f"{' '.join(word.split())}: {hint}")
    if re.search(r"\b_target_\b", word) or (key not in GROUPS and ("/" in key or "@" in key)):
        raise ConfigError(f"{key} is not a key of the configuration: `--cfg job` prints every key")
    if command in SHOW_ALL and key in ("experiment", "seed") and not multirun:
        raise ConfigError(f"{word}: `aiayn {command}` shows every trained run; leave it out")


def _quoted(word: str) -> str:
    """Quotes `~`, which Hydra's grammar has no place for, and a group's number, which is then the name of a file."""
    word = re.sub(rf"^({'|'.join(GROUPS)})=([\w.+-]+)$", r"\1='\2'", word)
    return word if {*word} & {*"'\""} else re.sub(r"(?<=[=,])~[^,]*", r"'\g<0>'", word)


def for_completion(asked: str, commands: Iterable[str]) -> list[str]:
    """What Hydra takes when a shell completes a line, without the command, which is completed here."""
    line = re.split(" +", os.environ.get("COMP_LINE", "").lstrip(), maxsplit=2)
    if len(line) == 2:
        print(*commands, sep="\n")
        sys.exit()
    *before, last = line[-1].split(" ")
    overrides = [word for word in before if "=" in word] + [last]
    # For a flag without its value argparse would print its usage
    os.environ["COMP_LINE"] = " ".join(["aiayn", *(word for word in overrides if not word.startswith("-"))])
    return ["aiayn", "--shell-completion", asked]
