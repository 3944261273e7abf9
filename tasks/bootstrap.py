"""bootstrap: the environment that jobs run in, checked once and recorded."""

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State

from infra.environment import check_environment, environment_artifact
from infra.jobs import MachineSession
from tasks.making import LIGHT_TASK, cached, recorded


@task(name="bootstrap", task_run_name="bootstrap", cache_policy=NO_CACHE, **LIGHT_TASK)
def bootstrap(machine: MachineSession) -> State[Any] | None:
    artifact = environment_artifact()
    with recorded(machine.run, "bootstrap", artifact.key) as outcome:
        if machine.store.has(artifact):
            outcome.state = "Cached"
            return cached(artifact, machine)
        check_environment(machine.store)
    return None
