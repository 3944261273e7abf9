"""Following a job's output from an offset, without loss or repeats, over whatever happens to the connection."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

from infra.errors import Unreachable
from infra.machines.machine import Machine, Offsets, Watched

LOOK_SECONDS = 0.1
AWAY_SECONDS = 2.0
"""Between two attempts to reach a machine that does not answer."""


@dataclass(frozen=True)
class LogLine:
    text: str


def watching(machine: Machine, job: str, at: Offsets, patience: float) -> Iterator[Watched | LogLine]:
    """The job's state and new output, again and again, for as long as somebody asks; a line when it can't be seen.

    Raises `Unreachable` when its machine has not answered for `patience` seconds.
    """
    away: float | None = None
    waits = ""
    while True:
        watched = machine.watch(job, at, LOOK_SECONDS)
        if watched.status.state != "unreachable":
            if away is not None:
                yield LogLine(f"{machine.name} answers again after {time.monotonic() - away:.0f} s")
                away = None
            at = Offsets(at.log + len(watched.log), at.metrics + len(watched.metrics))
            if watched.status.state == "running" and watched.status.message != waits:
                waits = watched.status.message
                yield LogLine(f"waiting for {machine.name}: {waits}" if waits else f"{machine.name}: the job goes on")
            yield watched
            continue
        if away is None:
            away = time.monotonic()
            yield LogLine(f"{watched.status.message}: the job runs on there, and it is tried again")
        if time.monotonic() - away > patience:
            raise Unreachable(
                f"{watched.status.message} for {patience / 3600:g} hours (machine.unreachable_limit_hours). "
                "Its job may run on: the same run finds it when the machine is back"
            )
        time.sleep(AWAY_SECONDS)


@dataclass
class Lines:
    """Bytes in, complete lines out."""

    rest: bytes = b""

    def take(self, data: bytes) -> list[str]:
        *complete, self.rest = (self.rest + data).split(b"\n")
        return [line.decode(errors="replace") for line in complete if line.strip()]
