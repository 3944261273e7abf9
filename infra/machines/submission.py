"""What is asked of Slurm for a run."""

import math
from typing import Any

from infra.connection.remote import Remote
from infra.inventory import Slurm
from infra.machines.requirements import wanted_gpus
from rollouts_core.config import MachineConfig


def submission(remote: Remote, slurm: Slurm, settings: MachineConfig) -> dict[str, Any]:
    """One allocation, as `infra.host.allocations` submits it."""
    hours = settings.time_limit_hours if slurm.hours is None else slurm.hours
    return {
        "agent": remote.command(),
        "partition": slurm.partition,
        "nodes": settings.nodes,
        "minutes": max(1, math.ceil(60 * hours)),
        "signal": slurm.signal_seconds,
        "modules": slurm.modules,
        "options": _options(slurm, wanted_gpus(settings, remote.host.gpus)),
    }


def _options(slurm: Slurm, gpus: int) -> list[str]:
    kind = f"{slurm.gpu_type}:" if slurm.gpu_type else ""
    values = {
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "reservation": slurm.reservation,
        "constraint": slurm.constraint,
        "gres": f"gpu:{kind}{gpus}" if gpus else None,
        "cpus-per-task": slurm.cpus,
        "mem": None if slurm.memory_gb is None else f"{math.ceil(1024 * slurm.memory_gb)}M",
    }
    given = [f"--{name}={value}" for name, value in values.items() if value is not None]
    return [*given, *(["--exclusive"] if slurm.exclusive else []), *slurm.options]
