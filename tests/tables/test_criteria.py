"""`aiayn criteria`: what is said of runs whose metrics are known."""

import dataclasses
import json
import math
import runpy
from pathlib import Path
from typing import Any

import pytest

from aiayn.config import compose, folders
from aiayn.config.schema import ROWS, Config, ConfigError
from aiayn.runs import records
from aiayn.tables import criteria, table3

UPDATES = 1000


@pytest.fixture
def run(tmp_path: Path) -> Config:
    return compose.compose_row("scale=small", "scale.steps=0.002", f"output={tmp_path}/runs", "seed=0")


def train_nats(step: int) -> float:
    """From 7 to 2 nats: half of the fall within a tenth of the updates."""
    return 2 + 5 * math.exp(-step / 150)


def finished(run: Config, row: str, seed: int = 0, **changed: Any) -> Path:
    """A finished run: dev PPL 10.1 after nine tenths, 10 at the end, BLEU 20 ± 1, 20 epochs."""
    trained = compose.row(row, run)
    given: dict[str, Any] = {"ppl": 10.0, "before": 10.1, "epochs": 20.0, "half": 1.0, "nats": train_nats} | changed
    folder = folders.sweep_folder(run) / row / f"seed{seed}"
    folder.mkdir(parents=True)
    updates = trained.training.max_steps
    rows: list[dict[str, float]] = [
        {"step": step, "train/nats": given["nats"](step * UPDATES / updates)} for step in range(1, updates + 1)
    ]
    rows.insert(updates * 9 // 10, {"step": updates * 9 // 10, "dev/ppl": given["before"]})
    rows.append({"step": updates, "dev/ppl": given["ppl"]})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = {
        **{"schema": 1, "status": "finished", "experiment": row, "seed": seed, "scale": "small", "data": "tiny"},
        **{"config": dataclasses.asdict(trained), "params": 1, "params_at_40960_rows": 1, "steps": updates},
        **{"train_seconds": 60.0, "device_seconds": {"cpu": 60.0}, "epochs": given["epochs"]},
        "sha256": {"data": "d", "tokenizer": "t"},
        "dev": {
            **{"ppl": given["ppl"], "bits_per_character": 1.0},
            "bleu": {"paper": 20.0, "sacrebleu": 20.0, "intl": 20.0},
            "bleu_ci95": [20 - given["half"], 20 + given["half"]],
        },
    }
    (folder / "result.json").write_text(json.dumps(result))
    return folder


def said(run: Config, capsys: pytest.CaptureFixture[str]) -> list[str]:
    criteria.main(run)
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("- ")]


def test_rows_that_train_as_they_should_fulfil_every_criterion(run, capsys):
    for row in ROWS:
        for seed in (0, 1):
            finished(run, row, seed, **({"epochs": 60.0} if row == "big" else {}))
    lines = said(run, capsys)
    assert len(lines) == len(criteria.CRITERIA) + 1
    assert all(line.startswith("- holds: ") for line in lines), lines


@pytest.mark.parametrize(
    ("row", "changed", "column"),
    [
        ("c_n8", {"epochs": 14.9}, "epochs"),
        ("c_n8", {"epochs": 40.1}, "epochs"),
        ("b_dk16", {"before": 10.3}, "fall %"),
        ("c_n8", {"nats": lambda step: 7.0 - 5 * max(0, step - 700) / 300}, "start"),
        ("a_h1", {"nats": lambda step: train_nats(step) + 0.3 * (step > 500)}, "relapse"),
        ("d_dropout00", {"nats": lambda step: train_nats(step) + 1}, "train - dev"),
        ("big", {"half": 1.6}, "± BLEU"),
    ],
)
def test_a_row_that_misses_a_criterion_is_named_with_its_value(run, capsys, row, changed, column):
    finished(run, "base")
    finished(run, row, **changed)
    (missed,) = (line for line in said(run, capsys) if line.startswith("- MISSED"))
    criterion = next(criterion for criterion in criteria.CRITERIA if criterion.column == column)
    assert missed.startswith(f"- MISSED: {criterion.text} ({row} ")


