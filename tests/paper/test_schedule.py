"""Eq. 3 against values worked out by hand."""

import pytest

from aiayn.paper.schedule import learning_rate


@pytest.mark.parametrize(
    ("step", "d_model", "warmup_steps", "rate"),
    # 1/2 * min(1, 1/8); the peak, 1/2 * 1/2; 1/2 * 1/4; 1/5 * 1/10
    [(1, 4, 4, 1 / 16), (4, 4, 4, 1 / 4), (16, 4, 4, 1 / 8), (100, 25, 4, 1 / 50)],
)
def test_eq_3_by_hand(step: int, d_model: int, warmup_steps: int, rate: float) -> None:
    assert learning_rate(step, d_model, warmup_steps) == pytest.approx(rate, rel=1e-12)
