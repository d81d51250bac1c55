"""A schedule gives each row its devices once, longest first, and ends soon."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiayn.config import compose
from aiayn.cost import device_schedule


def rows_of(seconds: list[float]) -> dict[str, float]:
    return {f"row{number}": time for number, time in enumerate(seconds)}


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0.5, 100.0), min_size=1, max_size=20), st.integers(1, 9))
def test_each_row_has_its_devices_once_and_no_device_two_rows(seconds, available) -> None:
    rows = rows_of(seconds)
    draw = random.Random(len(seconds))
    wanted = {row: draw.randint(1, available) for row in rows}
    turns = device_schedule.schedule(rows, wanted, available)
    assert sorted(turn.name for turn in turns) == sorted(wanted)
    for turn in turns:
        assert len(set(turn.devices)) == wanted[turn.name]
        assert turn.end - turn.start == pytest.approx(rows[turn.name] / len(turn.devices))
    for number in range(available):
        own = sorted((turn.start, turn.end) for turn in turns if number in turn.devices)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(own))
    one_each = device_schedule.schedule(rows, dict.fromkeys(wanted, 1), available)
    least = max(max(seconds), sum(seconds) / available)
    # Longest first ends at most a third later than the best there is, which takes `least` or more
    assert least <= device_schedule.length(one_each) * (1 + 1e-9) <= least * 2 + 1e-6
    starts = [rows[turn.name] for turn in one_each]
    assert starts == sorted(starts, reverse=True)
    best = device_schedule.best_schedule(rows, 1, available, available)
    assert device_schedule.length(best) <= device_schedule.length(one_each)


def test_a_schedule_by_hand() -> None:
    rows = rows_of([3, 5, 2, 4])
    turns = device_schedule.schedule(rows, dict.fromkeys(rows, 1), 2)
    planned = [(rows[turn.name], turn.devices, turn.start, turn.end) for turn in turns]
    assert planned == [(5, (0,), 0, 5), (4, (1,), 0, 4), (3, (1,), 4, 7), (2, (0,), 5, 7)]


def test_a_long_row_gets_devices_while_the_whole_ends_sooner() -> None:
    rows = rows_of([60, 10, 10])
    for most, expected in ((1, 1), (2, 2), (3, 3), (4, 3)):
        turns = device_schedule.best_schedule(rows, 1, most, 4)
        assert {turn.name: len(turn.devices) for turn in turns} == {"row0": expected, "row1": 1, "row2": 1}
    assert [len(turn.devices) for turn in device_schedule.best_schedule(rows_of([60]), 1, 4, 4)] == [4]
    assert device_schedule.best_schedule({}, 1, 4, 4) == []
    asked = [compose.compose_row(f"hardware={kind}", "hardware.devices=2").hardware for kind in ("cpu", "gpu")]
    assert [device_schedule.most_of_one(hardware, 8) for hardware in asked] == [2, 8]
