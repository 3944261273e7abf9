"""sync: the run's results come home: policy, metrics, samples."""

from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from infra.jobs.session import MachineSession
from infra.results import bring_home
from rollouts_core.config import ResultsConfig
from rollouts_core.stages.plan import Plan
from tasks.stage_task import WAITING_TASK, ArtifactRef, recorded, run_name


@task(name="sync", task_run_name=run_name, cache_policy=NO_CACHE, **WAITING_TASK)
def sync(
    stages: Plan, policy: ArtifactRef | None, machine: MachineSession, wanted: ResultsConfig, outputs: Path
) -> Path:
    with recorded(machine.run, "sync"):
        final = policy.artifact if policy else None
        return bring_home(stages, final, machine, wanted, outputs / machine.run.run_id)
