"""The whole of Table 3, trained and printed through the command line, at the scale where a row takes seconds."""

import csv
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import trained_runs

from aiayn.config import compose
from aiayn.runs import checkpoint

# Twenty workers in turn, each of which imports everything anew
pytestmark = pytest.mark.slow

SWEEP = ("train", "-cn", "table3", "scale=smoke", "wandb.mode=disabled")


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """An empty folder, after `aiayn train -cn table3 scale=smoke` in it, and what that printed."""
    folder = tmp_path_factory.mktemp("table3")
    script = Path(sys.executable).with_name("aiayn")
    done = subprocess.run([script, *SWEEP], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout


def run_folder(folder: Path, row: str) -> Path:
    return folder / "runs" / "tiny-smoke" / row / "seed1"


def test_one_command_trains_all_twenty_rows_of_the_table(sweep, aiayn_in):
    folder, printed = sweep
    table = aiayn_in(folder, "table", "scale=smoke", "format=csv").stdout
    assert {path.name for path in (folder / "runs" / "tiny-smoke").iterdir()} == set(compose.ROWS)
    results = {row: json.loads((run_folder(folder, row) / "result.json").read_text()) for row in compose.ROWS}
    for row, result in results.items():
        assert result["status"] == "finished"
        assert len(re.findall(rf"^\[\d+/20\] {row} +seed 1  finished  PPL ", printed, re.MULTILINE)) == 1, row
    found = {row["row"]: float(row["ppl"]) for row in csv.DictReader(io.StringIO(table))}
    assert found == {row: result["dev"]["ppl"] for row, result in results.items()}


def test_runs_of_another_precision_or_folder_are_pointed_to(sweep, aiayn_in):
    folder, _ = sweep
    done = aiayn_in(folder, "table", "scale=smoke", "hardware.precision=bf16-mixed", "format=md")
    assert "0 of 20 rows finished" in done.stdout
    assert done.stderr == "aiayn: runs/tiny.bf16-smoke has no runs; there are runs with hardware.precision=32-true\n"
    assert aiayn_in(folder, "table").stderr == "aiayn: runs/tiny-mini has no runs; there are runs in runs/tiny-smoke\n"
    assert aiayn_in(folder, "table", "scale=smoke", "format=md").stderr == ""  # control


def test_a_row_alone_equals_itself_in_a_sweep_bit_for_bit(sweep, aiayn_in, tmp_path):
    folder, _ = sweep
    aiayn_in(folder, "train", "experiment=c_n2", "scale=smoke", "wandb.mode=disabled", f"output={tmp_path}")
    alone, together = tmp_path / "tiny-smoke" / "c_n2" / "seed1", run_folder(folder, "c_n2")
    newest = [checkpoint.newest(run / "checkpoints")[0] for run in (alone, together, run_folder(folder, "base"))]
    weights = [checkpoint.load(path)["state_dict"] for path in newest]
    assert trained_runs.equal(*weights[:2])
    assert not trained_runs.equal(*weights[1:])  # control: rows differ
    assert (alone / "translations.txt").read_bytes() == (together / "translations.txt").read_bytes()
    assert trained_runs.rows(alone) == trained_runs.rows(together)
