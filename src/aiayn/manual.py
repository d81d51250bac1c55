"""What `--help` prints: of the whole, and of one command with the keys that it reads."""

import re
from importlib import resources

from aiayn.config import schema

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
    "criteria": {"scale=small seed=2": "of the rows that are trained with that seed, and what they miss"},
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
# Of each command: the keys that it reads, whole or by their section, besides those that say which run is meant
KEYS = {
    "prepare": ("data", "tokenizer", "prepared"),
    "train": ("seed", "model", "training", "decoding", "hardware", "wandb", "output"),
    "evaluate": ("split", "average", "decoding", "hardware"),
    "translate": ("average", "decoding", "hardware"),
    "table": ("format",),
    "criteria": ("seed",),
    "report": ("bench.output",),
    "attention": ("split", "average", "decoding", "hardware"),
    "dashboard": ("wandb",),
    "export": ("format", "average"),
    "bench": ("bench", "hardware"),
    "plan": ("plan", "hardware"),
}
# The files of conf/ that say what a key is, and the section whose keys each sets
DOCUMENTED = {"config.yaml": "", "data/files.yaml": "data.", "hardware/cpu.yaml": "hardware."}
EXIT_CODES = (
    "0 done, 1 failed, 2 wrong configuration or usage, 3 non-finite, 4 bad data, 5 storage,"
    " 75 interrupted: repeat to resume, 141 output closed"
)


def manual() -> str:
    """The manual of the whole: commands, rows, groups, keys, flags, exit codes."""
    commands = "\n".join(f"  {name:10} {what}" for name, what in COMMANDS.items())
    letters = ("base", "a_", "b_", "c_", "d_", "e_", "big")
    rows = "\n".join(f"  {'  '.join(row for row in schema.ROWS if row.startswith(letter))}" for letter in letters)
    return f"""\
aiayn: Table 3 of 'Attention Is All You Need', 20 rows, trained and compared with the paper cell by cell.

  aiayn COMMAND [KEY=VALUE ...]        python -m aiayn is the same

Commands (aiayn COMMAND --help explains one, with examples and the keys it reads):
{commands}

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


def manual_of(command: str) -> str:
    """The manual of one command: examples, and what conf/ says of its keys."""
    examples = {f"aiayn {command} {words}".rstrip(): what for words, what in EXAMPLES[command].items()}
    own = {
        f"{key}={value}": what
        for key, (value, what) in documented_keys().items()
        if any(key == name or key.startswith(f"{name}.") for name in KEYS[command])
    }
    return f"""\
aiayn {command}: {COMMANDS[command]}

  aiayn {command} [KEY=VALUE ...]

Examples:
{_in_columns(examples)}

Keys, with the values of conf/, which are the paper's where scale multiplies them:
{_in_columns(own)}

Keys of every command (experiment, data, scale, seed, output, ...) and flags: aiayn --help
Exit codes: {EXIT_CODES}"""


def documented_keys() -> dict[str, tuple[str, str]]:
    """Every key that a file of conf/ named in `DOCUMENTED` sets: its value there, and the comment beside it."""
    found = dict[str, tuple[str, str]]()
    for file, section in DOCUMENTED.items():
        for line in resources.files("aiayn.conf").joinpath(file).read_text("utf-8").splitlines():
            if header := re.fullmatch(r"(\w+):", line):
                section = f"{header[1]}."
            elif leaf := re.fullmatch(r"(  )?(\w+): +(\S+) *(?:# (.*))?", line):
                inside = bool(leaf[1]) or file != "config.yaml"
                found[f"{section if inside else ''}{leaf[2]}"] = leaf[3], leaf[4] or ""
    return found


def _in_columns(lines: dict[str, str]) -> str:
    width = max(map(len, lines))
    return "\n".join(f"  {line:{width}}  # {what}" if what else f"  {line}" for line, what in lines.items())
