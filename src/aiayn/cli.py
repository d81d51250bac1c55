"""The command line: which command, its manual, and Hydra for the rest. Only a command that needs torch imports it."""

import errno
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module, metadata
from itertools import islice
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from aiayn import manual
from aiayn.config import compose, schema, versions
from aiayn.core import signals

# Where the `main` of each command is, below `aiayn`; `train` starts worker processes instead
MODULES = {
    "prepare": "data.prepare",
    "evaluate": "tables.table2",
    "translate": "evaluation.translate",
    "table": "tables.table",
    "criteria": "tables.criteria",
    "report": "report.html_report",
    "attention": "report.attention_maps",
    "dashboard": "report.wandb_workspace",
    "export": "evaluation.export",
    "bench": "bench.bench",
    "plan": "cost.plan",
}
# Hydra's plugins that are an extra of this package: the name of a launcher's configuration, and the extra
LAUNCHER_EXTRAS = {"joblib": "launchers", "submitit_slurm": "launchers", "ray": "ray"}
FLAGS = ("-m", "--multirun", "-cn", "--config-name", "-c", "--cfg", "-p", "--package", "--resolve", "-sc")
# The commands that read every run of a folder, and what they read all of
ALL_OF = {"criteria": ("experiment",), **dict.fromkeys(("table", "report", "dashboard"), ("experiment", "seed"))}
ALONE = ("-m", "--multirun", "--resolve")  # flags without a value
# A name, several, or what a sweep makes of all names; never a path, which would lead to a file outside the package, nor
# the keys of a group, which Hydra would ignore
FILE = re.compile(r"(?![\[{])[^/\\]*")
GROUPS = ("experiment", "data", "scale", "fidelity", "hardware", "hydra/launcher")


def main() -> None:
    """Runs the command that `sys.argv` names and exits with its code."""
    with one_line_errors():
        _run(sys.argv[1:])


