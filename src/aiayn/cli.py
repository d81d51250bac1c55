"""The command line: which command, its manual, and Hydra for the rest. Only a command that needs torch imports it."""

import errno
import operator
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module, metadata
from itertools import compress, pairwise
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from aiayn import manual
from aiayn.config import compose, schema, versions
from aiayn.core import exit_codes, signals

VALUED = ("-cn", "--config-name", "-c", "--cfg", "-p", "--package")  # flags with a value
FLAGS = (*VALUED, "-m", "--multirun", "--resolve")
SHOW_ALL = ("table", "report", "dashboard")  # the commands that read every run of a folder
# A name, several, or a sweep over all; no path, which leads out of the package, nor keys, which Hydra would ignore
FILE = re.compile(r"(?![\[{])[^/\\]*")
GROUPS = ("experiment", "data", "scale", "fidelity", "hardware", "hydra/launcher")


def main() -> None:
    """Runs the command that `sys.argv` names and exits with its code."""
    with one_line_errors():
        command, *words = sys.argv[1:] or [""]
        if command in ("", "-h", "--help", "help"):
            print(manual.manual())
            sys.exit(exit_codes.DONE if command else exit_codes.WRONG_CONFIGURATION)
        if command == "--version":
            print(f"aiayn {metadata.version('aiayn')}")
        elif command not in manual.COMMANDS:
            fail(f"{command!r} is no command: one of {', '.join(manual.COMMANDS)}; `aiayn --help` explains them")
        elif {"-h", "--help"} & {*words}:
            print(manual.manual_of(command))
        else:
            versions.refuse()
            refuse_foreign(command, words)
            compose.register()
            # Hydra looks for plugins in packages named hydra_plugins on this path, and nowhere else.
            sys.path.append(str(Path(__file__).parent / "sweep" / "plugins"))
            # Hydra prints its own errors over many lines and exits with 1, unless it is told not to catch them.
            os.environ["HYDRA_FULL_ERROR"] = "1"
            sys.argv = [f"aiayn {command}", *flags_first(words)]
            hydra.main(version_base="1.3", config_path="pkg://aiayn.conf", config_name="config")(task(command))()


def flags_first(words: list[str]) -> list[str]:
    """The words with the flags and their values before the others: argparse takes no words on both sides of a flag.

    `scale=0` becomes `scale='0'`: Hydra then looks for such a file and lists those there are, as for any wrong name.
    """
    flags = [word.startswith("-") or before in VALUED for before, word in pairwise(["", *words])]
    quoted = [re.sub(rf"^({'|'.join(GROUPS)})=([\w.+-]+)$", r"\1='\2'", word) for word in words]
    return [*compress(words, flags), *compress(quoted, map(operator.not_, flags))]


def refuse_foreign(command: str, words: list[str]) -> None:
    """Fails for a word that brings in a configuration from elsewhere: Hydra creates whatever object that names.

    Fails as well for a row or a seed given to a command that shows them all, and would ignore it.
    """
    for before, word in pairwise(["", *words]):
        key, _, value = word.partition("=")
        key = key.strip().lstrip("+~").strip()
        if word.startswith("-") and key not in FLAGS:
            fail(f"{key} is no flag of this program: one of {', '.join(FLAGS)}")
        if (key in GROUPS or {key, before} & {"-cn", "--config-name"}) and not FILE.fullmatch(value or word):
            fail(f"{word}: must be the name of a file of this program's own")
        foreign = key.startswith("hydra") and not key.startswith(("hydra/launcher", "hydra.launcher."))
        if foreign or "_target_" in word or (key not in GROUPS and ("/" in key or "@" in key)):
            fail(f"{key} is not a key of the configuration: `--cfg job` prints every key")
        if command in SHOW_ALL and key in ("experiment", "seed") and not {"-m", "--multirun"} & {*words}:
            fail(f"{word}: `aiayn {command}` shows every trained run; leave it out")


