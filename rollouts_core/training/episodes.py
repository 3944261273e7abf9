"""Samples grouped by episode, for advantages and metrics.

Decision: an episode counts once, even if it is trained as several sequences. For the advantages its sequences are
joined, and the result is cut into them again.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rollouts_core.data.tokenized import Floats
from rollouts_core.types import Sample

Episodes = Sequence[Sequence[int]]
"""The places of each episode's samples."""


def episodes_of(samples: Sequence[Sample]) -> list[list[int]]:
    """The places of each episode's samples, in the order in which episodes first appear."""
    found: dict[tuple[int, int], list[int]] = {}
    for place, sample in enumerate(samples):
        found.setdefault((sample.group_index, sample.episode), []).append(place)
    return list(found.values())


def whole(samples: Sequence[Sample]) -> Sample:
    """The samples of one episode as one."""
    if len(samples) == 1:
        return samples[0]
    first, *further = samples
    return replace(
        first,
        tokens=tuple(token for sample in samples for token in sample.tokens),
        loss_mask=tuple(bit for sample in samples for bit in sample.loss_mask),
        rollout_log_probs=first.rollout_log_probs + tuple(p for sample in further for p in _log_probs(sample)),
        weight_versions=first.weight_versions + tuple(v for sample in further for v in _versions(sample)),
    )


def join(values: Sequence[Floats], episodes: Episodes) -> list[Floats]:
    """Numbers per learnt token, of samples, as those of episodes."""
    return [np.concatenate([values[place] for place in places]) for places in episodes]


def split(values: Sequence[Floats], lengths: Sequence[int], episodes: Episodes) -> list[Floats]:
    """The inverse of `join`; `lengths` are the samples' numbers of learnt tokens."""
    found: list[Floats] = [np.zeros(0)] * len(lengths)
    for places, value in zip(episodes, values, strict=True):
        ends = np.cumsum([lengths[place] for place in places])[:-1]
        for place, part in zip(places, np.split(value, ends), strict=True):
            found[place] = part
    return found


def turn_rewards(sample: Sample, length: int) -> Floats:
    """The rewards of single turns, each at its turn's last token. `length`: the learnt tokens of the episode."""
    rewards = np.zeros(length)
    if sample.turn_rewards:
        rewards[turn_ends(sample, length)] = sample.turn_rewards
    return rewards


def turn_ends(sample: Sample, length: int) -> list[int]:
    """Places among an episode's learnt tokens where turns end."""
    if sample.trajectory is None:
        return [length - 1]
    ends = np.cumsum([len(turn.tokens) for turn in sample.trajectory.final.sampled])
    return [int(end) - 1 for end in ends]


def _log_probs(sample: Sample) -> tuple[float, ...]:
    return (0.0,) * len(sample.prompt.tokens) + sample.rollout_log_probs


def _versions(sample: Sample) -> tuple[int, ...]:
    return sample.weight_versions[:1] * len(sample.prompt.tokens) + sample.weight_versions
