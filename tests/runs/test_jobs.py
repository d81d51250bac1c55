"""One run, one worker: a folder keeps its meaning, a worker starts clean and never outlives its parent."""

import codecs
import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import Mock

import pytest
from run_results import changed, result_of

from aiayn.config import compose, folders, schema
from aiayn.core import exit_codes, storage
from aiayn.runs import checkpoint, jobs, records
from aiayn.training import wandb_log
from tests.core.test_process_pool import all_end, is_alive


def hold(run: schema.Config, section: str, **values: object) -> Path:
    """Makes the run's folder hold a run with other values, whose text was prepared."""
    folder = folders.run_folder(run)
    storage.write_text(folder / "config.yaml", compose.to_yaml(schema.vary(run, **{section: values})))
    storage.write_text(folder / "data.sha256", "0" * 64 + "\n")
    return folder


def test_a_folder_of_another_run_is_refused_with_both_values(toy_run):
    folder = hold(toy_run, "data", vocab_size=777)
    with pytest.raises(schema.ConfigError, match=rf"data\.vocab_size=25: {re.escape(str(folder))} .*=777;"):
        jobs.check(toy_run)
    with pytest.raises(schema.ConfigError, match=r"^scale\.width=9\.0: "):  # before what it multiplies
        jobs.check(schema.vary(toy_run, scale={"width": 9.0}))
    for section, values in (("hardware", {"threads": 3}), ("data", {"train_source": "elsewhere"})):  # control
        hold(toy_run, section, **values)
        jobs.check(toy_run)


def test_missing_text_is_refused_before_a_folder_is_made(toy_run, tmp_path):
    gone = schema.vary(toy_run, data={"dev_target": f"{tmp_path}/gone"})
    with pytest.raises(schema.ConfigError, match=r"data\.dev_target=.*gone.*no such file"):
        jobs.check(gone)
    assert list(tmp_path.iterdir()) == []


