"""A group's way from its prompt to an outcome: answers, scores, filters. What both managers do with each group."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
from anyio import to_thread

from rollouts_core.errors import RewardFailed, RolloutsStalled
from rollouts_core.inference.engine import Completion, InferenceEngine
from rollouts_core.rollout.answers import SampleFailed, answer_of
from rollouts_core.rollout.filters import GroupFilter
from rollouts_core.rollout.groups import Group, Outcome, request_for, to_samples
from rollouts_core.rollout.settings import RolloutConfig
from rollouts_core.types import Sample

Score = Callable[[list[Sample]], list[Sample]]
FAILED = "failed"
ABORTED = "aborted"
REFUSED_BATCHES = 20
"""Groups refused for one batch, in batches, before it is given up."""


@dataclass
class Counts:
    """What happened while batches were made; taken, and begun anew, with each batch."""

    faults: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    causes: Counter[str] = field(default_factory=Counter)
    """Of failed samples."""
    reward_seconds: float = 0.0

    def metrics(self) -> dict[str, float]:
        faults = {f"rollout/faults/{name}": float(count) for name, count in self.faults.items()}
        refused = {f"rollout/refused/{name}": float(count) for name, count in self.refused.items()}
        return {**faults, **refused, "rollout/failed_samples": float(sum(self.causes.values()))}


@dataclass(frozen=True)
class Workshop:
    """What groups are worked on with."""

    engine: InferenceEngine
    tokenizer: Any
    score: Score
    filters: Mapping[str, GroupFilter]
    config: RolloutConfig
    places: anyio.CapacityLimiter
    """For samples under way."""
    note: Callable[[int, Completion], None] = lambda round_number, answer: None
    """Told of each answer as it ends, before anything else is done with it."""
    stopping: anyio.Event = field(default_factory=anyio.Event)
    """Once it is set, nothing new is asked for."""

    async def outcome_of(self, group: Group, counts: Counts) -> Outcome:
        """Answer, score and filter a group. An aborted one is refused as such, with what there is of it.

        Raises `RewardFailed` when the reward function raises, hangs, or returns no number.
        """
        try:
            with first_error():
                group = await self._answered(group, counts)
        except SampleFailed:
            return Outcome(group, refused=FAILED)
        if not group.is_answered:
            return Outcome(group, refused=ABORTED)
        samples = await self._scored(to_samples(group, self.tokenizer), counts)
        refusing = [name for name, accepts in self.filters.items() if not accepts(samples)]
        counts.refused.update(refusing[:1])
        return Outcome(group, tuple(samples), refusing[0] if refusing else "")

    async def _answered(self, group: Group, counts: Counts) -> Group:
        stop = (self.tokenizer.eos_token_id,)
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

    async def _answer(self, group: Group, number: int, stop: tuple[int, ...], counts: Counts) -> Completion:
        """One that fails is counted, and begun once more from the start."""
        seconds = self.config.sample_seconds
        for before in (group.answers[number], None):
            request = request_for(group.with_answer(number, before), number, self.config, stop)
            try:
                done = await answer_of(self.engine, request, before, seconds, counts.faults, self.stopping.is_set)
            except SampleFailed as error:
                counts.causes[str(error)] += 1
                failure = error
                continue
            if done.finish_reason != "abort":
                self.note(group.round, done)
            return done
        raise failure

    async def _scored(self, samples: list[Sample], counts: Counts) -> list[Sample]:
        began = time.perf_counter()
        try:
            with anyio.fail_after(self.config.reward_seconds):
                return await to_thread.run_sync(partial(self.score, samples), abandon_on_cancel=True)
        except TimeoutError:
            rows = samples[0].prompt.source_row
            raise RewardFailed(
                f"the reward function has not scored the answers to source row {rows} within "
                f"{self.config.reward_seconds:g} s (rl.rollouts.reward_seconds): it hangs, or needs more time"
            ) from None
        finally:
            counts.reward_seconds += time.perf_counter() - began


@contextmanager
def first_error() -> Iterator[None]:
    """What went wrong first, out of the groups that structured concurrency wraps it in."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None


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


def _with_answers(group: Group, answers: Sequence[Completion | None]) -> Group:
    for number, answer in enumerate(answers):
        group = group.with_answer(number, answer)
    return group
