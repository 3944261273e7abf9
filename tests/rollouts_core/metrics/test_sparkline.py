"""Curves in a line of text."""

import math

from hypothesis import given
from hypothesis import strategies as st

from rollouts_core.metrics.sparkline import BARS, sparkline


def test_a_rising_curve_rises() -> None:
    assert sparkline(list(range(8)), 8) == BARS
    assert sparkline(list(range(800)), 8) == BARS


def test_a_curve_that_does_not_change_is_a_line() -> None:
    assert sparkline([0.0, 0.0, 0.0], 10) == "▅▅▅"
    assert sparkline([], 10) == sparkline([math.nan, math.inf], 10) == ""


@given(st.lists(st.floats(-1e9, 1e9)), st.integers(1, 60))
def test_it_is_as_long_as_it_may_be_and_no_longer(values: list[float], width: int) -> None:
    drawn = sparkline(values, width)
    assert len(drawn) == min(width, len(values))
    assert set(drawn) <= set(BARS)