def test_only_the_row_without_dropout_must_fit_its_training_text(run, capsys):
    finished(run, "d_dropout02", nats=lambda step: train_nats(step) + 1)
    assert not any("MISSED" in line for line in said(run, capsys))


def test_seeds_that_disagree_are_missed_and_a_single_seed_leaves_it_open(run, capsys):
    def of_seeds() -> str:
        return next(line for line in said(run, capsys) if "seeds agree" in line)

    finished(run, "base")
    assert of_seeds().startswith("- open: ")
    finished(run, "base", 1, ppl=10.3)
    assert of_seeds().startswith("- open: ")  # 0.021, and the other rows are missing
    finished(run, "base", 2, ppl=10.8)
    assert of_seeds().startswith("- MISSED: ")
    assert "(base 0.039)" in of_seeds()


def test_rows_that_a_scale_makes_equal_or_too_narrow_are_named(run, capsys):
    small = dataclasses.replace(run, scale=dataclasses.replace(run.scale, layers=0.25, width=0.125))
    finished(small, "base")
    line = next(line for line in said(small, capsys) if "degenerates" in line)
    assert line.startswith("- MISSED: ")
    assert line.endswith("(d_k 2, base = c_n8, c_n2 = c_n4)")


def test_missing_rows_are_named_and_of_no_finished_row_it_says_so(run, capsys):
    with pytest.raises(ConfigError, match="seed=0: no row is finished"):
        criteria.main(run)
    finished(run, "base", 1)
    with pytest.raises(ConfigError, match="seed=0: no row is finished"):
        criteria.main(run)
    finished(run, "base")
    criteria.main(run)
    printed = capsys.readouterr().out
    assert "1 rows, 1 minutes of training\nmissing: a_h1, " in printed


def test_kept_metrics_give_the_figures_of_the_whole_ones(run, capsys):
    run = dataclasses.replace(run, scale=dataclasses.replace(run.scale, steps=0.016))  # 1600 updates, 16 a hundredth
    metrics = finished(run, "base") / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    others = {"train/loss": 2.0, "train/gradient_norm": 1.0, "source_tokens": 3, "target_tokens": 5, "seconds": 9.0}
    whole = [json.dumps(row | (others if "train/nats" in row else {})) + "\n" for row in rows]
    thinned = runpy.run_path("experiments/results/keep.py")["thinned"]

    def printed(lines: list[str]) -> str:
        metrics.write_text("".join(lines))
        criteria.main(run)
        return capsys.readouterr().out

    kept = thinned(whole)
    assert len(kept) == 200 + 2
    assert sum(json.loads(line).get("target_tokens", 0) for line in kept) == 5 * 1600
    assert printed(kept) == printed(whole)
    control = [
        line for place, line in enumerate(whole) if place % 37 == 0 or "dev" in line
    ]  # over borders of hundredths
    assert printed(control) != printed(whole)


def test_a_table_names_what_its_first_seed_misses_and_leaves_out_what_is_damaged(run):
    def missed() -> tuple[str, ...]:
        folder = folders.sweep_folder(run)
        made = table3.table(run, records.read_runs(folder))
        return criteria.judged(made, folder).missed

    assert missed() == ()
    finished(run, "base", 1)
    assert missed() == ()
    for row in ("a_h1", "a_h4", "a_h16"):
        finished(run, row, 1, half=1.75)
    assert missed() == ("the bootstrap 95 % interval of BLEU is at most ±1.5 (a_h1 1.75, a_h4 1.75, a_h16 1.75)",)
    damaged = finished(run, "a_h32", 1, half=1.75)
    assert missed() == ("the bootstrap 95 % interval of BLEU is at most ±1.5 (4 rows)",)
    for damage in (b"{}\nno JSON\n", b'{"step": \xff}\n'):
        (damaged / "metrics.jsonl").write_bytes(damage)
        assert "a_h16 1.75)" in missed()[0]
    (damaged / "metrics.jsonl").write_text("".join(f'{{"step": {n}, "train/nats": 5.0}}\n' for n in range(1, 1601)))
    assert "a_h16 1.75)" in missed()[0]
