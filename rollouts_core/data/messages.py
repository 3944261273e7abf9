"""Messages as people and data sets write them, the chat format of OpenAI and of transformers' templates, and back.

Several forms are accepted: text as a string or as text blocks, arguments as an object or as JSON text, calls with or
without `function` around them, `thinking` for `reasoning_content`. Null fields, which columnar files are full of, count
as absent.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from rollouts_core.config import Role
from rollouts_core.types import Data, Message, ToolCall

ROLES: tuple[str, ...] = get_args(Role)
REASONING = ("reasoning_content", "reasoning", "thinking")


def messages_problem(messages: Any, name: str = "messages") -> str:
    """The problem of a conversation in data; empty if there is none."""
    if not isinstance(messages, list | tuple) or not messages:
        other = ", and neither 'prompt' nor 'text'" if name == "messages" else ", nor text"
        return f"no list of messages under {name!r}{other}"
    for number, message in enumerate(messages):
        if problem := _message_problem(message):
            return f"{name}[{number}] {problem}"
    return ""


def tools_problem(tools: Any) -> str:
    """The problem of a list of tools in data; empty if there is none."""
    listed = _parsed(tools) if tools else []
    if not isinstance(listed, list | tuple):
        return "'tools' is not a list of tools"
    for number, tool in enumerate(listed):
        given = _function_of(tool) if isinstance(tool, Mapping) else {}
        if not isinstance(given.get("name"), str):
            return f"tools[{number}] has no name"
        form = given.get("parameters") or {}
        if not isinstance(form, Mapping) or not isinstance(form.get("properties") or {}, Mapping):
            return f"tools[{number}] has parameters that are no JSON schema of an object"
    return ""


def message_from_data(data: Data) -> Message:
    """A message from data without problems."""
    reasoning = next((data[name] for name in REASONING if data.get(name)), "")
    return Message(
        data["role"],
        _text(data.get("content")) or "",
        tuple(_call(call) for call in data.get("tool_calls") or ()),
        reasoning,
        data.get("name") or "",
        data.get("tool_call_id") or "",
    )


def tools_from_data(tools: Any) -> tuple[Data, ...]:
    """Tools from data without problems: `{"type": "function", "function": {...}}`, as templates read them."""
    listed = _parsed(tools) if tools else []
    return tuple({"type": "function", "function": _without_nulls(_function_of(tool))} for tool in listed)


def message_to_data(message: Message) -> dict[str, Any]:
    data: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        data["tool_calls"] = [_call_to_data(call) for call in message.tool_calls]
    if message.reasoning:
        data["reasoning_content"] = message.reasoning
    if message.name:
        data["name"] = message.name
    if message.tool_call_id:
        data["tool_call_id"] = message.tool_call_id
    return data


def messages_to_json(messages: Sequence[Message]) -> str:
    return json.dumps([message_to_data(message) for message in messages])


def messages_from_json(text: str) -> tuple[Message, ...]:
    return tuple(message_from_data(data) for data in json.loads(text))


def _message_problem(message: Any) -> str:
    if not isinstance(message, Mapping) or message.get("role") not in ROLES:
        return f"has no role among {', '.join(ROLES)}"
    calls = message.get("tool_calls") or ()
    if not isinstance(calls, list | tuple):
        return "has tool_calls that are not a list"
    if _text(message.get("content")) is None and not (calls and message.get("content") is None):
        return "has no text under 'content'"
    if calls and message["role"] != "assistant":
        return f"has tool_calls, and its role is {message['role']}"
    for number, call in enumerate(calls):
        given = _function_of(call) if isinstance(call, Mapping) else {}
        if not isinstance(given.get("name"), str):
            return f"has tool_calls[{number}] without a name"
        if not isinstance(_parsed(given.get("arguments") or {}), Mapping):
            return f"has tool_calls[{number}] whose arguments are no JSON object"
    named = [name for name in (*REASONING, "name", "tool_call_id") if not isinstance(message.get(name) or "", str)]
    return f"has {named[0]!r} that is not text" if named else ""


def _text(content: Any) -> str | None:
    """The text of a content, which may be a list of text blocks; None if it is anything else."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple) or not content:
        return None
    blocks: list[Any] = [block.get("text") if isinstance(block, Mapping) else None for block in content]
    return "".join(blocks) if all(isinstance(block, str) for block in blocks) else None


def _call(call: Data) -> ToolCall:
    given = _function_of(call)
    arguments = given.get("arguments") or {}
    parsed = _parsed(arguments) if isinstance(arguments, str) else _without_nulls(arguments)
    return ToolCall(given["name"], parsed, call.get("id") or "")


def _call_to_data(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": dict(call.arguments)}
    return {"type": "function", "function": function} | ({"id": call.id} if call.id else {})


def _function_of(data: Data) -> Data:
    function = data.get("function")
    return function if isinstance(function, Mapping) else data


def _parsed(value: Any) -> Any:
    """JSON text as what it says; None where it is not JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_nulls(entry) for name, entry in value.items() if entry is not None}
    return value
