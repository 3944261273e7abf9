"""Checks of arguments, before anything is loaded."""

import inspect
import os
from typing import Any

import torch

from rollouts_core.config import BackendConfig
from rollouts_core.errors import BadInput
from rollouts_core.rewards.functions import identify_reward, load_reward
from rollouts_core.rewards.reward import AnyReward, GroupReward, OpenReward


def as_reward(reward: Any) -> AnyReward:
    """A function of a sample, a `GroupReward`, an `OpenReward`, or a name as in configs. Raises `BadInput`."""
    if isinstance(reward, str):
        return load_reward(identify_reward(reward).location)
    if isinstance(reward, OpenReward):
        return reward
    function, given = (reward.function, "samples") if isinstance(reward, GroupReward) else (reward, "sample")
    if not callable(function):
        raise BadInput(f"reward: a {type(reward).__name__} is neither a function of a sample nor the name of a reward")
    refuse_other_arity("reward", function, given)
    return reward  # type: ignore[no-any-return]


def refuse_other_arity(argument: str, function: Any, *given: str) -> None:
    """Raises `BadInput` where a function can't be called with so many values."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function in C has no signature; the call itself will fail
        return
    try:
        signature.bind(*given)
    except TypeError as error:
        name = getattr(function, "__name__", type(function).__name__)
        raise BadInput(f"{argument}: {name}{signature} is called with ({', '.join(given)}): {error}") from None


def refuse_ranks(backend: BackendConfig) -> None:
    if backend.processes > 1:
        raise BadInput(f"backend.processes {backend.processes}: here one process trains; ranks need the pipeline")


def refuse_unresumable(optimizer: Any, directory: Any) -> None:
    if optimizer is not None:
        refuse_other_arity("optimizer", optimizer, "parameters", "learning_rate")
        if directory is not None:
            raise BadInput("directory: the state of your own optimizer is not saved; leave one of the two out")


def make_deterministic(wanted: bool) -> None:
    """Torch's deterministic algorithms, from here on and for the whole process; the same seed then gives the same
    bits on the same machine."""
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
