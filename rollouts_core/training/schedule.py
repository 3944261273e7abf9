"""Learning-rate schedules: linear warm-up, then cosine, linear, stable-then-decay or no decay, to zero.

Decision: a schedule is a function of the step alone, so there is no scheduler whose state could be lost.
"""

import math
from collections.abc import Callable
from functools import partial

from rollouts_core.config import Schedule

Rate = Callable[[int], float]
"""The factor on the peak learning rate at optimizer step `step`, counted from 0."""
DECAY_SHARE = 0.2
"""The share of all steps over which stable_then_decay falls, in a straight line (arXiv 2404.06395, section 4)."""


def create_scheduler(kind: Schedule, warmup_steps: int, num_steps: int) -> Rate:
    return partial(rate, kind, warmup_steps=warmup_steps, num_steps=num_steps)


def create_warmup_cosine_scheduler(warmup_steps: int, num_steps: int) -> Rate:
    """A linear warm-up, then a cosine to zero: the factor on the learning rate at each step.

    Examples:
        >>> rate = rc.create_warmup_cosine_scheduler(warmup_steps=2, num_steps=10)
        >>> [round(rate(step), 2) for step in (0, 2, 6)]
        [0.33, 1.0, 0.5]
    """
    return create_scheduler("cosine", warmup_steps, num_steps)


def rate(kind: Schedule, step: int, warmup_steps: int, num_steps: int) -> float:
    """The factor on the peak learning rate at optimizer step `step`, counted from 0; the first step is not lost."""
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    if kind == "constant":
        return 1.0
    falling = num_steps - warmup_steps
    if kind == "stable_then_decay":
        falling = min(falling, max(1, round(DECAY_SHARE * num_steps)))
    left = min(1.0, max(0.0, (num_steps - step) / max(1, falling)))
    return 0.5 * (1 - math.cos(math.pi * left)) if kind == "cosine" else left
