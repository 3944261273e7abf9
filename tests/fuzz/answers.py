"""What servers answer, whole and as a stream of events, over a real socket; and what clients ask of our own server."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Any

import anyio.from_thread
import anyio.to_thread
import httpx
import numpy as np

from rollouts_core.data.tokenized import Example
from rollouts_core.errors import EngineUnavailable
from rollouts_core.inference import sglang, vllm
from rollouts_core.inference.endpoints.anthropic import anthropic_endpoint
from rollouts_core.inference.endpoints.openai import completions_endpoint, openai_endpoint
from rollouts_core.inference.endpoints.service import Service
from rollouts_core.inference.engine import GenerationRequest
from rollouts_core.inference.http import JsonClient
from rollouts_core.inference.streamed import Pieces
from rollouts_core.loopback import opened
from rollouts_core.serving.api import app_for
from rollouts_core.serving.talker import Talker
from rollouts_core.training import reference
from rollouts_core.types import Message
from rollouts_core.types.episode import AgentState
from tests.fuzz.changes import changed, changed_bytes
from tests.fuzz.target import Read, Target, in_event_loop
from tests.rollouts_core.rollout.test_episodes import TOKENIZER, Speaks

REQUEST = GenerationRequest("r", (1, 2), 3, ())
STATE = AgentState((Message("user", "1+1="),))
EXAMPLE = Example(np.array([5, 6, 7], np.int64), np.array([False, True, True]))
CALL = {"index": 0, "id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "input_tokens": 3, "output_tokens": 2}
META = {
    "output_token_logprobs": [[-0.5, 7, None], [-0.25, 8, None]], "completion_tokens": 2,
    "weight_versions": [{"version": "0", "start": 0, "end": 2}], "finish_reason": {"type": "stop"},
    "input_token_logprobs": [[None, 5, None], [-0.5, 6, None], [-0.1, 7, None]],
}  # fmt: skip
SGLANG: dict[str, Any] = {"output_ids": [7, 8], "meta_info": META}
VLLM: dict[str, Any] = {"choices": [{
    "token_ids": [7, 8], "logprobs": {"token_logprobs": [-0.5, -0.25]}, "finish_reason": "stop", "text": "2",
    "prompt_logprobs": [None, {"6": {"logprob": -0.5}}, {"7": {"logprob": -0.5}}],
}]}  # fmt: skip
CHAT: dict[str, Any] = {
    "choices": [{"message": {"role": "assistant", "content": "2", "tool_calls": [CALL], "reasoning_content": "hm"},
                 "finish_reason": "stop"}], "usage": USAGE,
}  # fmt: skip
CLAUDE: dict[str, Any] = {
    "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "2"},
                {"type": "tool_use", "id": "c", "name": "add", "input": {}}], "stop_reason": "end_turn", "usage": USAGE,
}  # fmt: skip
CHAT_EVENTS: list[Any] = [
    {"choices": [{"delta": {"role": "assistant", "content": "2"}, "finish_reason": None}]},
    {"choices": [{"delta": {"reasoning_content": "hm", "tool_calls": [CALL]}}]},
    {"choices": [{"delta": {}, "finish_reason": "stop"}], "usage": USAGE},
]
CLAUDE_EVENTS: list[Any] = [
    {"type": "message_start", "message": {"usage": USAGE}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "2"}},
    {"type": "content_block_start", "index": 1, "content_block": CLAUDE["content"][2]},
    {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": "{}"}},
    {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": USAGE},
]  # fmt: skip
SGLANG_EVENTS: list[Any] = [SGLANG, {"output_ids": [9], "meta_info": META | {"completion_tokens": 3}}]
ASKED: dict[str, Any] = {
    "model": "policy", "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "1+1="}],
    "prompt": "1+1=", "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "stop": ["x"],
    "seed": 3, "n": 1, "stream": False, "stream_options": {"include_usage": True}, "tool_choice": "auto",
    "tools": [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}],
}  # fmt: skip
TEMPLATES = {
    "sglang": SGLANG, "vllm": VLLM, "teacher-sglang": SGLANG, "teacher-vllm": VLLM, "chat": CHAT, "text": VLLM,
    "claude": CLAUDE, "sglang-events": SGLANG_EVENTS, "chat-events": CHAT_EVENTS, "claude-events": CLAUDE_EVENTS,
    "plain": SGLANG,
}  # fmt: skip
STATUSES = (200, 204, 100, 101, 301, 307, 400, 401, 404, 408, 429, 500, 503, 529, 999)
HEADERS = {
    "Content-Length": ("0", "3", "99", "-1", "x", "9" * 30), "Transfer-Encoding": ("chunked", "gzip", "x"),
    "Content-Encoding": ("gzip", "deflate", "br", "zstd", "x"), "Content-Type": ("text/plain; charset=x", "x", ""),
    "Location": ("/", "//", "http://[", "file:///etc/passwd", "http://127.0.0.1:99999"), "Connection": ("close", "x"),
    "Retry-After": ("1", "inf", "-1", "9" * 400, "1 Oct 99999 07:28:00 GMT", "1 Jan 0001 00:00:00 +2359", "\u00b2"),
    "Retry-After-Ms": ("1", "nan", "inf", "1e999", "x"), "X-Ratelimit-Remaining-Tokens": ("0", "x"),
    "X-Ratelimit-Reset-Tokens": ("6m0s", "9" * 400 + "h", "1.1.1s", "x"),
    "Set-Cookie": ("a=b; Max-Age=x", "=", "\u00e9"),
}  # fmt: skip
HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"
Given = tuple[str, bytes]
"""Who is to read it, and the bytes of the answer."""


def _body(names: tuple[str, ...], draw: random.Random) -> Given:
    name = draw.choice(names)
    data = changed(TEMPLATES[name], draw) if draw.random() < 0.8 else TEMPLATES[name]
    if name.endswith("-events"):
        events = data if isinstance(data, list) else [data]
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    else:
        body = json.dumps(data)
    content = body.encode()
    content = changed_bytes(content, draw) if draw.random() < 0.4 else content
    return name, HEAD % len(content) + content


def _head(draw: random.Random) -> Given:
    """An answer whose head is damaged, or says what servers seldom say."""
    name = draw.choice(list(TEMPLATES))
    body = json.dumps(TEMPLATES[name]).encode()
    chosen = draw.sample(list(HEADERS), draw.randint(0, 3))
    told = {"Content-Length": str(len(body)), **{header: draw.choice(HEADERS[header]) for header in chosen}}
    lines = [f"HTTP/1.1 {draw.choice(STATUSES)} OK", *(f"{header}: {value}" for header, value in told.items())]
    head = "\r\n".join([*lines, "", ""]).encode()
    return name, (changed_bytes(head, draw) if draw.random() < 0.4 else head) + body


class _Server:
    """Answers every request with the bytes that are set, and then ends the connection if it `ends`."""

    answer = b""

    def __init__(self, ends: bool) -> None:
        self.ends = ends

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    (line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), b":0"
                )
                await reader.readexactly(int(length.partition(b":")[2]))
                writer.write(self.answer)
                await writer.drain()
                if self.ends:
                    return
        except (asyncio.IncompleteReadError, OSError):
            return
        finally:
            writer.close()


@asynccontextmanager
async def _opened(ends: bool = False) -> AsyncIterator[Callable[[Given], Awaitable[None]]]:
    server = _Server(ends)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    service = Service(url, "m", tries=1)
    http = JsonClient()
    async with (
        listening,
        openai_endpoint(service) as openai,
        anthropic_endpoint(service) as anthropic,
        completions_endpoint(service, lambda state: "x") as completions,
    ):

        async def call(method: str, path: str, body: Any, seconds: float) -> Any:
            return await http.call(method, f"{url}{path}", body, deadline=seconds)

        async def answered() -> Any:
            return await http.call("POST", url, {}, deadline=20)

        async def streamed() -> None:
            pieces = Pieces()
            try:
                async for event in http.events(url, {}):
                    pieces.add(event, True)
            except EngineUnavailable:
                pieces.kept(REQUEST, 1)
                raise
            sglang.read_completion(pieces.whole(), REQUEST)

        def plain() -> None:
            with suppress(OSError), opened(url, 5.0) as answer:
                answer.read()

        async def all_of(stream: AsyncIterator[Any]) -> None:
            async for _ in stream:
                pass

        readers: dict[str, Callable[[], Awaitable[Any]]] = {
            "sglang": lambda: _then(answered(), lambda data: sglang.read_completion(data, REQUEST)),
            "vllm": lambda: _then(answered(), lambda data: vllm.read_completion(data, REQUEST, 1)),
            "teacher-sglang": lambda: reference._ask_sglang(call, url, "m", EXAMPLE),
            "teacher-vllm": lambda: reference._ask_vllm(call, url, "m", EXAMPLE),
            "chat": lambda: openai.complete(STATE, 3),
            "text": lambda: completions.complete(STATE, 3),
            "claude": lambda: anthropic.complete(STATE, 3),
            "sglang-events": streamed,
            "chat-events": lambda: all_of(openai.stream(STATE, 3)),
            "claude-events": lambda: all_of(anthropic.stream(STATE, 3)),
            "plain": lambda: anyio.to_thread.run_sync(plain),
        }

        async def read(given: Given) -> None:
            name, server.answer = given
            with anyio.fail_after(30):
                await readers[name]()

        try:
            yield read
        finally:
            await http.aclose()


@asynccontextmanager
async def _opened_anew() -> AsyncIterator[Callable[[Given], Awaitable[None]]]:
    """New clients for each answer, because an answer may ask them to wait."""

    async def read(given: Given) -> None:
        async with _opened(ends=True) as once:
            await once(given)

    yield read


async def _then(answer: Awaitable[Any], read: Callable[[Any], object]) -> None:
    read(await answer)


@contextmanager
def _own_server() -> Iterator[Read]:
    """Our own endpoint: whatever it is sent, it answers with a status, and never with 500."""
    talker = Talker("a-run", TOKENIZER, Speaks(["2"] * 10**6), 128, None)

    async def read(given: tuple[str, bytes]) -> None:
        path, body = given
        transport = httpx.ASGITransport(app=app_for(talker))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            with anyio.fail_after(30):
                answer = await client.post(path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code in (200, 400, 404, 503), f"status {answer.status_code}: {answer.text[:500]}"

    with anyio.from_thread.start_blocking_portal() as portal:
        yield lambda given: portal.call(read, given)


def _asked(draw: random.Random) -> tuple[str, bytes]:
    body = json.dumps(changed(ASKED, draw)).encode()
    path = draw.choice(["/v1/chat/completions", "/v1/completions"])
    return path, changed_bytes(body, draw) if draw.random() < 0.2 else body


WHOLE = tuple(name for name in TEMPLATES if not name.endswith("-events"))
STREAMS = tuple(name for name in TEMPLATES if name.endswith("-events"))
TARGETS: dict[str, Target] = {
    "answers": Target(partial(_body, WHOLE), partial(in_event_loop, _opened)),
    "streams": Target(partial(_body, STREAMS), partial(in_event_loop, _opened)),
    "heads": Target(_head, partial(in_event_loop, _opened_anew)),
    "requests": Target(_asked, _own_server),
}
