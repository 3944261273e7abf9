"""Endpoints against a local server that speaks their protocols, and misbehaves as services do."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rollouts_core.environments.agent import RunConfig, run_agent
from rollouts_core.environments.environment import Functions
from rollouts_core.environments.tools import tool
from rollouts_core.errors import BadInput, EngineRefused, EngineUnavailable, MalformedAnswer
from rollouts_core.inference.endpoints import client as client_module
from rollouts_core.inference.endpoints.anthropic import anthropic_endpoint
from rollouts_core.inference.endpoints.client import asked_to_wait
from rollouts_core.inference.endpoints.openai import completions_endpoint, openai_endpoint
from rollouts_core.inference.endpoints.service import Prices, Service
from rollouts_core.types import Message, ToolCall
from rollouts_core.types.episode import AgentState, Answered, StopReason, Usage

KEY = "sk-a-key-that-nobody-may-see"


def add(a: int, b: int) -> int:
    """The sum."""
    return a + b


ASKED = AgentState((Message("system", "Be brief."), Message("user", "1+2=")), (tool(add).schema,))
CALL = ToolCall("add", {"a": 1, "b": 2}, "c1")


@dataclass(frozen=True)
class Reply:
    body: Any
    """JSON data; bytes go out as they are; a list as a stream of events."""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    breaks_off: bool = False


@dataclass
class Served:
    """What a server was asked, and what it says next."""

    replies: list[Reply]
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        self.headers.append(dict(request.headers))
        self.paths.append(request.path)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await anyio.sleep(0.01)
        self.at_once -= 1
        reply = self.replies[min(len(self.asked), len(self.replies)) - 1]
        if isinstance(reply.body, list):
            return await self._stream(request, reply)
        body = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
        answer = web.StreamResponse(status=reply.status, headers=reply.headers)
        answer.content_length = len(body)
        await answer.prepare(request)
        await answer.write(body[: len(body) // 2] if reply.breaks_off else body)
        if reply.breaks_off and request.transport:
            request.transport.abort()
        return answer

    async def _stream(self, request: web.Request, reply: Reply) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        for event in reply.body:
            await answer.write(
                f"event: any\ndata: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode()
            )
        if reply.breaks_off and request.transport:
            request.transport.abort()
        return answer


@asynccontextmanager
async def serving(*replies: Reply) -> AsyncIterator[tuple[str, Served]]:
    served = Served(list(replies))
    application = web.Application()
    application.router.add_post("/v1/{path:.*}", served.answer)
    server = TestServer(application, host="127.0.0.1")
    await server.start_server()
    try:
        yield str(server.make_url("/v1")), served
    finally:
        await server.close()


def asking(work: Callable[[str, Served], Awaitable[Any]], *replies: Reply) -> Any:
    """What the work gives, with a server that gives these replies."""

    async def run() -> Any:
        async with serving(*replies) as (url, served):
            return await work(url, served)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client_module, "FIRST_WAIT", 0.001)
        return anyio.run(run)


def chat(content: str | None, calls: Sequence[dict[str, Any]] = (), finish: str = "stop") -> Reply:
    message = {"role": "assistant", "content": content, "tool_calls": list(calls) or None}
    usage = {"prompt_tokens": 10, "completion_tokens": 5}
    return Reply({"choices": [{"message": message, "finish_reason": finish}], "usage": usage})


def calling(arguments: str) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}


async def ask(url: str, served: Served, max_tokens: int | None = 7, **settings: Any) -> Answered:
    async with openai_endpoint(Service(url, "m", **settings)) as endpoint:
        return await endpoint.complete(ASKED, max_tokens)


def test_openai_s_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", KEY)

    async def work(url: str, served: Served) -> tuple[Answered, Served]:
        settings = {"key_variable": "SOME_KEY", "temperature": 0.5, "body": {"top_p": 0.9}, "prices": Prices(1.0, 2.0)}
        return await ask(url, served, **settings), served

    answered, served = asking(work, chat(None, [calling('{"a": 1, "b": 2}')], "tool_calls"))
    assert answered.message == Message("assistant", "", (CALL,))
    assert answered.usage == Usage(10, 5, pytest.approx(20e-6))
    (asked,) = served.asked
    assert asked == {
        "model": "m",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+2="}],
        "tools": [tool(add).schema],
        "max_completion_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
    }
    assert served.headers[0]["Authorization"] == f"Bearer {KEY}"
    assert served.paths == ["/v1/chat/completions"]


def test_an_episode_over_openai_s_protocol_tells_calls_and_results_back() -> None:
    async def work(url: str, served: Served) -> tuple[Any, Served]:
        async with openai_endpoint(Service(url, "m")) as endpoint:
            config = RunConfig(endpoint, Functions(lambda row: [], (tool(add),)))
            return await run_agent(ASKED, config), served

    done, served = asking(work, chat(None, [calling('{"a": 1, "b": 2}')]), chat(None, [calling("{a")]), chat("3"))
    assert done.final.stop is StopReason.ANSWERED
    last = served.asked[-1]["messages"]
    assert last[2] == {"role": "assistant", "content": None, "tool_calls": [calling('{"a": 1, "b": 2}')]}
    assert last[3] == {"role": "tool", "content": "3", "tool_call_id": "c1"}
    assert last[4]["tool_calls"] == [calling("{a")]
    assert last[5]["content"] == "error: the arguments are no JSON object: {a"


def piece(finish: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"delta": delta, "finish_reason": finish}]}


STREAM = [
    piece(role="assistant", content=""),
    piece(content="thr"),
    piece(content="ee"),
    piece(tool_calls=[{"index": 0, "id": "c1", "function": {"name": "add", "arguments": ""}}]),
    piece(tool_calls=[{"index": 0, "function": {"arguments": '{"a": 1,'}}]),
    piece(tool_calls=[{"index": 0, "function": {"arguments": ' "b": 2}'}}]),
    piece("tool_calls"),
    {"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": 5}},
    "[DONE]",
]


async def streamed(url: str, served: Served) -> list[str | Answered]:
    async with openai_endpoint(Service(url, "m")) as endpoint:
        return [part async for part in endpoint.stream(ASKED, None)]


def test_a_stream_is_the_same_answer_piece_by_piece() -> None:
    *pieces, answered = asking(streamed, Reply(STREAM))
    assert pieces == ["thr", "ee"]
    assert answered == Answered(Message("assistant", "three", (CALL,)), Usage(10, 5))


@pytest.mark.parametrize("breaks_off", [True, False])
def test_half_a_stream_is_no_answer(breaks_off: bool) -> None:
    with pytest.raises(EngineUnavailable):
        asking(streamed, Reply(STREAM[:4], breaks_off=breaks_off))


@pytest.mark.parametrize(
    "bad",
    [
        Reply({"error": "slow down"}, 429, {"retry-after": "0"}),
        Reply({"error": "inside"}, 500),
        Reply(b'{"choices": [', 200),
        Reply(b"\xff\xfe\xfd", 200),
        Reply({"choices": [{}] * 99}, breaks_off=True),
    ],
)
def test_what_may_pass_is_tried_again(bad: Reply) -> None:
    async def work(url: str, served: Served) -> tuple[Answered, int]:
        return await ask(url, served), len(served.asked)

    answered, asked = asking(work, bad, bad, chat("3"))
    assert (answered.message.content, asked) == ("3", 3)


@pytest.mark.parametrize(
    ("bad", "error", "asked"),
    [
        (Reply({"error": "no such model"}, 404), EngineRefused, 1),
        (Reply({"error": "come back"}, 429, {"retry-after": "3600"}), EngineRefused, 1),
        (Reply({"error": "inside"}, 503), EngineUnavailable, 3),
        (Reply(b"<html>", 200), MalformedAnswer, 3),
        (Reply({"choices": []}), MalformedAnswer, 1),
    ],
)
def test_what_does_not_pass_is_told(bad: Reply, error: type[Exception], asked: int) -> None:
    async def work(url: str, served: Served) -> int:
        with pytest.raises(error):
            await ask(url, served, tries=3)
        return len(served.asked)

    assert asking(work, bad) == asked


def test_a_service_that_is_not_there_is_named() -> None:
    with pytest.raises(EngineUnavailable, match=r"http://127\.0\.0\.1:1/v1/chat/completions"):
        asking(lambda url, served: ask("http://127.0.0.1:1/v1", served, tries=2), chat("3"))


def test_no_more_is_under_way_than_allowed_and_a_budget_holds() -> None:
    async def work(url: str, served: Served) -> Served:
        async with openai_endpoint(Service(url, "m", max_concurrent=3)) as endpoint:
            async with anyio.create_task_group() as tasks:
                for _ in range(12):
                    tasks.start_soon(endpoint.complete, ASKED, None)
            assert endpoint.used == Usage(120, 60)
        async with openai_endpoint(Service(url, "m", prices=Prices(1e5), budget=1.5)) as endpoint:
            await endpoint.complete(ASKED, None)
            await endpoint.complete(ASKED, None)
            with pytest.raises(EngineRefused, match=r"the budget of 1\.5 is spent \(2\)"):
                await endpoint.complete(ASKED, None)
        return served

    served = asking(work, chat("3"))
    assert (served.most_at_once, len(served.asked)) == (3, 14)


def test_a_key_that_is_not_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOME_KEY", raising=False)
    with pytest.raises(BadInput, match="SOME_KEY, which is not set"):
        asking(lambda url, served: ask(url, served, key_variable="SOME_KEY"), chat("3"))


def test_a_key_is_in_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", KEY)
    with pytest.raises(EngineRefused) as caught:
        asking(lambda url, served: ask(url, served, key_variable="SOME_KEY"), Reply({"error": "no"}, 401))
    assert KEY not in str(caught.value) and KEY not in repr(Service("u", "m", "SOME_KEY"))


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, 0.0),
        ({"retry-after": "1.5"}, 1.5),
        ({"retry-after-ms": "250", "retry-after": "9"}, 0.25),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0.0),
        ({"retry-after": "soon"}, 0.0),
        ({"x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": "6m0.5s"}, 360.5),
        ({"x-ratelimit-remaining-tokens": "7", "x-ratelimit-reset-tokens": "6m0s"}, 0.0),
        ({"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "20ms"}, 0.02),
    ],
)
def test_what_headers_ask_for(headers: dict[str, str], seconds: float) -> None:
    assert asked_to_wait(headers) == seconds


def test_nobody_goes_where_one_was_told_to_wait() -> None:
    """The second request begins when the first has been told to wait, and waits as well."""
    times: list[float] = []

    async def work(url: str, served: Served) -> int:
        async with openai_endpoint(Service(url, "m")) as endpoint:

            async def one() -> None:
                await endpoint.complete(ASKED, None)
                times.append(anyio.current_time())

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(one)
                while len(served.asked) < 1 or served.at_once:
                    await anyio.sleep(0.001)
                await anyio.sleep(0.02)
                tasks.start_soon(one)
                await anyio.sleep(0.1)
                return len(served.asked)

    wait = Reply({"error": "slow down"}, 429, {"retry-after": "0.4"})
    assert asking(work, wait, chat("3")) == 1
    assert len(times) == 2


def test_completions_go_on_from_text() -> None:
    async def work(url: str, served: Served) -> tuple[Answered, Served]:
        async with completions_endpoint(Service(url, "m"), lambda state: state.messages[-1].content) as endpoint:
            return await endpoint.complete(ASKED, 3), served

    answered, served = asking(work, Reply({"choices": [{"text": "3", "finish_reason": "length"}]}))
    assert answered == Answered(Message("assistant", "3"), Usage(), cut_off=True)
    assert served.asked == [{"model": "m", "prompt": "1+2=", "max_tokens": 3}]


TALK = AgentState(
    (
        *ASKED.messages,
        Message("assistant", "", (CALL,)),
        Message("tool", "3", name="add", tool_call_id="c1"),
        Message("user", "and?"),
    ),
    ASKED.tools,
)


def test_anthropic_s_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", KEY)

    async def work(url: str, served: Served) -> tuple[Answered, Served]:
        async with anthropic_endpoint(Service(url, "m", "SOME_KEY", prices=Prices(1.0, 2.0))) as endpoint:
            return await endpoint.complete(TALK, 7), served

    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "text", "text": "three"},
        {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1, "b": 2}},
    ]
    usage = {"input_tokens": 4, "cache_read_input_tokens": 6, "output_tokens": 5}
    answered, served = asking(work, Reply({"content": blocks, "stop_reason": "tool_use", "usage": usage}))
    assert answered.message == Message("assistant", "three", (CALL,), "hm")
    assert answered.usage == Usage(10, 5, pytest.approx(20e-6))
    (asked,) = served.asked
    assert asked["system"] == "Be brief." and asked["max_tokens"] == 7
    assert asked["tools"][0]["input_schema"]["required"] == ["a", "b"]
    assert asked["messages"] == [
        {"role": "user", "content": [{"type": "text", "text": "1+2="}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1, "b": 2}}]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "3"},
                {"type": "text", "text": "and?"},
            ],
        },
    ]
    assert served.headers[0]["x-api-key"] == KEY and served.headers[0]["anthropic-version"]


def test_anthropic_s_stream_is_the_same_answer() -> None:
    events = [
        {"type": "message_start", "message": {"usage": {"input_tokens": 10, "output_tokens": 1}}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "ping"},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "thr"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "ee"}},
        {"type": "content_block_stop", "index": 0},
        {
            "type": "content_block_start",
            "index": 1,
            "content_block": {"type": "tool_use", "id": "c1", "name": "add", "input": {}},
        },
        {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": '{"a": 1'}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": ', "b": 2}'}},
        {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 5}},
        {"type": "message_stop"},
    ]

    async def work(url: str, served: Served) -> list[str | Answered]:
        async with anthropic_endpoint(Service(url, "m")) as endpoint:
            return [part async for part in endpoint.stream(ASKED, None)]

    *pieces, answered = asking(work, Reply(events))
    assert pieces == ["thr", "ee"]
    assert answered == Answered(Message("assistant", "three", (CALL,)), Usage(10, 5))
    overloaded = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}
    with pytest.raises(EngineUnavailable, match="overloaded_error"):
        asking(work, Reply([*events[:4], overloaded]))
    with pytest.raises(EngineUnavailable, match="broke off"):
        asking(work, Reply(events[:5]))
