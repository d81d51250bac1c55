"""Work on a stream: the same answers in the same order whatever the processes, and never all of it in memory."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from aiayn import cores
from aiayn.cores import forked, in_order

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
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda process: {0, 1, 2, 3})


@pytest.mark.parametrize(("count", "processes"), [(0, 2), (1, 2), (19, 1), (19, 2)])
def test_answers_come_in_the_order_of_the_chunks(count, processes):
    expected = [5 + number * number for number in range(count)]
    assert list(in_order(partial(squarer, 5), iter(range(count)), processes)) == expected


def test_one_chunk_starts_no_process(monkeypatch):
    monkeypatch.setattr(cores, "ProcessPoolExecutor", None)
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
    facts[0] = 1000
    assert list(answers) == [7, 8, 9, 10, 11]


def ending(number: int) -> int:
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


@needs_fork
def test_a_process_that_fails_or_dies_is_an_error():
    with pytest.raises(LookupError, match="no 97"):
        list(forked(partial(square, 0), range(90, 100), 2))
    with pytest.raises(RuntimeError, match=r"DataLoader worker .* (killed|exited)"):
        list(forked(ending, range(9), 2))


@needs_fork
def test_forked_processes_die_with_the_one_that_was_killed():
    code = (
        "import os, time; from aiayn import cores; cores._available = lambda: 2\n"
        "def work(number): print(os.getpid(), flush=True); time.sleep(99)\n"
        "list(cores.forked(work, range(2), 2))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        workers = [int(parent.stdout.readline()) for _ in range(2)]
        assert all(Path(f"/proc/{worker}").exists() for worker in workers)
        parent.kill()
    deadline = time.monotonic() + 10
    while any(map(_lives, workers)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
