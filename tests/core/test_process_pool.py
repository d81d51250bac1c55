"""Work on a stream: the same answers in the same order whatever the processes, and never all of it in memory."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from aiayn.core import process_pool
from aiayn.core.exit_codes import INTERRUPTED
from aiayn.core.process_pool import apart, in_order


def is_alive(process: int) -> bool:
    """A zombie that nobody has waited for is dead."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def all_end(processes: Iterable[int], seconds: float = 10) -> bool:
    """Whether all end within so many seconds."""
    deadline = time.monotonic() + seconds
    while any(map(is_alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(is_alive, processes))


def made(work: Callable[[int], int]) -> Callable[[], Callable[[int], int]]:
    return partial(partial, work)


def square(number: int) -> int:
    if number == 97:
        raise LookupError("no 97")
    return number * number


def process_of(number: int) -> int:
    return os.getpid()


def signalled(with_signal: signal.Signals, number: int) -> int:
    os.kill(os.getpid(), with_signal)
    return number


@pytest.fixture(autouse=True)
def four_cores(monkeypatch):
    monkeypatch.setattr(process_pool.os, "sched_getaffinity", lambda process: {0, 1, 2, 3})


@pytest.mark.parametrize(("count", "processes"), [(0, 2), (19, 1), (19, 2)])
def test_answers_come_in_the_order_of_the_chunks(count, processes):
    assert list(in_order(made(square), iter(range(count)), processes)) == [number * number for number in range(count)]


def test_few_chunks_are_read_ahead_and_errors_arrive_as_they_are():
    taken: list[int] = []
    answers = in_order(made(square), (taken.append(number) or number for number in range(1009)), 2)
    for number in range(90):
        assert next(answers) == number * number
        assert len(taken) <= number + 5
    with pytest.raises(LookupError, match="no 97"):
        list(answers)
    assert len(taken) < 105


def test_a_process_that_dies_is_an_error():
    with pytest.raises(RuntimeError, match="a worker process was killed"):
        list(in_order(made(partial(signalled, signal.SIGKILL)), iter(range(9)), 2))


def test_a_worker_leaves_a_signal_to_its_parent():
    """SLURM sends SIGTERM to one process after the other."""
    assert list(in_order(made(partial(signalled, signal.SIGTERM)), iter(range(9)), 2)) == list(range(9))


def test_work_apart_is_in_another_process_and_one_chunk_here():
    assert apart(os.getpid) != os.getpid()
    with pytest.raises(LookupError, match="no 97"):
        apart(partial(square, 97))
    assert list(in_order(made(process_of), iter([3]), 2)) == [os.getpid()]
    assert os.getpid() not in in_order(made(process_of), iter([3, 4]), 2)


def test_workers_end_with_the_iterator():
    answers = iter(in_order(made(process_of), iter(range(97)), 2))
    workers = {next(answers) for _ in range(7)}
    assert any(map(is_alive, workers))
    del answers
    assert not any(map(is_alive, workers))


def large(number: int) -> bytes:
    return bytes(2**27)


def test_a_worker_that_is_killed_as_it_writes_does_not_hang():
    answers = in_order(made(large), iter(range(97)), 2)
    next(answers)
    closing = threading.Thread(target=answers.close, daemon=True)  # type: ignore[attr-defined]
    closing.start()
    closing.join(20)
    assert not closing.is_alive()


# What `python -c` runs in a process of its own: two workers, each of which prints its number at once and then stays
PARENT = """
from functools import partial
from pathlib import Path
from aiayn.core import process_pool, signals
process_pool.cores = lambda: 2
stay = "import os, time; os.write(1, b'%d\\\\n' % os.getpid()); time.sleep(99)"
with signals.interrupting(), signals.reported():
    list(process_pool.in_order(partial(partial, exec), iter(9 * [stay]), 2))
"""


@contextmanager
def at_work() -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A process and its two workers; it leads a group, as a command in a terminal does."""
    words, pipe = [sys.executable, "-c", PARENT], subprocess.PIPE
    with subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True, process_group=0) as parent:
        assert parent.stdout is not None
        workers = [int(parent.stdout.readline()) for _ in range(2)]
        assert all(map(is_alive, [parent.pid, *workers]))
        yield parent, workers


@pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")
def test_no_worker_outlives_a_process_that_is_killed():
    with at_work() as (parent, workers):
        parent.kill()
    assert all_end(workers)


@pytest.mark.parametrize(
    ("number", "to_group"),
    [
        (signal.SIGINT, True),  # Ctrl-C
        (signal.SIGTERM, False),  # kill
        (signal.SIGUSR1, True),  # SLURM's warning, which would end multiprocessing's own process
        pytest.param(signal.SIGUSR1, False, marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_a_process_and_its_workers_with_one_line(number, to_group):
    with at_work() as (parent, workers):
        (os.killpg if to_group else os.kill)(parent.pid, number)
        _, printed = parent.communicate(timeout=20)
    assert printed == f"aiayn: stopped by {number.name}; repeat the command to go on from here\n"
    assert parent.returncode == INTERRUPTED
    assert all_end(workers)
