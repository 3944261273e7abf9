"""A weighted sum of rewards. Each part is logged by its name.

reward = rubric(
    Criterion("correct", math_equal()),
    Criterion("form", matches(r".*<answer>.*</answer>"), weight=0.2),
    Criterion("calls", lambda sample: ..., weight=0.0),      # only logged
)
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import anyio

from rollouts_core.rewards.reward import AnyReward, GroupReward, OpenReward, Reward, RewardFunction
from rollouts_core.rewards.scoring import Outcome, check_reward, opened, rewards_of
from rollouts_core.types import Sample


@dataclass(frozen=True)
class Criterion:
    name: str
    reward: AnyReward
    weight: float = 1.0
    """0: it is computed and logged, and counts nothing."""


def rubric(*criteria: Criterion) -> OpenReward:
    """The sum of weight x reward over the criteria, which are computed at once. An answer that one of them fails on
    fails. Raises ValueError for names that come twice."""
    names = [criterion.name for criterion in criteria]
    if len(set(names)) < len(names):
        raise ValueError(f"criteria need different names: {', '.join(names)}")

    @asynccontextmanager
    async def open_all() -> AsyncIterator[GroupReward]:
        async with AsyncExitStack() as closing:
            rewards = [await opened(criterion.reward, closing) for criterion in criteria]

            async def weighed(answers: Sequence[Sample]) -> Sequence[Reward | Exception]:
                found = await _all(rewards, names, answers)
                return [_sum(criteria, [of[place] for of in found]) for place in range(len(answers))]

            yield GroupReward(weighed)

    def check() -> None:
        for criterion in criteria:
            check_reward(criterion.reward)

    return OpenReward(open_all, check)


async def _all(
    rewards: Sequence[RewardFunction | GroupReward], names: Sequence[str], answers: Sequence[Sample]
) -> list[Sequence[Outcome]]:
    found: list[Sequence[Outcome]] = [()] * len(rewards)

    async def of(place: int) -> None:
        found[place] = await rewards_of(rewards[place], answers, names[place])

    async with anyio.create_task_group() as tasks:
        for place in range(len(rewards)):
            tasks.start_soon(of, place)
    return found


def _sum(criteria: Sequence[Criterion], outcomes: Sequence[Outcome]) -> Reward | Exception:
    failures = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    if failures:
        return failures[0]
    rewards = [outcome for outcome in outcomes if isinstance(outcome, Reward)]
    weighed = list(zip(criteria, rewards, strict=True))
    turns = [[criterion.weight * turn for turn in reward.turns] for criterion, reward in weighed if reward.turns]
    return Reward(
        sum(criterion.weight * reward.value for criterion, reward in weighed),
        {criterion.name: reward.total for criterion, reward in weighed},
        tuple(map(sum, zip(*turns, strict=True))),
    )
