"""OpenAI's protocol over a talker: `/v1/models`, `/v1/chat/completions` with streaming and tools, `/v1/completions`.

Decision: text becomes tokens here, with the model's own template, as in training: the engine gets token ids. If a
client hangs up, its request is aborted. Only requests to names of this host are answered, so that a page in a browser
can't reach the endpoint under a name of its own.
"""

import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from functools import partial
from typing import Any
from uuid import uuid4

import anyio
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.middleware.trustedhost import TrustedHostMiddleware

from rollouts_core.concurrency import first_error
from rollouts_core.data.chat import encode_texts
from rollouts_core.data.turns import stop_tokens
from rollouts_core.errors import BadInput, ContextOverflow, OutsideVocabulary, RolloutsError
from rollouts_core.inference.endpoints.openai import message_to_openai
from rollouts_core.inference.engine import Completion, GenerationRequest
from rollouts_core.serving.asked import Asked, read_chat, read_completion
from rollouts_core.serving.talker import Manner, Talker
from rollouts_core.types.episode import AgentState, Answered

HOSTS = ["127.0.0.1", "localhost", "[::1]"]
COMPLETION_TOKENS = 16
"""Tokens of `/v1/completions` where the client gives no number, as OpenAI does."""


def app_for(talker: Talker) -> FastAPI:
    """Answers for this one policy, under its name and under `policy`."""
    app = FastAPI(title="rollouts", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=HOSTS)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": talker.name, "object": "model", "owned_by": "rollouts"}]}

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await _answered(talker, request, read_chat, _chat, _chat_events)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await _answered(talker, request, read_completion, _completions, None)

    return app


async def _answered(
    talker: Talker,
    request: Request,
    read: Callable[[Any, int], Asked],
    whole: Callable[[Talker, Asked], Awaitable[dict[str, Any]]],
    events: Callable[[Talker, Asked], AsyncIterator[dict[str, Any]]] | None,
) -> Response:
    try:
        asked = read(await _body(request), time.time_ns() % 2**31)
        if asked.model not in ("", "policy", talker.name):
            return _refusal(404, f"no model {asked.model!r} here, only {talker.name!r}", "model_not_found")
        if asked.stream:
            if events is None or len(asked.manners) > 1:
                raise BadInput("stream: only chat completions with n = 1 are streamed here")
            stream = events(talker, asked)
            first = await anext(stream)  # refuse before the stream begins
            return StreamingResponse(_lines(first, stream), media_type="text/event-stream")
        found = await _unless_gone(request, partial(whole, talker, asked))
    except (BadInput, ContextOverflow, OutsideVocabulary) as error:
        return _refusal(400, str(error))
    except RolloutsError as error:
        return _refusal(503, str(error), kind="server_error")
    return JSONResponse(found)


async def _body(request: Request) -> Any:
    try:
        return json.loads(await request.body())
    except (ValueError, RecursionError) as error:
        raise BadInput(f"the body is not JSON: {error}") from None


async def _chat(talker: Talker, asked: Asked) -> dict[str, Any]:
    state = AgentState(asked.messages, asked.tools)
    answers: list[Answered | None] = [None] * len(asked.manners)

    async def answer(place: int, manner: Manner) -> None:
        answers[place] = await talker.endpoint(asked.tools, manner).complete(state, asked.max_tokens)

    await _all_of([partial(answer, place, manner) for place, manner in enumerate(asked.manners)])
    done = [one for one in answers if one is not None]
    choices = [
        {"index": place, "message": _message(one, asked), "finish_reason": _reason(one), "logprobs": None}
        for place, one in enumerate(done)
    ]
    return {**_head(talker, "chat.completion"), "choices": choices, "usage": _usage(done)}


async def _chat_events(talker: Talker, asked: Asked) -> AsyncIterator[dict[str, Any]]:
    head = _head(talker, "chat.completion.chunk")
    (manner,) = asked.manners
    parts = talker.endpoint(asked.tools, manner).stream(AgentState(asked.messages, asked.tools), asked.max_tokens)
    part = await anext(parts)
    yield _event(head, {"role": "assistant", "content": ""})
    held = ""  # this may be the beginning of a stop text, which is not sent
    while not isinstance(part, Answered):
        told, held = _tellable(held + part, asked)
        if told:
            yield _event(head, {"content": told})
        part = await anext(parts)
    message = _message(part, asked)
    if rest := _trimmed(held, asked):
        yield _event(head, {"content": rest})
    if calls := message.get("tool_calls"):
        yield _event(head, {"tool_calls": [{"index": number, **call} for number, call in enumerate(calls)]})
    yield _event(head, {}, _reason(part))
    if asked.usage:
        yield {**head, "choices": [], "usage": _usage([part])}


