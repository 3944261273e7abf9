"""A band for each replica that generated: how fast it was over the steps, and where it was away."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

RATE = re.compile(r"replicas/(.+)/tokens_per_second")
COLUMNS = 160
"""More steps than these share them."""

Records = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Cell:
    """Steps that lie side by side in a band, at one speed."""

    first: int
    last: int
    """Steps."""
    share: float
    """Share of all the band's steps."""
    tokens_per_second: float
    """Mean; 0 where the replica was away."""
    strength: float
    """The speed, between 0 and 1: the fastest cell of all bands is 1."""


@dataclass(frozen=True)
class Band:
    name: str
    cells: Sequence[Cell]
    mean: float
    """Tokens per second over the steps in which it served."""


def rates(records: Records) -> dict[str, list[float]]:
    """Tokens per second of each replica that ever served, at each step; 0 while it was away."""
    keys = {found[1]: key for record in records for key in record if (found := RATE.fullmatch(key))}
    return {name: [float(record.get(keys[name], 0.0)) for record in records] for name in sorted(keys)}


def bands(records: Records) -> list[Band]:
    """`records`: metrics of an RL run, one for each step."""
    steps = [record["step"] for record in records]
    size = max(1, -(-len(steps) // COLUMNS))
    found = {
        name: [_mean(values[start : start + size]) for start in range(0, len(values), size)]
        for name, values in rates(records).items()
    }
    fastest = max((value for means in found.values() for value in means), default=0.0) or 1.0
    return [Band(name, _cells(means, steps, size, fastest), _served(means)) for name, means in found.items()]


def _cells(means: Sequence[float], steps: Sequence[int], size: int, fastest: float) -> list[Cell]:
    """Neighbours that look the same are one."""
    strengths = [round(mean / fastest, 1) if mean else 0.0 for mean in means]
    cells = []
    for _, run in groupby(range(len(means)), key=lambda place: (strengths[place], means[place] > 0)):
        places = list(run)
        begin, end = places[0] * size, min(len(steps), (places[-1] + 1) * size)
        mean = _mean([means[place] for place in places])
        strength = max(0.15, mean / fastest) if mean else 0.0
        cells.append(Cell(steps[begin], steps[end - 1], (end - begin) / len(steps), mean, strength))
    return cells


def _served(means: Sequence[float]) -> float:
    return _mean([mean for mean in means if mean])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
