"""A curve in one line of text."""

from collections.abc import Sequence
from itertools import pairwise
from math import isfinite
from statistics import fmean

BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw a curve with at most `width` characters. A constant curve is a line in the middle."""
    drawn = means(values, width)
    low, high = min(drawn, default=0.0), max(drawn, default=0.0)
    if low == high:
        return BARS[len(BARS) // 2] * len(drawn)
    return "".join(BARS[min(len(BARS) - 1, int((mean - low) / (high - low) * len(BARS)))] for mean in drawn)


def means(values: Sequence[float], most: int) -> list[float]:
    """At most `most` means, each of the same number of values, give or take one. Infinite values and NaN
    are left out."""
    finite = [value for value in values if isfinite(value)]
    count = min(most, len(finite))
    edges = [round(place * len(finite) / count) for place in range(count + 1)] if count else []
    return [fmean(finite[begin:end]) for begin, end in pairwise(edges)]
