"""The job that keeps the servers of a run: which GPUs each gets, and what they are started with.

Decision: servers are a job beside the trainer's, `serve-` and its name, on the same machine: the trainer finds them in
the directory beside its own, and a trainer that is killed and tried again finds them warm. The job is attended by the
trainer and by whoever follows it; when both are gone it ends within `UNATTENDED_SECONDS`.

Decision: with as many GPUs as servers and trainer need, the trainer has the first and the servers the others; with
fewer they share, and the servers give their memory away while the trainer works.
"""

from collections.abc import Sequence
from importlib import import_module

from infra.machines.machine import Job
from infra.servers.model import ServedModel
from rollouts_core.config import EngineConfig

UNATTENDED_SECONDS = 120.0
SERVICE_SECONDS = 30 * 24 * 3600.0
RESTARTS = 3
"""Starts in a row that may fail."""


def serve_job(
    name: str,
    command: Sequence[str],
    config: EngineConfig,
    model: ServedModel,
    python: str,
    gpus: int,
    memory: str | None,
) -> Job:
    """`command` runs `infra.host.servers` there. `python` has the server's package. `gpus`: how many are leased."""
    engine = import_module(f"infra.servers.{config.kind}")
    spec = {
        "replicas": [
            {
                "name": f"replica-{number}",
                "devices": _devices(config, number, gpus),
                **engine.server(config, model, python, on_gpu=gpus > 0),
            }
            for number in range(config.replicas)
        ],
        "router": engine.router(python) if config.replicas > 1 else None,
        "start_seconds": config.start_minutes * 60,
        "hang_seconds": config.hang_seconds,
        "restarts": RESTARTS,
        "memory": memory,
        "colocated": is_colocated(config, gpus),
    }
    return Job(service_name(name), tuple(command), spec, SERVICE_SECONDS, UNATTENDED_SECONDS, SERVICE_SECONDS)


def service_name(job: str) -> str:
    """The servers' job that belongs to a trainer's."""
    return f"serve-{job}"


def is_colocated(config: EngineConfig, gpus: int) -> bool:
    """Whether trainer and servers share GPUs."""
    return 0 < gpus <= gpus_needed(config)


def gpus_needed(config: EngineConfig) -> int:
    return config.replicas * config.tensor_parallel * config.data_parallel


def _devices(config: EngineConfig, number: int, gpus: int) -> list[int]:
    """Places of a replica's GPUs among those leased; none on a host without."""
    if not gpus:
        return []
    each = config.tensor_parallel * config.data_parallel
    first = (0 if is_colocated(config, gpus) else 1) + number * each
    return [(first + offset) % gpus for offset in range(each)]