def task(command: str) -> Callable[[DictConfig], int]:
    """What Hydra calls with the composed configuration; in a sweep it returns the exit code, alone it exits with it."""
    process = os.getpid()

    def run(composed: DictConfig) -> int:
        if os.getppid() == process:  # a launcher's workers would otherwise go on when the command is killed
            os.environ["AIAYN_PARENT"] = str(process)
            signals.die_with_parent()
        try:
            with one_line_errors():  # Hydra prints the overrides above an error that comes through it
                converted = compose.convert(composed)
                if command != "train":
                    import_module(f"aiayn.{manual.COMMANDS[command].module}").main(converted)
                elif "RANK" in os.environ:
                    from aiayn.training import worker

                    worker.leave(worker.as_rank(converted))
                else:
                    from aiayn.sweep import one_run

                    sys.exit(one_run.run_here(converted))
        except SystemExit as exit:
            # A launcher has other runs to start; only submitit exits below 0, with its job back in the queue
            if HydraConfig.get().mode != RunMode.MULTIRUN or not isinstance(exit.code, int) or exit.code < 0:
                raise
            return exit.code
        return exit_codes.DONE

    run.__name__ = command
    return run


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turns an error that a user can cause into one line and an exit code; any other keeps its traceback."""
    with signals.reported():
        try:
            try:
                yield
            finally:
                print(end="", flush=True)  # here, where a reader that has left is no error
        except BrokenPipeError:
            raise
        except Exception as error:
            # A signal may make a library's clean-up fail, whose error would hide it
            if isinstance(error.__context__, signals.Interrupted):
                raise error.__context__ from None
            code, line = explained(error)
            fail(line, code)


def explained(error: Exception) -> tuple[int, str]:
    """The exit code and the line for an error that a user can cause; raises any other as it is."""
    from aiayn.core.storage import StorageError
    from aiayn.data.parallel_text import DataError

    if isinstance(error, DataError | schema.ConfigError):
        return exit_codes.BAD_DATA if isinstance(error, DataError) else exit_codes.WRONG_CONFIGURATION, str(error)
    if isinstance(error, StorageError) or (isinstance(error, OSError) and error.filename is not None):
        return exit_codes.STORAGE, str(error)
    # Hydra 1.3 refuses some overrides of a group, such as scale=[1], by a plain ValueError of its own
    in_hydra = "/hydra/" in str(traceback.extract_tb(error.__traceback__)[-1:])
    if isinstance(error, HydraException | OmegaConfBaseException) or in_hydra:
        return exit_codes.WRONG_CONFIGURATION, _of_hydra(error)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        sys.stdout = None  # what it still holds would fail once more when the interpreter ends
        return exit_codes.STORAGE, f"cannot write the output: {error.strerror}"
    raise error


def _of_hydra(error: Exception) -> str:
    """Hydra's message in one line, with the remedy where it has none."""
    text = str(error)
    if sweep := re.search(r"Cannot find primary config '([^']+)'", text):
        return f"-cn {sweep[1]}: must be one of {', '.join(sorted(compose.read_folder('sweeps')))}"
    if unknown := re.search(r"Could not override '([^']+)'", text):
        return f"{unknown[1]} is not a key of the configuration: {schema.nearest(unknown[1])}"
    if "'hydra/launcher/submitit_slurm'" in text:
        return "hydra/launcher: submitit_slurm is not installed; pip install -c constraints.txt -e '.[launchers]'"
    if choice := re.search(r"Could not find '(.+)/([^/']*)'", text):
        offered = re.findall(r"^\t(\S+)$", text.partition("Config search path")[0], re.MULTILINE)
        return f"{choice[1]}={choice[2]}: must be one of {', '.join(offered)}"
    if isinstance(error, OverrideParseException):
        key, _, value = error.override.partition("=")
        remedy = f"quote a value that has special characters: '{key}=\"{value}\"'"
        text = f"{error.override}: {text.partition('See https')[0].strip()}; {remedy}"
    return " ".join(text.split())


def fail(line: str, code: int = exit_codes.WRONG_CONFIGURATION) -> None:
    """Says in one line what is wrong and exits."""
    print(f"aiayn: {line}", file=sys.stderr)
    sys.exit(code)
