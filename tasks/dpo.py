"""dpo: direct preference optimization, from the policy before it; None is the pretrained model."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from infra.jobs.session import MachineSession
from rollouts_core.stages.stage import Stage
from tasks.stage_task import JOB_TASK, ArtifactRef, make, run_name


@task(name="dpo", task_run_name=run_name, cache_policy=NO_CACHE, **JOB_TASK)
def dpo(stage: Stage, policy: ArtifactRef | None, machine: MachineSession) -> ArtifactRef:
    return make(stage, [stage], machine, policy)
