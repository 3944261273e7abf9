"""What is asked of Slurm for a run."""

import math
from typing import Any

from infra.connection.remote import Remote
from infra.inventory import Slurm
from infra.machines.requirements import wanted_gpus
from rollouts_core.config import MachineConfig


def submission(remote: Remote, slurm: Slurm, settings: MachineConfig, nodes: int) -> dict[str, Any]:
    """One allocation of so many nodes, as `infra.host.allocations` submits it."""
    hours = settings.time_limit_hours if slurm.hours is None else slurm.hours
    return {
        "agent": remote.command(),
        "partition": slurm.partition,
        "nodes": nodes,
        "minutes": max(1, math.ceil(60 * hours)),
        "signal": slurm.signal_seconds,
        "modules": slurm.modules,
        "options": [*_resources(slurm, wanted_gpus(settings, remote.host.gpus)), *chosen_options(slurm)],
    }


def chosen_options(slurm: Slurm) -> list[str]:
    """Who pays, and where jobs may run: what any job of this user needs."""
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
