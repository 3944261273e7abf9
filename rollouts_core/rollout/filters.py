"""Filters of groups: functions of a group's scored samples that say whether to train on it.

Decision: a filter decides about whole groups, before a batch is put together. A refused group is replaced by one of
another prompt and counted by the filter's name. A user's own filter is named by import path, like a reward.
"""

import statistics
from collections.abc import Callable, Sequence

from rollouts_core.store.identity import External
from rollouts_core.types import Sample, Status
from rollouts_core.user_code import identify_function, load_function

GroupFilter = Callable[[Sequence[Sample]], bool]
MIN_REWARD = 0.0
MIN_DISTINCT = 0.5
SUCCESS = 1.0


def check_reward_nonzero_std(samples: Sequence[Sample]) -> bool:
    """The rewards differ: otherwise every advantage is 0 (DAPO's dynamic sampling, arXiv 2503.14476, eq. 11).

    Examples:
        >>> rc.check_reward_nonzero_std(group) in (True, False)
        True
    """
    return statistics.pstdev(rewards_of(samples)) > 0


def check_min_reward(samples: Sequence[Sample]) -> bool:
    """The mean reward is above 0.

    Examples:
        >>> rc.check_min_reward(group) in (True, False)
        True
    """
    return statistics.fmean(rewards_of(samples)) > MIN_REWARD


def check_any_success(samples: Sequence[Sample]) -> bool:
    """Whether at least one sample has a reward of 1 or more.

    Examples:
        >>> rc.check_any_success(group) in (True, False)
        True
    """
    return max(rewards_of(samples)) >= SUCCESS


def check_response_diversity(samples: Sequence[Sample]) -> bool:
    """Whether at least half of the answers are distinct, token by token.

    Examples:
        >>> rc.check_response_diversity(group) in (True, False)
        True
    """
    answers = {sample.tokens[len(sample.prompt.tokens) :] for sample in samples}
    return len(answers) >= MIN_DISTINCT * len(samples)


def check_reasonable_length(samples: Sequence[Sample]) -> bool:
    """Whether some answer ended before its limit, and none is empty.

    Examples:
        >>> rc.check_reasonable_length(group) in (True, False)
        True
    """
    ended = any(sample.status == Status.COMPLETED for sample in samples)
    return ended and all(sample.response_length > 0 for sample in samples)


def check_quality_and_diversity(samples: Sequence[Sample]) -> bool:
    """`check_min_reward` and `check_response_diversity`.

    Examples:
        >>> rc.check_quality_and_diversity(group) in (True, False)
        True
    """
    return check_min_reward(samples) and check_response_diversity(samples)


SHIPPED: dict[str, GroupFilter] = {
    function.__name__: function
    for function in (
        check_reward_nonzero_std,
        check_min_reward,
        check_any_success,
        check_response_diversity,
        check_reasonable_length,
        check_quality_and_diversity,
    )
}


def identify_filter(name: str) -> External:
    """Raises `BadInput` when there is no such function."""
    return identify_function(name, SHIPPED, "filter")


def load_filter(location: str) -> GroupFilter:
    """Raises `BadInput` when its module fails to import or lacks it."""
    function: GroupFilter = load_function(location, SHIPPED, "filter")
    return function


def rewards_of(samples: Sequence[Sample]) -> list[float]:
    """Raises ValueError for a sample without a reward."""
    rewards = [sample.reward for sample in samples]
    if any(reward is None for reward in rewards):
        raise ValueError("a group is filtered before it is scored")
    return [reward for reward in rewards if reward is not None]
