"""Every run folder is understood, whatever lies in it."""

import json
import re
import unicodedata
from pathlib import Path

import pytest
import sacrebleu
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from run_results import damaged, put, result

from aiayn.config import compose
from aiayn.core import exit_codes, storage
from aiayn.runs import records
from aiayn.runs.records import last_step, read_runs


def test_a_finished_run_is_read_back_whole(sweep: Path) -> None:
    put(sweep, "a_h1", 1, result())
    storage.write_json(sweep / "a_h1" / "seed1" / "failure.json", {"exit_code": 1, "cause": "of an earlier attempt"})
    (run,) = read_runs(sweep)
    assert (run.experiment, run.seed, run.status, run.cause, run.steps_done) == ("a_h1", 1, "finished", "", 1000)
    assert run.result == result()


def test_a_perfect_translation_is_a_finished_run(sweep: Path) -> None:
    sentence = "the quick brown fox jumps"
    score = sacrebleu.corpus_bleu([sentence], [[sentence]]).score
    assert score > 100  # a float, as sacreBLEU computes it
    made = result()
    made["dev"]["bleu"] = dict.fromkeys(made["dev"]["bleu"], score)
    put(sweep, "a_h1", 1, made)
    assert [run.status for run in read_runs(sweep)] == ["finished"]


def test_a_language_without_the_papers_bleu_shows_sacrebleus(sweep: Path) -> None:
    without = result()
    del without["dev"]["bleu"]["paper"]
    put(sweep, "a_h1", 1, without)
    (run,) = read_runs(sweep)
    assert "BLEU 19.0 " in records.row_line(compose.compose_row("experiment=a_h1"), run)


def test_the_papers_figures_stand_beside_its_conditions_alone(sweep: Path) -> None:
    put(sweep, "a_h1", 1, result())
    (run,) = read_runs(sweep)
    for where, shown in ((["scale=paper", "data=wmt14_en_de"], True), (["scale=paper"], False), ([], False)):
        line = records.row_line(compose.compose_row("experiment=a_h1", *where), run)
        assert (re.findall(r"\(paper (\S+)\)", line) == ["5.29", "24.9"]) is shown, line


def test_curves_or_checkpoints_alone_make_a_run_half_done(sweep: Path) -> None:
    for number, damage in enumerate((b"", b"[]\n", b"nonsense\n", b'{"step": "x"}\n', b"\xff\xfe\n")):
        storage.write_bytes(sweep / "c_n2" / f"seed{number}" / "metrics.jsonl", damage)
    (sweep / "c_n2" / "seed5" / "checkpoints").mkdir(parents=True)
    (sweep / "c_n4" / "seed1").mkdir(parents=True)
    assert [(run.status, run.steps_done) for run in read_runs(sweep)] == [("half-done", 0)] * 6 + [("missing", 0)]


def test_a_failed_run_tells_its_cause_in_one_printable_line(sweep: Path) -> None:
    cause = "loss is \x1b[31mNaN\x1b[0m\n at update 17\x00 \u202eeman"
    storage.write_json(sweep / "big" / "seed2" / "failure.json", {"exit_code": 3, "cause": cause})
    (run,) = read_runs(sweep)
    assert (run.status, run.cause) == ("failed", "loss is NaN at update 17 eman (exit code 3)")


@pytest.mark.parametrize(
    "content",
    [
        *(json.dumps(result()).encode()[:length] for length in (0, 37, -1)),
        damaged("schema", 2),
        damaged("dev.ppl", float("nan")),
        damaged("seed", 2),
        damaged("config.data.vocab_size", [8000]),
        json.dumps(result()).replace("37.5", "1" + "0" * 400).encode(),
        b"[" * 100_000,
    ],
)
def test_a_torn_or_senseless_result_is_reported_as_failed(sweep: Path, content: bytes) -> None:
    put(sweep, "a_h1", 1, result()).write_bytes(content)
    (run,) = read_runs(sweep)
    assert run.status == "failed"
    assert "result.json" in run.cause
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


@pytest.mark.parametrize("name", ["", "seed3/result.json", "seed3/failure.json"])
def test_what_may_not_be_read_is_not_called_missing(sweep: Path, name: str) -> None:
    path = sweep / "a_h1" / name
    path.parent.mkdir(parents=True)
    path.symlink_to(path)  # as unreadable for root as for anyone
    put(sweep, "base", 1, result("base"))
    (run, other) = read_runs(sweep)
    assert (run.status, run.seed, other.status) == ("unreadable", 3 if name else -1, "finished")
    assert run.cause.endswith(f"{path}: Too many levels of symbolic links")
    records.refuse_unreadable(other)  # control
    with pytest.raises(storage.StorageError, match="Too many levels"):
        records.refuse_unreadable(other, run)


def test_runs_come_by_name_and_seed_without_other_folders(sweep: Path) -> None:
    for row, seed in (("big", 2), ("a_h1", 10), ("a_h1", 2)):
        put(sweep, row, seed, result(row, seed))
    for name in ("a_h1/seed01", "a_h1/seedx", "a_h1/seed-1", "a_h1/seed1 ", ".tmp/seed1", "a\x1bh1/seed1", "a_h1/1"):
        (sweep / name).mkdir(parents=True)
    (sweep / "notes.txt").touch()
    assert [(run.experiment, run.seed) for run in read_runs(sweep)] == [("a_h1", 2), ("a_h1", 10), ("big", 2)]


@given(st.text(max_size=400))
def test_printable_text_is_one_line_that_no_terminal_obeys(text: str) -> None:
    line = records.printable(f"{text}\x1b]0;title\x07\x1b[2J\r\n{text}")
    assert not any(unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") for character in line)
    assert len(line) <= 300


@given(st.integers(1, 900), st.binary(max_size=40).filter(lambda data: b"\n" not in data))
def test_the_last_recorded_update_is_found_behind_a_torn_line(tmp_path_factory, last, torn):
    folder = tmp_path_factory.mktemp("metrics")
    assert last_step(folder) == 0
    lines = b"".join(b'{"step": %d, "train/loss": 1.0}\n' % step for step in range(1, last + 1))
    (folder / "metrics.jsonl").write_bytes(lines + torn)
    assert last_step(folder) == last


def test_a_full_disk_leaves_the_cause_on_the_terminal(tmp_path, capsys):
    (tmp_path / "failure.json").mkdir()  # as unwritable for root as for anyone
    assert records.record_failure(tmp_path, exit_codes.STORAGE, "no space") == exit_codes.STORAGE
    assert "aiayn: no space; cannot write" in capsys.readouterr().err


@pytest.mark.parametrize("line", [b'{"step": 1, "\xff": 1}', b'{"step": 2, "x": NaN}', b'{"step": 3, "train/loss": 1}'])
def test_a_damaged_line_of_the_metrics_is_named(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "dev/ppl": 2.0}\n' + line + b"\n")
    with pytest.raises(storage.StorageError, match=r"metrics\.jsonl: line 2 is damaged"):
        records.read_metrics(tmp_path / "metrics.jsonl")
