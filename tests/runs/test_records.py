"""Every run folder is understood, whatever lies in it; the table's numbers are the plain statistics of the results."""

import copy
import dataclasses
import json
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aiayn.config import compose, folders, schema
from aiayn.core import storage
from aiayn.runs import records
from aiayn.tables import table3
from aiayn.runs.records import read_runs
from aiayn.tables.table3 import table

RUN = compose.compose_row("scale=mini")


def result(experiment: str = "a_h1", seed: int = 1, ppl: float = 37.5, bleu: float = 19.25) -> dict[str, Any]:
    """A finished run of the mini scale as train writes it."""
    trained = dataclasses.replace(compose.row(experiment, RUN), seed=seed)
    return {
        "schema": 1, "experiment": experiment, "seed": seed, "scale": "mini", "data": "tiny", "status": "finished",
        "config": dataclasses.asdict(trained), "params": 1_234_567, "params_at_40960_rows": 3_456_789, "steps": 1000,
        "source_tokens": 7, "target_tokens": 11, "train_seconds": 93.0, "target_tokens_per_second": 13.0,
        "device_seconds": {"cpu": 186.0},
        "dev": {"ppl": ppl, "nats": 17.0, "tokens": 19, "bits_per_character": 1.5,
                "bleu": {"paper": bleu, "sacrebleu": bleu - 0.25, "intl": bleu + 0.5},
                "bleu_ci95": [bleu - 1, bleu + 1], "signatures": {}},
        "sha256": {"data": "d" * 64, "tokenizer": "7" * 64}, "versions": {}, "hardware": {}, "finished_at": "",
    }  # fmt: skip


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "tiny-mini"


def put(sweep: Path, row: str, seed: int, value: dict[str, Any]) -> Path:
    path = sweep / row / f"seed{seed}" / "result.json"
    storage.write_json(path, value)
    return path


def test_a_finished_run_is_read_back_whole(sweep: Path) -> None:
    put(sweep, "a_h1", 1, result())
    (run,) = read_runs(sweep)
    assert (run.experiment, run.seed, run.status, run.cause, run.steps_done) == ("a_h1", 1, "finished", "", 1000)
    assert run.result == result()


def test_a_sweep_that_was_never_begun_has_no_runs(sweep: Path) -> None:
    assert read_runs(sweep) == []


def test_a_half_done_run_tells_its_last_whole_update(sweep: Path) -> None:
    metrics = sweep / "c_n2" / "seed3" / "metrics.jsonl"
    for step in (1, 2, 3):
        storage.append_lines(metrics, [json.dumps({"step": step, "train/loss": 5.0})])
    with metrics.open("ab") as file:
        file.write(b'{"step": 4, "train/lo')
    (run,) = read_runs(sweep)
    assert (run.status, run.steps_done, run.result) == ("half-done", 3, None)


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"[]\n", b"nonsense\n", b'{"step": "x"}\n', b"\xff\xfe\n", b'"step"\n']
)
def test_damaged_curves_leave_a_run_half_done_at_an_unknown_step(sweep: Path, content: bytes) -> None:
    storage.write_bytes(sweep / "c_n2" / "seed3" / "metrics.jsonl", content)
    (run,) = read_runs(sweep)
    assert (run.status, run.steps_done) == ("half-done", 0)


def test_checkpoints_alone_make_a_run_half_done_and_an_empty_folder_a_missing_one(sweep: Path) -> None:
    (sweep / "c_n2" / "seed1" / "checkpoints").mkdir(parents=True)
    (sweep / "c_n4" / "seed1").mkdir(parents=True)
    assert [run.status for run in read_runs(sweep)] == ["half-done", "missing"]


def test_a_failed_run_tells_its_cause_in_one_printable_line(sweep: Path) -> None:
    cause = "loss is \x1b[31mNaN\x1b[0m\n at update 17\x00 \u202eeman"
    storage.write_json(sweep / "big" / "seed2" / "failure.json", {"exit_code": 3, "cause": cause, "log": "worker.log"})
    (run,) = read_runs(sweep)
    assert (run.status, run.cause) == ("failed", "loss is NaN at update 17 eman (exit code 3)")


