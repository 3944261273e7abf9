"""This machine."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from infra.errors import MachineError
from infra.host import jobs
from infra.machines.machine import Job, JobStatus, Offsets, Watched
from rollouts_core.stages.stage import Stage
from rollouts_core.store.fetch import fetch
from rollouts_core.store.manifest import ArtifactId, Manifest
from rollouts_core.store.store import Store

NAME = "local"


class LocalMachine:
    """Jobs as detached processes of this user, each in a directory of the store's home. Its artifacts are the store's.

    Nothing is leased: whoever uses this machine sees who else does.
    """

    name = NAME
    python = sys.executable

    def __init__(self, store: Store) -> None:
        self._store = store
        self._jobs = store.home / "jobs"

    @property
    def places(self) -> Mapping[str, str | None]:
        return {"home": str(self._store.home.resolve()), "url": self._store.url}

    def claim(self, jobs: Sequence[str]) -> Iterator[str]:
        yield from ()

    def supply(self, stages: Sequence[Stage]) -> Iterator[str]:
        yield from ()

    def placed(self, stage: Stage) -> Stage:
        return stage

    def start(self, job: Job) -> None:
        try:
            jobs.start(self._jobs, asdict(job), jobs.runner_command(), {})
        except jobs.JobError as error:
            raise MachineError(str(error)) from error

    def watch(self, job: str, at: Offsets, wait: float) -> Watched:
        status, log, metrics = jobs.watch(self._jobs, job, at.log, at.metrics, wait)
        return Watched(JobStatus(**status), log, metrics)

    def attempt(self, job: str) -> Offsets:
        return Offsets(**jobs.attempt(self._jobs, job))

    def cancel(self, job: str, asked_by: str | None = None) -> bool:
        try:
            return jobs.cancel(self._jobs, job, asked_by)
        except jobs.JobError as error:
            raise MachineError(str(error)) from error

    def has(self, artifact: ArtifactId) -> bool:
        return self._store.has(artifact)

    def manifest(self, artifact: ArtifactId) -> Manifest:
        return self._store.manifest(artifact)

    def fetch(self, artifact: ArtifactId, target: Path, below: str) -> None:
        fetch(self._store, artifact, target, below)

    def keep(self, artifact: ArtifactId) -> None:
        """It is here."""

    def discard(self, artifacts: Sequence[ArtifactId]) -> None:
        """All of them are in the store."""

    def release(self) -> bool:
        return True
