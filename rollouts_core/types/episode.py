"""An episode of an agent as values: states, and the events between them.

    AgentState      the conversation so far, what the environment knows, what is pending, and whether it is over
    Event           Answered, Observed, Replied or Stopped: what came from outside
    apply           (state, event) -> the next state
    Trajectory      the first state and the events; every state follows from these

Decision: a state follows from the state before and an event. Models, tools and clocks are outside: their results are in
the events. So an episode can be resumed from any state, and replayed from its record, without asking anybody again.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from itertools import accumulate
from typing import Any

from rollouts_core.types.messages import Data, Message, ToolCall, ToolResult


class StopReason(StrEnum):
    """The reason that ended an episode."""

    ANSWERED = "answered"
    """The assistant has answered, and the environment has nothing to say to it."""
    ENVIRONMENT = "environment"
    """The environment has ended it."""
    TOOL = "tool"
    """A tool has ended it."""
    LENGTH = "length"
    """An answer was cut off."""
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    MAX_SECONDS = "max_seconds"
    FAILED = "failed"
    """The model's endpoint gave up; `AgentState.error` says why."""


@dataclass(frozen=True)
class Usage:
    """Tokens that were read and written, and what they cost in the endpoint's currency."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cost + other.cost,
        )


@dataclass(frozen=True)
class Sampled:
    """A turn as tokens, exactly as the engine was given and made them."""

    given: tuple[int, ...]
    """The prompt's tokens; if the turn `continues` the one before, only those between the two turns."""
    tokens: tuple[int, ...]
    """The tokens that the engine generated, the stop token included."""
    log_probs: tuple[float, ...]
    weight_versions: tuple[int, ...]
    continues: bool = False
    differs: bool = False
    """Whether encoding the conversation anew would have given the engine other tokens."""
    experts: str = ""
    """Which experts the tokens went through, where the engine tells (`inference.told_experts`): of a turn
    that `continues`, those of which the turn before did not tell yet."""


@dataclass(frozen=True)
class AgentState:
    """The state of an episode between two events."""

    messages: tuple[Message, ...]
    tools: tuple[Data, ...] = ()
    """The tools that the assistant may call, in the form that templates and endpoints read."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    """The environment's own state of the episode, as JSON data."""
    turn_idx: int = 0
    """Answers so far."""
    pending_tool_calls: tuple[ToolCall, ...] = ()
    """Calls of the last answer that were not carried out yet."""
    usage: Usage = Usage()
    sampled: tuple[Sampled, ...] = ()
    """The tokens of each turn, if one of this project's engines answers."""
    seconds: float = 0.0
    stop: StopReason | None = None
    """The reason of the end; None while the episode goes on."""
    error: str = ""

    @property
    def awaits_environment(self) -> bool:
        """Whether the assistant has answered without a call, so that it is for the environment to reply."""
        answered = bool(self.messages) and self.messages[-1].role == "assistant"
        return self.stop is None and not self.pending_tool_calls and answered


@dataclass(frozen=True)
class Answered:
    """The model's turn."""

    message: Message
    usage: Usage = Usage()
    cut_off: bool = False
    seconds: float = 0.0
    sampled: Sampled | None = None


@dataclass(frozen=True)
class Observed:
    """Results of all pending calls, in their order."""

    results: tuple[ToolResult, ...]
    seconds: float = 0.0


@dataclass(frozen=True)
class Replied:
    """The environment's reply to an answer without a call."""

    messages: tuple[Message, ...] = ()
    changes: Mapping[str, Any] = field(default_factory=dict)
    ends: bool = False
    seconds: float = 0.0


@dataclass(frozen=True)
class Stopped:
    """A limit was reached, or nobody could go on."""

    reason: StopReason
    error: str = ""


Event = Answered | Observed | Replied | Stopped


def apply(state: AgentState, event: Event) -> AgentState:
    """The state behind an event. Raises ValueError for an event that cannot come there."""
    if state.stop is not None:
        raise ValueError(f"the episode is over ({state.stop}), and {type(event).__name__} comes")
    match event:
        case Answered():
            return _answered(state, event)
        case Observed():
            return _observed(state, event)
        case Replied():
            return _replied(state, event)
        case Stopped():
            return replace(state, stop=event.reason, error=event.error)


@dataclass(frozen=True)
class Trajectory:
    """An episode: where it began, and what happened."""

    start: AgentState
    events: tuple[Event, ...] = ()

    @cached_property
    def states(self) -> tuple[AgentState, ...]:
        """All states of the episode: one more than its events."""
        return tuple(accumulate(self.events, apply, initial=self.start))

    @property
    def final(self) -> AgentState:
        return self.states[-1]

    def followed_by(self, event: Event) -> "Trajectory":
        """Raises ValueError as `apply` does."""
        longer = Trajectory(self.start, (*self.events, event))
        vars(longer)["states"] = (*self.states, apply(self.final, event))  # the final state is known already
        return longer


def _answered(state: AgentState, event: Answered) -> AgentState:
    if state.pending_tool_calls:
        raise ValueError("an answer comes while calls are pending")
    return replace(
        state,
        messages=(*state.messages, event.message),
        turn_idx=state.turn_idx + 1,
        pending_tool_calls=() if event.cut_off else event.message.tool_calls,
        usage=state.usage + event.usage,
        sampled=(*state.sampled, event.sampled) if event.sampled else state.sampled,
        seconds=state.seconds + event.seconds,
        stop=StopReason.LENGTH if event.cut_off else None,
    )


def _observed(state: AgentState, event: Observed) -> AgentState:
    if tuple(result.call for result in event.results) != state.pending_tool_calls:
        raise ValueError("results come of other calls than are pending")
    said = [
        Message("tool", result.content, name=result.call.name, tool_call_id=result.call.id) for result in event.results
    ]
    known: Mapping[str, Any] = state.environment
    for result in event.results:
        known = {**known, **result.changes}
    return replace(
        state,
        messages=(*state.messages, *said),
        environment=known,
        pending_tool_calls=(),
        seconds=state.seconds + event.seconds,
        stop=StopReason.TOOL if any(result.ends for result in event.results) else None,
    )


def _replied(state: AgentState, event: Replied) -> AgentState:
    if not state.awaits_environment:
        raise ValueError("the environment replies where no answer awaits it")
    stop = StopReason.ENVIRONMENT if event.ends else None if event.messages else StopReason.ANSWERED
    return replace(
        state,
        messages=(*state.messages, *event.messages),
        environment={**state.environment, **event.changes},
        seconds=state.seconds + event.seconds,
        stop=stop,
    )
