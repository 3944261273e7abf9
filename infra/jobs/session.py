"""A machine as one run holds it, and how far the output of its jobs has been read."""

import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from infra.errors import Unreachable
from infra.jobs.follow import Lines, LogLine
from infra.jobs.ranks import PeerWatch
from infra.machines.machine import Job, Machine
from infra.machines.ssh_machine import SSHMachine
from rollouts_core.config import EngineMachines, MachineConfig, Served
from rollouts_core.observe.runs import RunLog
from rollouts_core.store.manifest import ArtifactId, Manifest
from rollouts_core.store.store import Store

LAST_LINES = 15

logger = logging.getLogger("rollouts.machines")


@dataclass(frozen=True)
class Progress:
    """`done` of `total` steps of a stage, with the metrics of the last."""

    stage: str
    done: int
    total: int
    metrics: Mapping[str, float]
    step: int = 0
    """The step within the whole training, where that has several stages."""


@dataclass(frozen=True)
class Glimpse:
    """Some rollouts of a step, to show."""

    stage: str
    step: int
    rollouts: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Serving:
    """The replicas of a pool, told when one of them changes its state."""

    replicas: Sequence[Mapping[str, Any]]


Told = Progress | Glimpse


@dataclass
class Cursor:
    """How far a job's output has been read, and its last lines."""

    log: int
    metrics: int
    found: frozenset[str]
    """The stages whose artifacts were there before this run asked for the job."""
    lines: Lines = field(default_factory=Lines)
    records: Lines = field(default_factory=Lines)
    ahead: list[LogLine | Told] = field(default_factory=list)
    """Output of later stages: the job may be ahead of the flow."""
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))


class Watch(Protocol):
    """Looks after what a job needs on other machines."""

    def look(self) -> Iterator[LogLine | Serving]:
        """Do the work that is due, and yield what happened since the last look."""


@dataclass(frozen=True)
class MachineSession:
    """A machine as one run holds it: where its artifacts are, how long jobs may take, what has been read of them."""

    machine: Machine
    store: Store
    settings: MachineConfig
    run: RunLog
    cursors: dict[str, Cursor] = field(default_factory=dict)
    services: dict[str, Job] = field(default_factory=dict)
    """Jobs of servers on the run's machine, by the name of the job that asks them; see `beside` too."""
    peers: tuple[SSHMachine, ...] = ()
    """Machines whose ranks train along with the machine's."""
    engines: Mapping[tuple[str, EngineMachines], tuple[SSHMachine, ...]] = field(default_factory=dict)
    """Machines for servers, leased or to be leased, by the model beside the policy (empty: the policy) and by what was
    asked for."""
    served: tuple[Served, ...] = ()
    """The models that the run asks beside its policy."""
    beside: dict[str, str] = field(default_factory=dict)
    """The name that `services` and `pools` have for the running servers of a model, by the model's name."""
    watches: dict[str, PeerWatch] = field(default_factory=dict)
    """The watches of the ranks on other machines, by the name of the job that they belong to."""
    pools: dict[str, Watch] = field(default_factory=dict)
    """The watches of servers on other machines, named as in `services`."""
    asked_by: str | None = None
    """Another name under which the session's jobs are asked for, and may be cancelled."""

    def asked(self, job: str) -> list[str]:
        """Under which names `services` and `pools` have what a job asks."""
        return [job, *self.beside.values()]

    def has(self, artifact: ArtifactId) -> bool:
        """Whether the artifact is in the store here or on the machine."""
        return self.store.has(artifact) or self.machine.has(artifact)

    def manifest(self, artifact: ArtifactId) -> Manifest:
        """Raises `StoreError` when the artifact is neither here nor there."""
        return (self.store if self.store.has(artifact) else self.machine).manifest(artifact)

    def expect(self, stage: str, job: Job, machine: Machine) -> None:
        """Call this before a job is started: it records the job, for `rollouts cancel`, and ends it with the run."""
        self.run.job(stage, machine.name, job.name, None)
        self.run.endings.note(_named(job, machine), lambda: self.end(job, machine))

    def end(self, job: Job, machine: Machine) -> bool:
        """The same as `cancel_job`. A start of it that is still on its way is refused."""
        was_there = cancel_job(job.name, machine, job.asked_by[0])
        self.forget(job, machine)
        return was_there

    def forget(self, job: Job, machine: Machine) -> None:
        """Forget a job that has ended."""
        self.run.endings.forget(_named(job, machine))


def cancel_job(job: str, machine: Machine, asked_by: str | None = None) -> bool:
    """Cancel a job; returns whether it was running. If its machine is away, say so and leave it to its limits."""
    try:
        return machine.cancel(job, asked_by)
    except Unreachable as error:
        advice = f"job {job} may run on there; `rollouts cancel` ends it when the machine is back"
        logger.warning("%s: %s", error, advice)
        return False


def _named(job: Job, machine: Machine) -> str:
    return f"job {job.name} on {machine.name}"