def test_a_start_writes_config_and_log_and_removes_leftovers(toy_run, monkeypatch):
    folder = folders.run_folder(toy_run)
    python = Path(toy_run.output, "python")
    storage.write_text(python, '#!/bin/sh\necho "$@", rank $RANK, safe $PYTHONSAFEPATH\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("RANK", "3")  # another launcher's
    records.record_failure(folder, 3, "before")
    (folder / f".metrics.jsonl.{os.uname().nodename}.999999999.0.tmp").touch()  # of a process that was killed
    for _ in range(2):
        jobs.start(toy_run, folder / "worker.log", ExitStack(), {}).ranks[0].wait()
    assert {path.name for path in folder.iterdir()} == {"config.yaml", "worker.log"}
    assert compose.read(folder / "config.yaml") == toy_run
    assert (folder / "worker.log").read_text() == f"-m aiayn.training.worker {folder}, rank , safe 1\n" * 2


def worker(toy_run: schema.Config, folder: Path, *codes: str) -> jobs.Job:
    """A job with a process for each piece of code."""
    ranks = [subprocess.Popen([sys.executable, "-S", "-c", f"import os, sys, signal, time\n{code}"]) for code in codes]
    return jobs.Job(toy_run, folder, ranks, ExitStack())


def until_ended(job: jobs.Job) -> int:
    deadline = time.monotonic() + 30
    while not job.ended():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return jobs.close(job)


# A signal just before a sleep is handled after it
HANGS = "for _ in range(9900): time.sleep(0.01)"


def test_a_killed_rank_ends_the_others_and_is_the_cause(toy_run, tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "GRACE_SECONDS", 0.3)
    job = worker(toy_run, tmp_path, HANGS, "os.kill(os.getpid(), signal.SIGKILL)", HANGS)
    assert until_ended(job) == 137
    assert records.read_json(tmp_path / records.FAILURE)["cause"] == "rank 1 was killed by SIGKILL"
    assert [rank.returncode for rank in job.ranks] == [-9] * 3


@pytest.mark.parametrize(
    ("codes", "expected", "cause"),
    [
        (["", ""], 0, ""),
        (["sys.exit(75)", ""], 75, ""),
        (["signal.signal(15, signal.SIG_DFL); os.kill(os.getpid(), 15)"], 75, ""),  # SIGTERM before its handlers
        (["", "sys.exit(7)"], 7, "the worker ended with exit code 7"),
        (["os.abort()"], 134, "killed by SIGABRT"),
    ],
)
def test_the_code_of_the_whole_is_the_worst_of_its_ranks(toy_run, tmp_path, codes, expected, cause):
    assert until_ended(worker(toy_run, tmp_path, *codes)) == expected
    assert (tmp_path / "failure.json").exists() == bool(cause)
    if cause:
        assert records.read_json(tmp_path / records.FAILURE) == {"cause": cause, "exit_code": expected}


def test_an_interrupted_rank_ends_those_that_hear_no_signal(toy_run, tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "GRACE_SECONDS", 0.3)
    assert until_ended(worker(toy_run, tmp_path, HANGS, "sys.exit(75)")) == exit_codes.INTERRUPTED


def test_ranks_end_when_one_cannot_be_started(toy_run, tmp_path, monkeypatch):
    begun = subprocess.Popen(["sleep", "99"])
    monkeypatch.setattr(subprocess, "Popen", Mock(side_effect=[begun, BlockingIOError(11, "no process is left")]))
    with pytest.raises(BlockingIOError), ExitStack() as held:
        jobs.start(schema.vary(toy_run, hardware={"devices": 2}), tmp_path / "log", held, {})
    assert begun.wait(30) == -signal.SIGKILL


def test_a_rank_that_works_on_when_another_is_done_is_left_alone(toy_run, tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "GRACE_SECONDS", 0.05)
    assert until_ended(worker(toy_run, tmp_path, "time.sleep(0.5)", "")) == exit_codes.DONE


def test_a_worker_that_hangs_is_killed(toy_run, tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "GRACE_SECONDS", 0.3)
    deaf = f"signal.signal(signal.SIGABRT, signal.SIG_IGN)\nopen({str(tmp_path / 'ready')!r}, 'w')\n{HANGS}"
    job = worker(toy_run, tmp_path, deaf)
    while not (tmp_path / "ready").exists():
        time.sleep(0.01)
    job.abort("no sign of life")
    assert until_ended(job) == exit_codes.FAILED
    assert records.read_json(tmp_path / records.FAILURE)["cause"] == "no sign of life"


def test_a_signal_is_handed_on_once_to_every_rank(toy_run, tmp_path):
    listens = (
        f"os.chdir({str(tmp_path)!r})\nfile = open(f'heard{{os.getpid()}}', 'ab', 0)\n"
        "signal.signal(signal.SIGUSR1, lambda *_: file.write(b'x\\n'))\n"
        "file.write(b'ready\\n')\nwhile not os.path.exists('go'): time.sleep(0.01)\nsys.exit(75)"
    )
    job = worker(toy_run, tmp_path, listens, listens)
    while [path.read_text() for path in tmp_path.glob("heard*")] != ["ready\n"] * 2:
        time.sleep(0.01)
    for _ in range(3):
        job.stop("SIGUSR1")
        time.sleep(0.02)
    (tmp_path / "go").touch()
    assert until_ended(job) == exit_codes.INTERRUPTED
    assert [path.read_text() for path in tmp_path.glob("heard*")] == ["ready\nx\n"] * 2


def test_a_result_of_another_run_or_text_finishes_nothing(toy_run):
    path, made = folders.run_folder(toy_run) / "result.json", result_of(toy_run)
    for key, value in (("experiment", "big"), ("seed", 2), ("config.model.dropout", 0.75)):
        storage.write_json(path, changed(made, key, value))
        assert not jobs.is_finished(toy_run)
    storage.write_json(path, made)
    assert jobs.is_finished(toy_run)
    for sha256, finished in (("e" * 64, False), (made["sha256"]["data"], True)):
        here = dataclasses.replace(toy_run, prepared=f"{toy_run.output}/{finished}")
        storage.write_json(folders.prepared_folder(here) / "manifest.json", {"sha256": sha256})
        assert jobs.is_finished(here) == finished
        assert jobs.is_finished(schema.vary(here, data={"train_source": "moved.en"})) == finished
    storage.write_text(folders.prepared_folder(here) / "manifest.json", "{")
    assert jobs.is_finished(here)  # nothing here says otherwise: it may have been trained elsewhere
    assert not jobs.is_finished(schema.vary(here, data={"train_source": "another.en"}))


def test_a_finished_run_of_other_source_code_says_so(toy_run, capsys):
    assert not jobs.says_finished(toy_run)
    for code, said in ((records.code(), "finished: nothing to do"), ("0" * 64, "finished, by other source code than")):
        made = changed(result_of(toy_run), "sha256.code", code)
        storage.write_json(folders.run_folder(toy_run) / "result.json", made)
        assert jobs.says_finished(toy_run)
        assert f" is {said}" in capsys.readouterr().out


@pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")
@pytest.mark.parametrize("bound", [True, False])  # control: a worker that does not ask for it lives on
def test_a_worker_dies_with_a_parent_that_is_killed(bound):
    child = f"{bound} and signals.die_with_parent(); print(1, flush=True); time.sleep(99)"
    parent = (
        "import os, subprocess, sys\n"
        "os.environ['AIAYN_PARENT'] = str(os.getpid())\n"
        f"words = [sys.executable, '-c', {'import time; from aiayn.core import signals; ' + child!r}]\n"
        "child = subprocess.Popen(words, stdout=subprocess.PIPE)\n"
        "child.stdout.readline(); print(child.pid, flush=True); child.wait()"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        orphan = int(process.stdout.readline())
        assert is_alive(orphan)
        process.kill()
    try:
        assert all_end([orphan], 10 if bound else 1) == bound
    finally:
        if is_alive(orphan):
            os.kill(orphan, signal.SIGKILL)


def test_an_editor_s_marks_are_harmless_in_every_record(toy_run):
    """A byte order mark, blank lines and the line ends of another system."""
    folder = folders.run_folder(toy_run)
    saved, metrics = checkpoint.path_of(folder, 3), folder / records.METRICS
    storage.write_text(folder / "config.yaml", compose.to_yaml(toy_run))
    checkpoint.save({"state_dict": {}}, saved)
    storage.append_lines(metrics, ['{"step": 1, "dev/ppl": 2.0}', '{"step": 2, "dev/ppl": 3.0}'])

    def read() -> list[object]:
        jobs.check_data(folder, "a" * 64)
        found = [compose.read(folder / "config.yaml"), checkpoint.is_intact(saved), records.read_run(folder)]
        found += [records.read_metrics(metrics), records.last_step(folder), wandb_log.identity(folder)]
        return [*found, records.read_json(folder / records.FAILURE)]

    records.record_failure(folder, 3, "cause")
    storage.write_json(folder / records.RESULT, result_of(toy_run))
    before = read()
    assert before[1:6:3] == [True, 2]  # control: there is something to be read
    for path in {*folder.iterdir()} - {saved}:
        path.write_bytes(codecs.BOM_UTF8 + path.read_bytes().replace(b"\n", b"\r\n\r\n") + b"\n")
    assert read() == before


def test_other_text_under_the_same_name_is_another_run(tmp_path):
    for _ in range(2):
        jobs.check_data(tmp_path, "a" * 64)
    with pytest.raises(schema.ConfigError, match="was begun on data with SHA-256 aaaaaaaaaaaa, now it is bbbbbbbbbbbb"):
        jobs.check_data(tmp_path, "b" * 64)
    (tmp_path / "data.sha256").write_bytes(b"\xff\xfe\n")
    with pytest.raises(schema.ConfigError, match="was begun on data with SHA-256"):
        jobs.check_data(tmp_path, "d" * 64)
