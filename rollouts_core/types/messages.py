"""Conversations: messages, the calls in them, and what calls came to."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Data = Mapping[str, Any]
"""JSON data."""


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool, as the assistant wrote it."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""
    malformed: str = ""
    """The text that the model wrote as arguments, if that is no JSON object; `arguments` is then empty."""


@dataclass(frozen=True)
class ToolResult:
    """The result of a call, as the model sees it."""

    call: ToolCall
    content: str
    failed: bool = False
    """Whether the content says what went wrong."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Changes of the environment's state of the episode, as JSON data."""
    ends: bool = False
    """Whether the episode ends with it."""


@dataclass(frozen=True)
class Message:
    """A turn of a conversation, with its calls of tools."""

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    """The assistant's thoughts before its content, if the template separates the two."""
    name: str = ""
    """For a tool's result: the tool."""
    tool_call_id: str = ""
    """For a tool's result: the call that it answers."""
