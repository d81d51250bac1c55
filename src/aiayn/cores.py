"""All cores at work on a stream: chunk by chunk, in order, a few chunks in memory."""

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import chain, islice
from typing import Any, TypeVar

Chunk = TypeVar("Chunk")
Answer = TypeVar("Answer")

_work: Callable[[Any], Any]


def in_order(
    make: Callable[[], Callable[[Chunk], Answer]], chunks: Iterator[Chunk], max_processes: int
) -> Iterator[Answer]:
    """For each chunk, what the function gives that `make` makes once in each process; one chunk starts no process."""
    first = list(islice(chunks, 2))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cores = min(cores, max_processes)
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


def _begin(make: Callable[[], Callable[[Any], Any]]) -> None:
    global _work
    _work = make()


def _go_on(chunk: Any) -> Any:
    return _work(chunk)
