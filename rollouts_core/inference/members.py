"""The replicas of an engine: which have the current weights, how others get them, and which one is asked.

Decision: a replica takes part only while it is known to have the current weights. Its identity is its address, which is
new with each start. A newcomer first gets the current version and serves afterwards. A replica that can't get it is
taken out, and is asked to start again.

Decision: new weights are brought to a replica's machine while it generates, and it is paused only to load them.

Decision: without a router, a request goes to the replica that will probably answer first, by the requests under way
there and by its recent speed. So a slow replica gets fewer. The requests of a session (a group, an episode) go to the
replica of the first one while that serves, since it has their common prefix in its cache.
"""

import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import anyio

from rollouts_core.errors import EngineError, EngineUnavailable, WeightMismatch
from rollouts_core.inference.engine import Completion, GenerationRequest, ModelLimits
from rollouts_core.inference.probing import Said, outliers, probes
from rollouts_core.inference.replicas import Fleet, Replica, Servers

LOOK_SECONDS = 0.5
AGAIN_SECONDS = 10.0
"""The wait before another attempt with a replica that could not get the weights."""
SPEED_SHARE = 0.1
"""Weight of the last request in the average speed of a replica."""
SESSIONS = 2**16
"""Most sessions that are remembered; those that were used longest ago are forgotten."""
UNSENT = -1

Problems = dict[str, Exception]
"""The errors of replicas, by name."""


Step = Callable[[Sequence[Replica]], Awaitable[Problems]]


@dataclass(frozen=True)
class Giving:
    """How a version is given to replicas."""

    bring: Step
    """Brings the weights to where replicas load them from; they go on generating."""
    swap: Step
    """Makes replicas take the weights."""


