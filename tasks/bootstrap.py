"""bootstrap: the environment that jobs run in: checked here, built on a host, once, and recorded."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from infra.jobs.session import MachineSession
from infra.machines.ssh_machine import SSHMachine
from infra.python_envs.trainer import check_environment, environment_artifact, prepare_environment
from rollouts_core.store.manifest import ArtifactId
from tasks.stage_task import WAITING_TASK, ArtifactRef, cached, recorded, run_name, say


@task(name="bootstrap", task_run_name=run_name, cache_policy=NO_CACHE, **WAITING_TASK)
def bootstrap(machine: MachineSession) -> ArtifactRef:
    if isinstance(machine.machine, SSHMachine):
        return _on_host(machine.machine, machine)
    artifact = environment_artifact()
    with recorded(machine.run, "bootstrap", artifact.key) as outcome:
        if machine.store.has(artifact):
            outcome.state = "Cached"
            return cached(artifact)
        check_environment(machine.store)
    return ArtifactRef(artifact)


def _on_host(host: SSHMachine, session: MachineSession) -> ArtifactRef:
    built = False
    with recorded(session.run, "bootstrap") as outcome:
        found = []
        for machine in (host, *session.peers):
            for said in prepare_environment(machine, session):
                if isinstance(said, ArtifactId):
                    found.append(said)
                else:
                    built = True
                    if said:
                        say("bootstrap", said)
        outcome.state = "Completed" if built else "Cached"
    return ArtifactRef(found[0]) if built else cached(found[0])
