"""Runs with other settings than a row's: over their seeds, beside their own row."""

import csv
import io

from run_results import finish

from aiayn.config import compose, folders
from aiayn.core import storage
from aiayn.runs.records import read_runs
from aiayn.tables import formats, table3, variations


def test_a_variation_is_averaged_and_compared_with_its_own_row(tmp_path) -> None:
    here = ["scale=mini", f"output={tmp_path}", "prepared=nowhere"]
    run, other = compose.compose_row(*here), ["experiment=a_h1", "model.dropout=0.3"]
    for seed, ppl, bleu in ((1, 20.0, 11.0), (2, 23.0, 13.0)):
        finish(compose.compose_row(*here, f"seed={seed}"), 90.0, 1.0)  # base, which is not its row
        finish(compose.compose_row(*here, f"seed={seed}", other[0]), ppl, bleu)
        finish(compose.compose_row(*here, f"seed={seed}", *other), ppl + 5 * seed, bleu + 2)
    finish(compose.compose_row(*here, "experiment=f_unscaled", other[1]), 29.0, 7.0)  # whose row nobody has begun
    finish(odd := compose.compose_row(*here, "model.dropout=0.7"), 31.0, 5.0)
    storage.write_text(folders.run_folder(odd) / "config.yaml", "{")
    finish(compose.compose_row(*here, "seed=0", *other, "scale.steps=0.5"), 1.0, 99.0)  # in the same folder
    runs = read_runs(folders.sweep_folder(run))
    made = variations.layout(run, runs, [table3.table(run, runs)])
    rows = [[cell.text for cell in cells] for _, cells in made.rows]
    assert [row[0].partition("+")[0] for row in rows] == ["a_h1", "base", "f_unscaled"]
    assert rows[0][1:] == ["model.dropout=0.3", "29.00±5.66", "+7.50", "14.0±1.4", "+2.0", "1.23", "2"]
    ((stale, _, detail),) = made.table.notes
    assert (stale.partition("+")[0], detail[:26]) == ("a_h1", "scale.steps was 0.5, is 0."[:26])
    assert rows[1][1:] == ["config.yaml cannot be read", "31.00", "", "5.0", "", "1.23", "1"]
    assert rows[2][1:] == ["model.dropout=0.3", "29.00", "", "7.0", "", "1.23", "1"]
    assert {line["d_model"] for line in csv.DictReader(io.StringIO(formats.printed([made], "csv")))} == {""}
    for format in ("terminal", "md", "csv", "latex"):
        assert "model.dropout" in formats.printed([made], format).replace("\\", "")
    alone = [found for found in runs if found.experiment == rows[0][0] and found.seed]  # no row counts
    alone[1].result["sha256"]["data"] = "e" * 64
    assert [cell.text for cell in variations.layout(run, alone, [table3.table(run, alone)]).columns[-1].cells] == ["1"]
    assert variations.layout(run, [found for found in runs if "+" not in found.experiment], []) is None
