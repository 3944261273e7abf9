"""Batches that are generated while others are trained on: bounded off-policy rollouts.

Decision: generation never stops. New weights come between two tokens, and each token knows its version. Staleness is
bounded by how far generation may be ahead: groups that are under way or ready are never more than `max_staleness`
batches. A group that is still too old, because it took longer than others, is dropped and counted, and its prompt is
issued again.

Decision: of the groups that are ready, the best filled are taken first, and among equals those that have waited
longest.
"""

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import anyio

from rollouts_core.concurrency import first_error
from rollouts_core.data.prompts import DataBuffer, of_rows
from rollouts_core.errors import RolloutsStalled
from rollouts_core.inference.engine import InferenceEngine
from rollouts_core.rewards.reward import AnyReward
from rollouts_core.rewards.scoring import Scoring
from rollouts_core.rollout.episodes import Acting
from rollouts_core.rollout.filters import GroupFilter
from rollouts_core.rollout.generate import new_groups
from rollouts_core.rollout.groups import Group, Outcome, best_filled, group_from_data, group_to_data, to_samples
from rollouts_core.rollout.manager import GeneratedBatch, groups_from_state, samples_of
from rollouts_core.rollout.outcomes import Counts, Workshop, refuse_endless_failure, refuse_starvation
from rollouts_core.rollout.settings import RolloutConfig
from rollouts_core.types import Sample


