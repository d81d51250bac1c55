"""Several processes at work on one thing after another, with the results in order; none outlives this process."""

import multiprocessing
import operator
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from multiprocessing import resource_tracker
from typing import Any, TypeVar

from aiayn.core import signals

Chunk = TypeVar("Chunk")
Answer = TypeVar("Answer")
# Called once in each process, gives the function of a chunk
Make = Callable[[], Callable[[Chunk], Answer]]

_work: Callable[[Any], Any]


def in_order(make: Make[Chunk, Answer], chunks: Iterator[Chunk], max_processes: int) -> Iterator[Answer]:
    """For a stream of chunks, what the function gives that `make` makes once in each process; one chunk starts none."""
    first = list(islice(chunks, 2))
    processes = min(cores(), max_processes)
    if len(first) < 2 or processes == 1:
        return map(make(), chain(first, chunks))
    return _by_processes(make, chain(first, chunks), processes)


def apart(work: Callable[[], Answer]) -> Answer:
    """What `work` gives, in a process of its own: a library that looks at no signal while it works can be killed."""
    answers: Iterator[Answer] = _by_processes(partial(partial, operator.call), iter([work]), 1)
    (answer,) = answers
    return answer


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _by_processes(make: Make[Chunk, Answer], chunks: Iterator[Chunk], processes: int) -> Iterator[Answer]:
    with _blocked():
        resource_tracker.ensure_running()  # else it dies of SIGUSR1, and as it starts with a process unblocks signals
    # Not forked: the caller may have threads, which a fork would leave half there
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(processes, context, _begin, (make, os.getpid()))
    others = set(multiprocessing.active_children())
    at_work: deque[Future[Answer]] = deque()
    try:
        for chunk in chunks:
            # No signal finds a process half started; it inherits the mask, until `_begin` ignores what has come
            with _blocked():
                at_work.append(executor.submit(_answer, chunk))
            # As many ahead as keep all at work while the oldest is waited for
            if len(at_work) == 2 * processes:
                yield at_work.popleft().result()
        while at_work:
            yield at_work.popleft().result()
    except BrokenProcessPool as error:
        raise RuntimeError("a worker process was killed: perhaps the memory is too small") from error
    finally:
        for worker in set(multiprocessing.active_children()) - others:
            worker.kill()
        # Killed as it wrote an answer: the pipe has an end only if this process does not hold it open
        executor._result_queue._writer.close()  # type: ignore[attr-defined]
        executor.shutdown(cancel_futures=True)


@contextmanager
def _blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals.STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(make: Make[Any, Any], parent: int) -> None:
    """Leaves the end of this process to its parent, which a signal to all processes of a job reaches as well."""
    global _work
    signals.die_with_parent(parent)
    for number in signals.STOPPING:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals.STOPPING)
    _work = make()


def _answer(chunk: Any) -> Any:
    return _work(chunk)
