"""JSON over HTTP to servers on this host, with errors that say which server, what was asked, and what to expect.

Decision: every call has a deadline of its own. Nothing is retried here, since only the caller knows whether a retry is
right.
"""

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import anyio
import httpx

from rollouts_core.errors import EngineRefused, EngineUnavailable
from rollouts_core.inference.reading import QUOTED, json_in

DONE = "[DONE]"
NO_ANSWER = (httpx.HTTPError, UnicodeError)
"""The exceptions of httpx for a connection or an answer that fails. It reads some headers as ASCII."""


class JsonClient:
    """An HTTP client with a pool of connections. It ignores the environment's proxies: the servers are on this host."""

    def __init__(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._client = httpx.AsyncClient(limits=limits, timeout=None, trust_env=False)

    async def aclose(self) -> None:
        await self._client.aclose()

    async def call(
        self,
        method: str,
        url: str,
        body: Any = None,
        *,
        deadline: float,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """The answer as data; None where it is empty.

        Raises `EngineUnavailable` for whatever may pass (no connection, no answer in time, 5xx), `EngineRefused` for
        4xx with the server's words, `MalformedAnswer` for what is not JSON.
        """
        try:
            with anyio.fail_after(deadline):
                answer = await self._client.request(method, url, json=body, headers=dict(headers or {}))
        except TimeoutError:
            raise EngineUnavailable(f"{method} {url}: no answer in {deadline:g} s") from None
        except NO_ANSWER as error:
            raise EngineUnavailable(f"{method} {url}: {type(error).__name__}: {error}") from None
        _raise_for(answer.status_code, answer.text, f"{method} {url}")
        return json_in(answer.text, f"{method} {url}") if answer.text.strip() else None

    async def events(self, url: str, body: Any, headers: Mapping[str, str] | None = None) -> AsyncIterator[Any]:
        """The data of each server-sent event of an answer, until `[DONE]`. The caller has the deadline.

        Raises as `call` does; also where the stream ends before it is done.
        """
        asked = f"POST {url}"
        try:
            async with self._client.stream("POST", url, json=body, headers=dict(headers or {})) as answer:
                if answer.status_code >= 400:
                    _raise_for(answer.status_code, (await answer.aread()).decode(errors="replace"), asked)
                async for line in answer.aiter_lines():
                    told = line.removeprefix("data:").strip()
                    if told == DONE:
                        return
                    if told:
                        yield _event(json_in(told, asked), asked)
        except NO_ANSWER as error:
            raise EngineUnavailable(f"{asked}: {type(error).__name__}: {error}") from None
        raise EngineUnavailable(f"{asked}: the answer broke off")


def _raise_for(status: int, text: str, asked: str) -> None:
    if status >= 500 or status in (408, 425, 429):
        raise EngineUnavailable(f"{asked}: status {status}: {text[:QUOTED]}")
    if status >= 400:
        raise EngineRefused(f"{asked}: status {status}: {text[:QUOTED]}")


def _event(told: Any, asked: str) -> Any:
    """An error that comes behind the status is raised as one that comes with it."""
    error = told.get("error") if isinstance(told, dict) else None
    if error is None:
        return told
    code = error.get("code") if isinstance(error, dict) else None
    _raise_for(code if isinstance(code, int) and code >= 400 else 500, json.dumps(error), asked)
    return told
