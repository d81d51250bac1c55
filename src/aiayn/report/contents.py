"""What `aiayn report` is made of: everything that lies in the run folders of one scale and data set."""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from aiayn.config import compose, folders, schema
from aiayn.config.schema import Config, ConfigError
from aiayn.core import progress, storage
from aiayn.cost import flops
from aiayn.data.encoded import Dataset
from aiayn.data.parallel_text import DataError
from aiayn.evaluation import metrics
from aiayn.report import curves
from aiayn.report.figures import Runs
from aiayn.runs import checkpoint, records
from aiayn.runs.records import printable
from aiayn.tables import beyond, criteria, paper_claims, table3
from aiayn.tables.ladder import Ladder, Rung
from aiayn.tables.table3 import Table


@dataclass(frozen=True)
class Translated:
    """The dev set of the corpus that is here, and the translations of it by finished runs; empty where it is not."""

    subwords: int  # of the vocabulary
    lengths: tuple[float, float] = (flops.LENGTH, flops.LENGTH)  # token-weighted means of source and target sentences
    sources: Sequence[str] = ()
    references: Sequence[str] = ()
    translations: Mapping[tuple[str, int], list[str]] = field(default_factory=dict)
    counts: paper_claims.Counts = field(default_factory=dict)
    missing: str = ""  # why there is no BLEU over sentences


@dataclass(frozen=True)
class Material:
    """What the page is made of, read from the run folders and the prepared corpus."""

    table: Table
    runs: Runs
    dev: Translated  # by the rows beyond Table 3 too
    learned: Mapping[str, Any]  # positional vectors of row E, by side
    findings: Sequence[paper_claims.Finding]
    ladder: Ladder
    beyond: Table | None  # the rows beyond Table 3 and those compared with them, if one is begun
    beyond_findings: Sequence[paper_claims.Finding]
    layers: Mapping[str, Sequence[tuple[int, float]]]  # (length, seconds a token) of each type; empty if unmeasured


def collect(run: Config) -> Material:
    """Everything that lies in the folders of one scale and data set; whatever is damaged there is left out.

    For the ladder also the figures of this data set's other scales and precisions, and of runs under the paper's own
    conditions.
    """
    open_corpus = cache(_open)
    folder = folders.sweep_folder(run)
    stored = records.read_runs(folder)
    table = criteria.judged(table3.table(run, stored), folder)
    others = beyond.table(run, stored)
    lines = (*table.lines, *(others.lines[1:] if others else ()))
    named = [(line.name, found) for line in lines for found in line.runs]
    read = {
        (row, found.seed): curves.read(folder / row / f"seed{found.seed}")
        for row, found in progress.each(named, "reading curves")
    }
    own = _translated(run, dataclasses.replace(table, lines=lines), open_corpus)
    rungs = [Rung(table, own.subwords, own.lengths, paper_claims.check(table, own.counts))]
    for other in _others(run):
        beside = table3.table(other, records.read_runs(folders.sweep_folder(other)))
        in_our_precision = schema.vary(other, hardware={"precision": run.hardware.precision})
        if folders.setting(in_our_precision) == table.data or beside.comparable:
            theirs = _translated(other, beside, open_corpus)
            rungs.append(Rung(beside, theirs.subwords, theirs.lengths, paper_claims.check(beside, theirs.counts)))
    return Material(
        table=table,
        runs=read,
        dev=own,
        learned=_learned(table, folder),
        findings=rungs[0].findings,
        ladder=Ladder.of(rungs),
        beyond=others,
        beyond_findings=paper_claims.check(others, own.counts, beyond.CLAIMS) if others else (),
        layers=_layers(Path(run.bench.output)),
    )


def _others(run: Config) -> Iterator[Config]:
    """A run of each other sweep under `output`, by folder; its scale is ours of that name, where there is one."""
    for folder in sorted(path for path in Path(run.output).glob("*/") if path != folders.sweep_folder(run)):
        for path in sorted(folder.glob("*/seed*/config.yaml")):
            try:
                found = dataclasses.replace(compose.read(path), output=run.output, prepared=run.prepared)
            except (ConfigError, OSError):
                continue
            if folders.sweep_folder(found) == folder:
                yield dataclasses.replace(found, scale=compose.scales().get(found.scale.name, found.scale))
                break


def _open(folder: Path) -> tuple[str, Translated]:
    """The SHA-256 of the corpus in a folder, and what is known of it before any run is looked at."""
    dataset = Dataset.open(folder)
    subwords, lengths = dataset.tokenizer.vocab_size, flops.weighted_lengths(dataset.pairs("train"))
    return dataset.sha256, Translated(subwords, lengths, dataset.texts("dev", "source"), dataset.texts("dev", "target"))


def _translated(run: Config, table: Table, open_corpus: Callable[[Path], tuple[str, Translated]]) -> Translated:
    try:
        sha256, corpus = open_corpus(folders.prepared_folder(run))
    except (DataError, OSError) as error:
        missing = f"No paired bootstrap and no samples: {printable(str(error))}"
        return Translated(run.data.vocab_size, missing=missing)
    whole = table3.translations(table, folders.sweep_folder(run), sha256, len(corpus.references))
    counts = {
        key: metrics.paper_counts(lines, corpus.references, run.data.target_language)
        for key, lines in progress.each(whole.items(), f"counting n-grams, scale {table.scale.name}")
    }
    missing = "" if counts else "No paired bootstrap: no finished run has translations of the corpus that is here."
    return dataclasses.replace(corpus, translations=whole, counts=counts, missing=missing)


def _layers(path: Path) -> dict[str, list[tuple[int, float]]]:
    """What `bench.kind=layers` has measured, where its numbers lie and are whole."""
    try:
        part = json.loads(path.read_text("utf-8"))["parts"]["layers"]
        return {
            printable(line["name"]): [
                (int(length), float(seconds))
                for length, seconds in zip(part["lengths"], line["seconds_a_token"], strict=True)
            ]
            for line in part["layers"]
        }
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return {}


def _learned(table: Table, folder: Path) -> dict[str, Any]:
    """The positional vectors that the first finished run of row E has learned."""
    row = next(line for line in table.lines if line.config.model.positions == "learned")
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
