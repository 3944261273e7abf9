"""A group's way from its prompt to an outcome: answers, scores, filters. What both managers do with each group."""

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import anyio

from rollouts_core.concurrency import first_error
from rollouts_core.data.turns import stop_tokens
from rollouts_core.errors import RolloutsStalled
from rollouts_core.inference.engine import Completion, GenerationRequest, InferenceEngine
from rollouts_core.rollout.answers import SampleFailed, answer_of
from rollouts_core.rollout.episodes import Acting, Ask, Episode, play
from rollouts_core.rollout.filters import GroupFilter
from rollouts_core.rollout.groups import Answer, Group, Outcome, request_for, seed_of, to_samples
from rollouts_core.rollout.settings import RolloutConfig
from rollouts_core.types import Sample

Score = Callable[[Sequence[Sample]], Awaitable[Sequence[Sample]]]
"""Gives samples their rewards; one without is of a group that is to be dropped. See `rewards.scoring`."""
FAILED = "failed"
UNSCORED = "reward_failed"
ABORTED = "aborted"
REFUSED_BATCHES = 20
"""Groups refused for one batch, in batches, before it is given up."""


@dataclass
class Counts:
    """Counts of what happened while a batch was made; each batch begins with new ones."""

    faults: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    causes: Counter[str] = field(default_factory=Counter)
    """Causes of failed samples."""
    reward_seconds: float = 0.0

    def metrics(self) -> dict[str, float]:
        faults = {f"rollout/faults/{name}": float(count) for name, count in self.faults.items()}
        refused = {f"rollout/refused/{name}": float(count) for name, count in self.refused.items()}
        return {**faults, **refused, "rollout/failed_samples": float(sum(self.causes.values()))}


@dataclass(frozen=True)
class Workshop:
    """Everything that work on groups needs."""

    engine: InferenceEngine
    tokenizer: Any
    score: Score
    filters: Mapping[str, GroupFilter]
    config: RolloutConfig
    places: anyio.CapacityLimiter
    """The limit of samples that are generated at the same time."""
    acting: Acting | None = None
    """The environment of episodes; None for one answer to each prompt."""
    note: Callable[[int, Answer], None] = lambda round_number, answer: None
    """Called with each answer that ends, before anything else is done with it."""
    stopping: anyio.Event = field(default_factory=anyio.Event)
    """Once this is set, no new request is made."""

    async def outcome_of(self, group: Group, counts: Counts) -> Outcome:
        """Answer, score and filter a group. An aborted one is refused as such, with what there is of it.

        Raises `RewardFailed` when the reward function raises, hangs, or returns no number, and that is to stop.
        """
        try:
            with first_error():
                group = await self._answered(group, counts)
        except SampleFailed:
            return Outcome(group, refused=FAILED)
        if not group.is_answered:
            return Outcome(group, refused=ABORTED)
        samples = await self._scored(to_samples(group, self.tokenizer), counts)
        if any(sample.reward is None for sample in samples):
            counts.refused[UNSCORED] += 1
            return Outcome(group, refused=UNSCORED)
        refusing = [name for name, accepts in self.filters.items() if not accepts(samples)]
        counts.refused.update(refusing[:1])
        return Outcome(group, tuple(samples), refusing[0] if refusing else "")

    @cached_property
    def _stop(self) -> tuple[int, ...]:
        return stop_tokens(self.tokenizer)

    async def _answered(self, group: Group, counts: Counts) -> Group:
        stop = self._stop
        answers = list(group.answers)

        async def answer(number: int) -> None:
            async with self.places:
                if not self.stopping.is_set():
                    answers[number] = await self._answer(group, number, stop, counts)

        async with anyio.create_task_group() as samples:
            for number, there in enumerate(group.answers):
                if there is None or there.finish_reason == "abort":
                    samples.start_soon(answer, number)
        return _with_answers(group, answers)

    async def _answer(self, group: Group, number: int, stop: tuple[int, ...], counts: Counts) -> Answer:
        """An answer of a group. If it fails, that is counted, and it begins once more from the start."""
        for before in (group.answers[number], None):
            try:
                done = await self._once(group.with_answer(number, before), number, stop, counts)
            except SampleFailed as error:
                counts.causes[str(error)] += 1
                failure = error
                continue
            if done.finish_reason != "abort":
                self.note(group.round, done)
            return done
        raise failure

    async def _once(self, group: Group, number: int, stop: tuple[int, ...], counts: Counts) -> Answer:
        """Goes on from what is there of the answer."""

        async def ask(request: GenerationRequest, there: Completion | None) -> Completion:
            seconds = self.config.sample_seconds
            return await answer_of(self.engine, request, there, seconds, counts.faults, self.stopping.is_set)

        return await answer_group_member(group, number, ask, self.config, stop, self.acting, self.stopping.is_set)

    async def _scored(self, samples: Sequence[Sample], counts: Counts) -> Sequence[Sample]:
        began = time.perf_counter()
        try:
            return await self.score(samples)
        finally:
            counts.reward_seconds += time.perf_counter() - began


async def answer_group_member(
    group: Group,
    number: int,
    ask: Ask,
    config: RolloutConfig,
    stop: tuple[int, ...],
    acting: Acting | None,
    stopping: Callable[[], bool] = lambda: False,
) -> Answer:
    """An answer to a group's prompt, continued from what there is of it. Raises `SampleFailed` as `ask` and `play`
    do."""
    before, request = group.answers[number], request_for(group, number, config, stop)
    if acting is None:
        assert not isinstance(before, Episode), "an episode goes on in its environment"
        return await ask(request, before)
    assert not isinstance(before, Completion), "what is there of an episode is one"
    seed = seed_of(group, number, config)
    return await play(acting, ask, group.prompt, request.request_id, seed, before, config, stopping)


def refuse_endless_failure(counts: Counts, config: RolloutConfig) -> None:
    """Raises `RolloutsStalled` with the causes when more samples failed, within one batch, than it has."""
    limit = config.batch_size * config.n_samples_per_prompt
    if sum(counts.causes.values()) > limit:
        listed = "".join(f"\n  {count} x {cause}" for cause, count in counts.causes.most_common(5))
        raise RolloutsStalled(f"more samples failed than a batch has ({limit}):{listed}")


def refuse_starvation(counts: Counts, config: RolloutConfig) -> None:
    """Raises `RolloutsStalled` with the filters' names when they refuse nearly everything."""
    if sum(counts.refused.values()) > REFUSED_BATCHES * config.batch_size:
        listed = ", ".join(f"{name} {count}" for name, count in counts.refused.most_common())
        raise RolloutsStalled(
            f"the filters have refused {REFUSED_BATCHES} times as many groups as a batch has: {listed}"
        )


def _with_answers(group: Group, answers: Sequence[Answer | None]) -> Group:
    for number, answer in enumerate(answers):
        group = group.with_answer(number, answer)
    return group
