"""A sweep: longest first, so many at once, each run once; a failed run stops nobody; a re-run does what is missing."""

import contextlib
import dataclasses
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from run_results import result_of

from aiayn.config import compose, folders, schema
from aiayn.core import exit_codes, storage
from aiayn.cost import device_schedule
from aiayn.data.parallel_text import DataError
from aiayn.runs import devices, jobs, records
from aiayn.sweep import launcher
from aiayn.sweep.plugins.hydra_plugins import aiayn as plugin
from aiayn.tables.table3 import table


@pytest.fixture
def rows(tmp_path):
    """All rows, in an output folder of their own."""
    return [dataclasses.replace(row, output=f"{tmp_path}/runs") for row in compose.rows().values()]


@pytest.fixture
def seeds(rows, tmp_path):
    """Eight runs of base, and beside them the result that each would write."""
    runs = [dataclasses.replace(rows[0], seed=seed) for seed in range(1, 9)]
    for run in runs:
        storage.write_json(tmp_path / f"result{run.seed}.json", result_of(run))
    return runs


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Makes a shell script the worker of every run: it notes that it was started, then does what its seed says."""
    monkeypatch.setattr(launcher, "POLL_SECONDS", 0.02)

    def write(behaviour: dict[int, str]) -> None:
        cases = "".join(f"*seed{seed}) {act} ;;\n" for seed, act in behaviour.items())
        python = tmp_path / "python"
        start = f'#!/bin/sh\nhere={tmp_path}\necho "$3" >> $here/started\necho hello\n'
        storage.write_text(python, f"{start}case $3 in\n{cases}esac\n")
        python.chmod(0o755)
        monkeypatch.setattr(jobs.sys, "executable", str(python))

    return write


def begun(tmp_path: Path) -> list[int]:
    """The seeds of the workers that were started, in order."""
    return [int(line.rpartition("seed")[2]) for line in (tmp_path / "started").read_text().splitlines()]


def sweep_of(runs, at_once=1, hang_timeout=60.0):
    return launcher.Sweep(runs, pool_of(runs, [str(core) for core in range(at_once)]), hang_timeout)


def pool_of(runs, names, limit=0):
    return devices.Pool(runs[0].hardware, names, limit)


@pytest.mark.parametrize("at_once", [1, 2])
def test_the_longest_run_starts_first_and_each_run_once(rows, script, tmp_path, at_once):
    # No worker ends before as many have begun as may work at once
    together = f'until [ "$(grep -c seed $here/started)" -ge {at_once} ]; do sleep 0.01; done'
    script({1: f"{together}; echo end >> $here/started"})
    assert sweep_of([*rows, rows[1]], at_once).work_through() == exit_codes.DONE
    lines = (tmp_path / "started").read_text().splitlines()
    begun = [Path(line).parent.name for line in lines if line != "end"]
    assert sorted(begun) == sorted(schema.ROWS)
    assert max(itertools.accumulate(-1 if line == "end" else 1 for line in lines)) == at_once
    if at_once == 1:
        work = {run.experiment: launcher.work(run) for run in rows}
        assert begun == sorted(begun, key=work.__getitem__, reverse=True)
        assert begun[0] == "big"


@pytest.mark.parametrize(("max_devices_per_run", "of_big"), [(8, 3), (2, 2), (1, 1)])
def test_each_run_has_as_many_gpus_as_in_the_plan(rows, max_devices_per_run, of_big):
    given = {run.experiment: run.hardware.devices for run in launcher.assign_devices(rows, max_devices_per_run, 8)}
    operations = {run.experiment: launcher.work(run) for run in rows}
    planned = device_schedule.best_schedule(operations, 1, max_devices_per_run, 8)
    assert given == {turn.name: len(turn.devices) for turn in planned}
    assert given["big"] == of_big


def test_runs_that_share_a_gpu_have_no_other(rows):
    on_gpu = [schema.vary(run, hardware={"accelerator": "gpu"}) for run in rows]
    for names, widest in ((["GPU-a", "GPU-b"], 2), (["GPU-a", "GPU-a share 1"], 1)):
        sweep = launcher.Sweep(on_gpu, pool_of(on_gpu, names), 60.0)
        assert max(run.hardware.devices for run in sweep.waiting) == widest


def test_a_wide_run_makes_do_with_the_gpus_that_other_commands_leave(rows, monkeypatch):
    (big,) = (schema.vary(run, hardware={"accelerator": "gpu"}) for run in rows if run.experiment == "big")
    names, started = [f"GPU-{letter}{os.getpid()}" for letter in "abc"], []
    monkeypatch.setattr(jobs, "start", lambda run, *_: started.append(run.hardware.devices) or SimpleNamespace())
    sweep = launcher.Sweep([big], pool_of([big], names), 60.0)
    with contextlib.ExitStack() as others:
        assert devices.Pool(big.hardware, names).take(1, others)
        for expected in ([], [2]):
            assert sweep.waiting[0].hardware.devices == 3 - len(expected)
            sweep.fill()
            assert (started, sweep.blocked) == (expected, not expected)
    sweep.active.popitem()[1].claim.close()


def test_a_signal_reaches_the_runs_at_work_and_starts_no_other(seeds, script, tmp_path, capsys, monkeypatch):
    wait = "trap 'exit 75' TERM; touch $here/ready${3##*seed}; while true; do sleep 0.02; done"
    both = "until [ -e $here/ready1 ]; do sleep 0.02; done; kill -TERM $PPID"
    script({1: wait, 2: f"{both}; {wait}"})
    before, asked = signal.getsignal(signal.SIGTERM), list[str]()
    monkeypatch.setattr(launcher.slurm, "requeue_after", asked.append)
    assert sweep_of(seeds, 2).work_through() == exit_codes.INTERRUPTED
    assert (signal.getsignal(signal.SIGTERM), asked) == (before, ["SIGTERM"])
    assert sorted(begun(tmp_path)) == [1, 2]
    assert "/8]" not in capsys.readouterr().out  # no run is done


def test_hang_timeout_is_given_in_minutes(rows, monkeypatch):
    for name, mock in (("Sweep", made := Mock()), ("prepare_once", Mock())):
        monkeypatch.setattr(launcher, name, mock)
    monkeypatch.setattr(plugin, "checked_runs", lambda *_: rows)
    made.return_value.work_through.return_value = exit_codes.DONE
    side_by_side = plugin.SideBySide(devices=1, max_devices_per_run=0, hang_timeout=7.0)
    side_by_side.setup(hydra_context=None, task_function=None, config=None)
    side_by_side.launch([], 0)
    assert made.call_args.args[2] == 420.0


def test_each_corpus_of_unfinished_runs_is_prepared_once(rows, monkeypatch, capsys):
    mixed = [schema.vary(rows[0], data={"name": name}) for name in ("one", "two", "two", "three")]
    storage.write_json(folders.run_folder(mixed[3]) / "result.json", result_of(mixed[3]))
    prepared, bad = [], {"two"}

    def prepare_one(run, report):
        prepared.append(run.data.name)
        if run.data.name in bad:
            raise DataError(f"{run.data.name} is damaged")

    monkeypatch.setattr(launcher.prepare, "prepare", prepare_one)
    launcher.prepare_once(mixed)
    assert prepared == ["one", "two"]
    assert "two is damaged" in capsys.readouterr().out
    bad.add("one")
    with pytest.raises(DataError, match="two is damaged"):  # nothing is left to train on
        launcher.prepare_once(mixed)


DONE = "cp $here/result${3##*seed}.json $3/result.json"
NAN = 'echo \'{"exit_code": 3, "cause": "the loss is NaN"}\' > $3/failure.json; exit 3'
BAD = {
    2: ("echo 'Traceback: it raised' >&2; exit 1", "the worker ended with exit code 1"),
    3: (NAN, "the loss is NaN (exit code 3)"),
    4: ("kill -KILL $$", "killed by SIGKILL"),
    5: ("trap '' ABRT TERM; while true; do sleep 0.1; done", "no sign of life for 0.01 minutes: killed"),
}


def test_failed_rows_stop_nobody_and_a_rerun_does_only_those(seeds, script, tmp_path, monkeypatch, capsys):
    """Rows that raise, go NaN, are killed or hang: each is named with its cause and its log."""
    monkeypatch.setattr(jobs, "GRACE_SECONDS", 0.2)
    script(dict.fromkeys((1, 6, 7, 8), DONE) | {seed: act for seed, (act, _) in BAD.items()})
    assert sweep_of(seeds, 3, 0.6).work_through() == exit_codes.FAILED
    assert sorted(begun(tmp_path)) == list(range(1, 9))
    printed = capsys.readouterr().out
    assert "4 of 8 runs failed" in printed
    assert len(re.findall(r"seed [1678]  finished", printed)) == 4
    (line,) = table(seeds[0], records.read_runs(folders.sweep_folder(seeds[0]))).lines[:1]
    notes = {name: detail for name, status, detail in line.notes if status == "failed"}
    for seed, (_, cause) in BAD.items():
        (row,) = (row for row in printed.splitlines() if f"seed {seed}  failed" in row)
        log = folders.run_folder(seeds[seed - 1]) / "worker.log"
        assert "hello" in log.read_text()
        for told in (row, notes[f"base seed {seed}"]):
            assert cause in told
            assert str(log) in told
    # Again, when nothing is wrong any more
    finished = [folders.run_folder(seeds[number]) / "result.json" for number in (0, 7)]
    before = [path.stat().st_mtime_ns for path in finished]
    script(dict.fromkeys(range(1, 9), DONE))
    assert sweep_of(seeds, 3).work_through() == exit_codes.DONE
    assert sorted(begun(tmp_path)[8:]) == [2, 3, 4, 5]
    assert [path.stat().st_mtime_ns for path in finished] == before
    assert sweep_of(seeds, 3).work_through() == exit_codes.DONE
    assert len(begun(tmp_path)) == 12


def test_only_a_row_whose_folder_holds_another_run_is_stale(seeds, script, tmp_path, capsys):
    script(dict.fromkeys(range(1, 9), DONE))
    stale, damaged = (folders.run_folder(run) for run in seeds[1:3])
    storage.write_text(stale / "config.yaml", compose.to_yaml(schema.vary(seeds[1], model={"d_ff": 7})))
    storage.write_text(stale / "data.sha256", "0" * 64 + "\n")
    storage.write_text(damaged / "config.yaml", "[")
    assert sweep_of(seeds[:4]).work_through() == exit_codes.FAILED  # a row that cannot begin gives its device back
    assert sorted(begun(tmp_path)) == [1, 4]
    printed = capsys.readouterr().out
    assert re.search(r"seed 2  failed  model\.d_ff=2048: .* holds a run with model\.d_ff=7", printed)
    assert re.search(r"seed 3  failed  .*config\.yaml is damaged", printed)
    assert (damaged / "config.yaml").read_text() == "["


SWEEP = """
import dataclasses, sys
from pathlib import Path
from aiayn.config import compose
from aiayn.runs import devices
from aiayn.sweep import launcher
launcher.POLL_SECONDS = 0.02
sys.executable = {python!r}
base = dataclasses.replace(compose.rows()["base"], output={output!r})
runs = [dataclasses.replace(base, seed=seed) for seed in range(1, 9)]
print("ready", flush=True)
while not Path({go!r}).exists():
    pass
