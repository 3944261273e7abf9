"""A curve in one line of text."""

from collections.abc import Sequence
from itertools import pairwise
from math import isfinite
from statistics import fmean

BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int) -> str:
    """At most `width` characters, each the mean of as many values as the others, give or take one; numbers that are
    infinite or none are left out. A curve that does not change is a line in the middle."""
    values = [value for value in values if isfinite(value)]
    count = min(width, len(values))
    edges = [round(place * len(values) / count) for place in range(count + 1)] if count else []
    means = [fmean(values[begin:end]) for begin, end in pairwise(edges)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    if low == high:
        return BARS[len(BARS) // 2] * count
    return "".join(BARS[min(len(BARS) - 1, int((mean - low) / (high - low) * len(BARS)))] for mean in means)