def test_a_result_outweighs_the_failure_of_an_earlier_attempt(sweep: Path) -> None:
    put(sweep, "a_h1", 1, result())
    storage.write_json(sweep / "a_h1" / "seed1" / "failure.json", {"exit_code": 1, "cause": "old", "log": ""})
    assert read_runs(sweep)[0].status == "finished"


def test_a_result_torn_anywhere_is_reported_as_failed(sweep: Path) -> None:
    path = put(sweep, "a_h1", 1, result())
    whole = path.read_bytes()
    for length in range(0, len(whole.rstrip()), 37):
        path.write_bytes(whole[:length])
        (run,) = read_runs(sweep)
        assert run.status == "failed"
        assert "result.json" in run.cause
    path.write_bytes(whole)
    assert read_runs(sweep)[0].status == "finished"


def damaged(key: str, value: Any) -> bytes:
    tree = copy.deepcopy(result())
    *parents, last = key.split(".")
    part = tree
    for parent in parents:
        part = part[parent]
    part[last] = value
    return json.dumps(tree).encode()


@pytest.mark.parametrize(
    "content",
    [
        damaged("schema", 2),
        damaged("status", "running"),
        damaged("config", []),
        damaged("config.scale", None),
        damaged("dev", None),
        damaged("dev.ppl", "4.92"),
        damaged("dev.ppl", True),
        damaged("dev.ppl", float("nan")),
        damaged("dev.ppl", float("inf")),
        damaged("dev.bleu.paper", -1),
        damaged("dev.bleu", {}),
        damaged("params", 1.5),
        damaged("seed", 2),
        damaged("experiment", "a_h4"),
        damaged("scale", "paper"),
        damaged("data", "wmt14_en_de"),
        damaged("data", ["tiny"]),
        damaged("config.data", 7),
        damaged("config.data.vocab_size", [8000]),
        damaged("config.hardware", None),
        damaged("sha256.data", None),
        damaged("sha256.tokenizer", {}),
        damaged("device_seconds", 93.0),
        json.dumps(result()).replace("37.5", "1" + "0" * 400).encode(),
        json.dumps(result()).replace("37.5", "1" * 5000).encode(),
        json.dumps(result()).encode("utf-16"),
        b"[" * 100_000,
        b"[]",
        b"null",
        b"\xff\xfe\x00",
        b"<html>not found</html>",
    ],
)
def test_a_result_that_is_foreign_or_senseless_is_reported_as_failed(sweep: Path, content: bytes) -> None:
    put(sweep, "a_h1", 1, result()).write_bytes(content)
    (run,) = read_runs(sweep)
    assert run.status == "failed"
    assert "\n" not in run.cause


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(name=st.sampled_from(["result.json", "failure.json", "metrics.jsonl"]), content=st.binary(max_size=200))
def test_no_bytes_in_a_run_folder_raise(sweep: Path, name: str, content: bytes) -> None:
    folder = sweep / "a_h1" / "seed1"
    for path in folder.glob("*"):
        path.unlink()
    storage.write_bytes(folder / name, content)
    (run,) = read_runs(sweep)
    assert run.status == ("half-done" if name == "metrics.jsonl" else "failed")


def test_a_folder_in_the_place_of_a_result_is_reported_as_failed(sweep: Path) -> None:
    (sweep / "a_h1" / "seed1" / "result.json").mkdir(parents=True)
    assert read_runs(sweep)[0].status == "failed"


def test_runs_come_by_name_and_seed_and_other_folders_are_passed_over(sweep: Path) -> None:
    for row, seed in (("big", 2), ("a_h1", 10), ("a_h1", 2)):
        put(sweep, row, seed, result(row, seed))
    for name in ("a_h1/seed01", "a_h1/seedx", "a_h1/seed-1", "a_h1/seed1 ", ".tmp/seed1", "a\x1bh1/seed1", "a_h1/1"):
        (sweep / name).mkdir(parents=True)
    (sweep / "notes.txt").touch()
    assert [(run.experiment, run.seed) for run in read_runs(sweep)] == [("a_h1", 2), ("a_h1", 10), ("big", 2)]


