"""evaluate: held-out accuracy at one point of the chain.

All points are measured by one job.
"""

from collections.abc import Sequence

from prefect import task
from prefect.cache_policies import NO_CACHE

from infra.jobs.session import MachineSession
from rollouts_core.stages.stage import Stage
from tasks.stage_task import JOB_TASK, ArtifactRef, make, run_name


@task(name="evaluate", task_run_name=run_name, cache_policy=NO_CACHE, **JOB_TASK)
def evaluate(stage: Stage, points: Sequence[Stage], data: ArtifactRef, machine: MachineSession) -> ArtifactRef:
    return make(stage, points, machine, data)
