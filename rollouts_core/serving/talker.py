"""A policy ready to answer: its tokenizer, its engine, and its environment's tools.

Decision: a conversation holds its own tokens (`AgentState.sampled`), and a talker holds none. So any number of
conversations share one engine, and each turn continues exactly the tokens before it.
"""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import anyio
from transformers.utils.logging import disable_progress_bar

from rollouts_core.concurrency import first_error
from rollouts_core.config import Dtype, EngineConfig
from rollouts_core.data.tokenizers import load_tokenizer
from rollouts_core.data.turns import turn_format
from rollouts_core.environments.environment import Environment
from rollouts_core.environments.registry import check_environment, load_environment
from rollouts_core.environments.tools import failed
from rollouts_core.errors import BadInput
from rollouts_core.inference.embedded import EmbeddedEngine
from rollouts_core.inference.endpoints.engine import EngineEndpoint
from rollouts_core.inference.engine import EVERYTHING, InferenceEngine, Truncation
from rollouts_core.inference.registry import embedded_engine, engine_for
from rollouts_core.inference.replicas import SupervisedServers
from rollouts_core.serving.find import FoundPolicy
from rollouts_core.training.models import load_hf_model
from rollouts_core.types import Data, Message, ToolCall, ToolResult
from rollouts_core.types.episode import AgentState, Answered, Observed, apply

LONGEST_CONTEXT = 8192
"""Tokens, where the model has more positions and nobody asks for more."""
LOOK_SECONDS = 10.0
TOOL_SECONDS = 30.0
MOST_CALLS = 16
"""Turns in a row that call tools before the person is asked again."""


@dataclass(frozen=True)
class Manner:
    """How a turn is drawn."""

    temperature: float = 1.0
    truncation: Truncation = EVERYTHING
    stop: tuple[str, ...] = ()
    seed: int = 0


@dataclass(frozen=True)
class Talker:
    """Answers conversations. Made by `talker_of`."""

    name: str
    tokenizer: Any
    engine: InferenceEngine
    max_length: int
    """The context, in tokens."""
    environment: Environment | None

    def endpoint(self, tools: Sequence[Data], manner: Manner) -> EngineEndpoint:
        """An endpoint for a turn. Raises `BadInput` if the model's template can't render these tools."""
        return EngineEndpoint(
            self.engine.generate,
            turn_format(self.tokenizer, tools),
            self.max_length,
            f"turn-{uuid4().hex}",
            manner.seed,
            manner.temperature,
            manner.truncation,
            manner.stop,
            follow=self.engine.follow if isinstance(self.engine, EmbeddedEngine) else None,
        )

    async def answer(
        self, state: AgentState, manner: Manner, max_tokens: int | None
    ) -> AsyncIterator[str | ToolResult | AgentState]:
        """A person's turn answered: text as it comes, results of the calls it makes, at last the state behind it.

        Raises what the endpoint raises.
        """
        for _ in range(MOST_CALLS):
            async for part in self.endpoint(state.tools, manner).stream(state, max_tokens):
                if isinstance(part, Answered):
                    state = apply(state, part)
                else:
                    yield part
            if not state.pending_tool_calls:
                break
            results = [await self._carried_out(call, state) for call in state.pending_tool_calls]
            for result in results:
                yield result
            state = apply(state, Observed(tuple(results)))
            if state.stop is not None:
                break
        yield replace(state, stop=None)

    def begin(self, system: str = "") -> AgentState:
        """A conversation in which nobody has said anything, with the environment's tools."""
        tools = tuple(tool.schema for tool in self.environment.get_tools()) if self.environment else ()
        return AgentState((Message("system", system),) if system else (), tools)

    async def _carried_out(self, call: ToolCall, state: AgentState) -> ToolResult:
        """Carry out a call. A tool that needs confirmation is refused, because there is nobody to ask."""
        if self.environment is None:
            return failed(call, "there are no tools")
        if any(tool.name == call.name and tool.needs_confirmation for tool in self.environment.get_tools()):
            return failed(call, "this call was not confirmed")
        return await self.environment.exec_tool(call, state, TOOL_SECONDS)


def said(state: AgentState, text: str) -> AgentState:
    """The conversation with a turn of the user added."""
    return replace(state, messages=(*state.messages, Message("user", text)))


@asynccontextmanager
async def talker_of(
    found: FoundPolicy, device: str, context: int | None = None, servers: Path | None = None
) -> AsyncIterator[Talker]:
    """`context`: tokens of prompt and answer together. `servers`: the directory of running servers of the policy.

    Raises `BadInput` where the policy can't be loaded, or its environment's tools can't be used here.
    """
    disable_progress_bar()
    tokenizer = load_tokenizer(str(found.directory))
    environment = _environment(found, tokenizer)
    config = EngineConfig() if found.config is None else found.config.engine
    model = load_hf_model(str(found.directory), _dtype(found), device)
    length = _context(model.config, context)
    engine: InferenceEngine
    if servers is None:
        engine = embedded_engine(EngineConfig(), model, tokenizer, length)
    else:
        engine = engine_for(config, model, tokenizer, length, servers)
    try:
        with first_error():
            async with anyio.create_task_group() as tasks:
                if servers is not None:
                    tasks.start_soon(_look_after, servers)
                    await engine.update_weights_from_checkpoint(found.directory.resolve(), 0)
                yield Talker(found.name, tokenizer, engine, length, environment)
                tasks.cancel_scope.cancel()
    finally:
        await engine.aclose()


async def _look_after(servers: Path) -> None:
    """Servers that nobody looks at end after a while."""
    fleet = SupervisedServers(servers)
    while True:
        fleet.ready()
        await anyio.sleep(LOOK_SECONDS)


def _environment(found: FoundPolicy, tokenizer: Any) -> Environment | None:
    if found.config is None or found.config.environment is None:
        return None
    environment = load_environment(found.config.environment.name)
    check_environment(environment)
    turn_format(tokenizer, [tool.schema for tool in environment.get_tools()])
    return environment


def _dtype(found: FoundPolicy) -> Dtype:
    if found.config is not None:
        return found.config.model.dtype
    config = json.loads((found.directory / "config.json").read_text())
    return "bfloat16" if "bfloat16" in (config.get("dtype"), config.get("torch_dtype")) else "float32"


def _context(config: Any, asked: int | None) -> int:
    positions = getattr(config, "max_position_embeddings", None) or LONGEST_CONTEXT
    if asked is not None and asked > positions:
        raise BadInput(f"--context {asked}: the model has positions for {positions} tokens")
    return asked or min(positions, LONGEST_CONTEXT)