def test_a_run_with_overrides_keeps_its_own_name_and_stays_out_of_the_table(sweep: Path) -> None:
    put(sweep, "a_h1", 1, result())
    put(sweep, "a_h1+1f2e3d4c", 1, result(ppl=1.0))
    runs = read_runs(sweep)
    assert [(run.experiment, run.status) for run in runs] == [("a_h1", "finished"), ("a_h1+1f2e3d4c", "finished")]
    made = table(RUN, runs)
    assert made.others == 1
    assert made.lines[1].measured("dev.ppl") == table3.Measured(37.5, None)


def test_mean_and_deviation_are_numpys_over_the_finished_seeds(sweep: Path) -> None:
    figures = [36.25, 38.0, 37.1]
    for seed, ppl in enumerate(figures, 1):
        put(sweep, "a_h1", seed, result(seed=seed, ppl=ppl))
    storage.write_json(sweep / "a_h1" / "seed4" / "failure.json", {"exit_code": 3, "cause": "NaN", "log": ""})
    made = table(RUN, read_runs(sweep))
    measured = made.lines[1].measured("dev.ppl")
    assert measured is not None
    assert measured.mean == pytest.approx(np.mean(figures), abs=1e-12)
    assert measured.deviation == pytest.approx(np.std(figures, ddof=1), abs=1e-12)
    assert measured.deviation != pytest.approx(np.std(figures), rel=0.1)
    assert made.seeds == [1, 2, 3]
    assert made.notes[0] == ("a_h1 seed 4", "failed", "NaN (exit code 3)")


def test_a_single_seed_has_no_deviation_and_none_no_mean(sweep: Path) -> None:
    put(sweep, "a_h1", 1, result())
    made = table(RUN, read_runs(sweep))
    assert made.lines[1].measured("dev.ppl") == table3.Measured(37.5, None)
    assert made.lines[2].measured("dev.ppl") is None


def test_the_table_has_all_rows_in_the_papers_order_and_groups() -> None:
    made = table(RUN, [])
    assert tuple(line.name for line in made.lines) == compose.ROWS
    assert [line.group for number, line in enumerate(made.lines) if made.opens_group(number)] == [
        *("base", "(A)", "(B)", "(C)", "(D)", "(E)", "big"),
    ]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("model.d_k", 63), ("training.max_steps", 5), ("model.positions", "learned"), ("scale.batch", 0.5)),
        *(("fidelity.zero_start", True), ("decoding.beam_size", 5), ("decoding.precision", "int8")),
    ],
)
def test_a_run_of_other_values_than_the_row_has_now_is_stale_and_not_counted(sweep: Path, key: str, value: Any) -> None:
    path = put(sweep, "a_h1", 1, result())
    assert table(RUN, read_runs(sweep)).lines[1].status == "finished"
    path.write_bytes(damaged(f"config.{key}", value))
    line = table(RUN, read_runs(sweep)).lines[1]
    assert (line.status, line.finished) == ("stale", [])
    assert f"{key} was {value}, is " in line.notes[0][2]


def as_before(found: dict[str, Any], learned: bool = False) -> dict[str, Any]:
    """The result as it was written before a model had parts to choose among."""
    model = {key: found["config"]["model"][key] for key in ("num_layers", "d_model", "d_ff", "num_heads", "d_k", "d_v")}
    model |= {"dropout": found["config"]["model"]["dropout"], "learned_positions": learned}
    config = {key: value for key, value in found["config"].items() if key != "published"}
    return {**found, "config": {**config, "model": model}}


