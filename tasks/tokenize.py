"""tokenize: data to Parquet, and the tokenizer; where the config asks for it, in parts, on threads or
clusters."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from infra.jobs.session import MachineSession
from rollouts_core.stages.specs import TokenizeSpec
from rollouts_core.stages.stage import Stage
from tasks.stage_task import JOB_TASK, ArtifactRef, make, run_name
from tasks.tokenize_array import tokenize_in_array


def tokenize(stage: Stage, machine: MachineSession, cluster: MachineSession) -> ArtifactRef:
    """Tokenize; in parts only if the artifact does not exist. `cluster`: runs the job array of parts."""
    assert isinstance(stage.spec, TokenizeSpec), "the planner pairs this stage with its spec"
    settings = stage.spec.tokenization
    if settings.parts > 1 and settings.task_runner == "slurm" and not machine.has(stage.artifact):
        tokenize_in_array(stage, machine, cluster)
    elif settings.parts > 1 and not machine.has(stage.artifact):
        from tasks.tokenize_parts import tokenize_in_parts  # a flow, which takes a quarter of a second to define

        tokenize_in_parts(stage, machine)
    return tokenize_task(stage, machine)


@task(name="tokenize", task_run_name=run_name, cache_policy=NO_CACHE, **JOB_TASK)
def tokenize_task(stage: Stage, machine: MachineSession) -> ArtifactRef:
    return make(stage, [stage], machine)
