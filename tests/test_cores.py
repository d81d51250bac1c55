"""Work on a stream: the same answers in the same order whatever the processes, and never all of it in memory."""

from collections.abc import Callable, Iterator
from functools import partial

import pytest

from aiayn import cores
from aiayn.cores import in_order


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