@pytest.mark.parametrize("row", compose.ROWS)
def test_a_result_of_before_counts_as_what_it_was(sweep: Path, row: str) -> None:
    learned, trained = row == "e_learned_positions", dataclasses.replace(compose.row(row, RUN), seed=1)
    put(sweep, row, 1, as_before(result(row), learned))
    (run,) = read_runs(sweep)
    assert records.changed(schema.meaning(trained), run.result) == []
    line = next(line for line in table(RUN, [run]).lines if line.name == row)
    assert (line.status, len(line.finished)) == ("finished", 1)
    put(sweep, row, 1, as_before(result(row), not learned))  # control
    (run,) = read_runs(sweep)
    assert [key for key, _, _ in records.changed(schema.meaning(trained), run.result)] == ["model.positions"]
    line = next(line for line in table(RUN, [run]).lines if line.name == row)
    assert (line.status, line.finished) == ("stale", [])


def test_a_half_done_run_is_measured_against_the_steps_of_its_scale(sweep: Path) -> None:
    storage.append_lines(sweep / "big" / "seed1" / "metrics.jsonl", ['{"step": 1234}'])
    made = table(RUN, read_runs(sweep))
    assert made.notes[0] == ("big seed 1", "half-done", f"1,234 of {round(300_000 * RUN.scale.steps):,} steps")


@pytest.mark.parametrize("words", [(), ("tokenizer=paper",), ("hardware.precision=bf16-mixed",), ("data.source=/x",)])
def test_figures_on_the_papers_text_at_its_scale_are_comparable_in_any_precision(words: tuple[str, ...]) -> None:
    assert table(compose.compose_row("scale=paper", "data=wmt14_en_de", *words), []).comparable


@pytest.mark.parametrize(
    "words",
    [
        *(("data=tiny",), ("data=wmt14_en_fr",), ("scale=mini",), ("scale.batch=0.5",), ("data.vocab_size=8000",)),
        *(("data.max_length=100",), ("data.target_language=fr",), ("data.train_source=mine.en",)),
        *(("scale.max_words=7",), ("scale.pairs=5003",)),
    ],
)
def test_figures_under_any_other_condition_are_not_comparable(words: tuple[str, ...]) -> None:
    assert not table(compose.compose_row("scale=paper", "data=wmt14_en_de", *words), []).comparable


def test_an_effect_is_a_row_minus_base() -> None:
    made = table(RUN, [])
    nothing: list[float | None] = [None] * 18
    assert made.effects([5.0, 7.5, *nothing]) == [None, 2.5, *nothing]
    assert made.effects([None, 7.5, *nothing]) == [None, None, *nothing]


