"""One run, one worker: a folder keeps its meaning, a worker starts clean and never outlives its parent."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
import types
from contextlib import ExitStack
from pathlib import Path

import pytest

from aiayn.config import compose, folders, schema
from aiayn.core import signals, storage
from aiayn.data import prepare
from aiayn.data.parallel_text import DataError
from aiayn.runs import devices, jobs
from aiayn.training import train
from aiayn.training import worker as worker_module


def changed(run: schema.Config, key: str, value: object = None) -> schema.Config:
    """The run with another value, inside its range, at a dotted key; with that value if one is given."""
    if value is not None:
        section, _, name = key.partition(".")
        return dataclasses.replace(run, **{section: dataclasses.replace(getattr(run, section), **{name: value})})
    section, _, name = key.rpartition(".")
    part = getattr(run, section) if section else run
    value, meta = next((value, meta) for found, value, meta in schema.leaves(run) if found == key)
    if "choices" in meta:
        value = next(choice for choice in meta["choices"] if choice != value)
    elif isinstance(value, bool):
        value = not value
    elif key in ("fidelity.embedding_rows", "bench.d_model"):  # at least the vocabulary; a multiple of 64
        value = 40960
    elif "low" in meta:
        likely = (0.5, 0.25, 2.0) if value is None or isinstance(value, float) else (value + 2,)
        low, high, below = (meta[name] for name in ("low", "high", "below"))
        value = next(found for found in likely if found != value and low <= found <= high and found < below)
    elif key == "paper.params_millions":
        value = 1
    elif value is None:
        value = "x"
    else:
        value = f"{value}x"
    part = dataclasses.replace(part, **{name: value})
    if key == "hardware.compile":  # which a CPU cannot do
        part = dataclasses.replace(part, accelerator="gpu")
    return dataclasses.replace(run, **{section: part}) if section else part


def hold(folder_of: schema.Config, content: schema.Config) -> Path:
    """Makes the folder of one run hold another, whose text was prepared."""
    folder = folders.run_folder(folder_of)
    storage.write_text(folder / "config.yaml", compose.to_yaml(content))
    storage.write_text(folder / "data.sha256", "0" * 64 + "\n")
    return folder


@pytest.mark.parametrize("key", sorted(schema.MEANING - {"experiment", "model.kind"}))  # no other kind suits this row
def test_a_folder_with_another_meaning_is_refused_naming_key_old_and_new_value(toy_run, key):
    other = changed(toy_run, key)
    folder = hold(toy_run, other)
    section, _, name = key.rpartition(".")
    old, new = (getattr(getattr(run, section) if section else run, name) for run in (other, toy_run))
    with pytest.raises(schema.ConfigError) as caught:
        jobs.check(toy_run)
    message = str(caught.value)
    assert f"{key}={new}:" in message
    assert f"{key}={old};" in message
    assert str(folder) in message


def test_a_run_that_failed_before_its_training_is_made_with_other_settings(toy_run):
    """As with a vocabulary that its text does not give: the corrected command goes on in the same folder."""
    folder = hold(toy_run, changed(toy_run, "data.vocab_size"))
    (folder / "data.sha256").unlink()
    storage.write_text(folder / "failure.json", "{}")
    jobs.check(toy_run)
    for name in ("metrics.jsonl", "result.json", "data.sha256"):  # control: something is trained, or about to be
        storage.write_text(folder / name, "x\n")
        with pytest.raises(schema.ConfigError, match=r"holds a run with data\.vocab_size"):
            jobs.check(toy_run)
        (folder / name).unlink()


def test_the_same_meaning_is_not_refused(toy_run):  # control
    hold(toy_run, toy_run)
    jobs.check(toy_run)


@pytest.mark.parametrize("key", sorted(schema.HARMLESS - {"output"}))
def test_a_harmless_change_is_allowed(toy_run, key):
    other = changed(toy_run, key)
    assert other != toy_run
    hold(toy_run, other)
    jobs.check(toy_run)


def test_a_hash_of_the_text_that_is_damaged_is_told_with_its_file(tmp_path):
    (tmp_path / "data.sha256").write_bytes(b"\xff\xfe\n")
    with pytest.raises(storage.StorageError, match=r"data\.sha256 is damaged"):
        jobs.check_data(tmp_path, "d" * 64)


def test_text_that_is_not_there_is_refused_before_a_folder_is_made(toy_run, tmp_path):
    gone = dataclasses.replace(toy_run, data=dataclasses.replace(toy_run.data, dev_target=f"{tmp_path}/gone"))
    with pytest.raises(schema.ConfigError, match=r"data\.dev_target=.*gone.*no such file"):
        jobs.check(gone)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def echo(monkeypatch, tmp_path):
    """Instead of Python a script that writes down its arguments and its environment."""
    script = tmp_path / "python"
    lines = ("#!/bin/sh", f'printf "%s\\n" "$@" > {tmp_path}/arguments', f"env > {tmp_path}/environment", "echo hello")
    script.write_text("\n".join(lines))
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))

    def seen() -> tuple[list[str], dict[str, str]]:
        lines = (tmp_path / "environment").read_text().splitlines()
        environment = dict(line.split("=", 1) for line in lines if "=" in line)
        return (tmp_path / "arguments").read_text().splitlines(), environment

    return seen


def test_a_worker_sees_nothing_of_somebody_elses_group_of_ranks(toy_run, echo, monkeypatch):
    for key in jobs.FOREIGN:
        monkeypatch.setenv(key, "5")
    monkeypatch.setenv("MINE", "kept")
    run = dataclasses.replace(toy_run, hardware=dataclasses.replace(toy_run.hardware, threads=3))
    assert jobs.start(run, None, ExitStack(), {}).ranks[0].wait() == 0
    arguments, environment = echo()
    assert not set(jobs.FOREIGN) & set(environment)
    assert {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} <= set(jobs.FOREIGN)
    assert (environment["MINE"], environment["OMP_NUM_THREADS"], environment["MKL_NUM_THREADS"]) == ("kept", "3", "3")
    assert environment["AIAYN_PARENT"] == str(os.getpid())
    assert arguments == ["-m", "aiayn.training.worker", str(folders.run_folder(run))]


PYTHON = sys.executable


def test_a_module_of_the_user_in_the_folder_of_the_command_hides_none_of_pythons(toy_run, echo, tmp_path):
    jobs.start(toy_run, None, ExitStack(), {}).ranks[0].wait()
    (tmp_path / "secrets.py").write_text("")
    for variable, hidden in ((echo()[1]["PYTHONSAFEPATH"], False), ("", True)):  # empty: control
        command = [PYTHON, "-c", "import secrets; print(secrets.__file__)"]
        environment = os.environ | {"PYTHONSAFEPATH": variable}
        found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
        assert (found.stdout.strip() == str(tmp_path / "secrets.py")) == hidden


def test_each_device_has_a_process_that_knows_its_rank_and_where_to_meet(toy_run, echo, tmp_path):
    run = dataclasses.replace(toy_run, hardware=dataclasses.replace(toy_run.hardware, devices=3))
    (tmp_path / "python").write_text(f"#!/bin/sh\nenv > {tmp_path}/rank$RANK\n")
    job = jobs.start(run, None, ExitStack(), {})
    assert jobs.close(job) == jobs.DONE
    seen = [
        dict(line.split("=", 1) for line in (tmp_path / f"rank{rank}").read_text().splitlines()) for rank in range(3)
    ]
    assert [found["LOCAL_RANK"] for found in seen] == ["0", "1", "2"]
    assert {found["WORLD_SIZE"] for found in seen} == {"3"}
    assert len({(found["MASTER_ADDR"], found["MASTER_PORT"]) for found in seen}) == 1


@pytest.mark.usefixtures("echo")
def test_a_start_leaves_the_config_appends_to_the_log_and_forgets_the_last_failure(toy_run):
    folder = folders.run_folder(toy_run)
    jobs.record_failure(folder, 3, "before")
    for _ in range(2):
        jobs.start(toy_run, folder / "worker.log", ExitStack(), {}).ranks[0].wait()
    assert not (folder / "failure.json").exists()
    assert compose.read(folder / "config.yaml") == toy_run
    assert (folder / "worker.log").read_text() == "hello\nhello\n"


def worker(toy_run: schema.Config, folder: Path, *codes: str) -> jobs.Job:
    """A job with a process for each piece of code."""
    ranks = [subprocess.Popen([sys.executable, "-S", "-c", f"import os, sys, signal, time\n{code}"]) for code in codes]
    return jobs.Job(toy_run, folder, ranks, ExitStack())


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGABRT"])
def test_a_killed_worker_leaves_a_failure_naming_the_signal(toy_run, tmp_path, name):
    job = worker(toy_run, tmp_path, f"os.kill(os.getpid(), signal.{name})")
    assert jobs.close(job) == 128 + getattr(signal, name)
    failure = jobs.failure(tmp_path)
    assert failure["cause"] == f"killed by {name}"
    assert failure["exit_code"] == 128 + getattr(signal, name)
    assert failure["log"] == ""
    (tmp_path / "worker.log").write_text("of a sweep\n")
    jobs.record_failure(tmp_path, 1, "broken")
    assert jobs.failure(tmp_path)["log"] == str(tmp_path / "worker.log")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_a_worker_asked_to_stop_before_it_could_answer_is_interrupted_and_not_failed(toy_run, tmp_path, name):
    job = worker(
        toy_run, tmp_path, f"signal.signal(signal.{name}, signal.SIG_DFL); os.kill(os.getpid(), signal.{name})"
    )
    assert jobs.close(job) == jobs.INTERRUPTED
    assert not (tmp_path / "failure.json").exists()


def test_a_worker_that_ended_without_a_word_leaves_a_failure_with_its_exit_code(toy_run, tmp_path):
    assert jobs.close(worker(toy_run, tmp_path, "sys.exit(7)")) == 7
    assert jobs.failure(tmp_path)["cause"] == "the worker ended with exit code 7"


def test_the_workers_own_word_counts_more_than_its_exit_code(toy_run, tmp_path):
    jobs.record_failure(tmp_path, jobs.NON_FINITE, "the loss\nis NaN")
    assert jobs.close(worker(toy_run, tmp_path, "sys.exit(1)")) == jobs.NON_FINITE
    assert jobs.failure(tmp_path)["cause"] == "the loss is NaN"


@pytest.mark.parametrize("code", [jobs.DONE, jobs.INTERRUPTED])
def test_a_run_that_is_done_or_can_go_on_leaves_no_failure(toy_run, tmp_path, code):
    assert jobs.close(worker(toy_run, tmp_path, f"sys.exit({code})")) == code
    assert not (tmp_path / "failure.json").exists()


def until_ended(job: jobs.Job) -> int:
    deadline = time.monotonic() + 30
    while not job.ended():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return jobs.close(job)


# A signal just before a sleep is handled after it
HANGS = "for _ in range(9900): time.sleep(0.01)"


def test_when_a_rank_is_killed_the_others_end_too_and_the_first_death_is_the_cause(toy_run, tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "GRACE_SECONDS", 0.3)
    job = worker(toy_run, tmp_path, HANGS, "os.kill(os.getpid(), signal.SIGKILL)", HANGS)
    assert until_ended(job) == 137
    assert jobs.failure(tmp_path)["cause"] == "rank 1 was killed by SIGKILL"
    assert [rank.returncode for rank in job.ranks] == [-9] * 3


def test_a_rank_that_only_lost_its_peer_does_not_outweigh_its_death(toy_run, tmp_path):
    jobs.record_failure(tmp_path, jobs.FAILED, "connection closed by peer")
    job = worker(toy_run, tmp_path, "sys.exit(1)", "os.kill(os.getpid(), signal.SIGSEGV)")
    for rank in job.ranks:  # both before this process looks
        rank.wait()
    assert until_ended(job) == 139
    assert jobs.failure(tmp_path)["cause"] == "rank 1 was killed by SIGSEGV"


def test_the_word_of_the_rank_that_failed_stands(toy_run, tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "GRACE_SECONDS", 0.3)
    jobs.record_failure(tmp_path, jobs.NON_FINITE, "the loss is NaN")
    assert until_ended(worker(toy_run, tmp_path, "sys.exit(3)", HANGS)) == jobs.NON_FINITE
    assert jobs.failure(tmp_path)["cause"] == "the loss is NaN"


@pytest.mark.parametrize(
    ("codes", "expected"),
    [((0, 0), jobs.DONE), ((75, 75), jobs.INTERRUPTED), ((75, 0), jobs.INTERRUPTED), ((7, 7), 7), ((0, 1), 1)],
)
def test_the_code_of_the_whole_is_the_worst_of_its_ranks(toy_run, tmp_path, codes, expected):
    assert until_ended(worker(toy_run, tmp_path, *(f"sys.exit({code})" for code in codes))) == expected
    assert (tmp_path / "failure.json").exists() == (expected not in (jobs.DONE, jobs.INTERRUPTED))


def test_a_rank_that_works_on_when_the_other_is_done_is_left_alone(toy_run, tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "GRACE_SECONDS", 0.05)
    assert until_ended(worker(toy_run, tmp_path, "time.sleep(0.5)", "")) == jobs.DONE


def test_a_worker_that_hangs_is_ended_whatever_it_does_about_it(toy_run, tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "GRACE_SECONDS", 0.3)
    deaf = f"signal.signal(signal.SIGABRT, signal.SIG_IGN)\nopen({str(tmp_path / 'ready')!r}, 'w')\n{HANGS}"
    job = worker(toy_run, tmp_path, deaf)
    while not (tmp_path / "ready").exists():
        time.sleep(0.01)
    job.abort("no sign of life")
    assert until_ended(job) == jobs.FAILED
    assert jobs.failure(tmp_path)["cause"] == "no sign of life"


def test_a_signal_is_handed_on_once_to_every_rank(toy_run, tmp_path):
    answers = (
        f"import pathlib\nheard = pathlib.Path({str(tmp_path)!r})\nme = str(os.getpid())\n"
        "def stop(*_): (heard / f'heard{me}').write_text((heard / f'heard{me}').read_text() + 'x')\n"
        "(heard / f'heard{me}').write_text('')\nsignal.signal(signal.SIGUSR1, stop)\n"
        "(heard / f'ready{me}').write_text('')\ntime.sleep(0.3)\nsys.exit(75)"
    )
    job = worker(toy_run, tmp_path, answers, answers)
    while len(list(tmp_path.glob("ready*"))) < 2:
        time.sleep(0.01)
    for _ in range(3):
        job.stop("SIGUSR1")
        time.sleep(0.02)
    assert until_ended(job) == jobs.INTERRUPTED
    assert [path.read_text() for path in tmp_path.glob("heard*")] == ["x", "x"]


def test_a_disk_that_takes_no_last_word_still_gets_the_code_and_the_cause_to_the_terminal(tmp_path, capsys):
    (tmp_path / "failure.json").mkdir()  # as unwritable for root as for anyone
    assert jobs.record_failure(tmp_path, jobs.STORAGE, "no space") == jobs.STORAGE
    assert "aiayn: no space; cannot write" in capsys.readouterr().err


def test_a_command_that_anothers_handler_ends_waits_until_its_worker_has_saved(toy_run, monkeypatch, tmp_path):
    """As submitit does: it puts the job back into the queue, then exits from its handler of the warning."""
    answers = f"signal.signal(signal.SIGTERM, lambda *_: (open({str(tmp_path / 'saved')!r}, 'w'), os._exit(75)))"
    code = f"{answers}\nopen({str(tmp_path / 'ready')!r}, 'w')\n{HANGS}"
    monkeypatch.setattr(jobs, "start", lambda run, log, held, seeing: worker(run, folders.run_folder(run), code))

    def leave(seconds: float) -> None:
        monkeypatch.setattr(jobs.time, "sleep", lambda seconds: None)
        while not (tmp_path / "ready").exists():
            pass
        sys.exit(-1)

    monkeypatch.setattr(jobs.time, "sleep", leave)
    with pytest.raises(SystemExit):
        jobs.run_here(toy_run)
    assert (tmp_path / "saved").exists()


@pytest.mark.parametrize("stopped", [False, True])
def test_a_run_waits_for_its_gpu_and_can_be_stopped_while_it_does(toy_run, monkeypatch, stopped):
    gpu = compose.compose_row("hardware=gpu").hardware
    run, seen = dataclasses.replace(toy_run, hardware=gpu), []
    names = [f"GPU-{letter}{os.getpid()}" for letter in "xy"]
    monkeypatch.setattr(devices, "gpus", lambda: names)
    others = ExitStack()
    assert devices.Pool(gpu, names).take(2, others) == {}

    def start(run, log, held, seeing):
        seen.append(seeing)
        return jobs.Job(run, folders.run_folder(run), [types.SimpleNamespace(poll=lambda: 0, wait=lambda: 0)], held)

    monkeypatch.setattr(jobs, "start", start)
    release = (lambda seconds: os.kill(os.getpid(), signal.SIGTERM)) if stopped else lambda seconds: others.close()
    monkeypatch.setattr(jobs.time, "sleep", release)
    if stopped:
        with pytest.raises(signals.Interrupted, match="stopped by SIGTERM; repeat the command"):
            jobs.run_here(run)
    else:
        assert jobs.run_here(run) == jobs.DONE
    assert seen == ([] if stopped else [{"CUDA_VISIBLE_DEVICES": names[0]}])
    others.close()


def test_a_folder_that_another_command_has_is_refused_naming_it_and_left_alone(toy_run):
    folder = folders.run_folder(toy_run)
    jobs.record_failure(folder, 3, "before")
    with jobs.claim(toy_run), pytest.raises(storage.InUse, match=f"in use by process {os.getpid()} on "):
        jobs.run_here(toy_run)
    assert jobs.failure(folder)["cause"] == "before"
    assert not (folder / "config.yaml").exists()
    with jobs.claim(toy_run):  # control: it is free again
        pass


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"seed: 1", b"\xff", b"a: &a [1]\nb: *a", b"x: !!python/object/apply:os.system [true]", b"{" * 999],
)
def test_a_damaged_config_is_one_line_that_names_the_file(toy_run, content):
    path = folders.run_folder(toy_run) / "config.yaml"
    storage.write_bytes(path, content)
    with pytest.raises(schema.ConfigError, match=r"config\.yaml is damaged: .*; delete that folder") as caught:
        jobs.check(toy_run)
    assert "\n" not in str(caught.value)


def test_a_config_that_looks_into_the_environment_is_refused(toy_run, monkeypatch):
    monkeypatch.setenv("SECRET", "s3ntinel")
    path = folders.run_folder(toy_run) / "config.yaml"
    text = compose.to_yaml(toy_run)
    storage.write_text(path, text.replace("project: aiayn", "project: ${oc.env:SECRET}"))
    with pytest.raises(schema.ConfigError, match="it holds an interpolation"):
        jobs.check(toy_run)


def test_other_text_under_the_same_name_is_another_run(tmp_path):
    jobs.check_data(tmp_path, "a" * 64)
    jobs.check_data(tmp_path, "a" * 64)
    with pytest.raises(schema.ConfigError, match="was begun on data with SHA-256 aaaaaaaaaaaa, now it is bbbbbbbbbbbb"):
        jobs.check_data(tmp_path, "b" * 64)


@pytest.mark.parametrize("key", ["experiment", "seed", "data", "model.dropout", "decoding.beam_size"])
def test_a_result_of_another_run_finishes_nothing(toy_run, result_of, key):
    made = result_of(toy_run)
    path = folders.run_folder(toy_run) / "result.json"
    storage.write_json(path, made)
    assert jobs.is_finished(toy_run)
    section, _, name = key.rpartition(".")
    part = made["config"][section] if section else made
    part[name] = {"experiment": "big", "seed": 2, "data": "other"}.get(key, 0.75)
    storage.write_json(path, made)
    assert not jobs.is_finished(toy_run)


def test_a_result_on_other_text_than_is_prepared_here_finishes_nothing(toy_run, result_of):
    storage.write_json(folders.run_folder(toy_run) / "result.json", result_of(toy_run))
    assert jobs.is_finished(toy_run)
    for sha256, finished in (("e" * 64, False), (result_of(toy_run)["sha256"]["data"], True)):
        here = dataclasses.replace(toy_run, prepared=f"{toy_run.output}/{finished}")
        storage.write_json(folders.prepared_folder(here) / "manifest.json", {"sha256": sha256})
        assert jobs.is_finished(here) == finished
    storage.write_text(folders.prepared_folder(here) / "manifest.json", "{")
    assert jobs.is_finished(here)  # nothing here says otherwise: it may have been trained elsewhere


def test_a_run_in_another_precision_is_another_run_with_a_folder_of_its_own(toy_run, result_of):
    storage.write_json(folders.run_folder(toy_run) / "result.json", result_of(toy_run))
    for precision in ("bf16-mixed", "64-true"):
        other = changed(toy_run, "hardware.precision", precision)
        assert not jobs.is_finished(other)
        assert folders.run_folder(other) != folders.run_folder(toy_run)
        moved = folders.run_folder(other)
        storage.write_json(moved / "result.json", result_of(toy_run) | {"data": folders.setting(other)})
        assert not jobs.is_finished(other)  # nor where somebody puts it into that folder


def finishes_before_the_claim(run, result_of, monkeypatch):
    """Another command finishes the run between this one's first look and its claim."""
    claim = jobs.claim

    def later(run):
        storage.write_json(folders.run_folder(run) / "result.json", result_of(run))
        return claim(run)

    monkeypatch.setattr(jobs, "claim", later)


