"""The agent loop: `run_agent(state, config)`, which asks the model, carries out its calls, and hears the environment.

Decision: the loop only makes events; `episode.apply` says how they change the state. The loop holds no state of its
own, so an episode can continue from any state.
"""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

import anyio

from rollouts_core.concurrency import first_error
from rollouts_core.environments.environment import Environment
from rollouts_core.environments.tools import failed
from rollouts_core.errors import ContextOverflow, EngineRefused, EngineUnavailable, MalformedAnswer
from rollouts_core.inference.endpoints.endpoint import Endpoint
from rollouts_core.types import ToolCall, ToolResult
from rollouts_core.types.episode import (
    AgentState,
    Event,
    Observed,
    Replied,
    Stopped,
    StopReason,
    Trajectory,
    apply,
)


@dataclass(frozen=True)
class RunConfig:
    """The endpoint, the environment and the limits of an episode."""

    endpoint: Endpoint
    environment: Environment
    max_turns: int = 16
    max_tokens: int | None = None
    """Most tokens that the model may write, over all turns."""
    max_seconds: float = 600.0
    """Deadline of the whole episode; what is under way then is ended."""
    tool_seconds: float = 30.0
    """Deadline of one call."""
    confirm: Callable[[ToolCall], Awaitable[bool]] | None = None
    """Asked about calls of tools that need it; without it they are refused."""


async def run_agent(state: AgentState, config: RunConfig) -> Trajectory:
    """The episode from a state to its end: every state it goes through, and what led there.

    Raises what the environment's own methods raise; an endpoint that gives up ends the episode.
    """
    start, events = state, list[Event]()
    while state.stop is None:
        events.append(await next_event(state, config))
        state = apply(state, events[-1])
    return Trajectory(start, tuple(events))


async def next_event(state: AgentState, config: RunConfig) -> Event:
    """The episode's next event, or its end if it has reached a limit."""
    began = time.monotonic()
    left = config.max_seconds - state.seconds
    if left <= 0:
        return Stopped(StopReason.MAX_SECONDS)
    try:
        with anyio.fail_after(left):
            event = await _next(state, config)
    except TimeoutError:
        return Stopped(StopReason.MAX_SECONDS)
    return event if isinstance(event, Stopped) else replace(event, seconds=time.monotonic() - began)


async def _next(state: AgentState, config: RunConfig) -> Event:
    if state.pending_tool_calls:
        return Observed(await _results(state, config))
    if state.awaits_environment:
        said = config.environment.on_assistant_message(state.messages[-1], state)
        return said if isinstance(said, Replied) else await said
    if state.turn_idx >= config.max_turns:
        return Stopped(StopReason.MAX_TURNS)
    tokens = None if config.max_tokens is None else config.max_tokens - state.usage.completion_tokens
    if tokens is not None and tokens <= 0:
        return Stopped(StopReason.MAX_TOKENS)
    try:
        return await config.endpoint.complete(state, tokens)
    except ContextOverflow as error:
        return Stopped(StopReason.MAX_TOKENS, str(error))
    except (EngineUnavailable, EngineRefused, MalformedAnswer) as error:
        return Stopped(StopReason.FAILED, str(error))


async def _results(state: AgentState, config: RunConfig) -> tuple[ToolResult, ...]:
    """Carry out all pending calls at the same time, each with its own deadline; results in the order of the calls."""
    calls = state.pending_tool_calls
    results: list[ToolResult | None] = [None] * len(calls)

    async def carry_out(place: int, call: ToolCall) -> None:
        results[place] = await _result(call, state, config)

    with first_error():
        async with anyio.create_task_group() as tasks:
            for place, call in enumerate(calls):
                tasks.start_soon(carry_out, place, call)
    return tuple(result for result in results if result is not None)


async def _result(call: ToolCall, state: AgentState, config: RunConfig) -> ToolResult:
    confirming = {tool.name for tool in config.environment.get_tools() if tool.needs_confirmation}
    if call.name in confirming and not (config.confirm and await config.confirm(call)):
        return failed(call, "this call was not confirmed")
    return await config.environment.exec_tool(call, state, config.tool_seconds)
