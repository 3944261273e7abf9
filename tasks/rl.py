"""rl: one segment of the RL run, from the policy before it; None is the pretrained model.

All segments are made by one job, so the trainer stays warm between them.
"""

from collections.abc import Sequence

from prefect import task
from prefect.cache_policies import NO_CACHE

from infra.jobs.session import MachineSession
from rollouts_core.stages.stage import Stage
from tasks.stage_task import JOB_TASK, ArtifactRef, make, run_name


@task(name="rl", task_run_name=run_name, cache_policy=NO_CACHE, **JOB_TASK)
def rl(stage: Stage, segments: Sequence[Stage], policy: ArtifactRef | None, machine: MachineSession) -> ArtifactRef:
    return make(stage, segments, machine, policy)
