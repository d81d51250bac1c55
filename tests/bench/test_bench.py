"""`aiayn bench`: what is asked for is measured, printed and written, every number. No test judges a time."""

import json

import pytest

from aiayn.bench import bench
from aiayn.config import compose

SIZES = ["model.d_k=8", "model.d_v=8", "bench.mean_length=5", "bench.updates=1", "bench.rounds=2"]


@pytest.mark.parametrize(
    ("kind", "parts"), [("training", ["training"]), ("decoding", ["decoding, beam 4", "decoding, beam 1"])]
)
def test_a_kind_prints_its_sheet_and_writes_every_number(kind, parts, toy, tmp_path, capsys):
    bench.main(compose.compose_row(*toy, *SIZES, f"bench.kind={kind}", f"bench.output={tmp_path}/all.json"))
    result, printed = json.loads((tmp_path / "all.json").read_text()), capsys.readouterr().out
    assert list(result["parts"]) == parts
    assert result["config"]["bench"]["rounds"] == 2
    for line in (line for part in result["parts"].values() for line in part["lines"]):
        assert all(line["name"] in text for text in (printed, (tmp_path / "all.md").read_text()))


def test_a_row_has_the_fastest_round_the_spread_and_the_ratio():
    lines = [
        {"name": "aiayn", "precision": "fp32", "checks": {"loss": 0.0}, "seconds_per_round": [1.0, 1.5]},
        {"name": "slow", "precision": "fp32", "checks": {"loss": 0.5}, "seconds_per_round": [4.0, 2.0]},
    ]
    part = {"unit": "update", "units_per_round": 2, "target_tokens": [200, 100], "lines": lines}
    ours, slow = (list(row.values()) for row in bench.by_case({"training": part}))
    assert ours == ["training", "aiayn", "fp32", "200", "375.0", "200%", "", "loss 0"]
    assert slow == ["training", "slow", "fp32", "50", "1,500.0", "0%", "4.00 x", "loss 0.5"]
