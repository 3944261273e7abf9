"""Services that speak OpenAI's protocol: its own, SGLang, vLLM and many more. Chat, streamed chat, and completions."""

import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from rollouts_core.errors import EngineUnavailable
from rollouts_core.inference.endpoints.client import Client, connected
from rollouts_core.inference.endpoints.service import Service
from rollouts_core.inference.reading import count_of, reading, text_of
from rollouts_core.types import Message, ToolCall
from rollouts_core.types.episode import AgentState, Answered, Usage


@asynccontextmanager
async def openai_endpoint(service: Service) -> AsyncIterator["OpenAIEndpoint"]:
    """`async with openai_endpoint(Service(...)) as endpoint`. Raises `BadInput` when its key is not set."""
    async with connected(service, _headers(service)) as client:
        yield OpenAIEndpoint(client)


@asynccontextmanager
async def completions_endpoint(
    service: Service, render: Callable[[AgentState], str]
) -> AsyncIterator["CompletionsEndpoint"]:
    """An endpoint for a model without chat: `render` makes the text that the model continues."""
    async with connected(service, _headers(service)) as client:
        yield CompletionsEndpoint(client, render)


@dataclass(frozen=True)
class OpenAIEndpoint:
    """A service that speaks OpenAI's `/chat/completions`. Fits `Endpoint`."""

    client: Client

    @property
    def used(self) -> Usage:
        """The usage of all requests so far."""
        return self.client.used

    async def complete(self, state: AgentState, max_tokens: int | None) -> Answered:
        """Raises as `Client.post` does."""
        data = await self.client.post("chat/completions", self._body(state, max_tokens))
        with reading(self.client.service.url, data):
            choice = data["choices"][0]
            message, cut_off = message_from_openai(choice["message"]), choice["finish_reason"] == "length"
            return Answered(message, self._counted(data.get("usage")), cut_off)

    async def stream(self, state: AgentState, max_tokens: int | None) -> AsyncIterator[str | Answered]:
        """Pieces of the content as they come, then the whole answer. Raises as `Client.events` does."""
        body = self._body(state, max_tokens) | {"stream": True, "stream_options": {"include_usage": True}}
        gathered, usage, finish = _Gathered(), None, None
        async for event in self.client.events("chat/completions", body):
            piece = ""
            with reading(self.client.service.url, event):
                usage = event.get("usage") or usage
                for choice in (event.get("choices") or ())[:1]:
                    finish = choice.get("finish_reason") or finish
                    piece = gathered.take(choice.get("delta") or {})
            if piece:
                yield piece
        if finish is None:
            raise EngineUnavailable(f"{self.client.service.url}: the stream broke off")
        with reading(self.client.service.url, usage):
            counted = self._counted(usage)
        yield Answered(message_from_openai(gathered.message()), counted, finish == "length")

    def _body(self, state: AgentState, max_tokens: int | None) -> dict[str, Any]:
        service = self.client.service
        body: dict[str, Any] = {"model": service.model, "messages": [message_to_openai(m) for m in state.messages]}
        if state.tools:
            body["tools"] = list(state.tools)
        return body | _sampling(service, max_tokens, "max_completion_tokens")

    def _counted(self, usage: Mapping[str, Any] | None) -> Usage:
        return _counted(self.client, usage)


@dataclass(frozen=True)
class CompletionsEndpoint:
    """`/completions`: text in, text out. Fits `Endpoint`."""

    client: Client
    render: Callable[[AgentState], str]

    async def complete(self, state: AgentState, max_tokens: int | None) -> Answered:
        """Raises as `Client.post` does."""
        service = self.client.service
        body = {"model": service.model, "prompt": self.render(state), **_sampling(service, max_tokens, "max_tokens")}
        data = await self.client.post("completions", body)
        with reading(service.url, data):
            choice = data["choices"][0]
            text, cut_off = text_of(choice["text"]), choice["finish_reason"] == "length"
            return Answered(Message("assistant", text), _counted(self.client, data.get("usage")), cut_off)


def message_to_openai(message: Message) -> dict[str, Any]:
    data: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        data |= {"content": message.content or None, "tool_calls": [_call_to_openai(c) for c in message.tool_calls]}
    if message.role == "tool":
        data["tool_call_id"] = message.tool_call_id
    return data


def message_from_openai(data: Mapping[str, Any]) -> Message:
    calls = tuple(_call_from_openai(call) for call in data.get("tool_calls") or ())
    thought = text_of(data.get("reasoning_content") or data.get("reasoning"))
    return Message("assistant", text_of(data.get("content")), calls, thought)


def call_of(name: str, arguments: str, id: str) -> ToolCall:
    """A call as the model wrote it; arguments that are no JSON object are kept as text."""
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        parsed = None
    return ToolCall(name, parsed, id) if isinstance(parsed, dict) else ToolCall(name, {}, id, arguments)


class _Gathered:
    """A message out of its pieces."""

    def __init__(self) -> None:
        self._texts: dict[str, list[str]] = {"content": [], "reasoning_content": []}
        self._calls: dict[int, dict[str, str]] = {}

    def take(self, delta: Mapping[str, Any]) -> str:
        """The piece of content in it."""
        for name, pieces in self._texts.items():
            pieces.append(text_of(delta.get(name)))
        for place, call in enumerate(delta.get("tool_calls") or ()):
            index = count_of(call.get("index", place))
            kept = self._calls.setdefault(index, {"id": "", "name": "", "arguments": ""})
            function = call.get("function") or {}
            kept["id"] = text_of(call.get("id")) or kept["id"]
            kept["name"] += text_of(function.get("name"))
            kept["arguments"] += text_of(function.get("arguments"))
        return self._texts["content"][-1]

    def message(self) -> dict[str, Any]:
        calls = [
            {"id": call["id"], "function": {"name": call["name"], "arguments": call["arguments"]}}
            for _, call in sorted(self._calls.items())
        ]
        return {name: "".join(pieces) for name, pieces in self._texts.items()} | {"tool_calls": calls}


def _call_to_openai(call: ToolCall) -> dict[str, Any]:
    arguments = call.malformed or json.dumps(dict(call.arguments))
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _call_from_openai(data: Mapping[str, Any]) -> ToolCall:
    function = data["function"]
    return call_of(text_of(function["name"]), text_of(function.get("arguments")), text_of(data.get("id")))


def _sampling(service: Service, max_tokens: int | None, name: str) -> dict[str, Any]:
    limit = {name: max_tokens} if max_tokens is not None else {}
    temperature = {"temperature": service.temperature} if service.temperature is not None else {}
    return {**limit, **temperature, **service.body}


def _counted(client: Client, usage: Mapping[str, Any] | None) -> Usage:
    found = usage or {}
    read, written = count_of(found.get("prompt_tokens")), count_of(found.get("completion_tokens"))
    return client.count(client.service.prices.of(read, written))


def _headers(service: Service) -> dict[str, str]:
    key = service.key()
    return {"Authorization": f"Bearer {key}"} if key else {}