class OverlappedRollouts:
    """Groups in the making, and those that are ready. `run` makes them for as long as it is let run."""

    def __init__(
        self,
        engine: InferenceEngine,
        tokenizer: Any,
        data_buffer: DataBuffer,
        reward: AnyReward,
        config: RolloutConfig,
        filters: Mapping[str, GroupFilter] | None = None,
        acting: Acting | None = None,
    ) -> None:
        """`config.max_staleness` must be at least 1."""
        self._engine, self._buffer, self._config = engine, data_buffer, config
        self._scoring = Scoring(reward, config.scoring)
        places = anyio.CapacityLimiter(config.max_concurrent_samples)
        self._workshop = Workshop(engine, tokenizer, self._scoring, filters or {}, config, places, acting)
        self._tokenizer = tokenizer
        self._waiting: list[Group] = []
        self._running: dict[tuple[int, int], Group] = {}
        self._ready: list[Outcome] = []
        self._issued = 0
        self._seen: Counter[int] = Counter()
        self._changed = anyio.Event()
        self._failure: BaseException | None = None
        self._counts = Counts()
        self._stale = 0
        self._idle_since: float | None = None
        self._idle = 0.0

    async def run(self) -> None:
        """Make groups until cancelled. What ends it otherwise is raised by `next_batch`."""
        try:
            with first_error():
                async with anyio.create_task_group() as tasks:
                    while True:
                        await self._until_there_is_room()
                        group = self._next_group()
                        self._running[group.round, group.place] = group
                        tasks.start_soon(self._work, group)
        except Exception as error:
            self._failure = error
            self._wake()

    async def next_batch(self, step: int) -> GeneratedBatch:
        """A batch for the engine's weights. Raises `RolloutsStalled` at its deadline, and what ended `run`."""
        began = time.perf_counter()
        try:
            with anyio.fail_after(self._config.batch_seconds):
                chosen = await self._chosen()
        except TimeoutError:
            raise RolloutsStalled(
                f"batch {step} was not complete after {self._config.batch_seconds:g} s: {len(self._ready)} of "
                f"{self._config.batch_size} groups ready, {len(self._running)} under way; failed samples: "
                f"{dict(self._counts.causes)}, faults: {dict(self._counts.faults)}"
            ) from None
        samples = samples_of(chosen)
        metrics = {
            **self._counts.metrics(),
            **self._taken_metrics(),
            "timing_s/trainer_waiting_for_data": time.perf_counter() - began,
        }
        self._counts = Counts()
        return GeneratedBatch(samples, metrics)

    async def aclose(self) -> None:
        """End what rewards have opened."""
        await self._scoring.aclose()

    def state(self) -> dict[str, Any]:
        """The state as JSON data: the buffer's place, groups that are ready with their scores, and prompts to issue
        again."""
        ready = [{**group_to_data(o.group), "scores": [_score(sample) for sample in o.samples]} for o in self._ready]
        unfinished = [*self._running.values(), *self._waiting]
        groups = [group_to_data(group) for group in unfinished]
        return {**self._buffer.position(), "issued": self._issued, "groups": groups, "ready": ready}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up a saved state; one of `AsyncRolloutManager` does as well."""
        prompts = self._buffer.prompts
        self._buffer = self._buffer.at(state)
        self._issued = state.get("issued", 0)
        self._waiting = groups_from_state(state, prompts)
        ready = state.get("ready", [])
        by_row = of_rows(prompts, {data["row"] for data in ready})
        for data in ready:
            group = group_from_data(data, by_row)
            pairs = zip(to_samples(group, self._tokenizer), data["scores"], strict=True)
            scored = tuple(
                replace(sample, **{**score, "turn_rewards": tuple(score["turn_rewards"])}) for sample, score in pairs
            )
            self._ready.append(Outcome(group, scored))

    async def _chosen(self) -> Sequence[Outcome]:
        while True:
            if self._failure is not None:
                raise self._failure
            self._drop_stale()
            if len(self._ready) >= self._config.batch_size:
                chosen = best_filled(self._ready, self._config.batch_size)
                taken = set(map(id, chosen))
                self._ready = [outcome for outcome in self._ready if id(outcome) not in taken]
                self._wake()
                return chosen
            await self._changed.wait()

    def _drop_stale(self) -> None:
        version = self._engine.weight_version
        for outcome in list(self._ready):
            if self._config.is_stale(outcome.group.oldest_version, version):
                self._ready.remove(outcome)
                self._stale += 1
                self._waiting.append(_emptied(outcome.group))
                self._wake()

    async def _until_there_is_room(self) -> None:
        config = self._config
        limit = math.ceil(config.batch_size * config.max_staleness * config.over_sampling_factor)
        while len(self._running) + len(self._ready) >= limit:
            if self._idle_since is None and not self._running:
                self._idle_since = time.perf_counter()
            changed = self._changed
            await changed.wait()
        if self._idle_since is not None:
            self._idle += time.perf_counter() - self._idle_since
            self._idle_since = None

    def _next_group(self) -> Group:
        if self._waiting:
            return self._waiting.pop(0)
        round_number, place = self._issued // self._config.batch_size + 1, self._issued % self._config.batch_size
        if place == 0:
            self._seen.clear()
        prompts, self._buffer = self._buffer.get_prompts(1)
        self._issued += 1
        (group,) = new_groups(prompts, round_number, place, self._config.n_samples_per_prompt, self._seen)
        return group

    async def _work(self, group: Group) -> None:
        outcome = await self._workshop.outcome_of(group, self._counts)
        del self._running[group.round, group.place]
        if not outcome.refused:
            self._ready.append(outcome)
        refuse_endless_failure(self._counts, self._config)
        refuse_starvation(self._counts, self._config)
        if self._idle_since is None and not self._running and len(self._ready) >= self._config.batch_size:
            self._idle_since = time.perf_counter()
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    def _taken_metrics(self) -> dict[str, float]:
        idle = self._idle
        if self._idle_since is not None:
            now = time.perf_counter()
            idle, self._idle_since = idle + now - self._idle_since, now
        stale, self._idle, self._stale = self._stale, 0.0, 0
        return {
            "rollout/groups_ready": float(len(self._ready)),
            "rollout/groups_running": float(len(self._running)),
            "rollout/groups_stale": float(stale),
            "timing_s/generation_waiting_for_trainer": idle,
            "timing_s/reward": self._counts.reward_seconds,
        }


def _score(sample: Sample) -> dict[str, Any]:
    return {"reward": sample.reward, "rewards": dict(sample.rewards), "turn_rewards": list(sample.turn_rewards)}


def _emptied(group: Group) -> Group:
    return Group(group.round, group.place, group.repeat, group.prompt, (None,) * len(group.answers))
