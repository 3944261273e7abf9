"""The agent loop: what ends episodes, what tools come to, and that states follow from their record."""

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts_core.environments.agent import RunConfig, run_agent
from rollouts_core.environments.environment import Functions
from rollouts_core.environments.record import (
    state_from_data,
    state_to_data,
    trajectory_from_data,
    trajectory_to_data,
)
from rollouts_core.environments.tools import Tool, tool
from rollouts_core.errors import EngineUnavailable
from rollouts_core.types import Message, ToolCall, ToolResult
from rollouts_core.types.episode import (
    AgentState,
    Answered,
    Observed,
    Replied,
    Stopped,
    StopReason,
    Trajectory,
    Usage,
    apply,
)


def add(a: int, b: int = 1) -> int:
    """The sum of two numbers."""
    return a + b


async def never(a: int) -> str:
    """Does not return."""
    await anyio.sleep_forever()
    return ""


def breaks() -> str:
    """Raises."""
    raise RuntimeError("broken")


def finish(answer: str) -> ToolResult:
    """Ends the episode."""
    return ToolResult(ToolCall("", {}), answer, changes={"answer": answer}, ends=True)


TOOLS = (tool(add), tool(never), tool(breaks), tool(finish))


@dataclass
class Scripted:
    """Answers from a list, and remembers how many tokens it was allowed."""

    answers: list[Answered | Exception]
    allowed: list[int | None] = field(default_factory=list)

    async def complete(self, state: AgentState, max_tokens: int | None) -> Answered:
        self.allowed.append(max_tokens)
        answer = self.answers[state.turn_idx]
        if isinstance(answer, Exception):
            raise answer
        return answer


def said(content: str, *calls: ToolCall, tokens: int = 5, cut_off: bool = False) -> Answered:
    return Answered(Message("assistant", content, calls), Usage(10, tokens, 0.5), cut_off)


def call(name: str, /, id: str = "c1", malformed: str = "", **arguments: Any) -> ToolCall:
    return ToolCall(name, arguments, id, malformed)


def begun(tools: Sequence[Tool] = TOOLS, **knows: Any) -> AgentState:
    return AgentState((Message("user", "1+1="),), tuple(tool.schema for tool in tools), knows)


def run(
    *answers: Answered | Exception,
    tools: Sequence[Tool] = TOOLS,
    reply: Callable[..., Replied] | None = None,
    state: AgentState | None = None,
    **limits: Any,
) -> Trajectory:
    environment = Functions(lambda row: [], tuple(tools), *([reply] if reply else []))
    config = RunConfig(Scripted(list(answers)), environment, **limits)
    return anyio.run(partial(run_agent, state or begun(tools), config))


def result_of(trajectory: Trajectory) -> str:
    return next(message.content for message in trajectory.final.messages if message.role == "tool")


def test_calls_are_carried_out_and_their_results_told() -> None:
    done = run(said("", call("add", a=2, b=3), call("add", id="c2", a=4)), said("5"))
    roles = [(message.role, message.content) for message in done.final.messages]
    assert roles == [("user", "1+1="), ("assistant", ""), ("tool", "5"), ("tool", "5"), ("assistant", "5")]
    assert [message.tool_call_id for message in done.final.messages[2:4]] == ["c1", "c2"]
    assert (done.final.stop, done.final.turn_idx) == (StopReason.ANSWERED, 2)
    assert done.final.usage == Usage(20, 10, 1.0)
    assert [type(event) for event in done.events] == [Answered, Observed, Answered, Replied]
    assert len(done.states) == len(done.events) + 1


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (call("divide", a=1), "no tool 'divide'; tools: add, never, breaks, finish"),
        (call("add", malformed="{a: 1"), "the arguments are no JSON object: {a: 1"),
        (call("", malformed="[1"), "the call is no JSON object: [1"),
        (call("add", a="two"), "wrong arguments: a: Input should be a valid integer"),
        (call("add"), "wrong arguments: a: Field required"),
        (call("add", a=1, c=2), "wrong arguments: c: Extra inputs are not permitted"),
        (call("breaks"), "RuntimeError: broken"),
        (call("never", a=1), "never took longer than 0.05 s"),
    ],
)
def test_what_goes_wrong_in_a_call_is_told_and_the_episode_goes_on(wrong: ToolCall, told: str) -> None:
    done = run(said("", wrong, call("add", id="c2", a=1)), said("5"), tool_seconds=0.05)
    assert result_of(done).startswith(f"error: {told}")
    results = next(event.results for event in done.events if isinstance(event, Observed))
    assert [result.failed for result in results] == [True, False]
    assert done.final.stop is StopReason.ANSWERED


