"""What `aiayn report` is made of: everything that lies in the run folders of one scale and data set."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiayn import checkpoint, claims, config, criteria, curves, metrics, progress, results, storage
from aiayn.corpus import DataError
from aiayn.dataset import Dataset
from aiayn.figures import Runs
from aiayn.results import Table, look_up, printable
from aiayn.schema import Config


@dataclass(frozen=True)
class Material:
    """What the page is made of, read from the run folders and the prepared corpus."""

    table: Table
    runs: Runs
    translations: Mapping[tuple[str, int], list[str]]  # of finished runs on the corpus that is here
    sources: list[str]
    references: list[str]
    counts: claims.Counts
    learned: Mapping[str, Any]  # positional vectors of row E, by side
    missing: str  # why there is no BLEU over sentences; empty when there is


def gather(run: Config) -> Material:
    """Everything that lies in the folders of one scale and data set; whatever is damaged there is left out."""
    folder = config.sweep_folder(run)
    table = criteria.judged(
        results.table(config.rows(run.fidelity.name), results.read_runs(folder), run.scale, config.setting(run)), folder
    )
    named = [(line.name, found) for line in table.lines for found in line.runs]
    read = {
        (row, found.seed): curves.read(folder / row / f"seed{found.seed}")
        for row, found in progress.each(named, "reading curves")
    }
    sources, references, translations, missing = [], [], {}, ""
    try:
        dataset = Dataset.open(config.prepared_folder(run))
        sources, references = dataset.texts("dev", "source"), dataset.texts("dev", "target")
        for row, found in named:
            lines = _translations(folder / row / f"seed{found.seed}")
            of_here = look_up(found.result or {}, "sha256.data") == dataset.sha256
            if of_here and len(lines) == len(references):
                translations[row, found.seed] = lines
    except (DataError, OSError) as error:
        missing = f"No paired bootstrap and no samples: {printable(str(error))}"
    counts = {
        key: metrics.paper_counts(lines, references, run.data.target_language)
        for key, lines in progress.each(translations.items(), "counting n-grams")
    }
    if not counts and not missing:
        missing = "No paired bootstrap: no finished run has translations of the corpus that is here."
    return Material(table, read, translations, sources, references, counts, _learned(table, folder), missing)


def _translations(folder: Path) -> list[str]:
    try:
        return (folder / "translations.txt").read_bytes().decode("utf-8", "replace").split("\n")[:-1]
    except OSError:
        return []


def _learned(table: Table, folder: Path) -> dict[str, Any]:
    """The positional vectors that the first finished run of row E has learned."""
    row = next(line for line in table.lines if line.config.model.learned_positions)
    for run in row.runs:
        if run.result is None:
            continue
        try:
            newest = checkpoint.newest(folder / row.name / f"seed{run.seed}" / "checkpoints")
            weights = checkpoint.average(newest) if newest else {}
        except storage.StorageError:
            continue
        sides = {side: weights.get(f"transformer.{side}_positions.weight") for side in ("source", "target")}
        return {f"Learned, {side} side": vectors.numpy()[:64] for side, vectors in sides.items() if vectors is not None}
    return {}
