"""Rewards by name: shipped ones, and a user's own by import path."""

from rollouts_core.rewards.math import math_equal
from rollouts_core.rewards.reward import AnyReward, GroupReward, OpenReward
from rollouts_core.store.identity import External
from rollouts_core.types import Sample
from rollouts_core.user_code import identify_function, load_function


def exact_match(sample: Sample) -> float:
    """1.0 where the answer, stripped of white space, equals the row's `answer`; otherwise 0.0."""
    return float(sample.response.strip() == str(sample.prompt.metadata["answer"]).strip())


def contains_answer(sample: Sample) -> float:
    """1.0 where the row's `answer` occurs in the answer; otherwise 0.0."""
    return float(str(sample.prompt.metadata["answer"]).strip() in sample.response)


def solved(sample: Sample) -> float:
    """1.0 where the environment says at the end that the episode is `solved`; otherwise 0.0."""
    return float(sample.trajectory is not None and bool(sample.trajectory.final.environment.get("solved")))


SHIPPED: dict[str, AnyReward] = {
    "exact_match": exact_match,
    "contains_answer": contains_answer,
    "math_equal": math_equal(),
    "solved": solved,
}


def identify_reward(name: str) -> External:
    """The identity and location of a reward. Raises `BadInput` when there is no such file or module."""
    return identify_function(name, SHIPPED, "reward")


def load_reward(location: str) -> AnyReward:
    """Import the function. Raises `BadInput` when its module fails to import or lacks it."""
    reward: AnyReward = load_function(location, SHIPPED, "reward", (GroupReward, OpenReward))
    return reward
