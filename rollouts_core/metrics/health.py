"""Healthy ranges of metrics, and warnings outside them. docs/metrics.md has the same table with reasons."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Range:
    low: float
    high: float
    meaning: str


RANGES: dict[str, Range] = {
    "sampling/sampling_logp_difference/mean": Range(0.0, 0.05, "engine and trainer disagree on the same tokens"),
    "sampling/mismatch_kl": Range(-1e-3, 0.05, "the training data was sampled from another policy"),
    "sampling/importance_sampling_ratio/mean": Range(0.9, 1.1, "the training data was sampled from another policy"),
    "sampling/importance_sampling_ratio/max": Range(0.0, 100.0, "single tokens dominate the gradient"),
    "sampling/corrected_fraction": Range(0.0, 0.1, "many tokens are cut by the correction"),
    "frac_reward_zero_std": Range(0.0, 0.9, "nearly all groups have one reward, and teach nothing"),
    "rewards/failed/mean": Range(0.0, 0.0, "rewards fail, and count as nothing"),
    "episodes/rewritten_turns": Range(0.0, 0.5, "the chat template renders most turns anew; each is trained by itself"),
    "tools/failure_frequency": Range(0.0, 0.5, "most calls of tools fail"),
    "completions/clipped_ratio": Range(0.0, 0.5, "most answers are cut off at max_new_tokens"),
    "entropy": Range(1e-3, float("inf"), "the policy has collapsed to one answer"),
}
AGAIN_STEPS = 50
"""The same warning is not repeated for so many steps."""


@dataclass
class Warnings:
    """The warnings that were given, so that they are not repeated at every step."""

    _said: dict[str, int] = field(default_factory=dict)

    def about(self, metrics: Mapping[str, float], step: int) -> list[str]:
        found = []
        for name, healthy in RANGES.items():
            value = metrics.get(name)
            if value is None or healthy.low <= value <= healthy.high:
                continue
            if step - self._said.get(name, -AGAIN_STEPS) >= AGAIN_STEPS:
                self._said[name] = step
                found.append(
                    f"warning: step {step}: {name} is {value:.4g}, outside {healthy.low:g} to {healthy.high:g}: "
                    f"{healthy.meaning}"
                )
        return found
