"""Which replicas of an engine have the current weights, and how the others get there.

Decision: a replica takes part only while it is known to have the current weights. It is told apart by its address,
which is new with each start; a newcomer is brought to the current version first and serves afterwards. Whoever cannot
be brought there is taken out, and a new start of it is asked for.
"""

import time
from collections.abc import Awaitable, Callable, Sequence

import anyio

from rollouts_core.errors import EngineError, EngineUnavailable, WeightMismatch
from rollouts_core.inference.replicas import Fleet, Replica, Servers

LOOK_SECONDS = 0.5
UNSENT = -1

Problems = dict[str, Exception]
"""By name of the replica: what went wrong with it."""


class Members:
    """The replicas that may be asked, and the version they have."""

    def __init__(self, fleet: Fleet, start_seconds: float) -> None:
        """`start_seconds`: how long to wait for a server where none is left that could answer."""
        self._fleet, self._start_seconds = fleet, start_seconds
        self.version = UNSENT
        self.current: dict[str, Replica] = {}
        """By address."""

    def servers(self) -> Servers:
        """What is there, without those that are gone. Raises `EngineUnavailable` when nothing will come any more."""
        servers = self._fleet.ready()
        there = {replica.url for replica in servers.replicas}
        self.current = {url: replica for url, replica in self.current.items() if url in there}
        return servers

    def newcomers(self) -> list[Replica]:
        return [replica for replica in self.servers().replicas if replica.url not in self.current]

    async def bring(self, version: int, update: Callable[[Sequence[Replica]], Awaitable[Problems]]) -> None:
        """Have `update` give all replicas that lack it the version; wait for a replica where none has it.

        Raises `WeightMismatch` when all refuse the weights, `EngineUnavailable` when none could be reached in time.
        """
        if version != self.version:
            self.current = {}
        self.version = version
        end = time.monotonic() + self._start_seconds
        said = "no server is ready"
        while True:
            if replicas := self.newcomers():
                problems = await update(replicas)
                self.current |= {replica.url: replica for replica in replicas if replica.name not in problems}
                self._restart(replicas, problems)
                if problems:
                    said = "; ".join(f"{name}: {problem}" for name, problem in problems.items())
            if self.current:
                return
            if time.monotonic() > end:
                raise EngineUnavailable(f"weight version {version} could be given to no server: {said}")
            await anyio.sleep(LOOK_SECONDS)

    def _restart(self, replicas: Sequence[Replica], problems: Problems) -> None:
        refused = [problem for problem in problems.values() if isinstance(problem, WeightMismatch)]
        if refused and not self.current:
            raise refused[0]
        for replica in replicas:
            if replica.name in problems:
                self._fleet.restart(replica, str(problems[replica.name]))


async def for_each(replicas: Sequence[Replica], action: Callable[[Replica], Awaitable[object]]) -> Problems:
    """Do it with all at once. Who fails is told of; the others go on."""
    problems: Problems = {}

    async def attempt(replica: Replica) -> None:
        try:
            await action(replica)
        except (EngineError, WeightMismatch) as error:
            problems[replica.name] = error

    async with anyio.create_task_group() as group:
        for replica in replicas:
            group.start_soon(attempt, replica)
    return problems


def raise_first(problems: Problems) -> None:
    for problem in problems.values():
        raise problem
