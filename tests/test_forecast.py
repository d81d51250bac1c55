"""Estimates of several devices: exact where the parts are, against a ring that really passes its pieces round."""

import numpy as np
import pytest

from aiayn import forecast
from aiayn.forecast import Link, Pace


def ring(size: int, ranks: int, bytes_a_second: float) -> float:
    """Seconds until every rank has the sum: each sends one piece to the next at every turn. Checks that they do."""
    pieces = np.arange(ranks * ranks, dtype=float).reshape(ranks, ranks)  # rank, piece
    total, at = pieces.sum(0), pieces.copy()
    turns = 0
    for stage in ("add", "copy"):
        for turn in range(ranks - 1):
            sent = at.copy()
            for rank in range(ranks):
                piece = (rank - turn + (stage == "copy")) % ranks
                to = (rank + 1) % ranks
                at[to, piece] = sent[rank, piece] + (at[to, piece] if stage == "add" else 0)
            turns += 1
    assert np.array_equal(at, np.tile(total, (ranks, 1)))
    return turns * size / ranks / bytes_a_second


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 64])
def test_an_all_reduce_takes_as_long_as_a_ring_that_passes_pieces_round(ranks):
    assert forecast.ring_seconds(1009, ranks, 31.0) == pytest.approx(ring(1009, ranks, 31.0))
    if ranks > 1:
        assert forecast.ring_bandwidth(1009, ranks, ring(1009, ranks, 31.0)) == pytest.approx(31.0)


def test_the_pace_of_updates_that_lie_on_a_line_is_that_line():
    tokens = [101, 211, 503, 1009]
    pace = forecast.pace(tokens, [0.017 + 0.0003 * count for count in tokens])
    assert (pace.fixed, pace.each_token) == (pytest.approx(0.017), pytest.approx(0.0003))
    assert pace.seconds(307) == pytest.approx(0.017 + 0.0003 * 307)


def test_no_part_of_a_pace_is_negative():
    pace = forecast.pace([100, 200, 400], [1.0, 2.2, 4.8])  # a line would begin below nothing
    assert pace.fixed == 0
    assert pace.each_token == pytest.approx(0.011, rel=0.1)


def test_an_update_that_is_shared_costs_the_share_and_what_of_the_gradient_the_backward_pass_does_not_hide():
    link = Link(1e9, "made up")
    # A step of 3 ms, of which 2 are the backward pass, and 7 ms of all-reduce
    for last_share, exposed in ((1, 7), (0, 5), (2 / 7, 5), (6 / 7, 6)):
        found = forecast.shared("8", Pace(0.002, 1e-6), 8000, 8, 1_000_000, last_share, link)
        assert found.step_seconds == pytest.approx(0.003)
        assert found.all_reduce_seconds == pytest.approx(2 * 7 / 8 * 4e6 / 1e9)
        assert found.exposed_seconds == pytest.approx(exposed / 1000)
        assert found.rate == pytest.approx(8000 / (0.003 + exposed / 1000))
        assert found.efficiency == pytest.approx(10 / (3 + exposed) / 8)
        assert found.basis == "made up"


def test_only_without_a_fixed_part_and_with_a_boundless_link_is_nothing_lost():
    boundless = Link(float("inf"), "")
    for ranks in (1, 8, 64):
        assert forecast.shared("", Pace(0, 1e-6), 8000, ranks, 1009, 1, boundless).efficiency == pytest.approx(1)
        if ranks > 1:  # controls
            assert forecast.shared("", Pace(0.001, 1e-6), 8000, ranks, 1009, 1, boundless).efficiency < 0.99
            assert forecast.shared("", Pace(0, 1e-6), 8000, ranks, 1009, 1, Link(1e6, "")).efficiency < 0.99
