"""Cells of Table 3: how a value and a difference are printed."""

import pytest

from aiayn.tables.columns import differences, value_text


@pytest.mark.parametrize(
    ("metric", "value", "text"),
    [
        ("PPL", 0.128, "+0.13"),
        ("PPL", -0.128, "−0.13"),
        ("PPL", -0.001, "0.00"),
        ("BLEU", 1.26, "+1.3"),
        ("BLEU", None, ""),
    ],
)
def test_a_difference_has_its_sign_unless_printed_as_0(metric, value, text):
    (cell,) = differences(metric, "diff", [value]).cells
    assert cell.text == text


def test_steps_are_printed_in_thousands():
    assert [value_text(100_000, "max_steps"), value_text(1_500, "max_steps"), value_text(2048, "d_ff")] == [
        "100K",
        "1500",
        "2048",
    ]
