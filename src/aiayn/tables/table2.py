"""`aiayn evaluate`, and Table 2: BLEU on the test set of averaged checkpoints, and what training them computed."""

import contextlib
from typing import Any, NamedTuple

from tabulate import tabulate

from aiayn.config import folders
from aiayn.config.schema import Config
from aiayn.cost import flops
from aiayn.data.dataset import Dataset
from aiayn.evaluation.evaluate import evaluate_trained
from aiayn.runs import records
from aiayn.tables import table3
from aiayn.tables.table3 import Line


class Published(NamedTuple):
    """What the paper has of a row: its name, the checkpoints averaged, BLEU by languages, FLOPs."""

    name: str
    average: int
    bleu: dict[str, float]
    flops: float


PAPER = {
    "base": Published("Transformer (base)", 5, {"en-de": 27.3, "en-fr": 38.1}, 3.3e18),
    "big": Published("Transformer (big)", 20, {"en-de": 28.4, "en-fr": 41.8}, 2.3e19),
}
# What Table 2 has of other systems, in its order: name, BLEU as printed there and training FLOPs, by languages
OTHERS: tuple[tuple[str, dict[str, str], dict[str, float]], ...] = (
    ("ByteNet", {"en-de": "23.75"}, {}),
    ("Deep-Att + PosUnk", {"en-fr": "39.2"}, {"en-fr": 1.0e20}),
    ("GNMT + RL", {"en-de": "24.6", "en-fr": "39.92"}, {"en-de": 2.3e19, "en-fr": 1.4e20}),
    ("ConvS2S", {"en-de": "25.16", "en-fr": "40.46"}, {"en-de": 9.6e18, "en-fr": 1.5e20}),
    ("MoE", {"en-de": "26.03", "en-fr": "40.56"}, {"en-de": 2.0e19, "en-fr": 1.2e20}),
    ("Deep-Att + PosUnk Ensemble", {"en-fr": "40.4"}, {"en-fr": 8.0e20}),
    ("GNMT + RL Ensemble", {"en-de": "26.30", "en-fr": "41.16"}, {"en-de": 1.8e20, "en-fr": 1.1e21}),
    ("ConvS2S Ensemble", {"en-de": "26.36", "en-fr": "41.29"}, {"en-de": 7.7e19, "en-fr": 1.2e21}),
)
HEAD = ("model", "figures from", "BLEU", "13a", "intl", "FLOPs as printed", "FLOPs by count")
PRINTED, MEASURED, NONE = "the paper's table", "measured here", "–"


def holds(run: Config, name: str) -> bool:
    """Whether an evaluation of a run stands in the table: the paper's languages, base or big as it is, averaged so."""
    in_table = run.experiment in PAPER and languages(run) in flops.VOCAB_SIZES
    return in_table and name == f"test-average{PAPER[run.experiment].average}" and not folders.variation(run)


def languages(run: Config) -> str:
    """From what and into what is translated: `en-de`."""
    return f"{run.data.source_language}-{run.data.target_language}"


def lines(run: Config, dataset: Dataset) -> list[str]:
    """Table 2 with what is trained and evaluated of the same data, scale, seed, fidelity and precision as `run`."""
    pair = languages(run)
    made_of = f"{folders.setting(run)}, {pair}, seed {run.seed}"
    table = table3.table(run, records.read_runs(folders.sweep_folder(run)))
    rows = [line for line in table.lines if line.name in PAPER]
    notes = [note for line in rows for note in line.notes]
    corpus = f"wmt14_{pair.replace('-', '_')}"
    published = not records.changes(run.scale) and not records.unlike(table.reference["config"]["data"], corpus)
    conditions = "" if published else " (not the paper's conditions)"
    printed = [
        [name, PRINTED, bleu.get(pair, NONE), NONE, NONE, flops.power(work[pair], 1) if pair in work else NONE, NONE]
        for name, bleu, work in OTHERS
    ]
    for line in rows:
        paper, counted = PAPER[line.name], flops.power(flops.of_paper(line.config, pair))
        printed.append([paper.name, PRINTED, str(paper.bleu[pair]), NONE, NONE, flops.power(paper.flops, 1), counted])
    cells = [HEAD, *printed, *(_measured(line, run, dataset) for line in rows)]
    align = ["left", "left", *["right"] * (len(HEAD) - 2)]
    lines = tabulate(cells, tablefmt="plain", colalign=align, disable_numparse=True).splitlines()
    return [
        f"Table 2 at scale {run.scale.name} on {made_of}{conditions}",
        *(line.rstrip() for line in lines),
        "BLEU: the paper's recipe; 13a and intl: sacreBLEU's. Each of the mean of the row's last checkpoints:"
        f" {' and '.join(f'{PAPER[line.name].average} of {line.name}' for line in rows)}.",
        "FLOPs as printed: the paper's, of devices by time. By count: products for the updates' tokens; the paper's,"
        " counted here, of its steps of 25,000 tokens.",
        *(f"{status}  {name}: {detail}" for name, status, detail in notes if status in ("stale", "unreadable")),
    ]


def _measured(line: Line, run: Config, dataset: Dataset) -> list[str]:
    result = next((found.result for found in line.runs if found.seed == run.seed and found.result), {})
    figures: dict[str, Any] = {}
    folder = folders.sweep_folder(run) / line.name / f"seed{run.seed}"
    with contextlib.suppress(FileNotFoundError, ValueError):  # not evaluated yet, or torn: dashes
        figures = records.read_json(folder / f"evaluation-test-average{PAPER[line.name].average}.json")
    if not result or records.look_up(figures, "steps") != result["steps"]:  # evaluated before the run was finished
        figures = {}
    found = [records.look_up(figures, f"bleu.{kind}") for kind in ("paper", "sacrebleu", "intl")]
    bleu = [f"{value:.1f}" if isinstance(value, float) else NONE for value in found]
    # What the updates computed, from the tokens that they really held
    source, target = (records.look_up(result, f"{side}_tokens") for side in ("source", "target"))
    counted = NONE
    if isinstance(source, int) and isinstance(target, int):
        rows, lengths = run.fidelity.rows(dataset.tokenizer.vocab_size), flops.weighted_lengths(dataset.pairs("train"))
        counted = flops.power(flops.training_flops(line.trained.model, rows, source, target, *lengths))
    return [PAPER[line.name].name, MEASURED, *bleu, NONE, counted]


def main(run: Config) -> None:
    """Evaluates a trained run and prints the figures; below them Table 2 when they stand in it."""
    dataset, name = evaluate_trained(run)
    if holds(run, name):
        print("", *lines(run, dataset), sep="\n")