def _run(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(manual.manual())
        sys.exit(0 if arguments else 2)
    command, *rest = arguments
    if command == "--version":
        print(f"aiayn {metadata.version('aiayn')}")
        sys.exit(0)
    if command not in manual.COMMANDS:
        fail(f"{command!r} is no command: one of {', '.join(manual.COMMANDS)}; `aiayn --help` explains them")
    if "-h" in rest or "--help" in rest:
        print(manual.manual_of(command))
        sys.exit(0)
    versions.refuse()
    refuse_foreign(rest)
    refuse_ignored(command, rest)
    compose.register()
    # Hydra looks for plugins in packages named hydra_plugins on this path, and nowhere else.
    sys.path.append(str(Path(__file__).parent / "sweep" / "plugins"))
    # Hydra prints its own errors over many lines and exits with 1, unless it is told not to catch them.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    sys.argv = [f"aiayn {command}", *map(as_name, flags_first(rest))]
    start = hydra.main(version_base="1.3", config_path="pkg://aiayn.conf", config_name="config")
    start(task(command))()


def flags_first(words: list[str]) -> list[str]:
    """The words with the flags and their values before the others: argparse takes no words on both sides of a flag."""
    flags, others, rest = list[str](), list[str](), iter(words)
    for word in rest:
        if not word.startswith("-"):
            others.append(word)
            continue
        flags.append(word)
        if word not in ALONE and "=" not in word:
            flags += islice(rest, 1)
    return flags + others


def as_name(word: str) -> str:
    """`scale=0` as `scale='0'`: Hydra then looks for such a file and lists those there are, as for any wrong name."""
    key, _, value = word.partition("=")
    return f"{key}='{value}'" if key in GROUPS and re.fullmatch(r"[\w.+-]+", value) else word


def refuse_foreign(words: list[str]) -> None:
    """Fails for a word that brings in a configuration from elsewhere: Hydra creates whatever object that names."""
    previous = ""
    for word in words:
        key, _, value = word.partition("=")
        key = key.strip().lstrip("+~").strip()
        if word.startswith("-") and key not in FLAGS:
            fail(f"{key} is no flag of this program: one of {', '.join(FLAGS)}")
        names_a_file = key in (*GROUPS, "-cn", "--config-name") or previous in ("-cn", "--config-name")
        if names_a_file and not FILE.fullmatch(value or word):
            fail(f"{word}: must be the name of a file of this program's own")
        foreign = key.startswith("hydra") and not key.startswith(("hydra/launcher", "hydra.launcher."))
        if foreign or "_target_" in word or (key not in GROUPS and ("/" in key or "@" in key)):
            fail(f"{key} is not a key of the configuration: `--cfg job` prints every key")
        previous = word


def refuse_ignored(command: str, words: list[str]) -> None:
    """Fails for a row or a seed given to a command that shows them all, and would ignore it."""
    if {"-m", "--multirun"} & {*words}:
        return  # refused anyway: only train sweeps
    for word in words:
        if word.partition("=")[0] in ALL_OF.get(command, ()):
            fail(f"{word}: `aiayn {command}` shows every trained run; leave it out")


def task(command: str) -> Callable[[DictConfig], int]:
    """What Hydra calls with the composed configuration; in a sweep it returns the exit code, alone it exits with it."""
    folder, process = os.getcwd(), os.getpid()

    def run(composed: DictConfig) -> int:
        if os.getppid() == process:  # joblib's workers would otherwise go on when the command is killed
            os.environ["AIAYN_PARENT"] = str(process)
            signals.die_with_parent()
        try:
            with one_line_errors():  # Hydra prints the overrides above an error that comes through it
                os.chdir(folder)  # the workers of a Ray cluster are where Ray was started
                converted = compose.convert(composed)
                if command == "train":
                    from aiayn.runs import jobs
                    from aiayn.training import worker

                    if "RANK" in os.environ:
                        worker.leave(worker.as_rank(converted))

                    sys.exit(jobs.run_here(converted))
                import_module(f"aiayn.{MODULES[command]}").main(converted)
        except SystemExit as exit:
            # To exit would end the process of a launcher, which has other runs to start; only submitit exits with a
            # number below 0, when it has put its job back into the queue
            if HydraConfig.get().mode != RunMode.MULTIRUN or not isinstance(exit.code, int) or exit.code < 0:
                raise
            return exit.code
        return 0

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

    if isinstance(error, DataError):
        return 4, str(error)
    if isinstance(error, StorageError):
        return 5, str(error)
    if isinstance(error, schema.ConfigError):
        return 2, str(error)
    # Hydra 1.3 refuses some overrides of a group, such as scale=[1], by a plain ValueError of its own
    if isinstance(error, HydraException | OmegaConfBaseException) or _is_raised_in(error, "hydra"):
        sweep = re.search(r"Cannot find primary config '([^']+)'", str(error))
        if sweep:
            return 2, f"-cn {sweep[1]}: must be one of {', '.join(sorted(compose.sweeps()))}"
        unknown = re.search(r"Could not override '([^']+)'", str(error))
        if unknown:
            return 2, f"{unknown[1]} is not a key of the configuration: {schema.nearest(unknown[1])}"
        absent = re.search(rf"'hydra/launcher/({'|'.join(LAUNCHER_EXTRAS)})'", str(error))
        if absent:
            extra = LAUNCHER_EXTRAS[absent[1]]
            return 2, f"hydra/launcher: {absent[1]} is not installed; pip install -c constraints.txt -e '.[{extra}]'"
        choice = re.search(r"Could not find '(.+)/([^/']*)'", str(error))
        if choice:
            offered = re.findall(r"^\t(\S+)$", str(error).partition("Config search path")[0], re.MULTILINE)
            return 2, f"{choice[1]}={choice[2]}: must be one of {', '.join(offered)}"
        if isinstance(error, OverrideParseException):
            key, _, value = error.override.partition("=")
            cause, _, _ = str(error).partition("See https")
            remedy = f"quote a value that has special characters: '{key}=\"{value}\"'"
            return 2, " ".join(f"{error.override}: {cause.strip()}; {remedy}".split())
        return 2, " ".join(str(error).split())
    if isinstance(error, OSError) and error.filename is not None:
        return 5, str(error)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        sys.stdout = None  # what it still holds would fail once more when the interpreter ends
        return 5, f"cannot write the output: {error.strerror}"
    raise error


def _is_raised_in(error: Exception, package: str) -> bool:
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return at is not None and str(at.tb_frame.f_globals.get("__name__")).partition(".")[0] == package


def fail(line: str, code: int = 2) -> None:
    """Says in one line what is wrong and exits."""
    print(f"aiayn: {line}", file=sys.stderr)
    sys.exit(code)