def test_calls_of_one_turn_run_at_once() -> None:
    met = []

    async def meet(name: str) -> str:
        met.append(name)
        while len(met) < 3:
            await anyio.sleep(0)
        return name

    done = run(said("", *(call("meet", id=name, name=name) for name in "abc")), said("."), tools=[tool(meet)])
    assert [message.content for message in done.final.messages if message.role == "tool"] == ["a", "b", "c"]


def test_what_ends_an_episode() -> None:
    again = said("", call("add", a=1), tokens=5)
    assert run(said("5")).final.stop is StopReason.ANSWERED
    assert run(said("", call("finish", answer="7"))).final.stop is StopReason.TOOL
    assert run(said("5", cut_off=True)).final.stop is StopReason.LENGTH
    assert run(again, again, again, max_turns=2).final.stop is StopReason.MAX_TURNS
    assert run(again, again, again, max_tokens=10).final.stop is StopReason.MAX_TOKENS
    assert run(said("", call("never", a=1)), max_seconds=0.05).final.stop is StopReason.MAX_SECONDS
    assert run(said("x"), reply=lambda message, state: Replied(ends=True)).final.stop is StopReason.ENVIRONMENT
    gone = run(again, EngineUnavailable("no answer")).final
    assert (gone.stop, gone.error, gone.turn_idx) == (StopReason.FAILED, "no answer", 1)


def test_the_model_is_allowed_what_is_left() -> None:
    scripted = Scripted([said("", call("add", a=1), tokens=4), said("", call("add", a=1), tokens=3), said("2")])
    config = RunConfig(scripted, Functions(lambda row: [], TOOLS), max_tokens=9)
    anyio.run(run_agent, begun(), config)
    assert scripted.allowed == [9, 5, 2]


def test_a_cut_off_answer_s_calls_are_not_carried_out() -> None:
    done = run(said("", call("add", a=1), cut_off=True))
    assert [message.role for message in done.final.messages] == ["user", "assistant"]
    assert done.final.pending_tool_calls == ()


@pytest.mark.parametrize(("confirm", "told"), [(None, False), (False, False), (True, True)])
def test_a_tool_that_needs_it_is_confirmed_first(confirm: bool | None, told: bool) -> None:
    async def asked(call: ToolCall) -> bool:
        return bool(confirm)

    hook: Callable[[ToolCall], Awaitable[bool]] | None = None if confirm is None else asked
    done = run(said("", call("add", a=1)), said("2"), tools=[tool(add, needs_confirmation=True)], confirm=hook)
    assert result_of(done) == ("2" if told else "error: this call was not confirmed")


def test_the_environment_replies_and_what_it_knows_changes() -> None:
    def higher(message: Message, state: AgentState) -> Replied:
        tries = state.environment["tries"] + 1
        if message.content == "3":
            return Replied(changes={"tries": tries}, ends=True)
        return Replied((Message("user", "higher"),), {"tries": tries})

    done = run(said("1"), said("2"), said("3"), reply=higher, state=begun(tries=0))
    assert done.final.environment == {"tries": 3}
    assert [state.environment["tries"] for state in done.states] == [0, 0, 1, 1, 2, 2, 3]
    assert done.start.environment == {"tries": 0}


