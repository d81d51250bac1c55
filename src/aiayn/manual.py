"""What `--help` prints: of the whole, and of one command with the keys that it reads."""

import re
import textwrap
from importlib import resources
from typing import NamedTuple

from aiayn.config import schema
from aiayn.core import exit_codes


class Command(NamedTuple):
    """Where a command's `main` is below `aiayn`, what it does, and which keys it reads, whole or by their section."""

    module: str
    summary: str
    keys: str  # besides those that say which run is meant


_OF_TRAINING = "seed model training decoding hardware wandb output"
_OF_TRAINED = "average decoding hardware"
COMMANDS = {
    "prepare": Command("data.prepare", "download, clean, tokenize and encode a corpus", "data tokenizer prepared"),
    "train": Command("sweep.one_run", "train a row, or many with -m, and evaluate each on the dev set", _OF_TRAINING),
    "evaluate": Command("tables.table2", "perplexity, BLEU of a trained row; Table 2", f"split {_OF_TRAINED}"),
    "translate": Command("evaluation.translate", "standard input to standard output, line by line", _OF_TRAINED),
    "table": Command("tables.table", "Table 3, paper and ours, from what is trained", "format"),
    "report": Command("report.html_report", "one page: table, claims, curves, figures", "output prepared"),
    "attention": Command("report.attention_maps", "where every head attends, for a sentence", _OF_TRAINED),
    "dashboard": Command("report.wandb_workspace", "a W&B workspace that compares the rows", "wandb"),
    "export": Command("evaluation.export", "a trained row, for CTranslate2 or safetensors", "format average hardware"),
    "bench": Command("bench.bench", "speed beside other libraries", "bench hardware"),
    "plan": Command("cost.plan", "parameters, FLOPs, memory and hours of the rows", "plan hardware"),
}
EXAMPLES = """\
aiayn prepare data=files data.name=mine data.train_source=train.en.gz ...  # your own text
aiayn prepare data=wmt14_en_de scale=paper  # downloads 1.7 GB; repeat to resume
aiayn train  # the base row at scale=mini
aiayn train experiment=a_h1 seed=2 hardware.threads=2  # one attention head, another seed, on two cores
aiayn train model.dropout=0.3  # your own variation: its folder gets a hash of the difference
aiayn train -cn table3 seed=1,2,3  # every row of Table 3, three seeds, side by side
aiayn evaluate experiment=big split=test average=20  # the mean of the last 20 checkpoints; prints Table 2
aiayn translate experiment=base < in.txt > out.txt  # with the run in runs/tiny-mini/base/seed1
aiayn table format=md scale=smoke > table.md  # as Markdown (or csv, latex), another scale
aiayn report  # runs/tiny-mini/report/report.html, and its figures as SVG and PNG
aiayn attention experiment=base < sentence.txt  # pages and figures in runs/tiny-mini/base/seed1/attention/
aiayn dashboard  # prints what would be built; uses no network
aiayn export format=ctranslate2 experiment=base  # into runs/tiny-mini/base/seed1/export-ctranslate2
aiayn bench scale=mini  # updates of base: tokens/s
aiayn plan data=wmt14_en_de scale=paper hardware=gpu plan.gpu=h200 plan.gpus=8  # the 20 rows on eight H200
"""
DOCUMENTED = {"config.yaml": "", "data/files.yaml": "data.", "hardware/cpu.yaml": "hardware."}


EXIT_CODES = "Exit codes: " + ", ".join(f"{code} {what}" for code, what in exit_codes.EXPLAINED.items())


def manual() -> str:
    """The manual of the whole: commands, rows, groups, keys, flags, exit codes."""
    commands = "\n".join(f"  {name:10} {command.summary}" for name, command in COMMANDS.items())
    return f"""\
aiayn: Table 3 of 'Attention Is All You Need', trained and compared cell by cell

  aiayn COMMAND [KEY=VALUE ...]        python -m aiayn is the same

Commands (aiayn COMMAND --help explains one, with examples and its keys):
{commands}

Rows of Table 3 (experiment=NAME):
{_wrapped("  " + "  ".join(schema.ROWS))}
{_wrapped("Beyond it: " + "  ".join(schema.BEYOND))}

Groups: scale=paper|small|mini|smoke|lengths  hardware=cpu|gpu
        data=tiny|bible|files|wmt14_en_de|wmt14_en_fr
        fidelity=paper|released_code: the paper's text or its authors' code
Keys:   seed, model.*, training.*, data.*, output, ... in the paper's units
Flags:  --cfg job prints the configuration, -m sweeps over comma lists,
        -cn NAME starts a sweep file (table3: all its rows; beyond: the others;
        seeds: base from three; lengths: longer sentences)
Tab:    eval "$(aiayn -sc install=bash)"; fish: aiayn -sc install=fish | source
{_wrapped(EXIT_CODES)}"""


def manual_of(name: str) -> str:
    """The manual of one command: examples, and what conf/ says of its keys."""
    command = COMMANDS[name]
    own_examples = (line.split("  # ") for line in EXAMPLES.splitlines() if line.split()[1] == name)
    examples = "\n".join(f"  # {what}\n  {example}" for example, what in own_examples)
    known, own = documented_keys(), command.keys.replace(" ", "|")
    keys = {f"{key}={value}": what for key, (value, what) in known.items() if re.match(rf"({own})(\.|$)", key)}
    width = max(map(len, keys))
    explained = (f"  {key:{width}}  # {what}".rstrip("# ") for key, what in keys.items())
    in_columns = "\n".join(_wrapped(line, " " * width + "    # ") for line in explained)
    return f"""\
aiayn {name}: {command.summary}

  aiayn {name} [KEY=VALUE ...]

Examples:
{examples}

Keys, with the values of conf/, the paper's where scale multiplies them:
{in_columns}

Keys of every command (data, scale, output, ...) and flags: aiayn --help
{_wrapped(EXIT_CODES)}"""


def documented_keys() -> dict[str, tuple[str, str]]:
    """Every key of the files of conf/ in `DOCUMENTED`, in a section: its value there, and the comment beside it."""
    documented = dict[str, tuple[str, str]]()
    for file, section in DOCUMENTED.items():
        for line in resources.files("aiayn.conf").joinpath(file).read_text("utf-8").splitlines():
            if header := re.fullmatch(r"(\w+):", line):
                section = f"{header[1]}."
            elif leaf := re.fullmatch(r"(  )?(\w+): +(\S+) *(?:# (.*))?", line):
                inside = bool(leaf[1]) or file != "config.yaml"
                documented[f"{section if inside else ''}{leaf[2]}"] = leaf[3], leaf[4] or ""
    return documented


def _wrapped(line: str, indent: str = "  ") -> str:
    return textwrap.fill(line, 80, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)
