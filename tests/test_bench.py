"""`aiayn bench`: medians and ratios of what was measured, and all numbers in one file. No test judges a time."""

import io
import json

import pytest
from rich.console import Console

from aiayn import bench, config, schema

PART = {
    "unit": "update",
    "source_tokens": [300, 600, 900],
    "target_tokens": [200, 400, 600],
    "padded_share_of_rivals": 0.25,
    "units_a_round": 2,
    "lines": [
        {"name": "aiayn", "precision": "fp32", "checks": {"loss": 0.0}, "seconds_a_round": [1.0, 1.0, 3.0]},
        {"name": "slow", "precision": "fp32", "checks": {"loss": 0.5}, "seconds_a_round": [4.0, 2.0, 6.0]},
        {"name": "aiayn", "precision": "bf16", "checks": {"loss": 0.1}, "seconds_a_round": [0.5, 0.5, 1.5]},
        {"name": "fast", "precision": "bf16", "checks": {"loss": 0.2}, "seconds_a_round": [0.25, 1.0, 0.5]},
    ],
}


def printed(part) -> list[list[str]]:
    console = Console(file=io.StringIO(), width=150)
    console.print(bench.table("", part))
    return [line.split() for line in console.file.getvalue().splitlines()]


def test_a_line_has_medians_over_rounds_and_the_median_ratio_to_ours_in_its_precision():
    rows = {tuple(row[:2]): row[2:] for row in printed(PART) if row}
    assert rows["aiayn", "fp32"][:3] == ["200", "300", "500.0"]  # of 200, 400, 200 tokens/s; 1 s for two updates
    assert rows["slow", "fp32"][:5] == ["100", "150", "2,000.0", "2.00", "x"]  # of 4, 2, 2
    assert rows["fast", "bf16"][:5] == ["800", "1,200", "250.0", "0.50", "x"]  # of 0.5, 2, 0.33


def test_the_verdict_compares_with_the_fastest_rival_of_the_precision_and_overall():
    fp32, best = bench.verdict(PART)
    assert fp32.startswith("fp32: 2.00 x the fastest rival (slow fp32")
    assert best.startswith("each in its fastest precision: 0.50 x the fastest rival (fast bf16")


def test_the_command_prints_tables_and_writes_every_number(toy, tmp_path, capsys):
    sizes = ["model.d_k=8", "model.d_v=8", "bench.mean_length=5", "bench.updates=1", "bench.rounds=1"]
    bench.main(config.compose_row(*toy, *sizes, f"bench.output={tmp_path}/all.json"))
    out = capsys.readouterr().out
    for words in ("threads", "bf16", "torch 2", "training: 1 updates", "beam 4", "greedy", "padded share"):
        assert words in out
    result = json.loads((tmp_path / "all.json").read_text())
    assert set(result["parts"]) == {"training", "decoding, beam 4", "decoding, greedy"}
    assert result["hardware"]["cpu"]
    assert result["config"]["bench"]["rounds"] == 1
    for part in result["parts"].values():
        assert all(len(line["seconds_a_round"]) == 1 for line in part["lines"])


def test_one_kind_alone_is_measured_when_asked(toy, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "training", lambda *_: PART)
    monkeypatch.setattr(bench, "decoding", lambda *_: pytest.fail("not asked for"))
    bench.main(config.compose_row(*toy, "bench.kind=training", f"bench.output={tmp_path}/all.json"))
    assert set(json.loads((tmp_path / "all.json").read_text())["parts"]) == {"training"}


def test_a_gpu_that_is_not_there_is_refused_in_one_line(toy, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(schema.ConfigError, match="torch sees no GPU here"):
        bench.main(config.compose_row(*toy, "hardware=gpu", "hardware.tokens_per_micro_batch=40"))
