"""The seeded cases of the kill matrix: what is hit, in which stage, when."""

import random
from dataclasses import dataclass
from typing import Literal

Fault = Literal[
    "kill orchestrator",
    "kill job",
    "kill runner",
    "kill Prefect server",
    "pause job",
    "pause orchestrator",
    "disk full",
    "store read-only",
    "store unreachable",
]
WEIGHTS: dict[Fault, int] = {
    "kill orchestrator": 20,
    "kill job": 28,
    "kill runner": 12,
    "kill Prefect server": 10,
    "pause job": 8,
    "pause orchestrator": 4,
    "disk full": 6,
    "store read-only": 6,
    "store unreachable": 6,
}
"""How many of 100 cases."""
STAGES = {"tokenize": 2, "sft": 4, "rl-1": 3, "rl-2": 3, "evaluate-sft": 2}
"""Weights."""
OUTAGE = (2.0, 6.0)
"""Seconds that a pause or an outage lasts."""


@dataclass(frozen=True)
class Case:
    number: int
    fault: Fault
    stage: str
    moment: float
    """Share of the stage's usual time after which it is hit."""
    outage: float
    """Seconds."""


def cases(count: int) -> list[Case]:
    """The same for the same count: the faults by their weights, in a seeded order."""
    draw = random.Random(20)
    faults = [fault for fault, weight in WEIGHTS.items() for _ in range(weight)]
    draw.shuffle(faults)
    names, weights = list(STAGES), list(STAGES.values())
    return [
        Case(
            number, faults[number % len(faults)], draw.choices(names, weights)[0], draw.random(), draw.uniform(*OUTAGE)
        )
        for number in range(count)
    ]
