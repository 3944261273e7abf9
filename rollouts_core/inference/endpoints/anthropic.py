"""Services that speak Anthropic's protocol: `/v1/messages`, whole or streamed."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from rollouts_core.errors import EngineUnavailable
from rollouts_core.inference.endpoints.client import Client, connected
from rollouts_core.inference.endpoints.openai import call_of
from rollouts_core.inference.endpoints.service import Service
from rollouts_core.inference.reading import count_of, reading, text_of
from rollouts_core.types import Message, ToolCall
from rollouts_core.types.episode import AgentState, Answered, Usage

VERSION = "2023-06-01"
MAX_TOKENS = 4096
"""The protocol wants a number where the caller has none."""
CUT_OFF = ("max_tokens", "model_context_window_exceeded")


@asynccontextmanager
async def anthropic_endpoint(service: Service) -> AsyncIterator["AnthropicEndpoint"]:
    """`async with anthropic_endpoint(Service("https://api.anthropic.com/v1", ...)) as endpoint`.

    Raises `BadInput` when its key is not set.
    """
    key = service.key()
    headers = {"anthropic-version": VERSION} | ({"x-api-key": key} if key else {})
    async with connected(service, headers) as client:
        yield AnthropicEndpoint(client)


@dataclass(frozen=True)
class AnthropicEndpoint:
    """Fits `Endpoint`."""

    client: Client

    @property
    def used(self) -> Usage:
        """The usage of all requests so far."""
        return self.client.used

    async def complete(self, state: AgentState, max_tokens: int | None) -> Answered:
        """Raises as `Client.post` does."""
        data = await self.client.post("messages", self._body(state, max_tokens))
        with reading(self.client.service.url, data):
            return self._answered(data["content"], data["stop_reason"], data["usage"])

    async def stream(self, state: AgentState, max_tokens: int | None) -> AsyncIterator[str | Answered]:
        """Pieces of the text as they come, then the whole answer. Raises as `Client.events` does."""
        gathered, url = _Gathered(), self.client.service.url
        async for event in self.client.events("messages", self._body(state, max_tokens) | {"stream": True}):
            with reading(url, event):
                piece = gathered.take(event, url)
            if piece:
                yield piece
        if gathered.stop is None:
            raise EngineUnavailable(f"{url}: the stream broke off")
        with reading(url, gathered.blocks):
            answered = self._answered(gathered.blocks, gathered.stop, gathered.usage)
        yield answered

    def _body(self, state: AgentState, max_tokens: int | None) -> dict[str, Any]:
        service = self.client.service
        body: dict[str, Any] = {
            "model": service.model,
            "max_tokens": MAX_TOKENS if max_tokens is None else max_tokens,
            "messages": messages_to_anthropic(state.messages),
        }
        if system := "\n\n".join(m.content for m in state.messages if m.role in ("system", "developer")):
            body["system"] = system
        if state.tools:
            functions = [tool["function"] for tool in state.tools]
            body["tools"] = [
                {"name": f["name"], "description": f.get("description", ""), "input_schema": f["parameters"]}
                for f in functions
            ]
        if service.temperature is not None:
            body["temperature"] = service.temperature
        return body | dict(service.body)

    def _answered(self, blocks: Sequence[Mapping[str, Any]], stop: str | None, usage: Mapping[str, int]) -> Answered:
        message = message_from_anthropic(blocks)
        read = sum(count_of(usage.get(f"{kind}input_tokens")) for kind in ("", "cache_creation_", "cache_read_"))
        written = count_of(usage.get("output_tokens"))
        return Answered(message, self.client.count(self.client.service.prices.of(read, written)), stop in CUT_OFF)


class _Gathered:
    """An answer out of its events."""

    def __init__(self) -> None:
        self.blocks: list[dict[str, Any]] = []
        self.usage: dict[str, Any] = {}
        self.stop: str | None = None

    def take(self, event: Mapping[str, Any], url: str) -> str:
        """The piece of text in it. Raises `EngineUnavailable` for an error of the service's."""
        match event.get("type"):
            case "message_start":
                self.usage |= event["message"]["usage"]
            case "content_block_start":
                self.blocks.append(dict(event["content_block"]) | {"written": ""})
            case "content_block_delta":
                return _take(self.blocks[event["index"]], event["delta"])
            case "message_delta":
                self.stop = event["delta"].get("stop_reason") or self.stop
                self.usage |= event.get("usage") or {}
            case "error":
                raise EngineUnavailable(f"{url}: {event['error']}")
        return ""


def messages_to_anthropic(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Turns in the protocol's form: results are the user's, and what one role says on end is one turn."""
    turns: list[dict[str, Any]] = []
    for message in messages:
        if message.role in ("system", "developer"):
            continue
        role = "assistant" if message.role == "assistant" else "user"
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += _blocks(message)
        else:
            turns.append({"role": role, "content": _blocks(message)})
    return turns


def message_from_anthropic(blocks: Sequence[Mapping[str, Any]]) -> Message:
    calls = tuple(_call(block) for block in blocks if block["type"] == "tool_use")
    text = "".join(text_of(block["text"]) for block in blocks if block["type"] == "text")
    thought = "".join(text_of(block["thinking"]) for block in blocks if block["type"] == "thinking")
    return Message("assistant", text, calls, thought)


def _blocks(message: Message) -> list[dict[str, Any]]:
    if message.role == "tool":
        return [{"type": "tool_result", "tool_use_id": message.tool_call_id, "content": message.content}]
    text = [{"type": "text", "text": message.content}] if message.content or not message.tool_calls else []
    return [
        *text,
        *({"type": "tool_use", "id": c.id, "name": c.name, "input": dict(c.arguments)} for c in message.tool_calls),
    ]


def _call(block: Mapping[str, Any]) -> ToolCall:
    """The call in a streamed block, whose input comes in pieces, or in a whole block."""
    if block.get("written"):
        return call_of(text_of(block["name"]), text_of(block["written"]), text_of(block["id"]))
    return ToolCall(text_of(block["name"]), dict(block["input"]), text_of(block["id"]))


def _take(block: dict[str, Any], delta: Mapping[str, Any]) -> str:
    """Add a piece to its block; the piece of text in it."""
    match delta["type"]:
        case "text_delta":
            block["text"] += delta["text"]
            return str(delta["text"])
        case "thinking_delta":
            block["thinking"] += delta["thinking"]
        case "input_json_delta":
            block["written"] += delta["partial_json"]
    return ""
