"""Where jobs run: the one interface of this machine and of every other.

    Job            a command with its directory's name, files and limits
    JobStatus      running, finished, lost or absent
    Machine        start, poll, read, attend, cancel

Decision: a job is a directory on its machine. Whoever wants it reads files from an offset and asks whether its lock is
held; nothing about a job lives in the orchestrator's memory, so an orchestrator may die and another one go on.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

JobFile = Literal["log", "metrics.jsonl"]


@dataclass(frozen=True)
class Job:
    name: str
    """Its directory; the same name is the same job."""
    command: tuple[str, ...]
    """May hold `{directory}`, which the machine fills in."""
    spec: Mapping[str, Any]
    """Becomes `spec.json` in the directory."""
    time_limit: float
    """Seconds."""
    unattended_limit: float
    """Seconds without anybody asking for it."""
    stall_limit: float
    """Seconds without a pulse, for commands that touch a file `pulse` in the directory."""


@dataclass(frozen=True)
class JobStatus:
    state: Literal["absent", "running", "finished", "lost"]
    """lost: it ran, and was killed together with what watched over it."""
    exit_status: int | None = None
    """Negative: the number of the signal that ended it."""
    reason: str = ""
    """exited, cancelled, time limit, unattended or stalled."""
    message: str = ""
    """The stage's own words on why it failed."""


@dataclass(frozen=True)
class Offsets:
    """Where in a job's files the current attempt began, or how far they have been read, in bytes."""

    log: int = 0
    metrics: int = 0


class Machine(Protocol):
    """Runs jobs."""

    @property
    def name(self) -> str: ...

    def start(self, job: Job) -> None:
        """Start the job unless it is running. Returns once it runs. Raises `MachineError` when it cannot be started."""

    def poll(self, job: str) -> JobStatus: ...

    def attempt(self, job: str) -> Offsets:
        """Where the current attempt's output begins."""

    def read(self, job: str, file: JobFile, offset: int) -> bytes:
        """What a file holds from an offset on."""

    def attend(self, job: str) -> None:
        """Say that the job is still wanted."""

    def cancel(self, job: str) -> None:
        """End the job: TERM, then KILL, the whole group. Returns once all of it is gone."""