def test_an_environment_may_take_its_time_to_reply() -> None:
    async def reply(message: Message, state: AgentState) -> Replied:
        await anyio.sleep(0.01)
        return Replied((Message("user", "again"),)) if state.turn_idx == 1 else Replied()

    assert [message.content for message in run(said("a"), said("b"), reply=reply).final.messages[1:]] == [
        "a",
        "again",
        "b",
    ]


def test_an_environment_whose_calls_raise_is_heard_as_it_is() -> None:
    @dataclass(frozen=True)
    class Broken(Functions):
        async def exec_tool(self, call: ToolCall, state: AgentState, seconds: float) -> ToolResult:
            raise KeyError("board")

    config = RunConfig(Scripted([said("", call("add", a=1), call("add", id="c2", a=2))]), Broken(lambda row: [], TOOLS))
    with pytest.raises(KeyError, match="board"):
        anyio.run(run_agent, begun(TOOLS), config)


def test_an_environment_that_raises_is_heard() -> None:
    def reply(message: Message, state: AgentState) -> Replied:
        raise RuntimeError("a fault of the environment")

    with pytest.raises(RuntimeError, match="a fault of the environment"):
        run(said("1"), reply=reply)


def test_an_episode_goes_on_from_any_state_and_its_record_gives_the_same_states() -> None:
    answers = (said("a", call("add", a=1)), said("", call("add", malformed="[")), said("b", call("finish", answer="7")))
    done = run(*answers)
    kept = json.loads(json.dumps(trajectory_to_data(done)))
    assert trajectory_from_data(kept).states == done.states
    for state in done.states[:-1]:
        resumed = run(*answers, state=state_from_data(json.loads(json.dumps(state_to_data(state)))))
        assert resumed.final.messages == done.final.messages
        assert resumed.final.environment == {"answer": "7"}


def test_a_schema_is_that_of_the_function() -> None:
    assert tool(add).schema == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "The sum of two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer", "default": 1}},
                "required": ["a"],
                "additionalProperties": False,
            },
        },
    }
    with pytest.raises(TypeError, match="its parameter 'x' has no annotation"):
        tool(lambda x: x)


CALLS = st.lists(st.builds(ToolCall, st.sampled_from(["add", "no"]), st.just({}), st.text(max_size=2)), max_size=2)
EVENTS = st.one_of(
    st.builds(
        Answered,
        st.builds(lambda text, calls: Message("assistant", text, tuple(calls)), st.text(max_size=3), CALLS),
        st.builds(Usage, st.integers(0, 9), st.integers(0, 9)),
        st.booleans(),
        st.floats(0, 9),
    ),
    st.builds(Replied, st.sampled_from([(), (Message("user", "x"),)]), st.sampled_from([{}, {"k": 1}]), st.booleans()),
    st.builds(Stopped, st.sampled_from(StopReason), st.text(max_size=3)),
    st.just("results"),
)


@given(st.lists(EVENTS, max_size=12))
def test_no_order_of_events_breaks_a_state(events: list[Any]) -> None:
    """Each event is taken or refused; what is taken only ever adds, and the record gives the same states."""
    trajectory = Trajectory(begun(k=0))
    state = trajectory.start
    for event in events:
        if event == "results":
            event = Observed(tuple(ToolResult(call, "r", changes={"k": 2}) for call in state.pending_tool_calls), 1.0)
        try:
            behind = apply(state, event)
        except ValueError:
            continue
        assert behind.messages[: len(state.messages)] == state.messages
        assert behind.seconds >= state.seconds and behind.turn_idx >= state.turn_idx
        assert state.stop is None
        trajectory, state = Trajectory(trajectory.start, (*trajectory.events, event)), behind
    kept = trajectory_from_data(json.loads(json.dumps(trajectory_to_data(trajectory))))
    assert kept.states == trajectory.states
    assert kept.final == state
