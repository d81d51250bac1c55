"""What `experiments/results/` keeps: archives that unpack to finished runs, and pages that quote what the runs have."""

import csv
import dataclasses
import json
import math
import re
import runpy
import statistics
import tarfile
from pathlib import Path

import pytest
import run_results

from aiayn.config import compose, folders
from aiayn.core import storage
from aiayn.runs import jobs, records

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "experiments" / "results"
PAGES = {name: [RESULTS / name / "README.md"] for name in ("mini", "small")}
PAGES["small"].append(ROOT / "README.md")
ARCHIVES = sorted(RESULTS.glob("*/*.tar.xz"))

keep = runpy.run_path(str(RESULTS / "keep.py"))
quoted = runpy.run_path(str(RESULTS / "quoted.py"))


def lines(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda path: path.name)
def test_an_archive_unpacks_to_the_finished_run_of_its_name(archive: Path, tmp_path: Path) -> None:
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path, filter="data")
    ((row, seed),) = re.findall(r"(.+)-seed(\d+)\.tar\.xz", archive.name)
    (folder,) = tmp_path.glob("*/*/*/")
    found = records.read_run(folder)
    assert (found.experiment, found.seed, found.status) == (row, int(seed), "finished")
    assert records.read_metrics(folder / "metrics.jsonl")[-1]["step"] == found.steps_done


@pytest.mark.parametrize("scale", sorted({path.parent for path in ARCHIVES}), ids=lambda path: path.name)
def test_results_csv_has_one_line_for_each_archive(scale: Path) -> None:
    assert (scale / "results.csv").read_text() == keep["results_csv"](map(keep["result_of"], scale.glob("*.tar.xz")))


def test_a_run_is_packed_once_and_counts_as_finished(tmp_path: Path) -> None:
    run = compose.compose_row("experiment=a_h1", f"output={tmp_path}/runs", f"prepared={tmp_path}/prepared")
    result = run_results.result_of(run)
    folder, kept = folders.run_folder(run), tmp_path / "kept"
    storage.write_json(folder / "result.json", result)
    texts = {"config.yaml": compose.to_yaml(run), "metrics.jsonl": '{"step": 4}\n', "translations.txt": "Eins\n"}
    for name, text in {**texts, "data.sha256": "d" * 64}.items():
        storage.write_text(folder / name, text)
    keep["main"](folders.sweep_folder(run), kept)
    archive = kept / "a_h1-seed1.tar.xz"
    assert keep["packed"](folder) == archive.read_bytes()  # the same bytes again
    assert str(tmp_path).encode() not in b"".join(keep["read"](archive).values())
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path / "unpacked", filter="data")
    assert jobs.is_finished(dataclasses.replace(run, output=str(tmp_path / "unpacked")))
    storage.write_json(folder / "result.json", {**result, "sha256": {**result["sha256"], "data": "e" * 64}})
    with pytest.raises(SystemExit, match="an archive is never rewritten"):
        keep["main"](folders.sweep_folder(run), kept)


@pytest.mark.parametrize("scale", PAGES)
def test_pages_quote_the_table_and_rho_of_results_csv(scale: str) -> None:
    rhos = re.findall(r"[+−]\d.\d\d \(.*?\)", " ".join(quoted["agreement"](RESULTS / scale)))
    for page in PAGES[scale]:
        text = page.read_text()
        assert quoted["table"](RESULTS / scale) in text
        assert all(rho in text.replace("\n", " ") for rho in rhos)


def test_tables_and_claims_in_files_are_those_of_the_results() -> None:
    scale = RESULTS / "small"
    for line in lines(scale / "table.csv"):
        runs = [run for run in lines(scale / "results.csv") if run["row"] == line["row"] and run["seed"] != "0"]
        for column, figure in (("ppl", "ppl"), ("bleu_paper", "bleu")):
            means = [statistics.mean(float(run[figure]) for run in runs)] if runs else []
            assert [float(text) for text in [line[column]] if text] == pytest.approx(means, rel=1e-12)
    verdicts = re.findall(r"\| (\w+) +\|$", (scale / "claims.md").read_text(), re.MULTILINE)[1:]
    assert f"{verdicts.count('reproduced')} of the {len(verdicts)} claims" in (scale / "README.md").read_text()


def test_the_fit_in_a_file_is_that_of_the_archives() -> None:
    nats: dict[str, list[float]] = {}
    for archive in (RESULTS / "small").glob("*-seed[1-9].tar.xz"):
        metrics = [json.loads(line) for line in [*keep["read"](archive).values()][2].splitlines()]
        training = [update["train/nats"] for update in metrics if "train/nats" in update]
        nats.setdefault(archive.name.split("-")[0], []).extend(training[-len(training) // 10 :])
    base, text = math.exp(statistics.mean(nats["base"])), (RESULTS / "small" / "fit.md").read_text()
    for row in nats.keys() & {*compose.ROWS}:
        shown = quoted["cell"](math.exp(statistics.mean(nats[row])), base, "PPL", is_base=row == "base")
        assert re.search(rf"\| {row} +\| {re.escape(shown)} ", text)
