"""The values that pass between data, rollout, reward and training.

    Message         one turn of a conversation, with the tools it calls
    ToolResult      what a call came to
    Prompt          a tokenized prompt with what its reward needs
    Sample          one answer to one prompt, of one turn or several: tokens, mask, log-probabilities, weight versions,
                    reward

All are frozen; a change makes a new value (`dataclasses.replace`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollouts_core.environments.episode import Trajectory


class Status(StrEnum):
    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: Mapping[str, Any]
    id: str = ""
    malformed: str = ""
    """What the model wrote for arguments where that is no JSON object; `arguments` is then empty."""


@dataclass(frozen=True)
class ToolResult:
    """What a call came to, as the model is told."""

    call: ToolCall
    content: str
    failed: bool = False
    """Whether the content says what went wrong."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """What the environment knows anew of the episode, as JSON data."""
    ends: bool = False
    """Whether the episode ends with it."""


@dataclass(frozen=True)
class Message:
    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    """What the assistant thought before its content, where a template keeps the two apart."""
    name: str = ""
    """Of a tool's result: the tool."""
    tool_call_id: str = ""
    """Of a tool's result: the call that it answers."""


@dataclass(frozen=True)
class Prompt:
    messages: tuple[Message, ...]
    tokens: tuple[int, ...]
    """Rendered by the chat template, generation prompt included."""
    metadata: Mapping[str, Any]
    """The row's further columns; rewards read them."""
    source_row: int
    """Row of the file it came from, counted from 0."""

    @property
    def text(self) -> str:
        """What it says last, for people."""
        return self.messages[-1].content if self.messages else str(self.metadata.get("prompt", ""))


@dataclass(frozen=True)
class Sample:
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
    trajectory: "Trajectory | None" = None
    """Of an answer in an environment."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """What the reward was made of, by name."""
    turn_rewards: tuple[float, ...] = ()
    """What of the reward single turns have earned; empty where only the whole counts."""

    @cached_property
    def response_length(self) -> int:
        """Tokens that the policy made."""
        return sum(self.loss_mask)
