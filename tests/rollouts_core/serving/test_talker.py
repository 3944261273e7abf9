"""Conversations with a policy: turns that go on from the tokens before them, and tools between."""

from typing import Any

import anyio

from rollouts_core.environments.environment import Functions
from rollouts_core.environments.shipped.calculator import calculator
from rollouts_core.environments.tools import tool
from rollouts_core.serving.talker import Manner, Talker, said
from rollouts_core.types import ToolResult
from rollouts_core.types.episode import AgentState
from tests.rollouts_core.rollout.test_episodes import CALL, TOKENIZER
from tests.rollouts_core.serving.test_api import SpeaksInPieces


def conversation(talker: Talker, *questions: str) -> tuple[list[list[Any]], AgentState]:
    """What was told of each question, and the state at the end."""

    async def talk() -> tuple[list[list[Any]], AgentState]:
        state, told = talker.begin("be short"), []
        for question in questions:
            *parts, state = [part async for part in talker.answer(said(state, question), Manner(), None)]
            told.append(parts)
        return told, state

    return anyio.run(talk)


def test_a_call_is_carried_out_and_gone_on_from() -> None:
    engine: Any = SpeaksInPieces([CALL, "it is 36", "you are welcome"])
    told, state = conversation(Talker("a", TOKENIZER, engine, 512, calculator()), "12*3", "thanks")
    (result, *words), thanks = told
    assert isinstance(result, ToolResult) and result.content == "36"
    assert "".join(words) == "it is 36"
    assert "".join(thanks) == "you are welcome"
    assert [message.role for message in state.messages] == [
        "system", "user", "assistant", "tool", "assistant", "user", "assistant"
    ]  # fmt: skip


def test_later_turns_go_on_from_the_engine_s_own_tokens() -> None:
    engine: Any = SpeaksInPieces(["one", "two"])
    _, state = conversation(Talker("a", TOKENIZER, engine, 512, None), "first", "second")
    first, second = state.sampled
    assert second.continues
    last = engine.asked[-1].prompt_tokens
    assert last[: len(first.given) + len(first.tokens)] == (*first.given, *first.tokens)


def test_a_tool_that_wants_to_be_confirmed_is_refused() -> None:
    def calculate(expression: str) -> str:
        """Never called."""
        raise AssertionError(expression)

    environment = Functions(lambda row: (), (tool(calculate, needs_confirmation=True),))
    engine: Any = SpeaksInPieces([CALL, "then not"])
    told, _ = conversation(Talker("a", TOKENIZER, engine, 512, environment), "12*3")
    assert told[0][0].failed and "not confirmed" in told[0][0].content
