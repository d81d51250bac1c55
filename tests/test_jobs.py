"""One run, one worker: a folder keeps its meaning, a worker starts clean and never outlives its parent."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from aiayn import config, jobs, storage

# What may change under a run without changing its numbers; a new key belongs here or into jobs.MEANING.
FREE = ("hardware", "wandb", "paper", "output", "prepared", "split", "average", "format")


def changed(run: config.Config, key: str) -> config.Config:
    """The run with another value of the same kind at a dotted key."""
    section, _, name = key.rpartition(".")
    part = getattr(run, section) if section else run
    value = getattr(part, name)
    if isinstance(value, bool):
        value = not value
    elif isinstance(value, int | float):
        value = value * 2 + 1
    else:
        value = f"{value or ''}x"
    part = dataclasses.replace(part, **{name: value})
    return dataclasses.replace(run, **{section: part}) if section else part


KEYS = [key for key, _, _ in config._leaves(config.Config())]
MEANING = [key for key in KEYS if key.partition(".")[0] in jobs.MEANING and key not in config.HARMLESS]


def hold(folder_of: config.Config, content: config.Config) -> Path:
    """Makes the folder of one run hold another."""
    folder = config.run_folder(folder_of)
    storage.write_text(folder / "config.yaml", config.to_yaml(content))
    return folder


def test_every_key_either_belongs_to_the_meaning_of_a_run_or_is_free():
    assert {key.partition(".")[0] for key in KEYS} == set(jobs.MEANING) | set(FREE)
    assert set(config.HARMLESS) < set(KEYS)


@pytest.mark.parametrize("key", [key for key in MEANING if key != "experiment"])
def test_a_folder_with_another_meaning_is_refused_naming_key_old_and_new_value(toy_run, key):
    other = changed(toy_run, key)
    if key == "data.max_length":
        other = dataclasses.replace(toy_run, data=dataclasses.replace(toy_run.data, max_length=11))
    elif key.endswith(("dropout", "smoothing", "beta1", "beta2", "epsilon")):
        section, name = key.split(".")
        other = dataclasses.replace(toy_run, **{section: dataclasses.replace(getattr(toy_run, section), **{name: 0.5})})
    elif key == "model.d_model":
        other = dataclasses.replace(toy_run, model=dataclasses.replace(toy_run.model, d_model=18))
    folder = hold(toy_run, other)
    section, _, name = key.rpartition(".")
    old, new = (getattr(getattr(run, section) if section else run, name) for run in (other, toy_run))
    with pytest.raises(config.ConfigError) as caught:
        jobs.check(toy_run)
    message = str(caught.value)
    assert f"{key}={new}:" in message
    assert f"{key}={old};" in message
    assert str(folder) in message


def test_the_same_meaning_is_not_refused(toy_run):  # control
    hold(toy_run, toy_run)
    jobs.check(toy_run)


@pytest.mark.parametrize(
    "key",
    [*config.HARMLESS, "hardware.threads", "hardware.devices", "hardware.tokens_per_micro_batch", "wandb.project"],
)
def test_a_harmless_change_is_allowed(toy_run, key):
    hold(toy_run, changed(toy_run, key))
    jobs.check(toy_run)


def test_text_that_is_not_there_is_refused_before_a_folder_is_made(toy_run, tmp_path):
    gone = dataclasses.replace(toy_run, data=dataclasses.replace(toy_run.data, dev_target=f"{tmp_path}/gone"))
    with pytest.raises(config.ConfigError, match=r"data\.dev_target=.*gone.*no such file"):
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
    assert jobs.start(run, None).process.wait() == 0
    arguments, environment = echo()
    assert not set(jobs.FOREIGN) & set(environment)
    assert {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} <= set(jobs.FOREIGN)
    assert (environment["MINE"], environment["OMP_NUM_THREADS"], environment["MKL_NUM_THREADS"]) == ("kept", "3", "3")
    assert environment["AIAYN_PARENT"] == str(os.getpid())
    assert arguments == ["-m", "aiayn.train", str(config.run_folder(run))]


def test_several_devices_are_started_by_torchrun(toy_run, echo):
    run = dataclasses.replace(toy_run, hardware=dataclasses.replace(toy_run.hardware, devices=3))
    jobs.start(run, None).process.wait()
    arguments, _ = echo()
    assert arguments[:2] == ["-m", "torch.distributed.run"]
    assert "--nproc-per-node=3" in arguments
    assert arguments[-3:] == ["-m", "aiayn.train", str(config.run_folder(run))]


@pytest.mark.usefixtures("echo")
def test_a_start_leaves_the_config_appends_to_the_log_and_forgets_the_last_failure(toy_run):
    folder = config.run_folder(toy_run)
    jobs.fail(folder, 3, "before")
    for _ in range(2):
        jobs.start(toy_run, folder / "worker.log").process.wait()
    assert not (folder / "failure.json").exists()
    assert config.read(folder / "config.yaml") == toy_run
    assert (folder / "worker.log").read_text() == "hello\nhello\n"


def worker(toy_run: config.Config, folder: Path, code: str) -> jobs.Job:
    return jobs.Job(toy_run, folder, subprocess.Popen([sys.executable, "-c", f"import os, sys, signal\n{code}"]))


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGABRT"])
def test_a_killed_worker_leaves_a_failure_naming_the_signal(toy_run, tmp_path, name):
    job = worker(toy_run, tmp_path, f"os.kill(os.getpid(), signal.{name})")
    assert jobs.close(job) == 128 + getattr(signal, name)
    failure = jobs.failure(tmp_path)
    assert failure["cause"] == f"killed by {name}"
    assert failure["exit_code"] == 128 + getattr(signal, name)
    assert failure["log"] == str(tmp_path / "worker.log")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_worker_asked_to_stop_before_it_could_answer_is_interrupted_and_not_failed(toy_run, tmp_path, name):
    job = worker(
        toy_run, tmp_path, f"signal.signal(signal.{name}, signal.SIG_DFL); os.kill(os.getpid(), signal.{name})"
    )
    assert jobs.close(job) == jobs.INTERRUPTED
    assert not (tmp_path / "failure.json").exists()


def test_a_worker_that_ended_without_a_word_leaves_a_failure_with_its_exit_code(toy_run, tmp_path):
    assert jobs.close(worker(toy_run, tmp_path, "sys.exit(7)")) == 7
    assert jobs.failure(tmp_path)["cause"] == "the worker ended with exit code 7"


def test_the_workers_own_word_counts_more_than_the_exit_code_of_torchrun(toy_run, tmp_path):
    jobs.fail(tmp_path, jobs.NON_FINITE, "the loss\nis NaN")
    assert jobs.close(worker(toy_run, tmp_path, "sys.exit(1)")) == jobs.NON_FINITE
    assert jobs.failure(tmp_path)["cause"] == "the loss is NaN"


@pytest.mark.parametrize("code", [jobs.DONE, jobs.INTERRUPTED])
def test_a_run_that_is_done_or_can_go_on_leaves_no_failure(toy_run, tmp_path, code):
    assert jobs.close(worker(toy_run, tmp_path, f"sys.exit({code})")) == code
    assert not (tmp_path / "failure.json").exists()


def test_a_signal_is_handed_on_to_the_worker_and_the_handlers_are_put_back(toy_run, tmp_path):
    ready = tmp_path / "ready"
    job = worker(
        toy_run,
        tmp_path,
        "import time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        f"open({str(ready)!r}, 'w').close()\nwhile True: time.sleep(0.01)",
    )
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with jobs.handing_on({"": job}) as stop:
        while not ready.exists():
            time.sleep(0.01)
        assert not stop.asked
        os.kill(os.getpid(), signal.SIGINT)
        assert jobs.close(job) == jobs.INTERRUPTED
        assert stop.asked
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_finished_run_starts_no_worker(toy_run, result_of, monkeypatch, capsys):
    storage.write_json(config.run_folder(toy_run) / "result.json", result_of(toy_run))
    monkeypatch.setattr(jobs, "start", lambda *_: pytest.fail("a worker was started"))
    assert jobs.run_here(toy_run) == jobs.DONE
    assert "nothing to do" in capsys.readouterr().out


@pytest.mark.parametrize("content", ['{"schema": 1', "{}", "[]", ""])
def test_a_result_that_is_torn_or_none_of_ours_finishes_nothing(toy_run, content):
    storage.write_text(config.run_folder(toy_run) / "result.json", content)
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
        f"import time; from aiayn import jobs; {bound} and jobs.die_with_parent(); print(1, flush=True); time.sleep(99)"
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
    code = "from aiayn import jobs; jobs.die_with_parent(); print('lives')"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "AIAYN_PARENT": "1"}, capture_output=True)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, b"")


@pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")
def test_kill_9_of_the_command_leaves_no_worker_behind(toy, tmp_path):
    arguments = ["train", *toy, "training.max_steps=1000000", "training.checkpoint_every=1000000"]
    folder = config.run_folder(config.compose_row(*arguments[1:]))
    command = subprocess.Popen([sys.executable, "-m", "aiayn", *arguments], cwd=tmp_path, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (folder / "metrics.jsonl").exists():
        assert command.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    worker = int((folder / ".lock").read_text().split()[1])
    assert worker != command.pid
    assert is_alive(worker)
    command.kill()
    command.wait()
    assert ends(worker, 10)
