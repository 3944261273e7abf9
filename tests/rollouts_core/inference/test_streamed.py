"""Answers that come in pieces from a server that breaks off: what had come goes on elsewhere."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from aiohttp import web

from rollouts_core.errors import EngineRefused, EngineUnavailable, MalformedAnswer
from rollouts_core.inference.engine import Completion, GenerationRequest, ModelLimits
from rollouts_core.inference.http import JsonClient
from rollouts_core.inference.members import Problems
from rollouts_core.inference.replicas import FixedServers, Replica
from rollouts_core.inference.sglang import SGLangEngine

LIMITS = ModelLimits(64, 100)
ASKED = GenerationRequest("r", (1, 2), 6, ())


class NoTransport:
    """Fits `WeightTransport`; what these servers would load is of no interest."""

    def __init__(self) -> None:
        self.brought: dict[str, Any] = {}

    async def bring(self, replicas: list[Replica], weights: Any, version: int) -> Problems:
        return {}

    async def swap(self, replicas: list[Replica], weights: Any, version: int) -> Problems:
        return {}

    async def aclose(self) -> None: ...


class Server:
    """Answers with the numbers behind the last token, two to an event, and breaks off when it is told to."""

    def __init__(self) -> None:
        self.version, self.asked = "1", list[list[int]]()
        self.breaks_after: Callable[[int], bool] = lambda events: False
        self.while_answering: Callable[[], Any] | None = None

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body["input_ids"])
        answer = web.StreamResponse()
        await answer.prepare(request)
        last, left = body["input_ids"][-1], body["sampling_params"]["max_new_tokens"]
        tokens = list(range(last + 1, last + 1 + left))
        for number in range(0, left, 2):
            if self.breaks_after(number // 2):
                assert request.transport is not None
                request.transport.abort()
                return answer
            done = number + 2 >= left
            meta = {"output_token_logprobs": [[-0.5, token, None] for token in tokens[number : number + 2]]}
            if done:
                spans = [{"version": self.version, "start": 0, "end": left}]
                meta |= {"completion_tokens": left, "finish_reason": {"type": "length"}, "weight_versions": spans}
            event = {"output_ids": tokens[number : number + 2], "meta_info": meta}
            await answer.write(f"data: {json.dumps(event)}\n\n".encode())
            if self.while_answering is not None:
                await self.while_answering()
        await answer.write(b"data: [DONE]\n\n")
        return answer

    async def info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.version})


@asynccontextmanager
async def engine_of(*servers: Server) -> AsyncIterator[SGLangEngine]:
    runners, urls = [], []
    for server in servers:
        app = web.Application()
        app.add_routes([web.post("/generate", server.generate), web.get("/model_info", server.info)])
        app.add_routes([web.post(f"/{name}_generation", nothing) for name in ("pause", "continue")])
        app.add_routes([web.post("/abort_request", nothing)])
        runners.append(web.AppRunner(app))
        await runners[-1].setup()
        await web.TCPSite(runners[-1], "127.0.0.1", 0).start()
        urls.append(f"http://127.0.0.1:{runners[-1].addresses[0][1]}")
    engine = SGLangEngine(FixedServers(urls), LIMITS, NoTransport(), streams=True)  # type: ignore[arg-type]
    try:
        await engine.update_weights({}, 1)
        for server in servers:
            server.asked.clear()
        yield engine
    finally:
        await engine.aclose()
        for runner in runners:
            await runner.cleanup()


async def nothing(request: web.Request) -> web.Response:
    return web.json_response({})


def test_a_broken_answer_goes_on_behind_the_tokens_that_had_come() -> None:
    server = Server()
    broken: list[int] = []

    def once(events: int) -> bool:
        if events == 2 and not broken:
            broken.append(events)
            return True
        return False

    async def main() -> Completion:
        async with engine_of(server) as engine:
            server.breaks_after = once
            return await engine.generate(ASKED)

    completion = anyio.run(main)
    assert completion.tokens == (3, 4, 5, 6, 7, 8) and completion.finish_reason == "length"
    assert completion.log_probs == (-0.5,) * 6 and completion.weight_versions == (1,) * 6
    assert server.asked == [[1, 2], [1, 2, 3, 4, 5, 6]]


def test_of_an_answer_that_broke_off_behind_new_weights_only_what_came_before_them_is_kept() -> None:
    server = Server()

    async def main() -> Completion:
        async with engine_of(server) as engine:
            steps: list[int] = []

            async def update_behind_the_first() -> None:
                steps.append(1)
                if len(steps) == 1:
                    await anyio.sleep(0.2)  # the first piece has arrived
                    server.version, server.while_answering = "2", None
                    await engine.update_weights({}, 2)

            server.while_answering = update_behind_the_first
            server.breaks_after = lambda events: len(server.asked) == 1 and events == 2
            return await engine.generate(ASKED)

    completion = anyio.run(main)
    assert completion.tokens == (3, 4, 5, 6, 7, 8)
    assert completion.weight_versions == (1, 1, 2, 2, 2, 2)
    assert [1, 2, 3, 4] in server.asked


def test_one_that_breaks_off_before_its_first_token_is_told_as_such() -> None:
    server = Server()

    async def main() -> None:
        async with engine_of(server) as engine:
            server.breaks_after = lambda events: True
            await engine.generate(ASKED)

    with pytest.raises(EngineUnavailable, match="/generate"):
        anyio.run(main)


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (b"data: {broken\n\n", MalformedAnswer),
        (b'data: {"output_ids": [1]}\n\n', MalformedAnswer),
        (b'data: {"error": {"message": "too long", "code": 400}}\n\n', EngineRefused),
        (b'data: {"error": "it died"}\n\n', EngineUnavailable),
        (b"", EngineUnavailable),
    ],
)
def test_events_that_make_no_sense_are_told(said: bytes, error: type[Exception]) -> None:
    async def generate(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        await answer.write(said)
        return answer

    async def main() -> None:
        app = web.Application()
        app.add_routes([web.post("/generate", generate), web.post("/abort_request", nothing)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        engine = SGLangEngine(FixedServers([url]), LIMITS, NoTransport(), streams=True)  # type: ignore[arg-type]
        try:
            await engine._streamed(f"{url}/generate", ASKED, {"sampling_params": {}})
        finally:
            await engine.aclose()
            await runner.cleanup()

    with pytest.raises(error):
        anyio.run(main)


def test_a_status_that_refuses_is_told_with_its_words() -> None:
    async def main() -> None:
        runner = web.AppRunner(web.Application())
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        client = JsonClient()
        try:
            url = f"http://127.0.0.1:{runner.addresses[0][1]}/generate"
            async for _ in client.events(url, {}):
                raise AssertionError("there is nothing there")
        finally:
            await client.aclose()
            await runner.cleanup()

    with pytest.raises(EngineRefused, match="404"):
        anyio.run(main)
