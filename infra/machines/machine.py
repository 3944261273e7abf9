"""The protocol of machines, on which jobs run: this machine and all others.

    Job            a command with its directory's name, files and limits
    JobStatus      running, finished, lost, absent or unreachable
    Machine        start, watch, cancel; what it has, and what is sent to it

Decision: a job is a directory on its machine. To follow it, one reads files from an offset and looks whether its lock
is held. Nothing about a job is only in the orchestrator's memory, so an orchestrator may die and another continue.

Decision: waiting for a machine is shown to people. A call that may take long (a queue for GPUs, sending data) is a
generator of lines, and a machine that does not answer is a status, not an exception.
"""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from rollouts_core.stages.stage import Stage
from rollouts_core.store.manifest import ArtifactId, Manifest


def new_name() -> str:
    """A random name of a request to start a job."""
    return secrets.token_hex(8)


@dataclass(frozen=True)
class Job:
    name: str
    """The name of the job's directory; the same name is the same job."""
    command: tuple[str, ...]
    """May hold `{directory}`, which the machine fills in; other braces are doubled (`literal`)."""
    spec: Mapping[str, Any]
    """Becomes `spec.json` in the directory."""
    time_limit: float
    """Seconds."""
    unattended_limit: float
    """Seconds without anybody asking for it."""
    stall_limit: float
    """Seconds without a pulse, for commands that touch a file `pulse` in the directory."""
    asked_by: tuple[str, ...] = field(default_factory=lambda: (new_name(),))
    """The names under which it is asked for, this start's first. A cancellation of one of these names refuses a start
    that is still on its way."""


@dataclass(frozen=True)
class JobStatus:
    state: Literal["absent", "running", "finished", "lost", "unreachable"]
    """lost: it ran, and was killed together with what watched over it. unreachable: its machine does not answer."""
    exit_status: int | None = None
    """Negative: the number of the signal that ended it."""
    reason: str = ""
    """exited, cancelled, time limit, unattended or stalled."""
    message: str = ""
    """The stage's own words on why it failed, why the machine is unreachable, or what a running job waits for."""


@dataclass(frozen=True)
class Offsets:
    """Places in a job's files, in bytes: where the current attempt began, or how far they were read."""

    log: int = 0
    metrics: int = 0


@dataclass(frozen=True)
class Watched:
    """A job at one moment, with what its files hold beyond the offsets that were asked for."""

    status: JobStatus
    log: bytes = b""
    metrics: bytes = b""


def literal(text: str) -> str:
    """Text that may have braces, as a part of a command."""
    return text.replace("{", "{{").replace("}", "}}")


class Machine(Protocol):
    """Runs jobs, and has artifacts that jobs read and publish."""

    @property
    def name(self) -> str: ...

    @property
    def python(self) -> str:
        """The interpreter that jobs run in."""

    @property
    def places(self) -> Mapping[str, str | None]:
        """`home` and `url` of the store that jobs use there."""

    @property
    def gpus(self) -> tuple[int, ...]:
        """Places of the leased GPUs among those of the machine."""

    def claim(self, jobs: Sequence[str]) -> Iterator[str]:
        """Lease what the run needs; yields why it must wait. Raises `MachineError` when it has waited too long."""

    def supply(self, stages: Sequence[Stage]) -> Iterator[str]:
        """Send the inputs of stages that are missing there; yields what is sent."""

    def placed(self, stage: Stage) -> Stage:
        """The stage with its outside inputs where they lie there."""

    def start(self, job: Job) -> None:
        """Start the job unless it is running; returns once it runs.

        Raises `LeaseLapsed` when the run must claim again, `MachineError` when the job cannot be started.
        """

    def watch(self, job: str, at: Offsets, wait: float) -> Watched:
        """How the job is, and its new output; waits up to `wait` seconds for some. Asking keeps it attended."""

    def attempt(self, job: str) -> Offsets:
        """The offsets at which the current attempt's output begins."""

    def cancel(self, job: str, asked_by: str | None = None) -> bool:
        """End the job: TERM, then KILL, the whole group. Returns once all of it is gone, and whether there was any.

        `asked_by`: who no longer wants it, and may have a start of it on its way.
        """

    def hand(self, job: str, file: str, content: str) -> None:
        """Write a file that the job reads while it runs."""

    def checksums(self, job: str) -> Sequence[Mapping[str, Any]]:
        """The versions and checksums of the weights of a job's replicas (see `infra.host.checksums`)."""

    def has(self, artifact: ArtifactId) -> bool:
        """Whether jobs there find the artifact."""

    def manifest(self, artifact: ArtifactId) -> Manifest:
        """Raises `StoreError` when the artifact is not there."""

    def fetch(self, artifact: ArtifactId, target: Path, below: str) -> None:
        """Copy an artifact's files, or those below a folder of it, to a directory here; verified."""

    def keep(self, artifact: ArtifactId) -> None:
        """Bring the whole artifact into the store here."""

    def discard(self, artifacts: Sequence[ArtifactId]) -> None:
        """Remove artifacts and partial work that are only there; those in the store here are another's to remove."""

    def release(self) -> bool:
        """Give back what was leased. Returns whether others still use the machine, or may."""
