"""The command line: which command, its manual, and Hydra for the rest. Only a command that needs torch imports it."""

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

from aiayn.config import compose, schema, versions
from aiayn.core import signals

COMMANDS = {
    "prepare": "download, verify, clean, tokenize and encode a corpus",
    "train": "train a row, or a sweep of rows with -m, and evaluate it",
    "evaluate": "perplexity, bits per character and BLEU of a trained row",
    "translate": "standard input to standard output, n lines in, n lines out",
    "table": "Table 3, paper and ours, from what is trained",
    "criteria": "does a scale train as the paper does: epochs, convergence, stability, the dev set's size",
    "report": "one page: Table 3, its runs, curves and figures, the paper's claims tested",
    "attention": "where every head of every layer attends, for a sentence and over the dev set",
    "dashboard": "a W&B workspace that compares the rows, or a list of what it would hold",
    "export": "a trained row for CTranslate2, transformers (as Marian) or safetensors",
    "bench": "tokens/s and memory beside other libraries in the same run; growth; torch's profile; Table 1",
    "plan": "parameters, FLOPs, memory, hours and cost of the rows; checks data, memory and disk, trains nothing",
}
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
# Of each command: words after its name, and what they do
EXAMPLES = {
    "prepare": {
        "": "the embedded corpus",
        "data=files data.name=mine data.train_source=train.en data.train_target=train.de.gz ...": "your own"
        " parallel text",
        "data=wmt14_en_de scale=paper": "downloads 1.7 GB; repeat to resume",
        "data=wmt14_en_de scale=paper data.source=archives": "the same from WMT's archives in a folder",
    },
    "train": {
        "": "the base row at scale=mini",
        "experiment=a_h1 seed=2": "one attention head, another seed",
        "experiment=base scale=small hardware.threads=2": "larger, on two cores",
        "fidelity=released_code": "base as in the authors' code, where that differs from the paper",
        "model.dropout=0.3": "your own variation: its folder gets a hash of the difference",
        "-cn table3 seed=1,2,3": "every row of Table 3, three seeds, side by side",
        "-cn beyond seed=1,2,3": "the rows beyond it",
    },
    "evaluate": {
        "experiment=a_h1": "on the dev set",
        "experiment=base split=test average=5": "the mean of the last five checkpoints; prints Table 2",
        "experiment=big split=test average=20": "the same of the big row, which keeps twenty",
    },
    "translate": {"experiment=base < in.txt > out.txt": "with the run in runs/tiny-mini/base/seed1"},
    "table": {
        "": "in the terminal",
        "format=md scale=smoke > table.md": "as Markdown (or csv, latex), another scale",
    },
    "criteria": {"scale=small seed=0": "of the rows that are trained with that seed, and what they miss"},
    "report": {"": "runs/tiny-mini/report/report.html, and the figures as SVG and PNG in figures/"},
    "attention": {
        "experiment=base < sentence.txt": "a page in runs/tiny-mini/base/seed1/attention/, and each layer as SVG"
        " and PNG; heads in numbers on dev",
    },
    "dashboard": {
        "": "prints what would be built; uses no network",
        "wandb.mode=online": "builds it and prints its link: needs '.[dashboard]' and a W&B key",
        "wandb.mode=online scale=small wandb.entity=my-team": "of another scale, for a team",
    },
    "export": {
        "format=ctranslate2 experiment=base": "into runs/tiny-mini/base/seed1/export-ctranslate2",
        "format=safetensors average=5": "the mean of the last five checkpoints",
        "format=marian experiment=big": "for transformers.MarianMTModel.from_pretrained",
    },
    "bench": {
        "scale=small": "all kinds, in ten minutes: rivals, growth, profile",
        "bench.kind=rivals experiment=a_h4 scale=small data.vocab_size=8000": "small: d_model 128, N 3, d_ff 512, h 4",
        "bench.kind=rivals scale=paper data.vocab_size=37000 training.tokens_per_update=2500": "base, in"
        " updates that take a CPU seconds",
        "bench.kind=decoding hardware.threads=2 bench.rounds=9": "beam search and greedy, on two cores",
        "bench.kind=growth scale=small": "by row, length and update; bench.json and bench.md",
        "bench.kind=layers": "Table 1, measured",
        "hardware=gpu": "base and big at the paper's size, in ten minutes",
    },
    "plan": {
        "data=wmt14_en_de scale=paper hardware=gpu plan.gpu=h200 plan.gpus=8": "the 20 rows on eight H200",
        "data=wmt14_en_de scale=paper hardware=gpu plan.efficiency=0.5 plan.price_per_hour=3": "at your pace and price",
        "": "on this CPU, at scale=mini",
        "experiment=big training.max_steps=1000 scale=paper": "one variation alone",
    },
}
FLAGS = ("-m", "--multirun", "-cn", "--config-name", "-c", "--cfg", "-p", "--package", "--resolve", "-sc")
ALONE = ("-m", "--multirun", "--resolve")  # flags without a value
# A name, several, or what a sweep makes of all names; never a path, which would lead to a file outside the package
FILE = re.compile(r"[^/\\]*")
GROUPS = ("experiment", "data", "scale", "fidelity", "hardware", "hydra/launcher")
EXIT_CODES = (
    "0 done, 1 failed, 2 wrong configuration or usage, 3 non-finite, 4 bad data, 5 storage,"
    " 75 interrupted: repeat to resume, 141 output closed"
)


