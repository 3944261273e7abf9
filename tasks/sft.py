"""sft: supervised fine-tuning on the demonstrations."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from infra.jobs.session import MachineSession
from rollouts_core.stages.stage import Stage
from tasks.stage_task import JOB_TASK, ArtifactRef, make, run_name


@task(name="sft", task_run_name=run_name, cache_policy=NO_CACHE, **JOB_TASK)
def sft(stage: Stage, data: ArtifactRef, machine: MachineSession) -> ArtifactRef:
    return make(stage, [stage], machine, data)
