"""A sweep: longest first, so many at once, each run once; a failed run stops nobody; a re-run does what is missing."""

import dataclasses
import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from trained_runs import cores, equal

from aiayn.config import compose, folders, schema
from aiayn.core import storage
from aiayn.core.signals import Interrupted, interrupting
from aiayn.cost import device_schedule
from aiayn.data.parallel_text import DataError
from aiayn.runs import checkpoint, jobs
from aiayn.runs.records import read_runs
from aiayn.sweep import launcher
from aiayn.tables.table3 import table
from aiayn.training import train


class Worker:
    """Stands for a worker process: it ends with `code` after it was asked `polls` times."""

    def __init__(self, code: int, polls: int = 5) -> None:
        self.code, self.polls, self.signals = code, polls, []

    def poll(self):
        self.polls -= 1
        return self.code if self.polls <= 0 else None

    def wait(self):
        return self.code

    def send_signal(self, number):
        self.signals.append(number)
        self.code = jobs.INTERRUPTED

    @property
    def returncode(self):
        return self.code if self.polls <= 0 else None


@pytest.fixture
def started(monkeypatch):
    """The runs that a sweep started, in order, each with how many were at work by then; no process is started."""
    begun, codes, workers = [], {}, []

    def start(run, log, held, seeing):
        at_work = sum(worker.polls > 0 for worker in workers) + 1
        begun.append((run, at_work))
        folder = folders.run_folder(run)
        storage.write_text(log, "")
        workers.append(Worker(codes.get(run.seed, jobs.DONE)))
        if codes.get(run.seed, jobs.DONE) == jobs.NON_FINITE:
            jobs.record_failure(folder, jobs.NON_FINITE, "the loss is NaN")
        return jobs.Job(run, folder, [workers[-1]], held)

    monkeypatch.setattr(jobs, "start", start)
    monkeypatch.setattr(launcher, "POLL_SECONDS", 0)
    begun_with = lambda: begun  # noqa: E731
    begun_with.codes, begun_with.workers = codes, workers
    return begun_with


@pytest.fixture
def runs(tmp_path):
    """All rows, in an output folder of their own."""
    return [dataclasses.replace(row, output=f"{tmp_path}/runs") for row in compose.rows().values()]


@pytest.mark.parametrize("at_once", [1, 2, 5])
def test_the_longest_run_starts_first_and_no_more_than_there_is_room_for_are_at_work(runs, started, at_once):
    assert launcher.Sweep(runs, cores(at_once), 60).work_through() == jobs.DONE
    begun = [run for run, _ in started()]
    assert sorted(run.experiment for run in begun) == sorted(schema.ROWS)
    sizes = [launcher.work(run) for run in begun]
    assert sizes == sorted(sizes, reverse=True)
    assert begun[0].experiment == "big"
    assert max(at_work for _, at_work in started()) == at_once


def test_work_grows_with_every_size_that_a_row_changes(runs):
    base = runs[0]
    for section, key in (
        *(("model", key) for key in ("num_layers", "d_model", "d_ff", "num_heads", "d_k", "d_v")),
        *(("training", key) for key in ("max_steps", "tokens_per_update")),
    ):
        part = getattr(base, section)
        larger = dataclasses.replace(base, **{section: dataclasses.replace(part, **{key: 2 * getattr(part, key)})})
        assert launcher.work(larger) > launcher.work(base), key
    assert launcher.work(dataclasses.replace(base, seed=2)) == launcher.work(base)


def test_a_run_that_stands_twice_in_a_sweep_is_trained_once(runs, started):
    again = dataclasses.replace(runs[0], hardware=dataclasses.replace(runs[0].hardware, threads=2))
    assert launcher.Sweep([*runs[:3], runs[1], again], cores(4), 60).work_through() == jobs.DONE
    assert len(started()) == 3


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_failed_run_stops_nobody_and_is_named_with_its_cause_and_its_log(runs, started, capsys, failing):
    seeds = [dataclasses.replace(runs[0], seed=seed) for seed in (1, 2, 3)]
    started.codes[failing] = jobs.NON_FINITE
    assert launcher.Sweep(seeds, cores(1), 60).work_through() == jobs.FAILED
    assert len(started()) == 3
    printed = capsys.readouterr().out
    (line,) = (line for line in printed.splitlines() if "failed  " in line)
    assert re.search(rf"base +seed {failing}  failed  the loss is NaN \(exit code 3\)", line)
    assert str(folders.run_folder(seeds[failing - 1]) / "worker.log") in line
    assert "1 of 3 runs failed" in printed