def main() -> None:
    """Runs the command that `sys.argv` names and exits with its code."""
    with one_line_errors():
        _run(sys.argv[1:])


def _run(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(manual())
        sys.exit(0 if arguments else 2)
    command, *rest = arguments
    if command == "--version":
        print(f"aiayn {metadata.version('aiayn')}")
        sys.exit(0)
    if command not in COMMANDS:
        fail(f"{command!r} is no command: one of {', '.join(COMMANDS)}; `aiayn --help` explains them")
    if "-h" in rest or "--help" in rest:
        print(manual_of(command))
        sys.exit(0)
    versions.refuse()
    refuse_foreign(rest)
    compose.register()
    # Hydra looks for plugins in packages named hydra_plugins on this path, and nowhere else.
    sys.path.append(str(Path(__file__).parent / "sweep" / "plugins"))
    # Hydra prints its own errors over many lines and exits with 1, unless it is told not to catch them.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    sys.argv = [f"aiayn {command}", *flags_first(rest)]
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
            fail(f"{word}: must name a file of this program's own, without a path")
        foreign = key.startswith("hydra") and not key.startswith(("hydra/launcher", "hydra.launcher."))
        if foreign or "_target_" in word or (key not in GROUPS and ("/" in key or "@" in key)):
            fail(f"{key} is not a key of the configuration: `--cfg job` prints every key")
        previous = word


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
    # Hydra 1.3 refuses some overrides of a group, such as scale=0, by a plain ValueError of its own
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


def manual() -> str:
    """The manual of the whole."""
    commands = "\n".join(f"  {name:10} {what}" for name, what in COMMANDS.items())
    return f"""\
aiayn: Table 3 of 'Attention Is All You Need', 20 rows, trained and compared with the paper cell by cell.

  aiayn COMMAND [KEY=VALUE ...]        python -m aiayn is the same

Commands (aiayn COMMAND --help explains one):
{commands}

{common()}"""


def manual_of(command: str) -> str:
    """The manual of one command."""
    examples = {f"aiayn {command} {words}".rstrip(): what for words, what in EXAMPLES[command].items()}
    width = max(map(len, examples))
    lines = "\n".join(f"  {line:{width}}  # {what}" for line, what in examples.items())
    return f"""\
aiayn {command}: {COMMANDS[command]}

  aiayn {command} [KEY=VALUE ...]

Examples:
{lines}

{common()}"""


def common() -> str:
    """What holds for every command: rows, groups, keys, flags, exit codes."""
    letters = ("base", "a_", "b_", "c_", "d_", "e_", "big")
    rows = "\n".join(f"  {'  '.join(row for row in schema.ROWS if row.startswith(letter))}" for letter in letters)
    return f"""\
Rows of Table 3 (experiment=NAME):
{rows}
Beyond it: {"  ".join(schema.BEYOND)}

Groups: scale=paper|small|mini|smoke  hardware=cpu|gpu  data=tiny|files|wmt14_en_de|wmt14_en_fr
        fidelity=paper|released_code: where the paper's text and its authors' code differ
        tokenizer=sentencepiece|paper: the paper's has Moses tokens and 32K merges
Keys:   seed, model.*, training.*, decoding.*, data.*, wandb.mode=offline|online|disabled, output, ...
        in the paper's units: scale multiplies them afterwards
Flags:  --cfg job prints the configuration, -m sweeps over comma lists, -cn NAME starts a sweep file
        (table3: all its rows; beyond: the others; seeds: base from three; lengths: longer sentences)
Tab completion: eval "$(aiayn train -sc install=bash)"
Exit codes: {EXIT_CODES}"""
