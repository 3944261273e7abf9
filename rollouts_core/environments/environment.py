"""Environments of episodes: a protocol of four methods, and a way to make one from functions.

Decision: an environment holds no state of an episode. Its part of an episode's state is `AgentState.environment`, as
JSON data, which `changes` of results and replies change. So one environment serves any number of episodes at the same
time, and each of them can be resumed elsewhere.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rollouts_core.environments.tools import Tool, call_tool
from rollouts_core.types import Data, Message, ToolCall, ToolResult
from rollouts_core.types.episode import AgentState, Replied


class Environment(Protocol):
    """What the policy acts in: first messages, tools and replies. Any class that has these methods fits; no base class
    is needed.

    One that needs something of its machine may have `check()` as well, which raises `BadInput` where that is lacking.
    """

    def begin(self, row: Mapping[str, Any]) -> AgentState:
        """The episode's first state, from a row of data."""

    def get_tools(self) -> Sequence[Tool]:
        """The tools that the assistant may call."""

    async def exec_tool(self, call: ToolCall, state: AgentState, seconds: float) -> ToolResult:
        """Carry out a call, within a deadline. What goes wrong is in the result."""

    def on_assistant_message(self, message: Message, state: AgentState) -> Replied | Awaitable[Replied]:
        """The reply to an answer without a call; an empty reply ends the episode. May be async."""


def beginning_of(environment: Environment) -> Callable[[Mapping[str, Any]], tuple[Sequence[Message], Sequence[Data]]]:
    """A function that makes the first messages and the tools of a row; see `data.sources.Begin`."""

    def begin(row: Mapping[str, Any]) -> tuple[Sequence[Message], Sequence[Data]]:
        state = environment.begin(row)
        return state.messages, state.tools

    return begin


@dataclass(frozen=True)
class Functions:
    """An environment made of functions. Fits `Environment`.

    `messages` makes the first ones of a row; `reply` is given an answer without a call, and the state.

    Examples:
        >>> environment = rc.Functions(lambda row: [rc.Message("user", row["question"])])
        >>> environment.begin({"question": "1+1="}).messages[0].content
        '1+1='
    """

    messages: Callable[[Mapping[str, Any]], Sequence[Message]]
    tools: tuple[Tool, ...] = ()
    reply: Callable[[Message, AgentState], Replied | Awaitable[Replied]] = lambda message, state: Replied()
    knows: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda row: {}
    """The environment's state at the beginning of an episode, from its row."""
    check: Callable[[], None] = lambda: None
    """Raises `BadInput` where the machine lacks what the tools need."""

    def begin(self, row: Mapping[str, Any]) -> AgentState:
        schemas = tuple(tool.schema for tool in self.tools)
        return AgentState(tuple(self.messages(row)), schemas, self.knows(row))

    def get_tools(self) -> Sequence[Tool]:
        return self.tools

    async def exec_tool(self, call: ToolCall, state: AgentState, seconds: float) -> ToolResult:
        return await call_tool(self.tools, call, seconds)

    def on_assistant_message(self, message: Message, state: AgentState) -> Replied | Awaitable[Replied]:
        return self.reply(message, state)
