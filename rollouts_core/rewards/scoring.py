"""Samples to scored samples: every kind of reward, within a deadline, and a policy for those that fail.

Decision: the experiment decides what a failed reward means: `stop` ends the run with the row and the answer, `drop`
takes the group out of the batch, `zero` gives the answer a reward of 0. Failures are counted in all cases.
"""

import inspect
import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import anyio
from anyio import to_thread

from rollouts_core.errors import RewardFailed
from rollouts_core.rewards.reward import AnyReward, GroupReward, OpenReward, Reward, RewardFunction, checked, place_of
from rollouts_core.types import Sample

OnFailure = Literal["stop", "drop", "zero"]
FAILED = "failed"
"""The component, 1 where a reward has failed, of rewards that are zero for it."""
TOLD = 5
"""Failures that a process is told of in words."""

Outcome = Reward | Exception
logger = logging.getLogger("rollouts.rewards")


@dataclass(frozen=True)
class ScoringSettings:
    name: str = "given"
    """The reward's name, for messages."""
    seconds: float = 300.0
    """Deadline of one group."""
    on_failure: OnFailure = "stop"


class Scoring:
    """A reward in use. Made in the event loop that it is used in; `aclose` ends what it has opened."""

    def __init__(self, reward: AnyReward, settings: ScoringSettings) -> None:
        self._reward, self._settings = reward, settings
        self._opened: RewardFunction | GroupReward | None = None
        self._opening = anyio.Lock()
        self._closing = AsyncExitStack()
        self._told = 0

    async def __call__(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples of a group with their rewards; all samples of an episode have the same.

        One that fails has no reward where groups are dropped for it. Raises `RewardFailed` where it is to stop.
        """
        last = {sample.episode: sample for sample in samples}
        outcomes = await self._outcomes(list(last.values()))
        found = {episode: self._settled(outcome) for episode, outcome in zip(last, outcomes, strict=True)}
        return [rewarded(sample, found[sample.episode]) for sample in samples]

    async def aclose(self) -> None:
        await self._closing.aclose()

    async def _outcomes(self, answers: Sequence[Sample]) -> Sequence[Outcome]:
        settings = self._settings
        try:
            with anyio.fail_after(settings.seconds):
                return await rewards_of(await self._open(), answers, settings.name)
        except TimeoutError:
            late = RewardFailed(
                f"the reward function {settings.name} has not scored the answers to source row "
                f"{answers[0].prompt.source_row} within {settings.seconds:g} s (rl.rollouts.reward_seconds): it hangs, "
                "or needs more time"
            )
            return [late] * len(answers)

    async def _open(self) -> RewardFunction | GroupReward:
        async with self._opening:
            if self._opened is None:
                self._opened = await opened(self._reward, self._closing)
        return self._opened

    def _settled(self, outcome: Outcome) -> Reward | None:
        if isinstance(outcome, Reward):
            return outcome
        if self._settings.on_failure == "stop":
            raise outcome
        if self._told < TOLD:
            self._told += 1
            logger.warning("%s", outcome)
        return Reward(0.0, {FAILED: 1.0}) if self._settings.on_failure == "zero" else None


def check_reward(reward: AnyReward) -> None:
    """Raises `BadInput` where this machine lacks what the reward needs."""
    if isinstance(reward, OpenReward):
        reward.check()


async def opened(reward: AnyReward, closing: AsyncExitStack) -> RewardFunction | GroupReward:
    return await closing.enter_async_context(reward.open()) if isinstance(reward, OpenReward) else reward


async def rewards_of(reward: RewardFunction | GroupReward, answers: Sequence[Sample], name: str) -> list[Outcome]:
    """The outcome of each answer: its reward, or `RewardFailed` with row and answer."""
    if isinstance(reward, GroupReward):
        return await _of_group(reward, answers, name)
    if not _is_async(reward):
        return await to_thread.run_sync(partial(_one_by_one, reward, answers, name), abandon_on_cancel=True)
    outcomes: list[Outcome] = [RewardFailed("not scored")] * len(answers)

    async def score(place: int) -> None:
        outcomes[place] = await _awaited(reward, answers[place], name)

    async with anyio.create_task_group() as tasks:
        for place in range(len(answers)):
            tasks.start_soon(score, place)
    return outcomes


def compute_reward(sample: Sample, reward: Callable[[Sample], Any], name: str) -> Reward:
    """The reward of one answer by a plain function. Raises `RewardFailed`, naming row and answer, on an exception or a
    non-number.

    Examples:
        >>> rc.compute_reward(samples[0], lambda sample: 0.5, "half").total
        0.5
    """
    try:
        value = reward(sample)
    except Exception as error:
        raise _failed(sample, name, error) from error
    return checked(value, sample, name)


def rewarded(sample: Sample, reward: Reward | None) -> Sample:
    """A copy of the sample with its reward; the sample itself where there is none.

    Examples:
        >>> rc.rewarded(samples[0], rc.Reward(0.5)).reward
        0.5
    """
    if reward is None:
        return sample
    return replace(sample, reward=reward.total, rewards=reward.components, turn_rewards=reward.turns)


def _one_by_one(reward: Callable[[Sample], Any], answers: Sequence[Sample], name: str) -> list[Outcome]:
    outcomes: list[Outcome] = []
    for answer in answers:
        try:
            outcomes.append(compute_reward(answer, reward, name))
        except RewardFailed as error:
            outcomes.append(error)
    return outcomes


async def _awaited(reward: Any, answer: Sample, name: str) -> Outcome:
    try:
        return checked(await reward(answer), answer, name)
    except RewardFailed as error:
        return error
    except Exception as error:
        return _failed(answer, name, error)


async def _of_group(reward: GroupReward, answers: Sequence[Sample], name: str) -> list[Outcome]:
    try:
        if _is_async(reward.function):
            values: Any = await reward.function(answers)  # type: ignore[misc]
        else:
            values = await to_thread.run_sync(partial(reward.function, answers), abandon_on_cancel=True)
    except Exception as error:
        return [_failed(answer, name, error) for answer in answers]
    if len(values) != len(answers):
        found = RewardFailed(f"reward {name}: gave {len(values)} rewards for a group of {len(answers)}")
        return [found] * len(answers)
    return [_of_value(value, answer, name) for value, answer in zip(values, answers, strict=True)]


def _of_value(value: Any, answer: Sample, name: str) -> Outcome:
    if isinstance(value, Exception):
        return value if isinstance(value, RewardFailed) else _failed(answer, name, value)
    try:
        return checked(value, answer, name)
    except RewardFailed as error:
        return error


def _failed(sample: Sample, name: str, error: Exception) -> RewardFailed:
    return RewardFailed(f"{place_of(sample, name)}: raised {type(error).__name__}: {error}")


def _is_async(function: Any) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
