"""Several cores at work on one thing after another, with the results in order."""

import multiprocessing
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from functools import partial
from itertools import chain, islice
from typing import Any, TypeVar

from aiayn import signals

Chunk = TypeVar("Chunk")
Answer = TypeVar("Answer")

_work: Callable[[Any], Any]


def in_order(
    make: Callable[[], Callable[[Chunk], Answer]], chunks: Iterator[Chunk], max_processes: int
) -> Iterator[Answer]:
    """For each chunk, what the function gives that `make` makes once in each process; one chunk starts no process.

    A few chunks are in memory.
    """
    first = list(islice(chunks, 2))
    cores = min(_available(), max_processes)
    if len(first) < 2 or cores == 1:
        yield from map(make(), chain(first, chunks))
        return
    # Not forked: the caller may have threads, which a fork would leave half there
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(cores, context, initializer=_begin, initargs=(make,)) as pool:
        waiting: deque[Future[Answer]] = deque()
        for chunk in chain(first, chunks):
            waiting.append(pool.submit(_go_on, chunk))
            if len(waiting) > cores + 1:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def forked(work: Callable[[Chunk], Answer], items: Sequence[Chunk], processes: int) -> Iterable[Answer]:
    """What `work` gives for each item, by so many processes of one thread, which have this one's memory as it is now.

    Fewer where there are fewer items or cores; none, but `map`, where one would be left or the system is not Linux. A
    process that dies is a RuntimeError; all of them end when the iterator or this process does.
    """
    processes = min(processes, len(items), _available())
    if processes <= 1 or sys.platform != "linux":  # macOS's own libraries do not survive a fork
        return map(work, items)
    import torch  # takes seconds, and a process of `in_order` does not need it
    from torch.utils.data import DataLoader

    return DataLoader(
        _Answers(work, items),  # type: ignore[arg-type]
        batch_size=None,
        collate_fn=_as_it_is,
        num_workers=processes,
        multiprocessing_context="fork",
        worker_init_fn=partial(_die_with, os.getpid()),
        generator=torch.Generator(),  # or each call would draw from what training draws from
    )


class _Answers:
    def __init__(self, work: Callable[[Any], Any], items: Sequence[Any]) -> None:
        self.work, self.items = work, items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, number: int) -> Any:
        return self.work(self.items[number])


def _available() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _as_it_is(answer: Any) -> Any:
    return answer


def _die_with(parent: int, worker: int) -> None:
    signals.die_with(parent)


def _begin(make: Callable[[], Callable[[Any], Any]]) -> None:
    global _work
    _work = make()


def _go_on(chunk: Any) -> Any:
    return _work(chunk)
