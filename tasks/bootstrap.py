"""bootstrap: the environment that jobs run in, checked once and recorded."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from infra.environment import check_environment, environment_artifact
from infra.jobs import MachineSession
from tasks.making import LIGHT_TASK, ArtifactRef, cached, recorded


@task(name="bootstrap", task_run_name="bootstrap", cache_policy=NO_CACHE, **LIGHT_TASK)
def bootstrap(machine: MachineSession) -> ArtifactRef:
    artifact = environment_artifact()
    with recorded(machine.run, "bootstrap", artifact.key) as outcome:
        if machine.store.has(artifact):
            outcome.state = "Cached"
            return cached(artifact)
        check_environment(machine.store)
    return ArtifactRef(artifact)
