"""Rewards: a function of a sample, or one of these classes.

    Reward        a number, with what it is made of and what single turns have earned
    GroupReward   looks at all answers to a prompt together
    OpenReward    needs something open while it is used: connections, processes, a model

Functions may be async. A sample of an environment has its `trajectory`; without one, `response` is all there is.
"""

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

from rollouts_core.errors import RewardFailed
from rollouts_core.types import Sample


@dataclass(frozen=True)
class Reward:
    """A reward with its parts, or with the rewards of single turns.

    Examples:
        >>> rc.Reward(1.5, {"correct": 1.0, "short": 0.5}).total
        1.5
    """

    value: float
    components: Mapping[str, float] = field(default_factory=dict)
    """The parts of the reward by name; each is logged."""
    turns: tuple[float, ...] = ()
    """Further rewards of each turn of the assistant, credited to that turn. The answer's reward includes them."""

    @property
    def total(self) -> float:
        return self.value + sum(self.turns)


Value = float | Reward
RewardFunction = Callable[[Sample], Value | Awaitable[Value]]


@dataclass(frozen=True)
class GroupReward:
    """A reward function of all answers to a prompt: one reward for each. An exception in its place fails that answer.

    Examples:
        >>> best = rc.GroupReward(lambda samples: [float(len(s.response)) for s in samples])
        >>> best.function(samples)[0] >= 0
        True
    """

    function: Callable[[Sequence[Sample]], Sequence[Value | Exception] | Awaitable[Sequence[Value | Exception]]]


@dataclass(frozen=True)
class OpenReward:
    """A reward that needs something open: opened once, in the event loop that it is used in, and closed at the end."""

    open: Callable[[], AbstractAsyncContextManager["RewardFunction | GroupReward"]]
    check: Callable[[], None] = lambda: None
    """Raises `BadInput` where this machine lacks what it needs."""


AnyReward = RewardFunction | GroupReward | OpenReward


def checked(value: Any, sample: Sample, name: str) -> Reward:
    """Raises `RewardFailed`, naming row and answer, for what is not a finite number, or for other turns than the
    sample's."""
    reward = value if isinstance(value, Reward) else Reward(value)
    numbers = (reward.value, *reward.components.values(), *reward.turns)
    if not all(isinstance(number, int | float) and math.isfinite(number) for number in numbers):
        raise RewardFailed(f"{place_of(sample, name)}: returned {value!r}, which is not a finite number")
    turns = sample.trajectory.final.turn_idx if sample.trajectory else 1
    if reward.turns and len(reward.turns) != turns:
        raise RewardFailed(f"{place_of(sample, name)}: rewarded {len(reward.turns)} turns, and there are {turns}")
    return Reward(float(reward.value), reward.components, tuple(map(float, reward.turns)))


def place_of(sample: Sample, name: str) -> str:
    """The names of a reward and an answer, for messages."""
    return f"reward {name} on source row {sample.prompt.source_row}, answer {sample.response!r}"
