"""What the report is made of: translations only of the corpus that is here, vectors only of intact checkpoints."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from aiayn.config import compose, folders
from aiayn.config.schema import Config
from aiayn.core import storage
from aiayn.data.prepare import prepare
from aiayn.report import contents
from aiayn.runs import checkpoint
from aiayn.tables import beyond


@pytest.fixture
def run(digits: list[str], tmp_path: Path) -> Config:
    return compose.compose_row(*digits, "scale=smoke", f"output={tmp_path}")


def put(run: Config, row: str, sha256: str, lines: int, result_of: Any) -> Path:
    """A finished run on a corpus of that hash, with so many translations."""
    trained = compose.scaled(dataclasses.replace(compose.rows("paper", (row,))[row], scale=run.scale, data=run.data))
    folder = folders.sweep_folder(run) / row / "seed1"
    storage.write_json(folder / "result.json", {**result_of(trained), "sha256": {"data": sha256, "tokenizer": "t"}})
    storage.write_text(folder / "translations.txt", "1 2 3\n" * lines)
    return folder


def test_only_translations_of_this_corpus_and_as_many_as_its_sentences_are_counted(run, result_of) -> None:
    here = prepare(run, lambda message: None).sha256
    put(run, "base", here, 41, result_of)
    put(run, "a_h1", "another", 41, result_of)
    put(run, "a_h4", here, 40, result_of)
    found = contents.collect(run)
    assert set(found.dev.counts) == {("base", 1)}
    # Most are on the text that is here: the one on other text is in no figure, and named
    assert set(found.runs) == {("base", 1), ("a_h4", 1)}
    assert [name for name, status, _ in found.table.notes if status == "stale"] == ["a_h1 seed 1"]
    assert found.dev.counts["base", 1].shape == (41, 10)
    assert (len(found.dev.sources), len(found.dev.references), found.dev.missing) == (41, 41, "")


def test_rows_beyond_table_3_are_read_beside_the_others(run, result_of) -> None:
    here = prepare(run, lambda message: None).sha256
    put(run, "base", here, 41, result_of)
    assert contents.collect(run).beyond is None
    put(run, "f_no_positions", here, 41, result_of)
    found = contents.collect(run)
    assert (
        set(found.dev.counts) == set(found.dev.translations) == set(found.runs) == {("base", 1), ("f_no_positions", 1)}
    )
    assert [line.name for line in found.beyond.lines if line.finished] == ["base", "f_no_positions"]
    assert len(found.beyond_findings) == len(beyond.CLAIMS)
    assert "f_no_positions" not in [line.name for line in found.table.lines]


def test_without_the_corpus_it_is_said_what_is_missing(run, result_of, tmp_path) -> None:
    put(run, "base", "x", 41, result_of)
    found = contents.collect(dataclasses.replace(run, prepared=str(tmp_path / "nowhere")))
    assert found.dev.counts == {}
    assert "holds no prepared data" in found.dev.missing
    prepare(run, lambda message: None)
    assert "no finished run has translations of the corpus" in contents.collect(run).dev.missing


def test_learned_positions_are_those_of_the_newest_intact_checkpoint(run, result_of) -> None:
    folder = put(run, "e_learned_positions", "x", 1, result_of) / "checkpoints"
    assert contents.collect(run).learned == {}
    weights = {f"transformer.{side}_positions.weight": torch.rand(67, 5) for side in ("source", "target")}
    checkpoint.save({"state_dict": weights}, checkpoint.path_of(folder, 3))
    found = contents.collect(run).learned
    assert list(found) == ["Learned, source side", "Learned, target side"]
    assert (found["Learned, source side"] == weights["transformer.source_positions.weight"].numpy()[:64]).all()
    checkpoint.path_of(folder, 3).write_bytes(b"torn")
    assert contents.collect(run).learned == {}  # control


def test_layers_are_those_of_a_measurement_that_is_whole_and_lies_where_bench_leaves_it(run, tmp_path) -> None:
    path = tmp_path / "bench.json"
    run = dataclasses.replace(run, bench=dataclasses.replace(run.bench, output=str(path)))
    assert contents.collect(run).layers == {}
    part = {"lengths": [16, 32], "layers": [{"name": "Recurrent", "seconds_a_token": [3e-6, 5e-6]}]}
    whole = json.dumps({"parts": {"layers": part}})
    path.write_text(whole)
    assert contents.collect(run).layers == {"Recurrent": [(16, 3e-6), (32, 5e-6)]}
    for damaged in (whole[:-1], whole.replace("[16, 32]", "[16]"), whole.replace("5e-06", "{}"), "[]", '{"parts": {}}'):
        path.write_text(damaged)
        assert contents.collect(run).layers == {}
