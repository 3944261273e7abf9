"""JSON over HTTP to servers on this host, with errors that say which server, what was asked, and what to expect.

Decision: every call has a deadline of its own; none is tried again here, since only the caller knows what a second try
would mean.
"""

import json
from collections.abc import Mapping
from typing import Any

import anyio
import httpx

from rollouts_core.errors import EngineRefused, EngineUnavailable, MalformedAnswer

SAID = 500
"""Characters of an answer that are quoted in an error."""


class JsonClient:
    """One pool of connections. Proxies of the environment are not used: the servers are here."""

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
        except httpx.HTTPError as error:
            raise EngineUnavailable(f"{method} {url}: {type(error).__name__}: {error}") from None
        if answer.status_code >= 500 or answer.status_code in (408, 425, 429):
            raise EngineUnavailable(f"{method} {url}: status {answer.status_code}: {answer.text[:SAID]}")
        if answer.status_code >= 400:
            raise EngineRefused(f"{method} {url}: status {answer.status_code}: {answer.text[:SAID]}")
        try:
            return json.loads(answer.text) if answer.text.strip() else None
        except ValueError:
            raise MalformedAnswer(f"{method} {url}: this is no JSON: {answer.text[:SAID]!r}") from None