sys.exit(launcher.Sweep(runs, devices.Pool(base.hardware, ['0', '1']), 60).work_through())
"""
PYTHON = sys.executable


@pytest.fixture
def sweep(tmp_path, seeds):
    """Starts a sweep of the eight runs in a process of its own, which waits for a file."""
    started = []

    def start() -> subprocess.Popen:
        code = SWEEP.format(output=seeds[0].output, python=f"{tmp_path}/python", go=f"{tmp_path}/go")
        started.append(subprocess.Popen([PYTHON, "-c", code], stdout=subprocess.PIPE, text=True))
        assert started[-1].stdout.readline() == "ready\n"
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_two_sweeps_at_once_run_each_row_exactly_once(seeds, script, sweep, tmp_path):
    script({seed: f"sleep 0.1; {'exit 1' if seed in (3, 6) else DONE}" for seed in range(1, 9)})
    sweeps = [sweep(), sweep()]
    (tmp_path / "go").touch()
    for process in sweeps:
        printed, _ = process.communicate(timeout=60)
        assert process.returncode == exit_codes.FAILED, printed
        assert len(re.findall(r"^\[\d/8\] base", printed, re.MULTILINE)) == 8
        assert len(re.findall("failed  the worker ended", printed)) == 2
    assert sorted(begun(tmp_path)) == list(range(1, 9))


@pytest.mark.slow
def test_a_sweep_takes_over_the_rows_of_one_that_is_killed(seeds, script, sweep, tmp_path):
    """The workers of the first hang and die with it, as real ones do, and the second sweep runs their rows again."""
    code = "from aiayn.core import signals; signals.die_with_parent()\nwhile 1: pass"
    script(dict.fromkeys(range(1, 9), f'[ -e $here/second ] || exec {PYTHON} -c "{code}"; {DONE}'))

    def start_until_begun(number: int) -> subprocess.Popen:
        process, deadline = sweep(), time.monotonic() + 60
        while not (tmp_path / "started").exists() or len(begun(tmp_path)) < number:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return process

    (tmp_path / "go").touch()
    first = start_until_begun(2)
    (tmp_path / "second").touch()
    second = start_until_begun(8)
    assert len(set(begun(tmp_path))) == 8  # the two that the first has are left to it
    first.kill()
    printed, _ = second.communicate(timeout=60)
    assert second.returncode == exit_codes.DONE, printed
    assert sorted(begun(tmp_path)) == sorted([*range(1, 9), *begun(tmp_path)[:2]])


@pytest.fixture
def four(toy_run) -> list[schema.Config]:
    """Finished before, in a folder of another run, and two to do, of which the last is there twice."""
    rows = ("base", "a_h1", "b_dk16", "c_n2", "c_n2")
    done, other, *_ = runs = [dataclasses.replace(toy_run, experiment=row) for row in rows]
    storage.write_json(folders.run_folder(done) / "result.json", result_of(done))
    storage.write_text(folders.run_folder(other) / "config.yaml", compose.to_yaml(done))
    storage.write_text(folders.run_folder(other) / "data.sha256", "0" * 64 + "\n")
    return runs


def test_a_launcher_gets_what_is_unfinished_and_can_begin(four, capsys):
    given = []

    def launch(numbers: list[int]) -> list[int]:
        given.extend(numbers)
        records.record_failure(folders.run_folder(four[2]), exit_codes.NON_FINITE, "not finite")
        storage.write_json(folders.run_folder(four[4]) / "result.json", result_of(four[4]))
        return [exit_codes.NON_FINITE, exit_codes.DONE]

    assert launcher.hand_over(four, launch) == exit_codes.FAILED
    assert given == [2, 4]
    first, *lines, last = capsys.readouterr().out.splitlines()
    assert first == "4 runs, 1 finished before"
    assert [line.startswith(f"[{n}/4] {four[n - 1].experiment}+") for n, line in enumerate(lines, 2)] == [True] * 3
    expected = ["failed  experiment", "failed  not finite", "finished  PPL 2.00"]
    assert [line.partition("seed 1  ")[2][:18] for line in lines] == expected
    assert last == "2 of 4 runs failed; repeat the command to try them again"
    assert launcher.hand_over(four[:1], lambda numbers: pytest.fail("asked")) == exit_codes.DONE


@pytest.mark.parametrize(("told", "remedy"), [("are you indeed on a slurm cluster?", "start it"), ("lost", "squeue")])
def test_a_launcher_s_error_says_what_to_do_about_it(monkeypatch, capsys, told, remedy):
    rows = SimpleNamespace(launcher=SimpleNamespace(launch=Mock(side_effect=RuntimeError(told))))
    with pytest.raises(SystemExit) as exit:
        plugin.Rows.codes(rows, [["seed=1"]])  # Hydra's sweeper is loaded anew by each command: it cannot be made here
    printed = capsys.readouterr().err
    assert (exit.value.code, printed.count("\n"), told in printed) == (exit_codes.FAILED, 1, True)
    assert [remedy in printed, "squeue" in printed] == [True, remedy == "squeue"]


def weights(folder: Path) -> dict[str, str]:
    """The SHA-256 of the last checkpoint of each row."""
    results = [json.loads(path.read_text()) for path in folder.glob("runs/*/*/*/result.json")]
    return {found["experiment"]: found["sha256"]["checkpoint"] for found in results}


def worker_of(sweep: subprocess.Popen[str], folder: Path, row: str) -> int:
    """The process that trains a row, once it has recorded an update."""
    while sweep.poll() is None:
        for metrics in folder.glob(f"runs/*/{row}/*/metrics.jsonl"):
            owner = (metrics.parent / ".lock").read_text().split()
            if owner and metrics.stat().st_size:
                return int(owner[1])
        time.sleep(0.005)
    raise AssertionError(f"{row} was not begun: {sweep.communicate()[0]}")


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("submitit"), reason="needs pip install -e '.[launchers]'")
def test_a_sweep_with_a_killed_row_ends_as_side_by_side(digits, aiayn_in, tmp_path):
    """The bits of the others are the same; the same command again begins the killed row alone."""
    rows, killed = ("base", "a_h1", "b_dk16"), "b_dk16"
    words = (*digits, "scale=smoke", "scale.steps=0.002", "training.checkpoint_every=500", "wandb.mode=disabled")
    words = ("train", "-m", *words, f"experiment={','.join(rows)}")
    local, here = tmp_path / "local", tmp_path / "here"
    local.mkdir()
    here.mkdir()
    aiayn_in(local, *words)
    expected = weights(local)
    words += ("hydra/launcher=submitit_local", "hydra.launcher.timeout_min=20")
    command = [sys.executable, "-m", "aiayn", *words]
    with subprocess.Popen(command, cwd=here, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as sweep:
        os.kill(worker_of(sweep, here, killed), signal.SIGKILL)
        printed, _ = sweep.communicate()
    assert sweep.returncode == exit_codes.FAILED, printed
    assert f"{killed:<19} seed 1  failed  killed by SIGKILL" in printed
    assert "1 of 3 runs failed; repeat the command to try them again" in printed
    assert weights(here) == {row: sha256 for row, sha256 in expected.items() if row != killed}
    assert "3 runs, 2 finished before" in aiayn_in(here, *words).stdout
    assert weights(here) == expected
    assert len(set(expected.values())) == len(rows)  # control: rows differ


def test_a_run_that_left_nothing_is_named_with_its_code(toy_run):
    storage.write_text(folders.run_folder(toy_run) / "config.yaml", "left by an earlier attempt")
    ends = " seed 1  failed  exit code 5; its own output says why"
    assert launcher.line_of(toy_run, exit_codes.STORAGE).endswith(ends)
    assert launcher.line_of(toy_run, exit_codes.INTERRUPTED).endswith(" seed 1  missing  no update is recorded yet")


@pytest.mark.parametrize(
    ("ended", "code", "said"),
    [([], 0, ""), ([0, 5, 3], 1, "2 of 7 runs failed; repeat"), ([1, 75], 75, "stopped; repeat the command")],
)
def test_an_interruption_outweighs_a_failure(ended, code, said, capsys):
    assert launcher.conclude(ended, 7) == code
    printed = capsys.readouterr().out
    assert printed.startswith(said) if said else not printed
