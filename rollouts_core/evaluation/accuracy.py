"""Accuracy of a policy on held-out prompts, with its uncertainty."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from rollouts_core.inference.torch_engine import TorchEngine
from rollouts_core.rewards.functions import RewardFunction, score
from rollouts_core.rollout.generate import generate_samples
from rollouts_core.rollout.settings import RolloutConfig
from rollouts_core.types import Prompt, Sample


@dataclass(frozen=True)
class Accuracy:
    """`correct` of `total`, and the 95 % Wilson interval of the share."""

    correct: int
    total: int
    low: float
    high: float

    @property
    def value(self) -> float:
        return self.correct / self.total


def evaluate(
    engine: TorchEngine,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    reward: RewardFunction,
    reward_name: str,
    max_new_tokens: int,
) -> tuple[Accuracy, list[Sample]]:
    """Greedy answers to the prompts and the share whose reward is at least 1."""
    settings = RolloutConfig(
        batch_size=len(prompts), n_samples_per_prompt=1, max_new_tokens=max_new_tokens, temperature=0.0, seed=0
    )
    samples = score(generate_samples(engine, tokenizer, prompts, settings), reward, reward_name)
    correct = sum(sample.reward is not None and sample.reward >= 1 for sample in samples)
    return Accuracy(correct, len(samples), *wilson_interval(correct, len(samples))), samples


def wilson_interval(correct: int, total: int, confidence: float = 0.95) -> tuple[float, float]:
    """The score interval of a binomial share (Wilson 1927, JASA 22): sound near 0 and 1, unlike the normal one."""
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share = correct / total
    centre = (share + z * z / (2 * total)) / (1 + z * z / total)
    half = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total)) / (1 + z * z / total)
    return max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))
