"""Environments of the verifiers package (0.1.14 and later 0.1) as ours: multi-turn ones, with tools or without, and
their rubrics as rewards.

    environment = partial(verifiers_environment, "my-env")      # name it in the config: my_file.py:environment
    reward = verifiers_reward("my-env")                         # and this: my_file.py:reward

Decision: verifiers keeps an episode in a dictionary of its own that changes. This object is part of our state, and a
record shows it as an empty object. If it is missing (in an episode that continues from its record) or belongs to other
turns, it is made again by playing the turns again. So an episode can continue from any state, if the environment is
deterministic.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import anyio

from rollouts_core.data.messages import message_from_data
from rollouts_core.environments.environment import Environment
from rollouts_core.environments.tools import Tool, failed, tool
from rollouts_core.errors import BadInput
from rollouts_core.rewards.reward import Reward, RewardFunction
from rollouts_core.types import Message, Sample, ToolCall, ToolResult
from rollouts_core.types.episode import AgentState, Replied

LIVE = "verifiers"


class Live(dict[str, Any]):
    """A state of verifiers' that JSON does not see, and the assistant's turns that it was told of."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.told: list[Message] = []
        self.replies: Sequence[Message] = ()
        """The environment's replies to the last answer."""
        self.lock = anyio.Lock()


@cache
def _loaded(name: str) -> Any:
    try:
        import verifiers
    except ImportError:
        raise BadInput(
            f"environment {name} of verifiers: `pip install 'verifiers>=0.1.14,<0.2'` where it runs"
        ) from None
    try:
        return verifiers.load_environment(name)
    except Exception as error:
        raise BadInput(f"environment {name} of verifiers: {type(error).__name__}: {error}") from error


def verifiers_environment(name: str) -> Environment:
    """An installed environment by its name. Raises `BadInput` when it cannot be loaded."""
    return VerifiersEnvironment(_loaded(name))


def verifiers_rows(name: str, count: int = -1) -> list[dict[str, Any]]:
    """The rows of its data set, for a file of prompts."""
    return [dict(row) for row in _loaded(name).get_dataset(n=count)]


def verifiers_reward(name: str) -> RewardFunction:
    """The reward of an episode by the environment's rubric, and its parts by name."""

    async def reward(sample: Sample) -> Reward:
        if sample.trajectory is None:
            raise BadInput(f"the rubric of {name} scores episodes in its environment")
        return await VerifiersEnvironment(_loaded(name)).score(sample.trajectory.final)

    return reward


class VerifiersEnvironment:
    """An environment of the verifiers package, as an `Environment`."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._tools = [tool(each) for each in getattr(environment, "tools", ())]

    def begin(self, row: Mapping[str, Any]) -> AgentState:
        prompt = row["prompt"]
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        schemas = tuple(each.schema for each in self._tools)
        return AgentState(tuple(map(message_from_data, asked)), schemas, {"row": dict(row), LIVE: {}})

    def get_tools(self) -> Sequence[Tool]:
        return self._tools

    async def exec_tool(self, call: ToolCall, state: AgentState, seconds: float) -> ToolResult:
        """Verifiers carries out the calls of a turn together; each is told its own."""
        live = await self._live(state, told=True)
        try:
            with anyio.fail_after(seconds):
                async with live.lock:
                    if live.told != _answers(state):
                        await self._next(live, state)
        except TimeoutError:
            return failed(call, f"{call.name} took longer than {seconds:g} s")
        said = {message.tool_call_id: message.content for message in live.replies}
        if call.id not in said:
            return ToolResult(call, "the episode is over", changes={LIVE: live}, ends=True)
        return ToolResult(call, said[call.id], changes={LIVE: live})

    async def on_assistant_message(self, message: Message, state: AgentState) -> Replied:
        return await self._next(await self._live(state), state)

    async def score(self, state: AgentState) -> Reward:
        """Score by its rubric."""
        live = await self._live(state, told=True)
        if live.told != _answers(state):
            self._note(live, state)
        await self._environment.render_completion(live.state)
        await self._environment.rubric.score_rollout(live.state)
        metrics = {name: float(value) for name, value in (live.state["metrics"] or {}).items()}
        return Reward(float(live.state["reward"]), metrics)

    async def _live(self, state: AgentState, told: bool = False) -> Live:
        """The live environment, as it was before the last answer; with `told`, it may have seen that answer."""
        live, answers = state.environment.get(LIVE), _answers(state)
        if isinstance(live, Live) and (live.told == answers[:-1] or (told and live.told == answers)):
            return live
        row = {"example_id": 0, **state.environment["row"]}
        made = Live(await self._environment.init_state(row, _nobody(), "policy"))
        await self._environment.setup_state(made.state)
        while len(made.told) < len(answers) - 1:
            await self._next(made, state)
        return made

    async def _next(self, live: Live, state: AgentState) -> Replied:
        """Tells it the next turn of the assistant; what it says to that."""
        seen = self._note(live, state)
        live.replies = ()
        if await self._environment.is_completed(live.state):
            return Replied(changes={LIVE: live}, ends=True)
        said = await self._environment.env_response(seen, live.state)
        live.replies = tuple(_from_verifiers(message) for message in said)
        over = live.state.get("final_env_response") is not None
        return Replied(tuple(live.replies), {LIVE: live}, ends=over or not live.replies)

    def _note(self, live: Live, state: AgentState) -> list[Any]:
        """The next turn into verifiers' own trajectory; the conversation up to it."""
        places = [place for place, message in enumerate(state.messages) if message.role == "assistant"]
        place = places[len(live.told)]
        prompt = [_to_verifiers(message) for message in state.messages[:place]]
        completion = [_to_verifiers(state.messages[place])]
        step = {"prompt": prompt, "completion": completion, "response": None, "tokens": None, "reward": None,
                "advantage": None, "is_truncated": False, "trajectory_id": live.state["trajectory_id"],
                "extras": {}}  # fmt: skip
        live.state["trajectory"].append(step)
        live.told.append(state.messages[place])
        return [*prompt, *completion]


def _answers(state: AgentState) -> list[Message]:
    return [message for message in state.messages if message.role == "assistant"]


def _nobody() -> Any:
    """Whom verifiers would ask for answers; nobody, here."""
    from verifiers.clients import OpenAIChatCompletionsClient

    return OpenAIChatCompletionsClient(None)


def _to_verifiers(message: Message) -> Any:
    from verifiers import types

    match message.role:
        case "assistant":
            calls = [
                types.ToolCall(id=call.id, name=call.name, arguments=call.malformed or json.dumps(dict(call.arguments)))
                for call in message.tool_calls
            ]
            return types.AssistantMessage(
                content=message.content, tool_calls=calls or None, reasoning_content=message.reasoning or None
            )
        case "tool":
            return types.ToolMessage(tool_call_id=message.tool_call_id, content=message.content)
        case "system":
            return types.SystemMessage(content=message.content)
        case _:
            return types.UserMessage(content=message.content)


def _from_verifiers(message: Any) -> Message:
    data = message if isinstance(message, Mapping) else message.model_dump()
    return message_from_data({name: value for name, value in data.items() if value is not None})