def test_a_run_that_cannot_be_started_gives_its_device_to_the_next(runs, started, monkeypatch, capsys):
    seeds = [dataclasses.replace(runs[0], seed=seed) for seed in (1, 2, 3)]
    start = jobs.start

    def full(run, log, held, seeing):
        if run.seed == 1:
            raise storage.StorageError("no space left")
        return start(run, log, held, seeing)

    monkeypatch.setattr(jobs, "start", full)
    assert launcher.Sweep(seeds, cores(1), 60).work_through() == jobs.FAILED
    assert len(started()) == 2
    assert "base seed 1  failed  no space left" in capsys.readouterr().out


@pytest.mark.usefixtures("started")
def test_of_a_reader_that_leaves_a_sweep_says_so_as_a_single_run_does(runs):
    """The command makes exit code 141 of it; rich itself would exit with 1."""

    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    sweep = launcher.Sweep(runs[:1], cores(1), 60)
    sweep.console.file = Gone()
    with pytest.raises(BrokenPipeError):
        sweep.work_through()


def test_a_signal_reaches_the_runs_at_work_and_starts_no_other(runs, started, monkeypatch, capsys):
    poll = Worker.poll

    def signalled(worker):
        if worker is started.workers[0] and not worker.signals:
            os.kill(os.getpid(), signal.SIGTERM)
        return poll(worker)

    monkeypatch.setattr(Worker, "poll", signalled)
    before = signal.getsignal(signal.SIGTERM)
    assert launcher.Sweep(runs, cores(2), 60).work_through() == jobs.INTERRUPTED
    assert signal.getsignal(signal.SIGTERM) is before
    assert len(started()) == 2
    assert all(worker.signals == [signal.SIGTERM] for worker in started.workers)
    assert "/20]" not in capsys.readouterr().out  # no run is done


def test_finished_runs_are_not_started_again(runs, started, result_of):
    for run in runs[:17]:
        storage.write_json(folders.run_folder(run) / "result.json", result_of(run))
    assert launcher.Sweep(runs, cores(2), 60).work_through() == jobs.DONE
    assert {run.experiment for run, _ in started()} == set(schema.ROWS[17:])


def test_each_corpus_of_unfinished_runs_is_prepared_once_before_any_worker(runs, result_of, monkeypatch, capsys):
    names = ("one", "two", "two", "three")
    mixed = [
        dataclasses.replace(run, data=dataclasses.replace(run.data, name=name))
        for run, name in zip(runs, names, strict=False)
    ]
    storage.write_json(folders.run_folder(mixed[3]) / "result.json", result_of(mixed[3]))
    prepared, bad = [], {"two"}

    def prepare_one(run, report):
        prepared.append(run.data.name)
        report("reading")
        if run.data.name in bad:
            raise DataError(f"{run.data.name} is damaged")

    monkeypatch.setattr(launcher.prepare, "prepare", prepare_one)
    launcher.prepare_once(mixed)
    assert prepared == ["one", "two"]
    assert "two is damaged" in capsys.readouterr().out
    bad.add("one")
    with pytest.raises(DataError, match="two is damaged"):  # nothing is left to train on
        launcher.prepare_once(mixed)
    bad.clear()
    monkeypatch.setattr(launcher.prepare, "prepare", lambda run, report: os.kill(os.getpid(), signal.SIGTERM))
    with interrupting(), pytest.raises(Interrupted, match="SIGTERM"):
        launcher.prepare_once(mixed)


@pytest.mark.parametrize("name", ["wmt14_en_de", "wmt14_en_fr"])
def test_a_sweep_takes_a_corpus_that_is_to_be_downloaded(aiayn, tmp_path, name):
    """As far as the first archive that is not there; without `data.source` it would ask for it."""
    (tmp_path / "archives").mkdir()
    words = (f"data={name}", f"data.source={tmp_path}/archives", f"prepared={tmp_path}/prepared", f"output={tmp_path}")
    printed = aiayn("train", "-m", "experiment=base,a_h1", *words, code=2).stderr
    assert printed.startswith(f"aiayn: data.source={tmp_path}/archives: holds no training-parallel-europarl-v7.tgz")


