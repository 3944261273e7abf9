"""The submission of a run to Slurm."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from infra.connection.remote import Remote
from infra.inventory import Slurm
from infra.machines.requirements import wanted_gpus
from rollouts_core.config import MachineConfig


@dataclass(frozen=True)
class Component:
    """Nodes of an allocation that are alike."""

    nodes: int
    gpus: int | None = None
    """The number of GPUs on each node; None: as many as the run's machine has."""
    options: tuple[str, ...] = ()
    """Options of sbatch for these nodes."""


def submission(
    remote: Remote, slurm: Slurm, settings: MachineConfig, components: Sequence[Component]
) -> dict[str, Any]:
    """The request of an allocation, which `infra.host.allocations` submits."""
    own = wanted_gpus(settings, remote.host.gpus)
    hours = settings.time_limit_hours if slurm.hours is None else slurm.hours
    return {
        "agent": remote.command(),
        "partition": slurm.partition,
        "minutes": max(1, math.ceil(60 * hours)),
        "signal": slurm.signal_seconds,
        "modules": slurm.modules,
        "local_disk": slurm.local_disk,
        "mount": _mount(remote) if slurm.sshfs else None,
        "components": [
            {"nodes": part.nodes, "options": _options(slurm, own if part.gpus is None else part.gpus, part.options)}
            for part in components
        ],
    }


def _mount(remote: Remote) -> dict[str, Any]:
    """How nodes reach the login node."""
    return {"host": remote.host.for_machines, "port": remote.host.port, "user": remote.user,
            "host_key": remote.host_key(), "work": remote.work}  # fmt: skip


def for_arrays(slurm: Slurm) -> Slurm:
    """The settings for jobs without GPUs: those for nodes with GPUs are left out."""
    found = replace(slurm, exclusive=False, cpus=None, memory_gb=None, gpu_type=None)
    if slurm.cpu_partition is None:
        return found
    return replace(found, partition=slurm.cpu_partition, constraint=None, reservation=None)


def _options(slurm: Slurm, gpus: int, options: Sequence[str]) -> list[str]:
    """The options of sbatch. A later option overrides an earlier one."""
    return [*_resources(slurm, gpus), *chosen_options(slurm), *options]


def chosen_options(slurm: Slurm) -> list[str]:
    """The options that every job of this user needs: account, and where jobs may run."""
    values = {
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "reservation": slurm.reservation,
        "constraint": slurm.constraint,
    }
    return [f"--{name}={value}" for name, value in values.items() if value is not None]


def _resources(slurm: Slurm, gpus: int) -> list[str]:
    kind = f"{slurm.gpu_type}:" if slurm.gpu_type else ""
    memory = None if slurm.memory_gb is None else f"{math.ceil(1024 * slurm.memory_gb)}M"
    values = {"gres": f"gpu:{kind}{gpus}" if gpus else None, "cpus-per-task": slurm.cpus, "mem": memory}
    given = [f"--{name}={value}" for name, value in values.items() if value is not None]
    return [*given, *(["--exclusive"] if slurm.exclusive else []), *slurm.options]
