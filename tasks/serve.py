"""serve: the engine that generates. The embedded one shares the trainer's process, so there is nothing to launch."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed

from infra.jobs import MachineSession
from rollouts_core.config import EngineConfig
from tasks.making import LIGHT_TASK, recorded


@contextmanager
def serve(config: EngineConfig, machine: MachineSession) -> Iterator[None]:
    serve_task(config, machine)
    yield


@task(name="serve", task_run_name="serve", cache_policy=NO_CACHE, **LIGHT_TASK)
def serve_task(config: EngineConfig, machine: MachineSession) -> State[Any]:
    with recorded(machine.run, "serve"):
        return Completed(name="Embedded", message=f"the {config.kind} engine runs inside the RL job")
