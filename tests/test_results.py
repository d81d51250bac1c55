"""What `experiments/results/` holds: runs that count as finished, and the tables that they give."""

import dataclasses
import runpy
import shutil
from pathlib import Path

import pytest

from aiayn.config import compose
from aiayn.runs import jobs

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "experiments" / "results"
RUNS = {"mini": RESULTS / "mini" / "runs", "small": RESULTS / "small_three_seeds" / "runs"}


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kept runs, copied as their README says."""
    folder = tmp_path_factory.mktemp("runs")
    for scale, kept in RUNS.items():
        shutil.copytree(kept, folder / f"tiny-{scale}")
    return folder


@pytest.mark.parametrize("scale", RUNS)
def test_every_kept_run_counts_as_finished(scale: str, output: Path) -> None:
    kept = sorted(path.parent for path in RUNS[scale].glob("*/seed*/result.json"))
    assert len(kept) >= 20
    like = compose.compose_row(f"scale={scale}", f"output={output}", f"prepared={output}/prepared")
    for folder in kept:
        run = dataclasses.replace(compose.row(folder.parent.name, like), seed=int(folder.name.removeprefix("seed")))
        assert jobs.is_finished(run), folder
    assert not jobs.is_finished(dataclasses.replace(like, seed=99))  # control


def test_the_table_of_the_readme_is_that_of_the_kept_runs(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(RESULTS / "readme_table.py"))["main"](str(output))
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(table) == 2 + len(compose.ROWS)
    assert "\n".join(table) in (ROOT / "README.md").read_text()


def test_the_claims_are_printed_one_to_a_line(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without the corpus there is no bootstrap over sentences; the figures are the same."""
    words = ("scale=small", f"output={output}", f"prepared={output}/prepared")
    runpy.run_path(str(RESULTS / "claims_table.py"))["main"](*words)
    written = (RESULTS / "small_three_seeds" / "claims.md").read_text()
    figures, kept = (
        [line.split("|")[:7] for line in text.splitlines() if line.startswith("|")]
        for text in (capsys.readouterr().out, written)
    )
    assert len(figures) == 2 + 17
    assert figures[2:] == kept[2:]
