"""The manager that a config's way of generating asks for."""

from collections.abc import Mapping
from typing import Any

from rollouts_core.config import RLConfig
from rollouts_core.data.prompts import DataBuffer
from rollouts_core.inference.engine import InferenceEngine
from rollouts_core.rewards.reward import AnyReward
from rollouts_core.rollout.episodes import Acting
from rollouts_core.rollout.filters import GroupFilter
from rollouts_core.rollout.journal import RolloutJournal
from rollouts_core.rollout.manager import AsyncRolloutManager
from rollouts_core.rollout.overlap import OverlappedRollouts
from rollouts_core.rollout.settings import rollout_config


def create_manager(
    training: RLConfig,
    seed: int,
    tokenizer: Any,
    buffer: DataBuffer,
    reward: AnyReward,
    name: str,
    filters: Mapping[str, GroupFilter],
    journal: RolloutJournal | None,
    acting: Acting | None,
    engine: InferenceEngine,
) -> AsyncRolloutManager | OverlappedRollouts:
    """Made in the event loop of its engine. `name`: the reward's, for messages; `journal` keeps answers over a kill
    where generation is on-policy."""
    config = rollout_config(training, seed, name)
    if training.rollouts.generation == "overlapped":
        return OverlappedRollouts(engine, tokenizer, buffer, reward, config, filters, acting)
    kept = journal if training.rollouts.generation == "on_policy" else None
    return AsyncRolloutManager(engine, tokenizer, buffer, reward, config, filters, kept, acting)
