"""Whether replicas that should have the same weights say the same.

Decision: versions and digests tell what a server was given, not what it computes with. So after each update every
replica is asked for the likeliest token after a few fixed prompts. A replica whose log-probabilities differ from the
others' does not serve. Replicas of one engine differ by rounding; other weights differ by more. A single replica has no
other to be compared with.
"""

import math
import statistics
from collections.abc import Mapping, Sequence

from rollouts_core.inference.engine import GenerationRequest, ModelLimits

PROMPTS, LENGTH = 3, 8
TOLERANCE = 0.2
"""Largest difference of a log-probability."""

Said = Sequence[float]
"""Log-probabilities, one for each prompt."""


def probes(limits: ModelLimits) -> list[GenerationRequest]:
    """Greedy requests for one token each."""
    length = min(LENGTH, limits.max_length - 1)
    tokens = [
        tuple((7919 * (prompt * length + place + 1)) % limits.vocab_size for place in range(length))
        for prompt in range(PROMPTS)
    ]
    return [GenerationRequest(f"probe/{number}", prompt, 1, (), 0.0) for number, prompt in enumerate(tokens)]


def outliers(said: Mapping[str, Said]) -> dict[str, float]:
    """Replicas that are further from the median than rounding explains, by name, and how far. Of two that disagree,
    both."""
    if len(said) < 2:
        return {}
    usual = [_median(values) for values in zip(*said.values(), strict=True)]
    distances = {name: max(map(_distance, own, usual)) for name, own in said.items()}
    return {name: distance for name, distance in distances.items() if distance > TOLERANCE}


def _median(values: Sequence[float]) -> float:
    """The median of those that are numbers."""
    return statistics.median([value for value in values if math.isfinite(value)] or [0.0])


def _distance(value: float, usual: float) -> float:
    return abs(value - usual) if math.isfinite(value) else math.inf
