"""Batches one after another: `AsyncRolloutManager.generate_batch`, with nothing under way in between.

Decision: with one seed and one version of the weights a batch is the same whatever ends first (given an engine that
honours seeds): groups are chosen in the order of issue, and the buffer stands behind the last one chosen. What was
issued beyond it is ended and issued again for the next batch.

Decision: with `max_staleness`, aborted answers keep their tokens and continue in the next batch, and groups are chosen
as they come, the best filled first. This is partial rollout (SLIME): long answers do not hold up a batch, and their
first tokens are from older weights.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import anyio
from anyio.abc import TaskGroup

from rollouts_core.concurrency import first_error
from rollouts_core.data.prompts import DataBuffer, of_rows
from rollouts_core.errors import RolloutsStalled
from rollouts_core.inference.engine import InferenceEngine
from rollouts_core.rewards.reward import AnyReward
from rollouts_core.rewards.scoring import Scoring
from rollouts_core.rollout.episodes import Acting
from rollouts_core.rollout.filters import GroupFilter
from rollouts_core.rollout.generate import new_groups
from rollouts_core.rollout.groups import (
    Answer,
    Choice,
    Group,
    Outcome,
    best_filled,
    choose,
    group_from_data,
    group_to_data,
)
from rollouts_core.rollout.journal import RolloutJournal
from rollouts_core.rollout.outcomes import ABORTED, Counts, Workshop, refuse_endless_failure, refuse_starvation
from rollouts_core.rollout.settings import RolloutConfig
from rollouts_core.types import Prompt, Sample

ABORT_AGAIN_SECONDS = 0.5


@dataclass(frozen=True)
class GeneratedBatch:
    """Scored samples of `batch_size` groups, one group after another."""

    samples: tuple[Sample, ...]
    metrics: Mapping[str, float]


class AsyncRolloutManager:
    """Generates batches from an engine and a buffer of prompts."""

    def __init__(
        self,
        engine: InferenceEngine,
        tokenizer: Any,
        data_buffer: DataBuffer,
        reward: AnyReward,
        config: RolloutConfig,
        filters: Mapping[str, GroupFilter] | None = None,
        journal: RolloutJournal | None = None,
        acting: Acting | None = None,
    ) -> None:
        """`journal` keeps finished answers over a kill; on-policy only."""
        self._buffer, self._config, self._journal = data_buffer, config, journal
        self._engine, self._scoring = engine, Scoring(reward, config.scoring)
        self._workshop = partial(Workshop, engine, tokenizer, self._scoring, filters or {}, config, acting=acting)
        self._carried: list[Group] = []

    async def generate_batch(self, step: int) -> GeneratedBatch:
        """The batch of a step, counted from 1; the same step again gives the same batch.

        Raises `RolloutsStalled` at its deadline or when nearly everything is refused or fails, `RewardFailed` as
        rewards do. Both name what was waited for.
        """
        batch = _Round(step, self._config, self._buffer, self._carried, self._known(step))
        try:
            with first_error(), anyio.fail_after(self._config.batch_seconds):
                chosen = await batch.make(self._new_workshop())
        except TimeoutError:
            raise RolloutsStalled(
                f"batch {step} was not complete after {self._config.batch_seconds:g} s: {batch.told()}"
            ) from None
        self._buffer, self._carried = batch.buffer, batch.carried
        return GeneratedBatch(samples_of(chosen), {**batch.counts.metrics(), **batch.metrics()})

    async def aclose(self) -> None:
        """End what rewards have opened."""
        await self._scoring.aclose()

    def state(self) -> dict[str, Any]:
        """The state as JSON data: the buffer's place, and what is carried over."""
        return {**self._buffer.position(), "groups": [group_to_data(group) for group in self._carried]}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._buffer = self._buffer.at(state)
        self._carried = groups_from_state(state, self._buffer.prompts)

    def _known(self, step: int) -> Mapping[str, Answer]:
        return self._journal.finished(step, self._engine.weight_version) if self._journal else {}

    def _new_workshop(self) -> Workshop:
        places = anyio.CapacityLimiter(self._config.max_concurrent_samples)
        return self._workshop(places, note=self._journal.note) if self._journal else self._workshop(places)


def samples_of(chosen: Sequence[Outcome]) -> tuple[Sample, ...]:
    """Groups numbered by their place in the batch."""
    return tuple(
        replace(sample, group_index=number) for number, outcome in enumerate(chosen) for sample in outcome.samples
    )


def groups_from_state(state: Mapping[str, Any], prompts: Sequence[Prompt]) -> list[Group]:
    groups = state.get("groups", [])
    by_row = of_rows(prompts, {data["row"] for data in groups})
    return [group_from_data(data, by_row) for data in groups]


