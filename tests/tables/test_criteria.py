"""`experiments/results/criteria.py`: what is said of runs whose metrics are known."""

import dataclasses
import json
import math
import runpy
from pathlib import Path
from typing import Any

import pytest
import run_results

from aiayn.config import compose, folders
from aiayn.config.schema import ROWS

criteria = runpy.run_path("experiments/results/criteria.py")
keep = runpy.run_path("experiments/results/keep.py")
UPDATES, WORDS = 1000, ("scale=small", "scale.steps=0.002", "seed=0")


def train_nats(step: float) -> float:
    """From 7 to 2 nats: half of the fall within a tenth of the updates."""
    return 2 + 5 * math.exp(-step / 150)


def finished(row: str, seed: int = 0, words: tuple[str, ...] = WORDS, **changed: Any) -> Path:
    """A finished run: dev PPL 10.1 after nine tenths, 10 at the end, BLEU 20 ± 1, 20 epochs."""
    run = compose.compose_row(*words)
    trained = dataclasses.replace(compose.row(row, run), seed=seed)
    folder = folders.run_folder(trained)
    given: dict[str, Any] = {"ppl": 10.0, "before": 10.1, "epochs": 20.0, "half": 1.0, "nats": train_nats} | changed
    folder.mkdir(parents=True)
    updates = trained.training.max_steps
    nats = [{"step": step, "train/nats": given["nats"](step * UPDATES / updates)} for step in range(1, updates + 1)]
    rows = [*nats, {"step": updates * 9 // 10, "dev/ppl": given["before"]}, {"step": updates, "dev/ppl": given["ppl"]}]
    rows.sort(key=lambda row: row["step"])
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = run_results.result_of(trained, given["ppl"], 20.0)
    made |= {"steps": updates, "train_seconds": 60.0, "epochs": given["epochs"]}
    made["dev"]["bleu_ci95"] = [20 - given["half"], 20 + given["half"]]
    (folder / "result.json").write_text(json.dumps(made))
    return folder


@pytest.fixture(autouse=True)
def printed(tmp_path, monkeypatch, capsys) -> Any:
    monkeypatch.chdir(tmp_path)

    def verdicts(*words: str) -> list[str]:
        criteria["main"](*(words or WORDS))
        return [line for line in capsys.readouterr().out.splitlines() if not line.startswith("|")]

    return verdicts


def test_rows_that_train_as_they_should_fulfil_every_criterion(printed):
    for row in ROWS:
        for seed in (0, 1):
            finished(row, seed, **({"epochs": 60.0} if row == "big" else {}))
    lines = printed()[2:]
    assert len(lines) == len(criteria["CRITERIA"]) + 1
    assert all(line.startswith("- holds: ") for line in lines), lines


@pytest.mark.parametrize(
    ("row", "changed", "column"),
    [
        ("c_n8", {"epochs": 40.1}, "epochs"),
        ("b_dk16", {"before": 10.3}, "fall %"),
        ("c_n8", {"nats": lambda step: 7.0 - 5 * max(0, step - 700) / 300}, "start"),
        ("a_h1", {"nats": lambda step: train_nats(step) + 0.3 * (step > 500)}, "relapse"),
        ("d_dropout00", {"nats": lambda step: train_nats(step) + 1}, "train - dev"),
        ("big", {"half": 1.6}, "± BLEU"),
    ],
)
def test_a_row_that_misses_a_criterion_is_named(printed, row, changed, column):
    finished("base")
    finished(row, **changed)
    (missed,) = (line for line in printed() if line.startswith("- MISSED"))
    assert missed.startswith(f"- MISSED: {criteria['CRITERIA'][column][2]} ({row} ")


def test_seeds_that_disagree_are_missed_and_one_leaves_it_open(printed):
    for seed, ppl, verdict in ((0, 10.0, "- open: "), (1, 10.3, "- open: "), (2, 10.8, "- MISSED: ")):
        finished("base", seed, ppl=ppl)
        assert next(line for line in printed() if "seeds agree" in line).startswith(verdict)


def test_rows_that_a_scale_makes_equal_or_too_narrow_are_named(printed):
    words = (*WORDS, "scale.layers=0.25", "scale.width=0.125", "scale.head_width=0.03")
    finished("base", words=words)
    assert printed(*words)[-1].endswith("(d_k 1, base = c_n8, b_dk16 = b_dk32, c_n2 = c_n4)")


def test_kept_metrics_give_the_figures_of_the_whole_ones(capsys):
    words = ("scale=small", "scale.steps=0.016", "seed=0")  # 1600 updates, 16 a hundredth
    metrics = finished("base", words=words) / "metrics.jsonl"
    others = {"train/loss": 2.0, "train/gradient_norm": 1.0, "source_tokens": 3, "target_tokens": 5, "seconds": 9.0}
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    whole = [json.dumps(row | (others if "train/nats" in row else {})) + "\n" for row in rows]
    texts = []
    for lines in (whole, keep["thinned"](whole), whole[::37] + whole[-1:]):  # the last, over borders, is the control
        metrics.write_text("".join(lines))
        criteria["main"](*words)
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
