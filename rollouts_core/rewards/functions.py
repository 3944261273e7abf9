"""Reward functions: `(Sample) -> float`, shipped ones by name, a user's own by import path."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from rollouts_core.errors import RewardFailed
from rollouts_core.store.identity import External
from rollouts_core.types import Sample
from rollouts_core.user_code import identify_function, load_function

RewardFunction = Callable[[Sample], float]


def exact_match(sample: Sample) -> float:
    """1.0 where the answer, stripped of white space, equals the row's `answer`; otherwise 0.0."""
    return float(sample.response.strip() == str(sample.prompt.metadata["answer"]).strip())


def contains_answer(sample: Sample) -> float:
    """1.0 where the row's `answer` occurs in the answer; otherwise 0.0."""
    return float(str(sample.prompt.metadata["answer"]).strip() in sample.response)


SHIPPED: dict[str, RewardFunction] = {"exact_match": exact_match, "contains_answer": contains_answer}


def identify_reward(name: str) -> External:
    """The identity and location of a reward. Raises `BadInput` when there is no such file or module."""
    return identify_function(name, SHIPPED, "reward")


def load_reward(location: str) -> RewardFunction:
    """Import the function. Raises `BadInput` when its module fails to import or lacks it."""
    function: RewardFunction = load_function(location, SHIPPED, "reward")
    return function


def score(samples: Sequence[Sample], reward: RewardFunction, name: str) -> list[Sample]:
    """The samples with their rewards. Raises `RewardFailed`, naming row and answer, on an exception or a non-number."""
    return [replace(sample, reward=compute_reward(sample, reward, name)) for sample in samples]


def compute_reward(sample: Sample, reward: RewardFunction, name: str) -> float:
    """One sample's reward. Raises `RewardFailed` as `score` does."""
    place = f"reward {name} on source row {sample.prompt.source_row}, answer {sample.response!r}"
    try:
        value = reward(sample)
    except Exception as error:
        raise RewardFailed(f"{place}: raised {type(error).__name__}: {error}") from error
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise RewardFailed(f"{place}: returned {value!r}, which is not a finite number")
    return float(value)
