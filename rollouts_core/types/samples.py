"""Prompts, and the answers to them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

from rollouts_core.types.episode import Trajectory
from rollouts_core.types.messages import Message


class Status(StrEnum):
    """How far a sample has come, or how it ended."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass(frozen=True)
class Prompt:
    """A prompt, tokenized, with what its reward needs."""

    messages: tuple[Message, ...]
    tokens: tuple[int, ...]
    """Rendered by the chat template, generation prompt included."""
    metadata: Mapping[str, Any]
    """The row's further columns; rewards read them."""
    source_row: int
    """Row of the file it came from, counted from 0."""

    @property
    def text(self) -> str:
        """The last message's text, for people to read."""
        return self.messages[-1].content if self.messages else str(self.metadata.get("prompt", ""))


@dataclass(frozen=True)
class Sample:
    """An answer to a prompt: tokens, loss mask, log-probabilities and reward."""

    prompt: Prompt
    response: str
    """The answer as text, without special tokens; of several turns, the last."""
    tokens: tuple[int, ...]
    """Prompt and answer as the engine saw and made them; never encoded again."""
    loss_mask: tuple[int, ...]
    """Per token: 1 where the policy made it."""
    rollout_log_probs: tuple[float, ...]
    """Per token behind the prompt, under the weights and temperature it was sampled with; 0 for observed ones."""
    weight_versions: tuple[int, ...]
    """Per token behind the prompt; of observed ones, that of the turn before."""
    group_index: int
    """Which prompt of the batch it answers."""
    status: Status
    reward: float | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    episode: int = 0
    """Which of its group's answers it is. An answer whose earlier turns are rendered anew is several samples."""
    trajectory: Trajectory | None = None
    """The episode, for an answer in an environment."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """The parts of the reward, by name."""
    turn_rewards: tuple[float, ...] = ()
    """The parts of the reward that single turns earned; empty if only the whole answer is rewarded."""
    experts: str = ""
    """Which experts each token but the last went through, where the engine tells (`inference.told_experts`)."""

    @cached_property
    def response_length(self) -> int:
        """Tokens that the policy made."""
        return sum(self.loss_mask)