@given(st.text(max_size=400))
def test_printable_text_is_one_line_without_anything_a_terminal_obeys(text: str) -> None:
    line = records.printable(f"{text}\x1b]0;title\x07\x1b[2J\r\n{text}")
    assert not any(unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") for character in line)
    assert len(line) <= 300


def test_printable_text_keeps_ordinary_words() -> None:
    assert records.printable("Größe 5 × 7 reicht nicht: 中文") == "Größe 5 × 7 reicht nicht: 中文"


def of_shared(key: str) -> Any:
    """Another value of what all runs of a table share."""
    return {"data.vocab_size": 8000, "data.max_length": 31, "hardware.precision": "64-true"}.get(key, "other")


def alike(experiment: str, seed: int, key: str, value: Any, **figures: float) -> dict[str, Any]:
    """A finished run with another value of what all runs of a table share."""
    made = result(experiment, seed, **figures)
    part = made if key.startswith("sha256.") else made["config"]
    *parents, last = key.split(".")
    for parent in parents:
        part = part[parent]
    part[last] = value
    return made


@pytest.mark.parametrize("key", records.SHARED)
def test_a_run_on_other_text_with_another_vocabulary_or_in_another_precision_is_named_and_not_counted(
    sweep: Path, key: str
) -> None:
    for seed in (1, 2):
        put(sweep, "a_h1", seed, result("a_h1", seed, ppl=14.0 + seed))
    before = table(RUN, read_runs(sweep)).lines[1]
    assert (before.measured("dev.ppl"), before.notes) == (
        table3.Measured(15.5, pytest.approx(0.5**0.5)),
        [],
    )  # control
    put(sweep, "a_h1", 3, alike("a_h1", 3, key, of_shared(key), ppl=3.0))
    line = table(RUN, read_runs(sweep)).lines[1]
    assert line.measured("dev.ppl") == before.measured("dev.ppl")
    assert [run.seed for run in line.stale] == [3]
    ((name, status, detail),) = line.notes
    hashed = key.startswith("sha256.")
    own = records.look_up(result(), key)[:12] if hashed else records.look_up(result(), f"config.{key}")
    assert (name, status) == ("a_h1 seed 3", "stale")
    assert detail.startswith(f"{key} was {of_shared(key)}, is {own}, as in most runs of this table: delete its")


def test_rows_are_compared_on_one_text_only(sweep: Path) -> None:
    """Not only the seeds of one row: an effect is the difference of two rows."""
    for row in ("base", "a_h4"):
        put(sweep, row, 1, result(row, 1, ppl=14.0))
    put(sweep, "a_h1", 1, alike("a_h1", 1, "sha256.data", "e" * 64, ppl=3.0))
    made = table(RUN, read_runs(sweep))
    assert [line.status for line in made.lines[:3]] == ["finished", "stale", "finished"]
    assert made.notes[0][2].startswith("sha256.data was eeeeeeeeeeee, is dddddddddddd, ")


def test_most_runs_decide_what_a_table_is_of_and_base_where_there_are_as_many(sweep: Path) -> None:
    put(sweep, "base", 1, result("base", 1))
    put(sweep, "a_h1", 1, alike("a_h1", 1, "data.vocab_size", 500))
    assert [line.status for line in table(RUN, read_runs(sweep)).lines[:2]] == ["finished", "stale"]
    put(sweep, "a_h4", 1, alike("a_h4", 1, "data.vocab_size", 500))
    made = table(RUN, read_runs(sweep))
    assert [line.status for line in made.lines[:3]] == ["stale", "finished", "finished"]
    assert records.look_up(made.reference, "config.data.vocab_size") == 500
    # One that no row counts has no say
    put(sweep, "a_h4", 1, alike("a_h4", 1, "model.d_k", 63) | {"sha256": {"data": "e" * 64, "tokenizer": "7" * 64}})
    assert [line.status for line in table(RUN, read_runs(sweep)).lines[:3]] == ["finished", "stale", "stale"]


def test_where_the_text_lay_when_a_run_was_trained_elsewhere_is_no_difference(sweep: Path) -> None:
    put(sweep, "a_h1", 1, result())
    put(sweep, "a_h1", 2, alike("a_h1", 2, "data.train_source", "/elsewhere/train.en"))
    assert len(table(RUN, read_runs(sweep)).lines[1].finished) == 2


def test_a_table_of_finished_runs_is_comparable_by_what_they_were_trained_on_and_not_by_the_commands_words(
    tmp_path: Path,
) -> None:
    run = compose.compose_row("scale=paper", "data=wmt14_en_de", f"output={tmp_path}")
    folder = folders.sweep_folder(run)
    other = dataclasses.replace(run, data=dataclasses.replace(run.data, vocab_size=8000))
    for of in (run, other):
        made = result("base") | {"scale": "paper", "data": "wmt14_en_de", "config": dataclasses.asdict(of)}
        storage.write_json(folder / "base" / "seed1" / "result.json", made)
        assert table(run, read_runs(folder)).comparable == (of is run)


def test_every_part_of_a_runs_meaning_is_a_rows_or_the_tables_or_its_seed_or_known_by_hash() -> None:
    claimed = set(table(RUN, []).lines[0].claims)
    assert claimed.isdisjoint(records.SHARED)
    left = schema.MEANING - claimed - set(records.SHARED)
    assert left == schema.PATHS | {"experiment", "seed"}