def test_a_run_that_another_command_has_just_finished_is_not_begun_again(toy_run, result_of, monkeypatch, capsys):
    finishes_before_the_claim(toy_run, result_of, monkeypatch)
    monkeypatch.setattr(jobs, "start", lambda *_: pytest.fail("a worker was started"))
    assert jobs.run_here(toy_run) == jobs.DONE
    assert "nothing to do" in capsys.readouterr().out
    assert not (folders.run_folder(toy_run) / "config.yaml").exists()


def test_a_folder_that_another_command_has_just_taken_for_another_run_is_refused(toy_run, monkeypatch):
    claim, other = jobs.claim, changed(toy_run, "model.d_ff")
    monkeypatch.setattr(jobs, "claim", lambda run: (hold(run, other), claim(run))[1])
    monkeypatch.setattr(jobs, "start", lambda *_: pytest.fail("a worker was started"))
    with pytest.raises(schema.ConfigError, match=r"model\.d_ff="):
        jobs.run_here(toy_run)


def test_a_rank_of_torchrun_does_not_begin_a_run_that_was_just_finished(toy_run, result_of, monkeypatch):
    finishes_before_the_claim(toy_run, result_of, monkeypatch)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(train, "main", lambda *_: pytest.fail("it trains"))
    with pytest.raises(storage.InUse, match="another command has just finished it"):
        worker_module.as_rank(toy_run)


