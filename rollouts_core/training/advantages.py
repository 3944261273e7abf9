"""Advantages: how much better than expected an answer, or a token of it, was.

The first functions give one number per answer, from the rewards of the step and the group of each answer. The last one
gives numbers per token, from a critic. All compute in Python's own float64.
"""

import math
import statistics
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from rollouts_core.errors import BadInput

STD_EPSILON = 1e-4
"""Added to the standard deviation, as in TRL."""

Floats = npt.NDArray[np.float64]


def compute_advantages(rewards: Sequence[float], group_index: Sequence[int], normalize_std: bool = True) -> list[float]:
    """GRPO's advantages (arXiv 2402.03300, section 4.1.2): A_i = (r_i - mean) / (std + 1e-4) within each group.

    std is the unbiased one (n - 1), as in TRL and verl. normalize_std=False leaves the division out (Dr. GRPO,
    arXiv 2503.20783). A group of one gets 0.

    Examples:
        >>> [round(advantage, 3) for advantage in rc.compute_advantages([1.0, 0.0, 0.5], [0, 0, 1])]
        [0.707, -0.707, 0.0]
    """
    means = _by_group(rewards, group_index, _mean)
    centred = [reward - mean for reward, mean in zip(rewards, means, strict=True)]
    if not normalize_std:
        return centred
    deviations = _by_group(rewards, group_index, _deviation)
    return [value / (deviation + STD_EPSILON) for value, deviation in zip(centred, deviations, strict=True)]


def leave_one_out_advantages(rewards: Sequence[float], group_index: Sequence[int]) -> list[float]:
    """RLOO's advantages: A_i = r_i - mean of the others of its group (arXiv 2402.14740, eq. 8). A group of one gets 0.

    Equal to n / (n - 1) times the centred reward.

    Examples:
        >>> rc.leave_one_out_advantages([1.0, 0.0, 0.5], [0, 0, 0])
        [0.75, -0.75, 0.0]
    """
    means = _by_group(rewards, group_index, _mean)
    sizes = _by_group(rewards, group_index, len)
    return [(reward - mean) * size / max(1, size - 1) for reward, mean, size in zip(rewards, means, sizes, strict=True)]


def maxrl_advantages(rewards: Sequence[float], group_index: Sequence[int]) -> list[float]:
    """MaxRL's: A_i = (r_i - mean) / mean within each group, 0 where the mean is 0 (arXiv 2602.02710, algorithm 1).

    For rewards of 0 or more only: raises `BadInput` for others, where the paper defines nothing. Without the paper's
    1 / n, which averaging over answers supplies.
    """
    if min(rewards, default=0.0) < 0:
        raise BadInput(f"rl.algorithm maxrl needs rewards of 0 or more, and rl.reward gave {min(rewards)}")
    means = _by_group(rewards, group_index, _mean)
    return [(reward - mean) / mean if mean else 0.0 for reward, mean in zip(rewards, means, strict=True)]


def batch_normalized(values: Sequence[Floats]) -> list[Floats]:
    """Numbers per token by the mean and standard deviation of all tokens of the step (REINFORCE++, arXiv 2501.03262,
    eq. 9). The deviation is the unbiased one, with 1e-4 added."""
    joined = np.concatenate(list(values)) if values else np.zeros(0)
    if len(joined) < 2:
        return [np.zeros_like(value) for value in values]
    mean, scale = joined.mean(), joined.std(ddof=1) + STD_EPSILON
    return [(value - mean) / scale for value in values]


def generalized_advantages(
    rewards: Floats, values: Floats, gamma: float = 1.0, lam: float = 0.95
) -> tuple[Floats, Floats]:
    """GAE of one answer (arXiv 1506.02438, eq. 16): advantages and returns of its learnt tokens.

    delta_t = r_t + gamma V_{t+1} - V_t and A_t = delta_t + gamma lam A_{t+1}; after the last token both are 0. The
    recursion runs over learnt tokens alone: observations between them are no actions (as in verl). R_t = A_t + V_t.
    """
    advantages = np.zeros_like(values)
    following_value = following = 0.0
    for t in reversed(range(len(values))):
        delta = rewards[t] + gamma * following_value - values[t]
        following = delta + gamma * lam * following
        advantages[t] = following
        following_value = values[t]
    return advantages, advantages + values


def _by_group(
    rewards: Sequence[float], group_index: Sequence[int], statistic: Callable[[Sequence[float]], float]
) -> list[float]:
    """A statistic of each answer's group."""
    groups: dict[int, list[float]] = {}
    for reward, group in zip(rewards, group_index, strict=True):
        groups.setdefault(group, []).append(reward)
    found = {group: statistic(values) for group, values in groups.items()}
    return [found[group] for group in group_index]


def _mean(values: Sequence[float]) -> float:
    """Exactly the value where all are the same, so that they have no advantage over each other."""
    return values[0] if min(values) == max(values) else math.fsum(values) / len(values)


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0
