"""Batches from a function of one's own."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollouts_core.data.prompts import DataBuffer
from rollouts_core.errors import BadInput
from rollouts_core.rewards.scoring import compute_reward, rewarded
from rollouts_core.rollout.manager import GeneratedBatch
from rollouts_core.types import Prompt, Sample

Sampler = Callable[[Sequence[Prompt], int], Sequence[Sample]]
"""(prompts, step) -> unscored samples; a prompt's samples follow one another and share a `group_index`."""


class SampledRollouts:
    """Fits `RolloutSource`. The sampler finds new weights in the model itself, which is trained in place."""

    def __init__(
        self, sampler: Sampler, buffer: DataBuffer, reward: Callable[[Sample], Any], batch_size: int, name: str
    ) -> None:
        self._sampler, self._buffer, self._reward = sampler, buffer, reward
        self._batch_size, self._name = batch_size, name

    def next_batch(self, step: int) -> GeneratedBatch:
        prompts, self._buffer = self._buffer.get_prompts(self._batch_size)
        samples = tuple(self._sampler(prompts, step))
        if wrong := [sample for sample in samples if not isinstance(sample, Sample)]:
            raise BadInput(f"sampler: it gave a {type(wrong[0]).__name__}, not a Sample")
        if len({sample.group_index for sample in samples}) != len(prompts):
            groups = len({sample.group_index for sample in samples})
            raise BadInput(f"sampler: it gave samples of {groups} groups for {len(prompts)} prompts")
        scored = (rewarded(sample, compute_reward(sample, self._reward, self._name)) for sample in samples)
        return GeneratedBatch(tuple(scored), {})

    def publish(self, weights: Mapping[str, Any], version: int) -> Mapping[str, float]:
        return {}

    def state(self) -> dict[str, Any]:
        return dict(self._buffer.position())

    def restore(self, state: Mapping[str, Any]) -> None:
        self._buffer = self._buffer.at(state)
