"""Work on a stream: the same answers in the same order whatever the processes, and never all of it in memory."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch

from aiayn.core import process_pool, signals
from aiayn.core.process_pool import forked, in_order
from aiayn.core.signals import Interrupted

needs_fork = pytest.mark.skipif(sys.platform != "linux", reason="forks on Linux only")


def squarer(offset: int) -> Callable[[int], int]:
    return partial(square, offset)


def square(offset: int, number: int) -> int:
    if number == 97:
        raise LookupError("no 97")
    return offset + number * number


def counted(limit: int, taken: list[int]) -> Iterator[int]:
    for number in range(limit):
        taken.append(number)
        yield number


@pytest.fixture(autouse=True)
def four_cores(monkeypatch):
    monkeypatch.setattr(process_pool.os, "sched_getaffinity", lambda process: {0, 1, 2, 3})


@pytest.mark.parametrize(("count", "processes"), [(0, 2), (1, 2), (19, 1), (19, 2)])
def test_answers_come_in_the_order_of_the_chunks(count, processes):
    expected = [5 + number * number for number in range(count)]
    assert list(in_order(partial(squarer, 5), iter(range(count)), processes)) == expected


def test_one_chunk_starts_no_process(monkeypatch):
    monkeypatch.setattr(process_pool, "_by_processes", None)
    assert list(in_order(partial(squarer, 5), iter([3]), 2)) == [14]
    with pytest.raises(TypeError):  # control
        list(in_order(partial(squarer, 5), iter([3, 4]), 2))


def test_only_a_few_chunks_are_read_ahead_and_an_error_arrives_as_itself():
    taken: list[int] = []
    answers = in_order(partial(squarer, 0), counted(1009, taken), 2)
    for number in range(90):
        assert next(answers) == number * number
        assert len(taken) <= number + 5
    with pytest.raises(LookupError, match="no 97"):
        list(answers)
    assert len(taken) < 105


def seen_from(number: int) -> tuple[int, int, int]:
    return number, os.getpid(), torch.get_num_threads()


@needs_fork
def test_forked_processes_answer_in_order_with_one_thread_each_and_as_many_as_there_is_work_for():
    before = torch.get_rng_state()
    for items, processes, count in ((11, 2, 2), (11, 3, 3), (2, 3, 2), (11, 9, 4)):  # of four cores
        found = list(forked(seen_from, range(items), processes))
        assert [number for number, _, _ in found] == list(range(items))
        assert len({process for _, process, _ in found}) == count
        assert {threads for _, _, threads in found} == {1}
        assert os.getpid() not in {process for _, process, _ in found}
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("items", "processes"), [(0, 2), (1, 2), (5, 1)])
def test_nothing_is_forked_for_one_process(items, processes):
    assert {process for _, process, _ in forked(seen_from, range(items), processes)} <= {os.getpid()}


@needs_fork
def test_what_is_there_before_the_fork_is_seen_and_what_comes_after_is_not():
    facts = [7]
    answers = iter(forked(lambda number: facts[0] + number, range(5), 2))
    found = [next(answers)]
    facts[0] = 1000
    assert [*found, *answers] == [7, 8, 9, 10, 11]


def ending(number: int) -> int:
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


@needs_fork
def test_a_process_that_fails_or_dies_is_an_error():
    with pytest.raises(LookupError, match="no 97"):
        list(forked(partial(square, 0), range(90, 100), 2))
    with pytest.raises(RuntimeError, match="a worker process was killed by SIGKILL"):
        list(forked(ending, range(9), 2))


def test_an_error_in_a_process_says_where_it_was():
    with pytest.raises(LookupError) as found:
        list(in_order(partial(squarer, 0), iter([97, 98]), 2))
    (note,) = found.value.__notes__
    assert "in square" in note


def process_of(number: int) -> int:
    return os.getpid()


def reported() -> Callable[[int], int]:
    return process_of


@pytest.mark.parametrize("chunks", [1, 2])
def test_work_apart_is_in_another_process_even_with_one_core_unless_it_is_one_chunk(monkeypatch, chunks):
    monkeypatch.setattr(process_pool.os, "sched_getaffinity", lambda process: {0})
    found = set(in_order(reported, iter(range(chunks)), 8, apart=True))
    assert (found == {os.getpid()}) == (chunks == 1)
    assert set(in_order(reported, iter(range(chunks)), 8)) == {os.getpid()}  # control


# What `python -c` runs in a process of its own: two workers, each of which prints its number and then stays
PARENT = {
    "spawn": "list(process_pool.in_order(staying.patient, iter(range(9)), 2))",
    "fork": "list(process_pool.forked(staying.patient(), range(9), 2))",
}
METHODS = [pytest.param("fork", marks=needs_fork), "spawn"]


@contextmanager
def at_work(method: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A process and its two workers; it leads a group, as a command in a terminal does."""
    code = (
        "from aiayn.core import process_pool, signals; import staying; process_pool.cores = lambda: 2\n"
        f"with signals.interrupting(), signals.reported(): {PARENT[method]}"
    )
    words, pipe = [sys.executable, "-c", code], subprocess.PIPE
    with subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True, process_group=0) as parent:
        assert parent.stdout is not None
        workers = [int(parent.stdout.readline()) for _ in range(2)]
        assert all(map(_lives, [parent.pid, *workers]))
        yield parent, workers


@pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")
@pytest.mark.parametrize("method", METHODS)
def test_no_worker_outlives_a_process_that_is_killed(method):
    with at_work(method) as (parent, workers):
        parent.kill()
    assert _end(workers, 10)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("number", "to_group"),
    [
        (signal.SIGINT, True),  # Ctrl-C
        (signal.SIGTERM, False),  # kill
        pytest.param(signal.SIGINT, False, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, True, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, True, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, False, marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_a_process_and_its_workers_at_once_with_one_line(method, number, to_group):
    with at_work(method) as (parent, workers):
        (os.killpg if to_group else os.kill)(parent.pid, number)
        _, printed = parent.communicate(timeout=20)
    assert printed == f"aiayn: stopped by {number.name}; repeat the command to go on from here\n"
    assert parent.returncode == signals.EXIT_CODE
    assert _end(workers, 10)


@needs_fork
def test_a_worker_that_a_job_s_signal_reaches_first_interrupts_its_parent():
    """SLURM sends SIGTERM to one process after the other; without this the first dead worker would be an error."""
    with pytest.raises(Interrupted, match="stopped by SIGTERM"):
        list(forked(lambda number: os.kill(os.getpid(), signal.SIGTERM), range(9), 2))


def test_workers_end_with_the_iterator():
    answers = iter(in_order(reported, iter(range(97)), 2))
    workers = {next(answers) for _ in range(7)}
    assert any(map(_lives, workers))
    del answers
    assert not any(map(_lives, workers))


def _end(processes: list[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while any(map(_lives, processes)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(_lives, processes))


def _lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
