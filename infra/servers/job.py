"""The job that keeps the servers of a run: which GPUs each gets, and what they are started with.

Decision: servers are a job beside the trainer's, `serve-` and its name, on the same machine: the trainer finds them in
the directory beside its own, and a trainer that is killed and tried again finds them warm. The job is attended by the
trainer and by whoever follows it; when both are gone it ends within `UNATTENDED_SECONDS`.
"""

from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module

from infra.machines.machine import Job
from infra.servers.model import ServedModel
from rollouts_core.config import EngineConfig, Placement
from rollouts_core.store.keys import key_of

UNATTENDED_SECONDS = 120.0
SERVICE_SECONDS = 30 * 24 * 3600.0
NOT_OF_A_SERVER = ("replicas", "min_replicas", "machines", "start_minutes")
HERE = "-here"
RESTARTS = 3
"""Starts in a row that may fail."""


def serve_job(
    name: str,
    command: Sequence[str],
    config: EngineConfig,
    model: ServedModel,
    python: str,
    placement: Placement,
    memory: str | None,
    drained: str | None = None,
) -> Job:
    """`command` runs `infra.host.servers` there. `python` has the server's package. `drained`: for a trainer on another
    machine, the file that says that this one is to be left."""
    engine = import_module(f"infra.servers.{config.kind}")
    spec = {
        "replicas": [
            {
                "name": f"replica-{number}",
                "devices": list(devices),
                **engine.server(config, model, python, on_gpu=bool(devices)),
            }
            for number, devices in enumerate(placement.servers)
        ],
        "router": engine.router(python) if config.replicas > 1 and drained is None and not model.name else None,
        "gate": None if drained is None else {"drained": drained},
        "start_seconds": config.start_minutes * 60,
        "hang_seconds": config.hang_seconds,
        "restarts": RESTARTS,
        "memory": memory,
        "colocated": placement.colocated,
    }
    return Job(service_name(name), tuple(command), spec, SERVICE_SECONDS, UNATTENDED_SECONDS, SERVICE_SECONDS)


def label_of(config: EngineConfig) -> str:
    """The label of servers on other machines. A run can't use servers of another label."""
    assert config.machines is not None, "a pool is on other machines"
    said = {name: value for name, value in asdict(config).items() if name not in NOT_OF_A_SERVER}
    return key_of({**said, "gpus": config.machines.gpus})[:16]


def service_name(job: str) -> str:
    """The servers' job that belongs to a trainer's, or the job that leads to those on other machines."""
    return f"serve-{job}"


def pool_name(job: str, trains: bool, node: int) -> str:
    """The job of a pool's servers on one machine, which may be the one that `trains`: that has the other job, too.
    `node`: of an allocation, whose nodes have all their jobs in one place; 0 elsewhere."""
    return service_name(job) + (f"-node-{node}" if node else HERE if trains else "")
