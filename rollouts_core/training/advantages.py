"""Advantages of a group: how much better than its siblings an answer was."""

import math
import statistics
from collections.abc import Sequence

STD_EPSILON = 1e-4
"""As TRL adds to the standard deviation."""


def compute_advantages(rewards: Sequence[float], group_index: Sequence[int], normalize_std: bool = True) -> list[float]:
    """GRPO's advantages (arXiv 2402.03300, section 4.1.2): A_i = (r_i - mean) / (std + 1e-4) within each group.

    std is the unbiased one (n - 1), as in TRL and verl. normalize_std=False leaves the division out (Dr. GRPO,
    arXiv 2503.20783). A group of one gets 0.
    """
    groups: dict[int, list[float]] = {}
    for reward, group in zip(rewards, group_index, strict=True):
        groups.setdefault(group, []).append(reward)
    mean = {group: math.fsum(values) / len(values) for group, values in groups.items()}
    scale = {group: _scale(values) if normalize_std else 1.0 for group, values in groups.items()}
    return [(reward - mean[group]) / scale[group] for reward, group in zip(rewards, group_index, strict=True)]


def _scale(values: Sequence[float]) -> float:
    return (statistics.stdev(values) if len(values) > 1 else 0.0) + STD_EPSILON