def test_a_rank_of_torchrun_takes_no_folder_that_another_run_has_just_begun(toy_run, monkeypatch):
    claim, other = jobs.claim, changed(toy_run, "model.d_ff")
    monkeypatch.setattr(jobs, "claim", lambda run: (hold(run, other), claim(run))[1])
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(train, "main", lambda *_: pytest.fail("it trains"))
    with pytest.raises(schema.ConfigError, match=r"model\.d_ff="):
        worker_module.as_rank(toy_run)


def test_a_finished_run_starts_no_worker_and_writes_nothing(toy_run, result_of, monkeypatch, capsys, tmp_path):
    storage.write_json(folders.run_folder(toy_run) / "result.json", result_of(toy_run))
    monkeypatch.setattr(jobs, "start", lambda *_: pytest.fail("a worker was started"))
    before = sorted(tmp_path.rglob("*"))
    assert jobs.run_here(toy_run) == jobs.DONE
    assert "nothing to do" in capsys.readouterr().out
    assert sorted(tmp_path.rglob("*")) == before


def test_a_finished_run_is_refused_when_its_text_was_edited_since(toy_run, result_of, tmp_path):
    run = dataclasses.replace(toy_run, prepared=f"{tmp_path}/prepared")
    made = result_of(run)
    storage.write_json(folders.run_folder(run) / "result.json", made)
    texts = prepare.fingerprints(prepare.sources(run.data))
    manifest = {"sha256": made["sha256"]["data"], "settings": texts}
    storage.write_json(folders.prepared_folder(run) / "manifest.json", manifest)
    assert jobs.run_here(run) == jobs.DONE  # control
    storage.write_json(
        folders.prepared_folder(run) / "manifest.json", manifest | {"settings": texts | {"dev.target": "0" * 64}}
    )
    with pytest.raises(DataError, match=r"\(dev.target was 000"):
        jobs.run_here(run)


