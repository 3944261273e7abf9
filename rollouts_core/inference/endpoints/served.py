"""Endpoints of models beside the policy: `served://NAME` is one of the model's replicas.

Decision: there is no router. The client reads which replicas answer, and takes the one with the fewest of its own
requests under way. So a replica may come back at another port or on another machine, and one that fails gets no
requests for a while. If no replica answers, requests wait.
"""

import json
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Protocol

import anyio

from rollouts_core.config.served import SCHEME
from rollouts_core.errors import BadInput, EngineUnavailable
from rollouts_core.inference.replicas import SupervisedServers

VARIABLE = "ROLLOUTS_SERVED"
WAIT_SECONDS = 600.0
LOOK_SECONDS = 0.5
AWAY_SECONDS = 5.0
"""A replica that has failed is asked again after that, or where no other is there."""


class Addresses(Protocol):
    def one(self) -> AbstractAsyncContextManager[str]:
        """An address for one request."""


def announce(directories: Mapping[str, Path]) -> None:
    """Tell this process and those it starts where the servers of each model are kept."""
    os.environ[VARIABLE] = json.dumps({name: str(directory) for name, directory in directories.items()})


def is_served(url: str) -> bool:
    return url.startswith(SCHEME)


def addresses_of(url: str) -> Addresses:
    """The addresses of a service. Raises `BadInput` for a served model that this run does not have."""
    if not is_served(url):
        return _Fixed(url)
    name, _, path = url.removeprefix(SCHEME).partition("/")
    known: dict[str, str] = json.loads(os.environ.get(VARIABLE, "{}"))
    if name not in known:
        has = f"it has {', '.join(known)}" if known else "it has none"
        raise BadInput(f"{url}: this run has no such model ({has}); add it to the config's `served`")
    return _Served(url, SupervisedServers(Path(known[name])), path)


class _Fixed:
    def __init__(self, url: str) -> None:
        self._url = url

    @asynccontextmanager
    async def one(self) -> AsyncIterator[str]:
        yield self._url


class _Served:
    def __init__(self, url: str, servers: SupervisedServers, path: str) -> None:
        self._url, self._servers, self._path = url, servers, path
        self._under_way: Counter[str] = Counter()
        self._failed: dict[str, float] = {}
        """When each replica that has failed did so last."""

    @asynccontextmanager
    async def one(self) -> AsyncIterator[str]:
        """Raises `EngineUnavailable` where none answers for `WAIT_SECONDS`."""
        url = await self._least_busy()
        self._under_way[url] += 1
        try:
            yield f"{url}/{self._path}".rstrip("/")
        except EngineUnavailable:
            self._failed[url] = time.monotonic()
            raise
        finally:
            self._under_way[url] -= 1

    async def _least_busy(self) -> str:
        end = time.monotonic() + WAIT_SECONDS
        while True:
            reason = "none is ready"
            try:
                ready = [replica.url for replica in self._servers.ready().replicas]
            except EngineUnavailable as error:
                ready, reason = [], str(error)
            if ready:
                return min(ready, key=lambda url: (self._is_away(url), self._under_way[url]))
            if time.monotonic() > end:
                raise EngineUnavailable(f"{self._url}: no server has answered for {WAIT_SECONDS:.0f} s: {reason}")
            await anyio.sleep(LOOK_SECONDS)

    def _is_away(self, url: str) -> bool:
        return time.monotonic() - self._failed.get(url, -AWAY_SECONDS) < AWAY_SECONDS
