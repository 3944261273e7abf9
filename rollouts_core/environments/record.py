"""Trajectories as JSON data, and back: the record from which every state follows."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from rollouts_core.data.messages import message_from_data, message_to_data
from rollouts_core.types import Message, ToolCall, ToolResult
from rollouts_core.types.episode import (
    AgentState,
    Answered,
    Event,
    Observed,
    Replied,
    Sampled,
    Stopped,
    StopReason,
    Trajectory,
    Usage,
)

KINDS: dict[str, type[Event]] = {"answered": Answered, "observed": Observed, "replied": Replied, "stopped": Stopped}


def trajectory_to_data(trajectory: Trajectory) -> dict[str, Any]:
    return {"start": state_to_data(trajectory.start), "events": [_event_to_data(event) for event in trajectory.events]}


def trajectory_from_data(data: Mapping[str, Any]) -> Trajectory:
    """Raises ValueError, KeyError or TypeError for what is not a record."""
    return Trajectory(state_from_data(data["start"]), tuple(_event_from_data(event) for event in data["events"]))


def state_to_data(state: AgentState) -> dict[str, Any]:
    data = {entry.name: getattr(state, entry.name) for entry in fields(state)}
    return data | {
        "messages": [_message_to_data(message) for message in state.messages],
        "tools": list(state.tools),
        "environment": dict(state.environment),
        "pending_tool_calls": [asdict(call) for call in state.pending_tool_calls],
        "usage": asdict(state.usage),
        "sampled": [vars(turn) for turn in state.sampled],
    }


def state_from_data(data: Mapping[str, Any]) -> AgentState:
    return AgentState(
        **{
            **data,
            "messages": tuple(_message_from_data(message) for message in data["messages"]),
            "tools": tuple(data["tools"]),
            "pending_tool_calls": tuple(ToolCall(**call) for call in data["pending_tool_calls"]),
            "usage": Usage(**data["usage"]),
            "sampled": tuple(_sampled_from_data(turn) for turn in data["sampled"]),
            "stop": StopReason(data["stop"]) if data["stop"] else None,
        }
    )


def _event_to_data(event: Event) -> dict[str, Any]:
    data = {entry.name: getattr(event, entry.name) for entry in fields(event)}
    match event:
        case Answered():
            sampled = vars(event.sampled) if event.sampled else None
            data |= {"message": _message_to_data(event.message), "usage": asdict(event.usage), "sampled": sampled}
        case Observed():
            data |= {"results": [asdict(result) for result in event.results]}
        case Replied():
            data |= {"messages": [_message_to_data(message) for message in event.messages]}
    return {"event": type(event).__name__.lower(), **data}


def _event_from_data(data: Mapping[str, Any]) -> Event:
    given = {name: value for name, value in data.items() if name != "event"}
    match KINDS[data["event"]]:
        case kind if kind is Answered:
            message, usage = _message_from_data(given["message"]), Usage(**given["usage"])
            sampled = _sampled_from_data(given["sampled"]) if given["sampled"] else None
            return Answered(**{**given, "message": message, "usage": usage, "sampled": sampled})
        case kind if kind is Observed:
            results = (ToolResult(**{**result, "call": ToolCall(**result["call"])}) for result in given["results"])
            return Observed(**{**given, "results": tuple(results)})
        case kind if kind is Replied:
            return Replied(**{**given, "messages": tuple(_message_from_data(entry) for entry in given["messages"])})
        case _:
            return Stopped(StopReason(given["reason"]), given["error"])


def _sampled_from_data(data: Mapping[str, Any]) -> Sampled:
    kept: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
    return Sampled(**kept)


def _message_to_data(message: Message) -> dict[str, Any]:
    """Calls that are no JSON keep what was written."""
    malformed = [call.malformed for call in message.tool_calls]
    return message_to_data(message) | ({"malformed": malformed} if any(malformed) else {})


def _message_from_data(data: Mapping[str, Any]) -> Message:
    message = message_from_data(data)
    if "malformed" not in data:
        return message
    calls = zip(message.tool_calls, data["malformed"], strict=True)
    kept = tuple(ToolCall(call.name, call.arguments, call.id, malformed) for call, malformed in calls)
    return Message(message.role, message.content, kept, message.reasoning, message.name, message.tool_call_id)
