"""Leases: who may make an artifact, across processes and machines.

Decision: a lease is a sequence of generations, `leases/<name>/<generation>.json`. The highest generation is the lease;
taking it over is the exclusive creation of the next one, which only one can win. A holder that wakes up after its
lease was taken sees the higher generation, and whatever it still tries is refused: the generation is its fencing
token.

Decision: clocks of different machines are never compared. A holder counts beats in its own generation; a waiter calls
the lease lapsed when the count has stood still for `seconds` on the waiter's own clock. On one machine a dead holder
is seen at once, by its process.

Decision: a holder that can't reach the store for `seconds` has lost its lease, since others may call it lapsed by
then. The heartbeat is ended and waited for before the lease is given up, so that no late beat can revive it.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from rollouts_core.errors import LeaseLost, StoreError, StoreUnavailable
from rollouts_core.store.locks import born
from rollouts_core.store.objects import Objects

LEASE_SECONDS = 60.0
BEATS_PER_LEASE = 6
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Holder:
    """The holder of a lease: its process, and its number of heartbeats."""

    owner: str
    """A random name that no other holder has."""
    host: str
    machine: str
    """The running kernel and its process namespace, in which `pid` is valid."""
    pid: int
    born: str
    """The start of the process in the kernel's ticks, because pids are used again."""
    since: str
    beat: int = 0
    released: bool = False

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"


class Lease:
    """Held from construction to `release`, beating from a thread of its own."""

    def __init__(
        self,
        objects: Objects,
        name: str,
        generation: int,
        holder: Holder,
        seconds: float,
        on_lost: Callable[[str], None],
    ) -> None:
        self._objects, self._name, self._holder = objects, name, holder
        self.generation = generation
        self._seconds, self._on_lost = seconds, on_lost
        self._renewed = _now()
        self._lost = ""
        self._end = threading.Event()
        self._heart = threading.Thread(target=self._beat_until_end, name=f"lease {name}", daemon=True)
        self._heart.start()

    def check(self) -> None:
        """Raises `LeaseLost` when somebody else may be making this by now. Asks the store."""
        self._notice_loss()
        if self._lost:
            raise LeaseLost(f"{self._name}: {self._lost}")

    def release(self) -> None:
        self._end.set()
        self._heart.join()
        with suppress(OSError, StoreError):  # where the store can't be reached, the lease lapses
            if not self._lost and self._is_mine():
                self._objects.write(_path(self._name, self.generation), _encode(replace(self._holder, released=True)))

    def _beat_until_end(self) -> None:
        while not self._end.wait(self._seconds / BEATS_PER_LEASE):
            try:
                self._notice_loss()
                if not self._lost:
                    self._holder = replace(self._holder, beat=self._holder.beat + 1)
                    self._objects.write(_path(self._name, self.generation), _encode(self._holder))
                    self._renewed = _now()
            except (OSError, StoreError) as error:
                if _now() - self._renewed > self._seconds:
                    self._lost = f"the lease could not be renewed for {self._seconds:.0f} s: {error}"
            if self._lost:
                self._on_lost(self._lost)
                return

    def _notice_loss(self) -> None:
        if not self._lost and not self._is_mine():
            self._lost = "the lease was taken over by another process"

    def _is_mine(self) -> bool:
        generation, holder = _latest(self._objects, self._name)
        if generation == 0:
            raise StoreUnavailable(f"store {self._objects.place} holds no leases: it is out of reach")
        return generation == self.generation and holder is not None and holder.owner == self._holder.owner


class Claim:
    """An attempt to get a lease. It remembers for how long the holder's heartbeats have stopped."""

    def __init__(self, objects: Objects, name: str, seconds: float = LEASE_SECONDS) -> None:
        self._objects, self._name, self._seconds = objects, name, seconds
        self._seen: tuple[int, int] | None = None
        self._since = 0.0
        self.holder: Holder | None = None

    def attempt(self, on_lost: Callable[[str], None]) -> Lease | None:
        """The lease if it is free, released, lapsed, or its holder is dead; else None, with `holder` telling whose."""
        generation, self.holder = _latest(self._objects, self._name)
        if self.holder is not None and not self._is_over(generation, self.holder):
            return None
        mine = _this_process()
        if not self._objects.create(_path(self._name, generation + 1), _encode(mine)):
            return None
        for name in self._objects.names(f"leases/{self._name}"):
            if _generation(name) <= generation:
                self._objects.delete(name)
        return Lease(self._objects, self._name, generation + 1, mine, self._seconds, on_lost)

    def _is_over(self, generation: int, holder: Holder) -> bool:
        if holder.released or _is_dead(holder):
            return True
        if self._seen != (generation, holder.beat):
            self._seen, self._since = (generation, holder.beat), _now()
        return _now() - self._since > self._seconds


@contextmanager
def holding(
    claim: Claim,
    deadline: float,
    enough: Callable[[], bool],
    say: Callable[[str], None],
    on_lost: Callable[[str], None],
) -> Iterator[Lease | None]:
    """Hold a lease. Waits up to `deadline` seconds, saying for whom; yields None as soon as `enough()` is true.

    Raises `StoreError` when the deadline passes.
    """
    end = time.monotonic() + deadline
    said = ""
    while (lease := claim.attempt(on_lost)) is None:
        if enough():
            yield None
            return
        reason = f"it is being made by {claim.holder}"
        if reason != said and claim.holder is not None:
            say(f"waiting: {reason}")
            said = reason
        if time.monotonic() > end:
            raise StoreError(f"waited {deadline:.0f} s: {reason}")
        time.sleep(POLL_SECONDS)
    try:
        yield lease
    finally:
        lease.release()


def live_leases(objects: Objects) -> dict[str, Holder]:
    """Name to holder of every lease that is neither released nor, as far as this machine can see, its holder's dead."""
    latest = {name.split("/")[1]: name for name in sorted(objects.names("leases"))}
    contents = objects.read_many(list(latest.values()))
    found = {name: Holder(**json.loads(contents[path])) for name, path in latest.items() if path in contents}
    return {name: holder for name, holder in found.items() if _is_live(holder)}


def is_live_lease(objects: Objects, name: str) -> bool:
    """Whether this one is among `live_leases`."""
    return _is_live(_latest(objects, name)[1])


def _is_live(holder: Holder | None) -> bool:
    return holder is not None and not holder.released and not _is_dead(holder)


def _latest(objects: Objects, name: str) -> tuple[int, Holder | None]:
    """The highest generation (0: none) and who wrote it."""
    found = objects.names(f"leases/{name}")
    if not found:
        return 0, None
    content = objects.read(found[-1])
    return _generation(found[-1]), Holder(**json.loads(content)) if content else None


def _path(name: str, generation: int) -> str:
    return f"leases/{name}/{generation:08d}.json"


def _generation(path: str) -> int:
    return int(path.rpartition("/")[2].removesuffix(".json"))


def _encode(holder: Holder) -> bytes:
    return json.dumps(asdict(holder)).encode()


def _this_process() -> Holder:
    since = datetime.now(UTC).isoformat(timespec="seconds")
    return Holder(os.urandom(8).hex(), socket.gethostname(), _machine(), os.getpid(), born(os.getpid()), since)


def _is_dead(holder: Holder) -> bool:
    """Whether it ran on this machine and is gone. Of other machines nothing can be said."""
    return bool(holder.machine) and holder.machine == _machine() and born(holder.pid) != holder.born


def _machine() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _now() -> float:
    """Seconds, the time that a machine was suspended included where the system can tell."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
