"""The command line: which command, its manual, and Hydra for the rest. Only a command that needs torch imports it."""

import errno
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module, metadata
from pathlib import Path
from typing import NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from aiayn import manual
from aiayn.config import arguments, compose, schema, versions
from aiayn.core import exit_codes, signals, storage
from aiayn.runs import devices


def main() -> None:
    """Runs the command that `sys.argv` names and exits with its code."""
    with one_line_errors():
        command, *words = sys.argv[1:] or [""]
        storage.open_standard_streams(reads=command in ("translate", "attention"))
        completes = {"-sc", "--shell-completion"} & {command, *words}
        if command in ("", "-h", "--help", "help"):
            print(manual.manual())
            sys.exit(exit_codes.DONE if command else exit_codes.WRONG_CONFIGURATION)
        elif command == "--version":
            print(f"aiayn {metadata.version('aiayn')}")
        elif command not in manual.COMMANDS and not completes:
            fail(f"{command!r} is no command: one of {', '.join(manual.COMMANDS)}; `aiayn --help` explains them")
        elif {"-h", "--help"} & {*words}:
            print(manual.manual_of(command))
        else:
            versions.refuse()
            if completes:
                sys.argv = arguments.for_completion(sys.argv[-1], manual.COMMANDS)
            else:
                sys.argv = [f"aiayn {command}", *arguments.for_hydra(command, words)]
            compose.register()
            # Hydra looks for plugins in packages named hydra_plugins on this path, and nowhere else.
            sys.path.append(str(Path(__file__).parent / "sweep" / "plugins"))
            # Hydra prints its own errors over many lines and exits with 1, unless it is told not to catch them.
            os.environ["HYDRA_FULL_ERROR"] = "1"
            hydra.main(version_base="1.3", config_path="pkg://aiayn.conf", config_name="config")(task(command))()


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
                if "hardware" in manual.COMMANDS[command].keys and "RANK" not in os.environ:
                    devices.warn_of_threads(converted.hardware, converted.hardware.devices if command == "train" else 1)
                import_module(f"aiayn.{manual.COMMANDS[command].module}").main(converted)
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
    if isinstance(error, exit_codes.ExplainedError):
        return error.exit_code, str(error)
    if isinstance(error, OSError) and error.filename is not None:
        return exit_codes.STORAGE, storage.description(error)
    # Hydra 1.3 refuses some overrides of a group, such as scale=[1], by a plain ValueError of its own
    raised_in = (frame.filename for frame in traceback.extract_tb(error.__traceback__)[-1:])
    in_hydra = any(Path(file).is_relative_to(Path(hydra.__file__).parent) for file in raised_in)
    if isinstance(error, HydraException | OmegaConfBaseException) or in_hydra:
        return exit_codes.WRONG_CONFIGURATION, _of_hydra(error)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EBADF, errno.EIO):
        sys.stdout = None  # what it still holds would fail once more when the interpreter ends
        return exit_codes.STORAGE, f"cannot write the output: {error.strerror}"
    raise error


def _of_hydra(error: Exception) -> str:
    """Hydra's message in one line, with the remedy where it has none."""
    text = str(error)
    if unknown := re.search(r"Could not override '([^']+)'", text):
        return f"{unknown[1]} is not a key of the configuration: {schema.nearest(unknown[1])}"
    if "'hydra/launcher/submitit_slurm'" in text:
        return "hydra/launcher: submitit_slurm is not installed; pip install 'aiayn[launchers]'"
    if several := re.search(r"Ambiguous value for argument '([^']+)'", text):
        return f"{several[1]}: several values are a sweep: `aiayn train -m {several[1]}`; a decimal has a point"
    if choice := re.search(r"Could not find '(.+)/([^/']*)'", text):
        offered = re.findall(r"^\t(\S+)$", text.partition("Config search path")[0], re.MULTILINE)
        return f"{choice[1]}={choice[2]}: must be one of {', '.join(offered)}"
    if isinstance(error, OverrideParseException):
        key, _, value = error.override.partition("=")
        remedy = f"quote a value that has special characters: '{key}=\"{value}\"'"
        text = f"{error.override}: {remedy}"
    return " ".join(text.split())


def fail(line: str, code: int = exit_codes.WRONG_CONFIGURATION) -> NoReturn:
    """Says in one line what is wrong and exits."""
    print(f"aiayn: {line}", file=sys.stderr)
    sys.exit(code)
