"""Environments of verifiers as ours, against verifiers' own loop: the same model, the same words, the same reward.

Run by `make test-verifiers`, in an environment of its own: what verifiers needs cannot be installed beside the rest.
"""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import anyio
import pytest

from rollouts_core.data.messages import messages_to_json
from rollouts_core.environments.agent import RunConfig, run_agent
from rollouts_core.environments.record import trajectory_from_data, trajectory_to_data
from rollouts_core.environments.verifiers import verifiers_environment, verifiers_reward, verifiers_rows
from rollouts_core.errors import BadInput
from rollouts_core.types import Message, Prompt, Sample, Status, ToolCall
from rollouts_core.types.episode import AgentState, Answered, Trajectory

pytestmark = pytest.mark.verifiers

GAME = """
import verifiers as vf
from datasets import Dataset

class Game(vf.MultiTurnEnv):
    async def setup_state(self, state):
        state["left"] = 3

    async def env_response(self, messages, state):
        state["left"] -= 1
        if not state["left"]:
            state["final_env_response"] = [{"role": "user", "content": "over"}]
            return state["final_env_response"]
        return [{"role": "user", "content": f"{state['left']} left, you said {messages[-1].content}"}]

async def words(completion, answer):
    return float(sum(answer in message.content for message in completion if message.role == "assistant"))

async def left(state):
    return float(state["left"])

def load_environment():
    rows = Dataset.from_list([{"question": "Go.", "answer": "yes"}])
    return Game(dataset=rows, max_turns=9, rubric=vf.Rubric(funcs=[words, left], weights=[1.0, 0.5]))
"""
TOOLS = """
import verifiers as vf
from datasets import Dataset

def add(a: int, b: int) -> int:
    "The sum."
    return a + b

async def right(completion, answer):
    return float(completion[-1].content == answer)

def load_environment():
    rows = Dataset.from_list([{"question": "1+2?", "answer": "3"}])
    return vf.ToolEnv(tools=[add], dataset=rows, max_turns=4, rubric=vf.Rubric(funcs=[right]))
"""


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for name, code in (("a_game", GAME), ("some_tools", TOOLS)):
        (tmp_path / f"{name}.py").write_text(code)


class Scripted:
    """Says one turn after the other."""

    def __init__(self, turns: Sequence[Message]) -> None:
        self._turns = turns

    async def complete(self, state: AgentState, max_tokens: int | None) -> Answered:
        return Answered(self._turns[state.turn_idx])


@cache
def scripted_client() -> type:
    from verifiers.clients import OpenAIChatCompletionsClient
    from verifiers.types import Response, ResponseMessage
    from verifiers.types import ToolCall as TheirCall

    class Client(OpenAIChatCompletionsClient):
        def __init__(self, turns: Sequence[Message]) -> None:
            super().__init__(None)
            self._turns = list(turns)

        async def get_response(self, *args: Any, **kwargs: Any) -> Response:
            turn = self._turns.pop(0)
            calls = [
                TheirCall(id=call.id, name=call.name, arguments=call.malformed or json.dumps(call.arguments))
                for call in turn.tool_calls
            ]
            said = ResponseMessage(
                content=turn.content, tool_calls=calls or None, finish_reason="stop", is_truncated=False
            )
            return Response(id="r", created=0, model="m", usage=None, message=said)

    return Client


def ours(name: str, turns: Sequence[Message]) -> Trajectory:
    environment = verifiers_environment(name)
    (row,) = verifiers_rows(name)
    config = RunConfig(Scripted(turns), environment, max_turns=9)
    return anyio.run(run_agent, environment.begin(row), config)


def theirs(name: str, turns: Sequence[Message]) -> Any:
    import verifiers

    environment = verifiers.load_environment(name)
    (row,) = verifiers_rows(name)

    async def play() -> Any:
        state = await environment.rollout(row, scripted_client()(turns), "m")
        await environment.rubric.score_rollout(state)
        return state

    return anyio.run(play)


def reward_of(name: str, episode: Trajectory) -> Any:
    prompt = Prompt(episode.start.messages, (), {}, 0)
    sample = Sample(prompt, "", (), (), (), (), 0, Status.COMPLETED, trajectory=episode)
    return anyio.run(verifiers_reward(name), sample)


SAID = [Message("assistant", text) for text in ("yes", "no", "yes yes")]
CALLED = [
    Message("assistant", "", (ToolCall("add", {"a": 1, "b": 2}, "c1"), ToolCall("add", {}, "c2", "{broken"))),
    Message("assistant", "3"),
]


@pytest.mark.parametrize(("name", "turns"), [("a-game", SAID), ("some-tools", CALLED)])
def test_an_episode_says_and_earns_what_it_does_in_verifiers(name: str, turns: list[Message]) -> None:
    episode, expected = ours(name, turns), theirs(name, turns)
    said = [(message.role, message.content) for message in episode.final.messages]
    whole = [*expected["prompt"], *expected["completion"]]
    assert said == [(message.role, message.content or "") for message in whole]
    reward = reward_of(name, episode)
    assert reward.value == expected["reward"]
    assert dict(reward.components) == {key: float(value) for key, value in expected["metrics"].items()}


@pytest.mark.parametrize(("name", "turns"), [("a-game", SAID), ("some-tools", CALLED)])
def test_an_episode_goes_on_from_the_record_of_any_of_its_states(name: str, turns: list[Message]) -> None:
    episode = ours(name, turns)
    read = trajectory_from_data(json.loads(json.dumps(trajectory_to_data(episode))))
    config = RunConfig(Scripted(turns), verifiers_environment(name), max_turns=9)
    for state in (*read.states, *episode.states):
        if state.stop is None:
            again = anyio.run(run_agent, state, config)
            assert messages_to_json(again.final.messages) == messages_to_json(episode.final.messages)
            assert reward_of(name, again).value == reward_of(name, episode).value


def test_what_is_not_installed_is_told() -> None:
    with pytest.raises(BadInput, match="environment nothing-like-it of verifiers: "):
        verifiers_environment("nothing-like-it")