class _Round:
    """A batch while it is being made."""

    def __init__(
        self,
        step: int,
        config: RolloutConfig,
        buffer: DataBuffer,
        carried: Sequence[Group],
        known: Mapping[str, Answer],
    ) -> None:
        self.step, self.config, self.buffer = step, config, buffer
        self.carried: list[Group] = []
        self.counts = Counts()
        self._known, self._waiting = known, list(carried)
        self._groups: list[Group] = []
        self._buffers: list[DataBuffer] = []
        """The buffer after each group."""
        self._seen: Counter[int] = Counter()
        self._outcomes: dict[int, Outcome] = {}
        self._changed = anyio.Event()
        self._stale = 0

    async def make(self, workshop: Workshop) -> Sequence[Outcome]:
        wanted = self.config.batch_size
        partial = self.config.max_staleness > 0
        async with anyio.create_task_group() as tasks:
            self._issue(math.ceil(wanted * self.config.over_sampling_factor), workshop, tasks)
            while True:
                choice = self._choice_of_those_there() if partial else choose(self._outcomes, len(self._groups), wanted)
                if choice.chosen:
                    break
                if choice.lacking:
                    self._issue(choice.lacking, workshop, tasks)
                await self._changed.wait()
                self._changed = anyio.Event()
            if partial:
                await self._carry_over(choice.chosen, workshop)
            tasks.cancel_scope.cancel()
        if not partial:
            self.buffer = self._buffers[choice.chosen[-1].group.place]
        return choice.chosen

    def told(self) -> str:
        """The state of the batch as text: groups accepted and pending, failures and faults."""
        pending = [group.name for group in self._groups if group.place not in self._outcomes]
        accepted = sum(not outcome.refused for outcome in self._outcomes.values())
        causes = "; ".join(f"{count} x {cause}" for cause, count in self.counts.causes.most_common(3))
        faults = "; ".join(f"{count} x {fault}" for fault, count in self.counts.faults.items())
        return (
            f"{accepted} of {self.config.batch_size} groups accepted, {len(pending)} pending ({', '.join(pending[:5])})"
            f"; failed samples: {causes or 'none'}; faults: {faults or 'none'}"
        )

    def metrics(self) -> dict[str, float]:
        return {
            "rollout/groups_issued": float(len(self._groups)),
            "rollout/groups_carried": float(len(self.carried)),
            "rollout/groups_stale": float(self._stale),
            "timing_s/reward": self.counts.reward_seconds,
        }

    def _issue(self, count: int, workshop: Workshop, tasks: TaskGroup) -> None:
        for _ in range(count):
            group = self._next_group()
            self._groups.append(group)
            tasks.start_soon(self._work, group, workshop)

    def _next_group(self) -> Group:
        place = len(self._groups)
        while self._waiting:
            carried = self._waiting.pop(0)
            return Group(carried.round, place, carried.repeat, carried.prompt, carried.answers)
        prompts, self.buffer = self.buffer.get_prompts(1)
        self._buffers.append(self.buffer)
        (group,) = new_groups(prompts, self.step, place, self.config.n_samples_per_prompt, self._seen)
        for number in range(self.config.n_samples_per_prompt):
            group = group.with_answer(number, self._known.get(f"{group.name}/{number}"))
        return group

    async def _work(self, group: Group, workshop: Workshop) -> None:
        outcome = await workshop.outcome_of(group, self.counts)
        self._outcomes[group.place] = outcome
        refuse_endless_failure(self.counts, self.config)
        refuse_starvation(self.counts, self.config)
        self._changed.set()

    def _choice_of_those_there(self) -> Choice:
        accepted = [outcome for outcome in self._outcomes.values() if not outcome.refused]
        wanted = self.config.batch_size
        if len(accepted) >= wanted:
            return Choice(tuple(best_filled(accepted, wanted)), 0)
        pending = len(self._groups) - len(self._outcomes)
        return Choice((), max(0, wanted - len(accepted) - pending))

    async def _carry_over(self, chosen: Sequence[Outcome], workshop: Workshop) -> None:
        """End what is under way and keep it, with its tokens; what was accepted and not chosen is kept whole."""
        workshop.stopping.set()
        numbers = range(self.config.n_samples_per_prompt)
        while pending := [group for group in self._groups if group.place not in self._outcomes]:
            await workshop.engine.abort([f"{group.name}/{number}" for group in pending for number in numbers])
            with anyio.move_on_after(ABORT_AGAIN_SECONDS):
                await self._changed.wait()
            self._changed = anyio.Event()
        kept = {outcome.group.place for outcome in chosen}
        for place, outcome in sorted(self._outcomes.items()):
            if place not in kept and (not outcome.refused or outcome.refused == ABORTED):
                self._keep(outcome.group, workshop.engine.weight_version)
        for group in self._waiting:
            self._keep(group, workshop.engine.weight_version)

    def _keep(self, group: Group, version: int) -> None:
        """Unless the next batch would find its oldest token too old; then its prompt alone is kept."""
        if self.config.is_stale(group.oldest_version, version + self.config.versions_per_step):
            self._stale += 1
            group = Group(group.round, group.place, group.repeat, group.prompt, (None,) * len(group.answers))
        self.carried.append(group)