@pytest.mark.parametrize("content", ['{"schema": 1', "{}", "[]", ""])
def test_a_result_that_is_torn_or_none_of_ours_finishes_nothing(toy_run, content):
    storage.write_text(folders.run_folder(toy_run) / "result.json", content)
    assert not jobs.is_finished(toy_run)


def is_alive(process: int) -> bool:
    """Whether a process runs: a zombie that nobody has waited for is dead."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ends(process: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while is_alive(process) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_alive(process)


@pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")
@pytest.mark.parametrize("bound", [True, False])  # control: a worker that does not ask for it lives on
def test_a_worker_dies_with_a_parent_that_is_killed(tmp_path, bound):
    child = (
        f"import time; from aiayn.core import signals; {bound} and signals.die_with_parent(); "
        "print(1, flush=True); time.sleep(99)"
    )
    parent = (
        "import os, subprocess, sys\n"
        "os.environ['AIAYN_PARENT'] = str(os.getpid())\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE)\n"
        "child.stdout.readline(); print(child.pid, flush=True); child.wait()"
    )
    environment = {key: value for key, value in os.environ.items() if key != "RANK"}
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        orphan = int(process.stdout.readline())
        assert is_alive(orphan)
        process.kill()
    try:
        assert ends(orphan, 10 if bound else 1) == bound
    finally:
        if is_alive(orphan):
            os.kill(orphan, signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")
def test_a_worker_whose_parent_died_before_it_could_ask_ends_at_once():
    code = "from aiayn.core import signals; signals.die_with_parent(); print('lives')"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "AIAYN_PARENT": "1"}, capture_output=True)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, b"")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")
def test_kill_9_of_the_command_leaves_no_rank_behind(toy, tmp_path):
    arguments = [
        "train",
        *toy,
        *("training.max_steps=1000000", "training.checkpoint_every=1000000", "hardware.devices=2"),
    ]
    folder = folders.run_folder(compose.compose_row(*arguments[1:]))
    command = subprocess.Popen([sys.executable, "-m", "aiayn", *arguments], cwd=tmp_path, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (folder / "metrics.jsonl").exists() or (folder / "metrics.jsonl").stat().st_size == 0:
        assert command.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    workers = {int((folder / lock).read_text().split()[1]) for lock in (".lock", ".lock1")}
    assert len(workers - {command.pid}) == 2
    assert all(map(is_alive, workers))
    assert str(command.pid) in (folder / ".claim").read_text().split()
    command.kill()
    command.wait()
    assert all(ends(worker, 10) for worker in workers)
