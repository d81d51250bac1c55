"""Packs finished runs into archives that can be committed, without checkpoints, and lists them in `results.csv`.

    python experiments/results/keep.py runs/tiny-mini experiments/results/mini

Each finished run becomes `<row>-seed<n>.tar.xz` with `<data>-<scale>/<row>/seed<n>/`, its metrics thinned. The same run
always gives the same bytes. An archive is never rewritten. `results.csv` has one line for each archive of the folder.
An unpacked run is finished for every command but those that need its weights:

    mkdir -p runs && for archive in experiments/results/mini/*-seed[1-9].tar.xz; do tar xJf "$archive" -C runs; done
"""

import csv
import io
import json
import lzma
import re
import sys
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from aiayn.cli import one_line_errors
from aiayn.config.schema import BEYOND, ROWS
from aiayn.core import storage
from aiayn.runs import records

FILES = ("config.yaml", "data.sha256", "metrics.jsonl", "translations.txt", "result.json")
PER_HUNDREDTH = 2  # lines for each hundredth of the updates
AVERAGED = ("train/loss", "train/nats", "train/gradient_norm")
SUMMED = ("source_tokens", "target_tokens")
# The columns of results.csv behind row and seed, and where a result has them.
COLUMNS = {
    "ppl": "dev.ppl",
    "nats": "dev.nats",
    "tokens": "dev.tokens",
    "bleu": "dev.bleu.paper",
    "sacrebleu": "dev.bleu.sacrebleu",
    "params": "params",
    "steps": "steps",
    "train_seconds": "train_seconds",
    "checkpoint_sha256": "sha256.checkpoint",
}


def thinned(lines: list[str]) -> list[str]:
    """One line for a group of updates, its last, with their mean losses and all their tokens; each dev measurement.

    No group crosses a hundredth of the updates: the criteria of a scale take means over hundredths.
    """
    rows = [json.loads(line) for line in lines]
    updates, groups = sum("train/loss" in row for row in rows), 100 * PER_HUNDREDTH
    last_updates = {round(number * updates / groups) for number in range(1, groups + 1)}
    kept, group, done = [], [], 0
    for line, row in zip(lines, rows, strict=True):
        if "train/loss" not in row:
            kept.append(line)
            continue
        group.append(row)
        done += 1
        if done in last_updates:
            means = {key: float(f"{sum(row[key] for row in group) / len(group):.6g}") for key in AVERAGED}
            sums = {key: sum(row[key] for row in group) for key in SUMMED}
            kept.append(json.dumps(row | means | sums) + "\n")
            group = []
    return kept


def packed(run: Path) -> bytes:
    """The archive of a finished run folder, in the same bytes wherever and whenever it is made."""
    inside = Path(*run.parts[-3:])
    memory = io.BytesIO()
    with tarfile.open(fileobj=memory, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name in FILES:  # result.json last: with it the run is finished
            text = _kept_text(run, name).encode()
            member = tarfile.TarInfo(str(inside / name))  # owner 0, time 0
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text))
    return lzma.compress(memory.getvalue(), preset=9)


def read(archive: Path) -> dict[str, bytes]:
    """The files of an archive by their path inside it."""
    with tarfile.open(archive, "r:xz") as opened:
        files = {member.name: opened.extractfile(member) for member in opened.getmembers()}
        return {name: file.read() for name, file in files.items() if file}


def result_of(archive: Path) -> dict[str, Any]:
    """The result.json of an archive."""
    (text,) = (text for name, text in read(archive).items() if name.endswith("/result.json"))
    result: dict[str, Any] = json.loads(text)
    return result


def results_csv(results: Iterable[Mapping[str, Any]]) -> str:
    """One line for each run: in the order of the rows, then of the seeds."""
    memory = io.StringIO()
    writer = csv.writer(memory, lineterminator="\n")
    writer.writerow(["row", "seed", *COLUMNS])
    order = (*ROWS, *BEYOND)
    for result in sorted(results, key=lambda result: (order.index(result["experiment"]), result["seed"])):
        figures = (records.look_up(result, key) for key in COLUMNS.values())
        writer.writerow([result["experiment"], result["seed"], *figures])
    return memory.getvalue()


def main(runs: Path, kept: Path) -> None:
    """Packs what is finished and not there yet. SystemExit where an archive holds another run of that row and seed."""
    kept.mkdir(parents=True, exist_ok=True)
    if not (found := records.read_runs(runs.absolute())):
        raise SystemExit(f"{runs} has no runs")
    for run in found:
        if run.result is None or "+" in run.experiment:
            continue
        folder = runs.absolute() / run.experiment / f"seed{run.seed}"
        archive = kept / f"{run.experiment}-seed{run.seed}.tar.xz"
        if not archive.exists():
            storage.write_bytes(archive, packed(folder))
            print(archive)
        elif result_of(archive)["sha256"] | {"code": ""} != run.result["sha256"] | {"code": ""}:
            raise SystemExit(f"{archive}: holds another run than {folder}; an archive is never rewritten")
    storage.write_text(kept / "results.csv", results_csv(map(result_of, kept.glob("*.tar.xz"))))


def _kept_text(run: Path, name: str) -> str:
    """A file of a run as it is kept: the folders of the machine where it was trained are replaced by the defaults."""
    text = (run / name).read_text("utf-8")
    if name == "metrics.jsonl":
        return "".join(thinned(text.splitlines(keepends=True)))
    output = "runs/criteria" if run.name == "seed0" else "runs"
    for key, folder in (("output", output), ("prepared", "prepared")):
        text = re.sub(rf"(?m)^({key}: ).*$", rf"\g<1>{folder}", text) if name == "config.yaml" else text
        text = re.sub(rf'(?m)^(  "{key}": ).*$', rf'\g<1>"{folder}",', text) if name == "result.json" else text
    if absolute := re.search(r"""(?m)^ *\S+: ["']?/.*$""", text if name != "translations.txt" else ""):
        raise SystemExit(f"{run / name}: names a file of this machine: {absolute[0].strip()}")
    return text


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    with one_line_errors():
        main(Path(sys.argv[1]), Path(sys.argv[2]))
