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

from aiayn.core import process_pool
from aiayn.core.exit_codes import INTERRUPTED
from aiayn.core.process_pool import apart, in_order


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


def test_few_chunks_are_read_ahead_and_errors_arrive_as_they_are():
    taken: list[int] = []
    answers = in_order(partial(squarer, 0), counted(1009, taken), 2)
    for number in range(90):
        assert next(answers) == number * number
        assert len(taken) <= number + 5
    with pytest.raises(LookupError, match="no 97"):
        list(answers)
    assert len(taken) < 105


def ending(number: int) -> int:
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def ender() -> Callable[[int], int]:
    return ending


def test_a_process_that_dies_is_an_error():
    with pytest.raises(RuntimeError, match="a worker process was killed"):
        list(in_order(ender, iter(range(9)), 2))


def process_of(number: int) -> int:
    return os.getpid()


def reported() -> Callable[[int], int]:
    return process_of


def test_work_apart_is_in_another_process(monkeypatch):
    monkeypatch.setattr(process_pool.os, "sched_getaffinity", lambda process: {0})
    assert apart(os.getpid) != os.getpid()
    with pytest.raises(LookupError, match="no 97"):
        apart(partial(square, 0, 97))
    assert set(in_order(reported, iter(range(2)), 8)) == {os.getpid()}  # control


# What `python -c` runs in a process of its own: two workers, each of which prints its number and then stays
PARENT = "list(process_pool.in_order(staying.patient, iter(range(9)), 2))"


@contextmanager
def at_work() -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A process and its two workers; it leads a group, as a command in a terminal does."""
    code = (
        "from aiayn.core import process_pool, signals; import staying; process_pool.cores = lambda: 2\n"
        f"with signals.interrupting(), signals.reported(): {PARENT}"
    )
    words, pipe = [sys.executable, "-c", code], subprocess.PIPE
    with subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True, process_group=0) as parent:
        assert parent.stdout is not None
        workers = [int(parent.stdout.readline()) for _ in range(2)]
        assert all(map(_lives, [parent.pid, *workers]))
        yield parent, workers


@pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")
def test_no_worker_outlives_a_process_that_is_killed():
    with at_work() as (parent, workers):
        parent.kill()
    assert _end(workers, 10)


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
def test_a_signal_ends_a_process_and_its_workers_with_one_line(number, to_group):
    with at_work() as (parent, workers):
        (os.killpg if to_group else os.kill)(parent.pid, number)
        _, printed = parent.communicate(timeout=20)
    assert printed == f"aiayn: stopped by {number.name}; repeat the command to go on from here\n"
    assert parent.returncode == INTERRUPTED
    assert _end(workers, 10)


def terminated(number: int) -> int:
    os.kill(os.getpid(), signal.SIGTERM)
    return number


def terminating() -> Callable[[int], int]:
    return terminated


def test_a_worker_leaves_a_signal_to_its_parent():
    """SLURM sends SIGTERM to one process after the other."""
    assert list(in_order(terminating, iter(range(9)), 2)) == list(range(9))


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
