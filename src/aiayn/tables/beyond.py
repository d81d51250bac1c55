"""The table of the rows beyond Table 3: rows for comparison, what others published, and their claims tested."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from aiayn.config import compose, folders
from aiayn.config.schema import BEYOND, Config
from aiayn.data.dataset import Dataset
from aiayn.data.parallel_text import DataError
from aiayn.evaluation import metrics
from aiayn.runs.records import Run, look_up, number_text, printable
from aiayn.tables import formats, table3
from aiayn.tables.formats import Cell, Column, definition, differences, measured, params, seeds
from aiayn.tables.paper_claims import Claim, Counts, Finding, both
from aiayn.tables.table3 import METRICS, Line, Table

PARTS = ("kind", "positions", "scores", "residual")
SIZES = (("N", "num_layers"), ("h", "num_heads"), ("d_k", "d_k"), ("P_drop", "dropout"))
# With whose rows of Table 3 they are compared: those with other scores have the single head of a_h1
COMPARED = ("base", "a_h1")
# Of base's BLEU: Shaw et al. lose 13.3 of 25.8 without positions, and to lose 10 of 25 leaves so much
FAR = 0.6

CLAIMS = (
    Claim("Without positions BLEU falls far", "BLEU", ("f_no_positions", "base"), share=FAR),
    *both("Relative positions are not worse than sinusoids", "base", "f_relative_positions", not_worse=True),
    Claim("Without residual connections BLEU falls far", "BLEU", ("f_no_residual", "base"), share=FAR),
    *both("Positions before every layer win some of it back", "f_no_residual", "f_no_residual_positions"),
    *both("Scaled scores are better than unscaled ones", "f_unscaled", "a_h1"),
    *both("Additive scores are not worse than unscaled dot products", "f_unscaled", "f_additive", not_worse=True),
    *both("Attention beats one fixed vector", "s_rnn", "s_rnn_attention"),
    *both("The Transformer beats an LSTM with one fixed vector", "s_rnn", "base"),
    *both("The Transformer beats an LSTM with attention", "s_rnn_attention", "base"),
)


def table(run: Config, runs: Sequence[Run]) -> Table | None:
    """The rows beyond Table 3 behind those that they are compared with, as `run` is; None if none is begun."""
    # The LSTMs have no fidelity but the paper's
    beyond = BEYOND if run.fidelity.name == "paper" else tuple(name for name in BEYOND if name.startswith("f_"))
    made = table3.table(run, runs, compose.rows(run.fidelity.name, (*COMPARED, *beyond)))
    return made if any(line.status != "missing" for line in made.lines[len(COMPARED) :]) else None


def on_dev(run: Config, shown: Sequence[Line]) -> tuple[list[int], Counts, str]:
    """The words of each source of dev, the n-grams of the runs' whole translations of it, and why there are none."""
    try:
        dataset = Dataset(folders.prepared_folder(run))
        words = [len(line.split()) for line in dataset.texts("dev", "source")]
        references = dataset.texts("dev", "target")
    except (DataError, OSError) as error:
        return [], {}, f"No BLEU by sentence: {printable(str(error))}"
    counts = {}
    for row, found in ((line.name, found) for line in shown for found in line.runs):
        with suppress(OSError):
            path = folders.sweep_folder(run) / row / f"seed{found.seed}" / "translations.txt"
            lines = path.read_bytes().decode("utf-8", "replace").split("\n")[:-1]
            whole = look_up(found.result or {}, "sha256.data") == dataset.sha256 and len(lines) == len(references)
            if whole and look_up(found.result or {}, table3.KEYS["BLEU"]) is not None:  # not for every language
                counts[row, found.seed] = metrics.paper_counts(lines, references, run.data.target_language)
    missing = "No BLEU by sentence: no finished run has translations of the corpus that is here." * (not counts)
    return words, counts, missing


def layout(made: Table, findings: Sequence[Finding]) -> formats.Layout:
    """The table as it is printed, its claims below it; the source of a published figure comes last."""
    effects = {metric: made.effects(made.means(metric)) for metric in METRICS}
    theirs = [line.published("BLEU") for line in made.lines]
    columns = [
        Column("row", "row", [Cell(line.name) for line in made.lines]),
        *(definition(made, symbol, "model", key) for symbol, key in (*zip(PARTS, PARTS, strict=True), *SIZES)),
        *(column for m in METRICS for column in (measured(made, m), differences(m, "Δ", effects[m]))),
        Column("BLEU", "published", [Cell("" if value is None else number_text(value, 1)) for value in theirs]),
        *(params(made, "ours", "params"), seeds(made)),
        Column("source", "published where", [Cell(line.source) for line in made.lines]),
    ]
    caption = (
        f"{formats.conditions(made)} Δ is a row minus base. Compare effects: published figures were made under the"
        f" conditions beside them. Falls far: to less than {FAR:g} of base's BLEU."
    )
    claims = [(found.claim.rows, _claim_text(found)) for found in findings]
    records = []
    for number, line in enumerate(made.lines):
        parts = {key: getattr(line.config.model, key) for key in PARTS}
        published = {f"published_{metric.lower()}": line.published(metric) for metric in METRICS}
        others: dict[str, Any] = {f"effect_{metric.lower()}": effects[metric][number] for metric in METRICS}
        others["claims"] = "; ".join(text for rows, text in claims if line.name in rows)
        records.append(formats.record(made, line, {**parts, **published, "published_where": line.source}, others))
    finished = f"{' and '.join(COMPARED)} for comparison: {made.finished} of {len(made.lines)} rows finished"
    title = f"Beyond Table 3 at scale {made.scale.name} on {made.data}, {finished}"
    return formats.Layout(title, caption, columns, made, records, [text for _, text in claims])


def _claim_text(finding: Finding) -> str:
    tested = "" if finding.p is None else " (95 % interval {interval}, over sentences {sentences}), p {p}"
    figures = f"published {{paper}}, ours {{ours}}{tested}"
    return f"{{verdict}}: {{sentence}} ({{metric}}, {{rows}}): {figures}; {{because}}".format(**finding.texts)