class Timer(Worker):
    """Stands for a worker that ends when the clock says so."""

    def __init__(self, clock: list[float], end: float) -> None:
        super().__init__(jobs.DONE)
        self.clock, self.end = clock, end

    def poll(self):
        return self.code if self.clock[0] >= self.end else None

    returncode = property(poll)


@pytest.mark.parametrize(("most", "expected"), [(0, 3), (2, 2), (1, 1)])
def test_on_eight_gpus_a_sweep_works_as_the_plan_says_and_each_run_sees_only_its_own(runs, monkeypatch, most, expected):
    """A run takes as long as it computes, on a clock that jumps from one end to the next."""
    gpu = compose.compose_row("hardware=gpu").hardware
    runs = [dataclasses.replace(run, hardware=gpu) for run in runs]
    names = [f"GPU-{number}-{os.getpid()}" for number in range(8)]
    clock, filled, timers, turns = [0.0], [0.0], [], []

    def start(run, log, held, seeing):
        storage.write_text(log, "")
        seen = tuple(seeing["CUDA_VISIBLE_DEVICES"].split(","))
        assert len(seen) == run.hardware.devices
        end = clock[0] + launcher.work(run) / len(seen)
        turns.append((run.experiment, seen, clock[0], end))
        timers.append(Timer(clock, end))
        return jobs.Job(run, folders.run_folder(run), [timers[-1]], held)

    def sleep(seconds):
        if filled[-1] != clock[0]:  # what has just ended leaves room first
            filled.append(clock[0])
        else:
            clock[0] = min((timer.end for timer in timers if timer.end > clock[0]), default=clock[0])

    monkeypatch.setattr(jobs, "start", start)
    monkeypatch.setattr(launcher.time, "sleep", sleep)
    assert launcher.Sweep(runs, names, 1e9, most).work_through() == jobs.DONE
    operations = {run.experiment: launcher.work(run) for run in runs}
    planned = device_schedule.best_schedule(operations, 1, most or 8, 8)
    assert [(name, len(seen)) for name, seen, *_ in turns] == [(turn.name, len(turn.devices)) for turn in planned]
    assert [(start, end) for *_, start, end in turns] == [
        (pytest.approx(turn.start), pytest.approx(turn.end)) for turn in planned
    ]
    assert {name: len(seen) for name, seen, *_ in turns}["big"] == expected
    assert {len(seen) for name, seen, *_ in turns if name != "big"} == {1}
    for name in names:
        own = [(start, end) for _, seen, start, end in turns if name in seen]
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(own))


