"""Rewards of an answer's form: a pattern, its length, and how often it repeats itself."""

import re
from collections.abc import Callable

from rollouts_core.types import Sample

Plain = Callable[[Sample], float]


def matches(pattern: str) -> Plain:
    """1.0 where the whole answer, stripped, is of this regular expression, in which a dot is any character."""
    compiled = re.compile(pattern, re.DOTALL)
    return lambda sample: float(compiled.fullmatch(sample.response.strip()) is not None)


def length_penalty(longest: int, buffer: int) -> Plain:
    """0 up to `longest - buffer` tokens, then down in a straight line to -1 at `longest` (DAPO, arXiv 2503.14476,
    eq. 13)."""
    return lambda sample: overlong_penalty(sample.response_length, longest, buffer)


def repetition_penalty(n: int = 3) -> Plain:
    """Minus the share of an answer's n-grams of words that came before: 0 to -1 (arXiv 2502.03373, section 3.3)."""

    def penalty(sample: Sample) -> float:
        words = sample.response.lower().split()
        grams = [tuple(words[place : place + n]) for place in range(len(words) - n + 1)]
        return len(set(grams)) / len(grams) - 1.0 if grams else 0.0

    return penalty


def overlong_penalty(length: int, longest: int, buffer: int) -> float:
    """DAPO's soft punishment of length (arXiv 2503.14476, eq. 13), added to the reward: 0 up to `longest - buffer`
    tokens, then down in a straight line to -1 at `longest`."""
    if buffer <= 0:
        return 0.0
    return -min(1.0, max(0.0, (length - (longest - buffer)) / buffer))
