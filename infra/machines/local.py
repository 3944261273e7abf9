"""This machine.

Decision: its GPUs are leased among the runs of one user, with any store, by the same records as on hosts
(`infra.host.gpu_leases`). Without GPUs nothing is leased.
"""

import os
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from infra.errors import LeaseLapsed, MachineError
from infra.host import gpu_leases, jobs
from infra.host.checksums import checksums_here
from infra.host.facts import gpus, visible
from infra.machines.machine import Job, JobStatus, Offsets, Watched
from infra.machines.requirements import wanted_gpus
from infra.machines.waiting import until_free
from rollouts_core.config import MachineConfig
from rollouts_core.errors import BadInput
from rollouts_core.stages.stage import Stage
from rollouts_core.store.fetch import fetch
from rollouts_core.store.manifest import ArtifactId, Manifest
from rollouts_core.store.store import Store

NAME = "local"
DEFAULTS = MachineConfig()


class LocalMachine:
    """Jobs as detached processes of this user, each in a directory of the store's home, where its artifacts are too."""

    name = NAME
    python = sys.executable

    def __init__(self, store: Store, settings: MachineConfig = DEFAULTS, who: str = "somebody") -> None:
        """`who` names the run to those who wait for its GPUs."""
        self._store, self._settings, self._who = store, settings, who
        self._jobs = store.home / "jobs"
        self._token = ""
        """The lease's token; empty where no lease was asked for."""
        self._lease = ""
        self._gpus: tuple[int, ...] = ()
        self._visible = ""
        """The leased GPUs, as `CUDA_VISIBLE_DEVICES` names them."""
        self._held = ExitStack()

    @property
    def places(self) -> Mapping[str, str | None]:
        return {"home": str(self._store.home.resolve()), "url": self._store.url}

    @property
    def gpus(self) -> tuple[int, ...]:
        return self._gpus

    def claim(self, jobs: Sequence[str]) -> Iterator[str]:
        """Raises `BadInput` where the machine has fewer GPUs than the config asks for."""
        there = [] if self._settings.device == "cpu" else usable_gpus()
        wanted = wanted_gpus(self._settings, len(there))
        if wanted > len(there):
            raise BadInput(f"machine.gpus: this machine has {len(there)} GPUs to lease, not {wanted}")
        if wanted:
            self._token = self._token or secrets.token_hex(8)
            yield from until_free(partial(self._try_claim, wanted, there, jobs), self._settings.wait_hours)

    def supply(self, stages: Sequence[Stage]) -> Iterator[str]:
        yield from ()

    def placed(self, stage: Stage) -> Stage:
        return stage

    def start(self, job: Job) -> None:
        if self._lease and not gpu_leases.use(lease_root(), self._lease, self._token, self._place(job.name)):
            raise LeaseLapsed("the lease of GPUs here is gone")
        variables = {"CUDA_VISIBLE_DEVICES": self._visible} if self._lease else {}
        try:
            jobs.start(self._jobs, asdict(job), jobs.runner_command(), variables)
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

    def hand(self, job: str, file: str, content: str) -> None:
        jobs.hand(self._jobs, job, file, content)

    def checksums(self, job: str) -> Sequence[Mapping[str, Any]]:
        return checksums_here(self._jobs, job)

    def has(self, artifact: ArtifactId) -> bool:
        return self._store.has(artifact)

    def manifest(self, artifact: ArtifactId) -> Manifest:
        return self._store.manifest(artifact)

    def fetch(self, artifact: ArtifactId, target: Path, below: str) -> None:
        fetch(self._store, artifact, target, below)

    def keep(self, artifact: ArtifactId) -> None:
        """Do nothing: the artifact is here."""

    def discard(self, artifacts: Sequence[ArtifactId]) -> None:
        """Do nothing: this machine's artifacts are those of the store."""

    def release(self) -> bool:
        self._held.close()
        if self._token:
            gpu_leases.release(lease_root(), self._jobs, self._token, for_good=True)
        return True

    def _try_claim(self, wanted: int, there: Sequence[Mapping[str, Any]], jobs: Sequence[str]) -> str:
        """Try to get the lease. Returns why it must wait; empty once it has the lease."""
        names, among = [self._place(job) for job in jobs], [gpu["index"] for gpu in there]
        ask = {"token": self._token, "who": self._who, "gpus": wanted, "among": among, "jobs": names}
        answer = gpu_leases.acquire(lease_root(), self._jobs, ask)
        if "busy" in answer:
            return f"waiting for {wanted} of {len(there)} GPUs here: {gpu_leases.names(answer['busy'])}"
        self._lease, self._gpus = answer["lease"], tuple(answer["gpus"])
        self._visible = visible(self._gpus, there)
        self._held.enter_context(gpu_leases.held(lease_root(), answer["lease"], self._token))
        return ""

    def _place(self, job: str) -> str:
        """A job's name in leases that several stores share."""
        return str((self._jobs / job).resolve())


def usable_gpus() -> list[dict[str, Any]]:
    """The GPUs of `gpus()` that this process may use: all, or what `CUDA_VISIBLE_DEVICES` leaves."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is None:
        return gpus()
    named = [name.strip() for name in allowed.split(",")]
    return [gpu for gpu in gpus() if str(gpu["index"]) in named or gpu["uuid"] in named]


def lease_root() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollouts" / "leases"