# With real processes that stand for workers


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Makes a shell script the worker of every run: it notes that it was started, then does what its seed says."""

    def write(behaviour: dict[int, str]) -> None:
        cases = "".join(f"*seed{seed}) {act} ;;\n" for seed, act in behaviour.items())
        python = tmp_path / "python"
        storage.write_text(
            python, f'#!/bin/sh\nhere={tmp_path}\necho "$3" >> $here/started\necho hello\ncase $3 in\n{cases}esac\n'
        )
        python.chmod(0o755)
        monkeypatch.setattr(jobs.sys, "executable", str(python))

    return write


@pytest.mark.parametrize("name", ["metrics.jsonl", "worker.log", "checkpoints"])
def test_a_run_is_silent_from_the_last_time_that_it_wrote_metrics_log_or_checkpoint(runs, tmp_path, monkeypatch, name):
    clock = [1000.0]
    monkeypatch.setattr(launcher.time, "monotonic", lambda: clock[0])
    sweep, job = launcher.Sweep(runs[:1], cores(1), 60), SimpleNamespace(folder=tmp_path)

    def silent_after(seconds: float) -> float:
        clock[0] += seconds
        return sweep.silent_for(job)

    assert [silent_after(3), silent_after(5), silent_after(7)] == [0, 5, 12]  # from when it was first looked at
    (tmp_path / name).mkdir() if name == "checkpoints" else (tmp_path / name).write_text("line\n")
    assert [silent_after(11), silent_after(13), silent_after(17)] == [0, 13, 30]
    os.utime(tmp_path / name, (7, 7))  # a clock that goes back is a sign of life too
    assert [silent_after(19), silent_after(23)] == [0, 23]
    (tmp_path / "config.yaml").write_text("")
    assert silent_after(29) == 52  # control: nothing else counts


@pytest.fixture
def seeds(runs, result_of, tmp_path):
    """Eight runs of base, and beside them the result that each would write."""
    found = [dataclasses.replace(runs[0], seed=seed) for seed in range(1, 9)]
    for run in found:
        storage.write_json(tmp_path / f"result{run.seed}.json", result_of(run))
    return found


def begun(tmp_path: Path) -> list[int]:
    """The seeds of the workers that were started, in order."""
    return [int(line.rpartition("seed")[2]) for line in (tmp_path / "started").read_text().splitlines()]


DONE = "cp $here/result${3##*seed}.json $3/result.json"
BAD = {
    2: ("echo 'Traceback: it raised' >&2; exit 1", "the worker ended with exit code 1"),
    3: (
        'echo \'{"exit_code": 3, "cause": "the loss is NaN"}\' > $3/failure.json; exit 3',
        "the loss is NaN (exit code 3)",
    ),
    4: ("exit 9", "the worker ended with exit code 9"),
    5: ("kill -SEGV $$", "killed by SIGSEGV"),
    6: ("kill -KILL $$", "killed by SIGKILL"),
    7: ("trap '' ABRT TERM; while true; do sleep 0.1; done", "no sign of life for 0.01 minutes: killed"),
}


def test_rows_that_raise_go_nan_exit_crash_are_killed_or_hang_stop_nobody_and_a_rerun_does_only_those(
    seeds, script, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(launcher, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(jobs, "GRACE_SECONDS", 0.2)
    script({1: DONE, **{seed: act for seed, (act, _) in BAD.items()}, 8: DONE})
    assert launcher.Sweep(seeds, cores(3), 0.6).work_through() == jobs.FAILED
    assert sorted(begun(tmp_path)) == list(range(1, 9))
    printed = capsys.readouterr().out
    assert "6 of 8 runs failed" in printed
    assert len(re.findall(r"seed [18]  finished", printed)) == 2
    (line,) = table(seeds[0], read_runs(folders.sweep_folder(seeds[0]))).lines[:1]
    notes = {name: detail for name, status, detail in line.notes if status == "failed"}
    for seed, (_, cause) in BAD.items():
        (row,) = (row for row in printed.splitlines() if f"seed {seed}  failed" in row)
        log = folders.run_folder(seeds[seed - 1]) / "worker.log"
        assert cause in row
        assert str(log) in row
        assert "hello" in log.read_text()
        assert cause in notes[f"base seed {seed}"]
        assert str(log) in notes[f"base seed {seed}"]
    # Again, when nothing is wrong any more
    finished = [folders.run_folder(seeds[number]) / "result.json" for number in (0, 7)]
    before = [path.stat().st_mtime_ns for path in finished]
    script(dict.fromkeys(range(1, 9), DONE))
    assert launcher.Sweep(seeds, cores(3), 60).work_through() == jobs.DONE
    assert sorted(begun(tmp_path)[8:]) == [2, 3, 4, 5, 6, 7]
    assert [path.stat().st_mtime_ns for path in finished] == before
    assert launcher.Sweep(seeds, cores(3), 60).work_through() == jobs.DONE
    assert len(begun(tmp_path)) == 14


def test_without_a_terminal_a_line_now_and_then_says_where_the_runs_are(seeds, script, monkeypatch, capsys):
    monkeypatch.setattr(launcher, "POLL_SECONDS", 0.02)
    script(dict.fromkeys(range(1, 9), DONE))
    for seconds, some in ((launcher.LOG_SECONDS, False), (-1.0, True)):  # control first
        monkeypatch.setattr(launcher, "LOG_SECONDS", seconds)
        assert launcher.Sweep(seeds[4 * some : 4 * some + 2], cores(1), 60).work_through() == jobs.DONE
        lines = re.findall(r"^[01] of 2 done; base seed \d: update 0 of \d+$", capsys.readouterr().out, re.MULTILINE)
        assert bool(lines) == some


def test_a_row_whose_folder_holds_another_run_is_stale_and_only_that_row(seeds, script, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(launcher, "POLL_SECONDS", 0.02)
    script(dict.fromkeys(range(1, 9), DONE))
    stale, damaged = (folders.run_folder(run) for run in seeds[1:3])
    other = dataclasses.replace(seeds[1], model=dataclasses.replace(seeds[1].model, d_ff=7))
    storage.write_text(stale / "config.yaml", compose.to_yaml(other))
    storage.write_text(stale / "data.sha256", "0" * 64 + "\n")
    storage.write_text(damaged / "config.yaml", "[")
    assert launcher.Sweep(seeds[:4], cores(2), 60).work_through() == jobs.FAILED
    assert sorted(begun(tmp_path)) == [1, 4]
    printed = capsys.readouterr().out
    assert "seed 2  failed  model.d_ff=2048: " in printed
    assert "holds a run with model.d_ff=7" in printed
    assert re.search(r"seed 3  failed  .*config\.yaml is damaged", printed)
    assert (damaged / "config.yaml").read_text() == "["


SWEEP = """
import dataclasses, sys
from pathlib import Path
from aiayn.config import compose
from aiayn.sweep import launcher
launcher.POLL_SECONDS = 0.02
sys.executable = {python!r}
base = dataclasses.replace(compose.rows()["base"], output={output!r})
runs = [dataclasses.replace(base, seed=seed) for seed in range(1, 9)]
Path({ready!r}).touch()
while not Path({go!r}).exists(): pass
sys.exit(launcher.Sweep(runs, ['0', '1'], 60).work_through())
"""


@pytest.fixture
def sweep(tmp_path, seeds):
    """Starts a sweep of the eight runs in a process of its own, which waits for the file `go`."""
    started = []

    def start() -> subprocess.Popen:
        names = {name: str(tmp_path / name) for name in ("python", "go")}
        ready = tmp_path / f"ready{len(started)}"
        code = SWEEP.format(output=seeds[0].output, ready=str(ready), **names)
        started.append(subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True))
        return started[-1]

    def begin() -> None:
        while len(list(tmp_path.glob("ready*"))) < len(started):
            assert all(process.poll() is None for process in started)
            time.sleep(0.01)
        (tmp_path / "go").touch()

    start.begin = begin
    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_without_a_claim_two_sweeps_would_run_rows_twice(seeds, script, sweep, tmp_path, monkeypatch):  # control
    interpreter = sys.executable
    script(dict.fromkeys(range(1, 9), f"sleep 0.3; {DONE}"))
    monkeypatch.setattr(jobs.sys, "executable", interpreter)
    unclaimed = "import contextlib; from aiayn.runs import jobs; jobs.claim = lambda run: contextlib.ExitStack()\n"
    monkeypatch.setitem(globals(), "SWEEP", SWEEP.replace("base =", f"{unclaimed}base =", 1))
    sweeps = [sweep(), sweep()]
    sweep.begin()
    for process in sweeps:
        process.communicate(timeout=60)
    assert len(begun(tmp_path)) > 8


@pytest.mark.parametrize("failing", [pytest.param((), marks=pytest.mark.slow), (3, 6)])
def test_two_sweeps_at_once_run_each_row_exactly_once(seeds, script, sweep, tmp_path, monkeypatch, failing):
    interpreter = sys.executable
    script({seed: f"sleep 0.1; {'exit 1' if seed in failing else DONE}" for seed in range(1, 9)})
    monkeypatch.setattr(jobs.sys, "executable", interpreter)
    sweeps = [sweep(), sweep()]
    sweep.begin()
    for process in sweeps:
        printed, _ = process.communicate(timeout=60)
        assert process.returncode == (jobs.FAILED if failing else jobs.DONE), printed
        assert len(re.findall(r"^\[\d/8\] base", printed, re.MULTILINE)) == 8
        assert len(re.findall("failed  the worker ended", printed)) == len(failing)
    assert sorted(begun(tmp_path)) == list(range(1, 9))


@pytest.mark.slow
def test_a_sweep_takes_over_the_rows_of_one_that_is_killed(seeds, script, sweep, tmp_path, monkeypatch):
    """The workers of the first hang; they die with it, as real ones do, and the second sweep runs their rows again."""
    interpreter = sys.executable
    code = "from aiayn.core import signals; signals.die_with_parent()\nwhile 1: pass"
    hang = f'[ -e $here/second ] || exec {interpreter} -c "{code}"'
    script(dict.fromkeys(range(1, 9), f"{hang}; {DONE}"))
    monkeypatch.setattr(jobs.sys, "executable", interpreter)
    first = sweep()
    sweep.begin()
    deadline = time.monotonic() + 60
    while not (tmp_path / "started").exists() or len(begun(tmp_path)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (tmp_path / "second").touch()
    second = sweep()
    while len(begun(tmp_path)) < 8:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert len(set(begun(tmp_path))) == 8  # the two that the first has are left to it
    first.kill()
    printed, _ = second.communicate(timeout=60)
    assert second.returncode == jobs.DONE, printed
    taken_over = begun(tmp_path)[:2]
    assert sorted(begun(tmp_path)) == sorted([*range(1, 9), *taken_over])


# With real workers


Swept = tuple[list[Path], subprocess.CompletedProcess[str], dict[Path, int], subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def swept(digits, finished, aiayn_in, tmp_path_factory) -> Swept:
    """Two seeds of which the first has a checkpoint that is none: swept, repaired, and swept again."""
    folder = tmp_path_factory.mktemp("sweep")
    arguments = [*finished[:-1], f"output={folder}/runs", "training.max_steps=5"]
    own = [folders.run_folder(compose.compose_row(*arguments, f"seed={seed}")) for seed in (1, 2)]
    storage.write_bytes(own[0] / "checkpoints" / "step-000000003.ckpt", b"no checkpoint")
    command = ("train", "-m", *arguments, "seed=1,2")
    first = aiayn_in(folder, *command, code=1)
    written = {path: path.stat().st_mtime_ns for path in own[1].rglob("*")}
    (own[0] / "checkpoints" / "step-000000003.ckpt").unlink()
    return own, first, written, aiayn_in(folder, *command)


@pytest.mark.slow
def test_workers_beside_one_that_fails_finish_and_the_sweep_exits_with_1(swept):
    folders, first, written, _ = swept
    assert folders[1] / "result.json" in written
    (line,) = (line for line in first.stdout.splitlines() if "failed  " in line)
    assert "seed 1  failed  no checkpoint in" in line
    assert "(exit code 5)" in line
    assert str(folders[0] / "worker.log") in line
    assert "Traceback" not in first.stdout + first.stderr


@pytest.mark.slow
def test_a_sweep_again_does_only_what_is_missing(swept):
    folders, _, written, again = swept
    assert "2 runs, 1 finished before" in again.stdout
    assert {path: path.stat().st_mtime_ns for path in written} == written
    assert json.loads((folders[0] / "result.json").read_text())["seed"] == 1
    assert not (folders[0] / "failure.json").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("signals")
def test_a_run_of_a_sweep_has_the_bits_of_the_same_run_alone(swept, tmp_path):
    folders, *_ = swept
    run = compose.read(folders[0] / "config.yaml")
    storage.write_text(tmp_path / "run" / "config.yaml", compose.to_yaml(run))
    train.train(run, tmp_path / "run")
    alone, together, other = (
        checkpoint.load(checkpoint.newest(folder / "checkpoints")[0]) for folder in (tmp_path / "run", *folders)
    )
    assert equal(alone, together)
    assert not equal(together, other)  # control: another seed


@pytest.mark.slow
def test_nothing_but_the_output_folder_appears_beside_it(swept):
    folders, *_ = swept
    root = folders[0].parents[3]
    assert [path.name for path in root.iterdir()] == ["runs"]


@pytest.mark.parametrize(
    ("point", "words"),
    [
        ("model.num_heads=1,2,O", "model.num_heads"),
        ("seed=1,2,-3", "seed=-3"),
        ("training.warmup_steps=5,7,0", "training.warmup_steps=0"),
        ("hardware=cpu,gpu", "hardware.accelerator=cpu and gpu"),
    ],
)
def test_a_mistake_in_the_last_point_is_refused_before_the_first_starts(aiayn, tmp_path, point, words):
    printed = aiayn("train", "-m", "wandb.mode=disabled", point, code=2)
    assert printed.stdout == ""
    assert len(printed.stderr.splitlines()) == 1
    assert words in printed.stderr
    assert list(tmp_path.iterdir()) == []