class Members:
    """The replicas that may be asked, and the version they have."""

    def __init__(self, fleet: Fleet, start_seconds: float, least: int = 1) -> None:
        """`start_seconds`: how long to wait while fewer than `least` replicas are there that could answer."""
        self._fleet, self._start_seconds, self._least = fleet, start_seconds, least
        self.version = UNSENT
        self.current: dict[str, Replica] = {}
        """Replicas with the current weights, by address."""
        self._busy: Counter[str] = Counter()
        self._homes: dict[str, str] = {}
        """For each session, the address of its replica; the one that was used last is last."""
        self._speeds: dict[str, float] = {}
        """Tokens a second of one request, by address."""
        self._tokens: Counter[str] = Counter()
        self._failed: dict[str, float] = {}
        """When replicas could not be given the weights, by address."""
        self._said: dict[str, Said] = {}
        """The answers of replicas to probes with this version, by address."""

    def servers(self) -> Servers:
        """The servers that are there. Raises `EngineUnavailable` if there are none and none will come."""
        servers = self._fleet.ready()
        there = {replica.url for replica in servers.replicas}
        self.current = {url: replica for url, replica in self.current.items() if url in there}
        return servers

    def newcomers(self) -> list[Replica]:
        """Replicas that lack the version, except those that have just failed to take it."""
        since = time.monotonic() - AGAIN_SECONDS
        there = self.servers().replicas
        return [r for r in there if r.url not in self.current and self._failed.get(r.url, since) <= since]

    def serving(self) -> list[Replica]:
        """The replicas that may be asked. Raises `EngineUnavailable` while they are too few."""
        self.servers()
        if len(self.current) < self._least:
            raise EngineUnavailable(
                f"{len(self.current)} servers have weight version {self.version}, and {self._least} are needed"
            )
        return list(self.current.values())

    @contextmanager
    def chosen(self, session: str) -> Iterator[Replica]:
        """The replica for a request, which counts as under way there for as long as the block lasts."""
        members = self.serving()
        replica = self.current.get(self._homes.pop(session, "")) or self._first_to_answer(members)
        if session:
            self._homes[session] = replica.url
            if len(self._homes) > SESSIONS:
                del self._homes[next(iter(self._homes))]
        self._busy[replica.url] += 1
        try:
            yield replica
        finally:
            self._busy[replica.url] -= 1

    def _first_to_answer(self, members: Sequence[Replica]) -> Replica:
        usual = statistics.median(self._speeds.values()) if self._speeds else 1.0
        return min(members, key=lambda member: (self._busy[member.url] + 1) / self._speeds.get(member.url, usual))

    def answered(self, replica: Replica, tokens: int, seconds: float) -> None:
        """A request was: for the shares that replicas get, and for `rates`."""
        self._tokens[replica.name] += tokens
        if tokens and seconds:
            speed = tokens / seconds
            before = self._speeds.get(replica.url, speed)
            self._speeds[replica.url] = before + SPEED_SHARE * (speed - before)

    async def probed(
        self,
        replicas: Sequence[Replica],
        limits: ModelLimits,
        ask: Callable[[GenerationRequest, Replica], Awaitable[Completion]],
    ) -> Problems:
        """Ask replicas with new weights what they compute; whose answers are not the others' has other weights."""
        if len(replicas) + len(self.current) < 2:
            return {}
        requests = probes(limits)
        said: dict[str, Said] = {}

        async def probe(replica: Replica) -> None:
            answers = [await ask(request, replica) for request in requests]
            said[replica.url] = [answer.log_probs[0] for answer in answers]

        problems = await for_each(replicas, probe)
        self._said = {url: self._said[url] for url in self.current if url in self._said} | said
        strange = outliers(self._said)
        return problems | {
            replica.name: EngineUnavailable(
                f"its weights are not those of the others: log-probabilities differ by {strange[replica.url]:.2g}"
            )
            for replica in replicas
            if replica.url in strange
        }

    def take_tokens(self) -> dict[str, int]:
        """How many tokens each replica has made since this was asked last; empty behind a router, which doesn't say."""
        tokens, self._tokens = self._tokens, Counter()
        if not self._speeds:
            return {}
        return {replica.name: tokens[replica.name] for replica in self.current.values()} | tokens

    async def bring(self, version: int, giving: Giving) -> None:
        """Give all replicas that lack it the version; wait while fewer than are needed have it.

        Raises `WeightMismatch` when all refuse the weights, `EngineUnavailable` when too few could be reached in time.
        """
        end = time.monotonic() + self._start_seconds
        said = "no server is ready"
        if version != self.version:
            self._failed = {}
        while True:
            replicas = self.newcomers() if version == self.version else list(self.servers().replicas)
            if replicas:
                problems = await self._give(replicas, version, giving)
                if problems:
                    said = "; ".join(f"{name}: {problem}" for name, problem in problems.items())
            if len(self.current) >= self._least and version == self.version:
                return
            if time.monotonic() > end:
                raise EngineUnavailable(
                    f"weight version {version} could be given to {len(self.current)} servers of the {self._least} that "
                    f"are needed: {said}"
                )
            await anyio.sleep(LOOK_SECONDS)

    async def _give(self, replicas: Sequence[Replica], version: int, giving: Giving) -> Problems:
        unreached = await giving.bring(replicas)
        if version != self.version:
            self.version, self.current = version, {}
        there = [replica for replica in replicas if replica.name not in unreached]
        refused = await giving.swap(there) if there else {}
        self.current |= {replica.url: replica for replica in there if replica.name not in refused}
        self._failed |= {r.url: time.monotonic() for r in replicas if r.name in unreached or r.name in refused}
        self._restart(there, refused)
        return unreached | refused

    def _restart(self, replicas: Sequence[Replica], problems: Problems) -> None:
        refused = [problem for problem in problems.values() if isinstance(problem, WeightMismatch)]
        if refused and not self.current:
            raise refused[0]
        for replica in replicas:
            if replica.name in problems:
                self._fleet.restart(replica, str(problems[replica.name]))


async def nothing_to_bring(replicas: Sequence[Replica]) -> Problems:
    """Do nothing: replicas can read the weights where they are."""
    return {}


def without(replicas: Sequence[Replica], problems: Problems) -> list[Replica]:
    """The replicas without a problem."""
    return [replica for replica in replicas if replica.name not in problems]


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
