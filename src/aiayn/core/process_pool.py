"""Several processes at work on one thing after another, with the results in order; none outlives this process."""

import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from aiayn.core import signals

Chunk = TypeVar("Chunk")
Answer = TypeVar("Answer")

_NO_MORE = object()


def in_order(
    make: Callable[[], Callable[[Chunk], Answer]], chunks: Iterator[Chunk], max_processes: int, *, apart: bool = False
) -> Iterator[Answer]:
    """For each chunk, what the function gives that `make` makes once in each process; one chunk starts no process.

    A few chunks are in memory. `apart` takes a process even where there is one core: for a library that looks at no
    signal while it works, so that it can be killed.
    """
    first = list(islice(chunks, 2))
    processes = min(cores(), max_processes)
    if len(first) < 2 or (processes == 1 and not apart):
        return map(make(), chain(first, chunks))
    # Not forked: the caller may have threads, which a fork would leave half there
    return _by_processes("spawn", make, chain(first, chunks), processes)


def forked(work: Callable[[Chunk], Answer], items: Sequence[Chunk], processes: int) -> Iterable[Answer]:
    """What `work` gives for each item, by so many processes of one thread, with a copy of this one's memory.

    The copy is made when the first answer is asked for. Fewer where there are fewer items or cores; none, but `map`,
    where one would be left or the system is not Linux. A process that dies is a RuntimeError.
    """
    processes = min(processes, len(items), cores())
    if processes <= 1 or sys.platform != "linux":  # macOS's own libraries do not survive a fork
        return map(work, items)
    return _by_processes("fork", partial(_in_one_thread, work), iter(items), processes)


def _by_processes(
    method: str, make: Callable[[], Callable[[Chunk], Answer]], chunks: Iterator[Chunk], most: int
) -> Iterator[Answer]:
    context = multiprocessing.get_context(method)
    workers: list[_Worker] = []
    idle: list[_Worker] = []
    at_work: dict[Any, tuple[_Worker, int]] = {}
    answers: dict[int, Answer] = {}
    dealt = given = 0
    more = True
    try:
        while more or at_work or answers:
            # As many ahead as keep all at work while the oldest is waited for
            while more and (idle or len(workers) < most) and dealt - given < 2 * most:
                chunk = next(chunks, _NO_MORE)
                more = chunk is not _NO_MORE
                if more:
                    if not idle:
                        idle.append(_Worker(context, make, workers))
                    worker = idle.pop()
                    worker.give(chunk)
                    at_work[worker.link] = worker, dealt
                    dealt += 1
            answered = wait(list(at_work), 0 if given in answers else None)
            for link in answered:
                worker, number = at_work.pop(link)
                answers[number] = worker.answer()
                idle.append(worker)
            if not answered:  # all that can be at work is
                yield answers.pop(given)
                given += 1
    finally:
        for worker in workers:
            worker.process.kill()
        for worker in workers:
            worker.process.join()


class _Worker:
    """A process that answers one chunk after another until it is killed; it counts among `workers` once it runs."""

    def __init__(self, context: Any, make: Callable[[], Callable[[Any], Any]], workers: list["_Worker"]) -> None:
        self.link, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(make, theirs, os.getpid()), daemon=True)
        resource_tracker.ensure_running()  # multiprocessing starts it with the first process, and then unblocks signals
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signals.STOPPING)
        try:
            self.process.start()
            workers.append(self)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()

    def give(self, chunk: Any) -> None:
        try:
            self.link.send(chunk)
        except OSError:
            self._raise_cause()

    def answer(self) -> Any:
        try:
            is_answer, found = self.link.recv()
        except (EOFError, OSError):
            self._raise_cause()
        if not is_answer:
            raise found
        return found

    def _raise_cause(self) -> None:
        self.process.join()
        code = self.process.exitcode or 0
        if -code in signals.STOPPING:  # sent to all processes of a job, and this one's is on its way
            raise signals.interrupted(signal.Signals(-code).name)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        raise RuntimeError(f"a worker process {how}")


def _serve(make: Callable[[], Callable[[Any], Any]], link: Connection, parent: int) -> None:
    signals.serve(parent)
    work = None
    while True:
        try:
            chunk = link.recv()
        except EOFError:
            return
        try:
            work = work or make()
            answer = True, work(chunk)
        except Exception as error:
            error.add_note(f"in a worker process:\n{traceback.format_exc()}")
            answer = False, error
        link.send(answer)


def _in_one_thread(work: Callable[[Chunk], Answer]) -> Callable[[Chunk], Answer]:
    import torch  # takes seconds, and a process of `in_order` does not need it

    torch.set_num_threads(1)
    return work


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
