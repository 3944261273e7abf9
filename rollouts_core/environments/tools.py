"""Tools: functions that a model may call, with a schema of their arguments.

    @tool
    def add(a: int, b: int) -> int:
        "The sum of two numbers."

Decision: every failure of a call is a result that the model sees. The model may have written invalid JSON, the name of
a tool that does not exist, or arguments of the wrong type; the tool may raise, or take too long. The episode goes on in
all these cases.
"""

import inspect
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import anyio
from anyio import to_thread
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from rollouts_core.types import Data, ToolCall, ToolResult

SAID = 2000
"""Characters of an error that the model is told."""


@dataclass(frozen=True)
class Tool:
    """A function with the form of its arguments."""

    name: str
    description: str
    arguments: type[BaseModel]
    run: Callable[..., Any]
    """Plain or async; what it returns is told as text, or as JSON; a `ToolResult` is taken as it is."""
    needs_confirmation: bool = False

    @property
    def schema(self) -> Data:
        """The tool's schema, as templates and endpoints read it."""
        parameters = self.arguments.model_json_schema()
        parameters.pop("title", None)
        for entry in parameters.get("properties", {}).values():
            entry.pop("title", None)
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": parameters},
        }


def tool(function: Callable[..., Any], needs_confirmation: bool = False) -> Tool:
    """A function as a tool: its name, its docstring, and its parameters' annotations.

    Raises TypeError for a parameter without annotation.

    Examples:
        >>> def add(a: int, b: int) -> int:
        ...     return a + b
        >>> rc.tool(add).schema["function"]["name"]
        'add'
    """
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        if parameter.annotation is parameter.empty:
            raise TypeError(f"tool {function.__name__}: its parameter {name!r} has no annotation")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[name] = (parameter.annotation, Field(default=default))
    form = create_model(function.__name__, __config__=ConfigDict(extra="forbid"), **fields)
    return Tool(function.__name__, inspect.getdoc(function) or "", form, function, needs_confirmation)


async def call_tool(tools: Sequence[Tool], call: ToolCall, seconds: float) -> ToolResult:
    """Carry out a call within a deadline; whatever goes wrong is in the result.

    A plain function runs in a thread, which is left to itself where it takes longer.
    """
    if call.malformed:
        what = "the arguments are" if call.name else "the call is"
        return failed(call, f"{what} no JSON object: {call.malformed[:200]}")
    found = {entry.name: entry for entry in tools}.get(call.name)
    if found is None:
        known = ", ".join(entry.name for entry in tools) or "there are none"
        return failed(call, f"no tool {call.name!r}; tools: {known}")
    try:
        arguments = found.arguments.model_validate(dict(call.arguments), strict=False)
    except ValidationError as error:
        told = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'arguments'}: {e['msg']}" for e in error.errors())
        return failed(call, f"wrong arguments: {told}")
    given = {name: getattr(arguments, name) for name in found.arguments.model_fields}
    try:
        with anyio.fail_after(seconds):
            return _told(call, await _ran(found.run, given))
    except TimeoutError:
        return failed(call, f"{call.name} took longer than {seconds:g} s")
    except Exception as error:
        return failed(call, f"{type(error).__name__}: {error}")


def failed(call: ToolCall, problem: str) -> ToolResult:
    return ToolResult(call, f"error: {problem[:SAID]}", failed=True)


async def _ran(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    if inspect.iscoroutinefunction(function):
        done: Awaitable[Any] = function(**arguments)
        return await done
    return await to_thread.run_sync(partial(function, **arguments), abandon_on_cancel=True)


def _told(call: ToolCall, value: Any) -> ToolResult:
    if isinstance(value, ToolResult):
        return replace(value, call=call)
    return ToolResult(call, value if isinstance(value, str) else json.dumps(value, default=str))