async def _completions(talker: Talker, asked: Asked) -> dict[str, Any]:
    tokenizer = talker.tokenizer
    prompts = [
        tuple(encode_texts(tokenizer, [prompt])[0].tolist()) if isinstance(prompt, str) else prompt
        for prompt in asked.prompts
    ]
    jobs = [(prompt, manner) for prompt in prompts for manner in asked.manners]
    made: list[Completion | None] = [None] * len(jobs)

    async def complete(place: int, prompt: tuple[int, ...], manner: Manner) -> None:
        asked_for = asked.max_tokens or COMPLETION_TOKENS
        request = GenerationRequest(
            f"completion-{uuid4().hex}", prompt, asked_for, stop_tokens(tokenizer), manner.temperature, manner.seed,
            truncation=manner.truncation, stop=manner.stop,
        )  # fmt: skip
        made[place] = await talker.engine.generate(request)

    await _all_of([partial(complete, place, *job) for place, job in enumerate(jobs)])
    done = [one for one in made if one is not None]
    choices = [
        {
            "index": place,
            "text": _trimmed(tokenizer.decode(list(one.tokens), skip_special_tokens=True), asked),
            "finish_reason": one.finish_reason,
            "logprobs": None,
        }
        for place, one in enumerate(done)
    ]
    read, written = sum(map(len, prompts)), sum(len(one.tokens) for one in done)
    usage = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
    return {**_head(talker, "text_completion"), "choices": choices, "usage": usage}


async def _all_of(work: list[Callable[[], Coroutine[Any, Any, None]]]) -> None:
    """Run all at the same time. Raises the first error itself, and not a group of errors."""
    with first_error():
        async with anyio.create_task_group() as tasks:
            for one in work:
                tasks.start_soon(one)


async def _unless_gone(request: Request, work: Callable[[], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
    """The result of the work, which is cancelled when the client hangs up."""
    found: dict[str, Any] = {}

    async def run() -> None:
        found.update(await work())
        tasks.cancel_scope.cancel()

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        tasks.cancel_scope.cancel()

    with first_error():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            tasks.start_soon(watch)
    return found


async def _lines(first: dict[str, Any], events: AsyncIterator[dict[str, Any]]) -> AsyncIterator[str]:
    yield f"data: {json.dumps(first)}\n\n"
    try:
        async for event in events:
            yield f"data: {json.dumps(event)}\n\n"
    except RolloutsError as error:
        yield f"data: {json.dumps(_error(str(error), 'server_error', None))}\n\n"
    yield "data: [DONE]\n\n"


def _head(talker: Talker, kind: str) -> dict[str, Any]:
    return {"id": f"{kind[:4]}-{uuid4().hex}", "object": kind, "created": int(time.time()), "model": talker.name}


def _event(head: dict[str, Any], delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}]}


def _message(answered: Answered, asked: Asked) -> dict[str, Any]:
    data = message_to_openai(answered.message)
    if data["content"]:
        data["content"] = _trimmed(data["content"], asked)
    return data | ({"reasoning_content": answered.message.reasoning} if answered.message.reasoning else {})


def _reason(answered: Answered) -> str:
    if answered.cut_off:
        return "length"
    return "tool_calls" if answered.message.tool_calls else "stop"


def _stops(asked: Asked) -> tuple[str, ...]:
    return asked.manners[0].stop


def _trimmed(text: str, asked: Asked) -> str:
    """Up to the first stop text."""
    places = [text.find(stop) for stop in _stops(asked) if stop in text]
    return text[: min(places)] if places else text


def _tellable(text: str, asked: Asked) -> tuple[str, str]:
    """Split text into a part in which no stop text can begin, and the rest."""
    longest = max((len(stop) for stop in _stops(asked)), default=1) - 1
    if any(stop in text for stop in _stops(asked)):
        return "", text
    return (text[:-longest], text[-longest:]) if longest else (text, "")


def _usage(answers: list[Answered]) -> dict[str, int]:
    read = answers[0].usage.prompt_tokens if answers else 0
    written = sum(answered.usage.completion_tokens for answered in answers)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def _refusal(status: int, message: str, code: str | None = None, kind: str = "invalid_request_error") -> JSONResponse:
    return JSONResponse(_error(message, kind, code), status_code=status)


def _error(message: str, kind: str, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
