"""Requests to a service: retried if that may help, with limits of how many at the same time and of their costs.

Decision: aiohttp and no vendor's client. A request is one POST of JSON, and hundreds of episodes make thousands of
them.

Decision: if a service says when to come back, no request of this client goes there before, since the next one would get
the same answer.
"""

import random
import re
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp
import anyio

from rollouts_core.errors import EngineRefused, EngineUnavailable, MalformedAnswer
from rollouts_core.inference.endpoints.served import addresses_of
from rollouts_core.inference.endpoints.service import Service
from rollouts_core.inference.reading import QUOTED, json_in
from rollouts_core.types.episode import Usage

FIRST_WAIT = 0.5
LONGEST_WAIT = 60.0
"""A service that wants to be left alone for longer counts as away."""
TRY_AGAIN = (408, 409, 425, 429)
PART = re.compile(r"([\d.]+)(ms|s|m|h)")
SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


class Client:
    """Connections to one service; counts what was used."""

    def __init__(self, service: Service, session: aiohttp.ClientSession, headers: Mapping[str, str]) -> None:
        self.service, self.used = service, Usage()
        self._session, self._headers = session, dict(headers)
        self._places = anyio.Semaphore(service.max_concurrent)
        self._open_at = 0.0
        self._addresses = addresses_of(service.url)

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The answer as data.

        Raises `EngineUnavailable` or `MalformedAnswer` after the last try, `EngineRefused` at once for what no try
        mends, a spent budget among it.
        """
        for tries in range(1, self.service.tries + 1):
            try:
                async with self._answer(path, body) as answer:
                    return json_in(await answer.read(), self._place(path))
            except (EngineUnavailable, MalformedAnswer) as error:
                await self._wait_or_raise(error, tries)
        raise AssertionError("the last try returns or raises")

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[Any]:
        """A stream's events as data, each as it comes; tried again only where it has not begun.

        Raises as `post` does, and `EngineUnavailable` for a stream that breaks off.
        """
        for tries in range(1, self.service.tries + 1):
            begun = False
            try:
                async with self._answer(path, body) as answer:
                    async for line in answer.content:
                        name, _, value = line.partition(b":")
                        if name == b"data" and value.strip() not in (b"", b"[DONE]"):
                            begun = True
                            yield json_in(value, self._place(path))
                return
            except (EngineUnavailable, MalformedAnswer) as error:
                if begun:
                    raise
                await self._wait_or_raise(error, tries)

    def count(self, usage: Usage) -> Usage:
        """Add to what was used."""
        self.used += usage
        return usage

    @asynccontextmanager
    async def _answer(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[aiohttp.ClientResponse]:
        budget = self.service.budget
        if budget is not None and self.used.cost >= budget:
            raise EngineRefused(f"{self.service.url}: the budget of {budget:g} is spent ({self.used.cost:.4g})")
        place, seconds = self._place(path), self.service.answer_seconds
        async with self._places, self._addresses.one() as address:
            await anyio.sleep(max(0.0, self._open_at - time.monotonic()))
            try:
                timeout = aiohttp.ClientTimeout(total=seconds)
                url = f"{address.rstrip('/')}/{path}"
                async with self._session.post(url, json=body, headers=self._headers, timeout=timeout) as answer:
                    if answer.status >= 400:
                        self._refuse(place, answer, (await answer.read())[:QUOTED].decode(errors="replace"))
                    yield answer
            except TimeoutError:
                raise EngineUnavailable(f"{place}: no whole answer in {seconds:g} s") from None
            except aiohttp.ClientError as error:
                raise EngineUnavailable(f"{place}: {type(error).__name__}: {error}") from None

    def _refuse(self, place: str, answer: aiohttp.ClientResponse, text: str) -> None:
        if answer.status < 500 and answer.status not in TRY_AGAIN:
            raise EngineRefused(f"{place}: status {answer.status}: {text}")
        wait = asked_to_wait(answer.headers)
        if wait > LONGEST_WAIT:
            raise EngineRefused(f"{place}: status {answer.status}, come back in {wait:.0f} s: {text}")
        self._open_at = max(self._open_at, time.monotonic() + wait)
        raise EngineUnavailable(f"{place}: status {answer.status}: {text}")

    async def _wait_or_raise(self, error: Exception, tries: int) -> None:
        if tries >= self.service.tries:
            raise error
        await anyio.sleep(min(LONGEST_WAIT, FIRST_WAIT * 2 ** (tries - 1)) * random.uniform(0.5, 1.0))

    def _place(self, path: str) -> str:
        return f"{self.service.url.rstrip('/')}/{path}"


@asynccontextmanager
async def connected(service: Service, headers: Mapping[str, str]) -> AsyncIterator[Client]:
    """A client whose connections end with the block."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        yield Client(service, session, headers)


def asked_to_wait(headers: Mapping[str, str]) -> float:
    """Seconds that an answer's headers ask for: `retry-after-ms`, `retry-after` (RFC 9110), or the reset of an
    exhausted `x-ratelimit-*`; 0 where they ask for nothing."""
    try:
        if found := headers.get("retry-after-ms"):
            return max(0.0, float(found) / 1000)
        if found := headers.get("retry-after"):
            if found.replace(".", "", 1).isdigit():
                return float(found)
            return max(0.0, parsedate_to_datetime(found).timestamp() - time.time())
        exhausted = [of for of in ("requests", "tokens") if headers.get(f"x-ratelimit-remaining-{of}") == "0"]
        resets = [_seconds(headers.get(f"x-ratelimit-reset-{of}", "")) for of in exhausted]
    except ValueError:
        return 0.0
    return max(resets, default=0.0)


def _seconds(text: str) -> float:
    """Seconds of a duration such as `6m0s` or `250ms`."""
    return sum(float(number) * SECONDS[unit] for number, unit in PART.findall(text))
