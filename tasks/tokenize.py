"""tokenize: data to Parquet, and the tokenizer; where the config asks for it, in parts, each a task of its own."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from infra.jobs.session import MachineSession
from rollouts_core.stages.specs import TokenizeSpec
from rollouts_core.stages.stage import Stage
from tasks.stage_task import JOB_TASK, ArtifactRef, make, run_name


def tokenize(stage: Stage, machine: MachineSession) -> ArtifactRef:
    """In parts only where there is something to make."""
    assert isinstance(stage.spec, TokenizeSpec), "the planner pairs this stage with its spec"
    if stage.spec.tokenization.parts > 1 and not machine.has(stage.artifact):
        from tasks.tokenize_parts import tokenize_in_parts  # a flow, which takes a quarter of a second to define

        tokenize_in_parts(stage, machine)
    return tokenize_task(stage, machine)


@task(name="tokenize", task_run_name=run_name, cache_policy=NO_CACHE, **JOB_TASK)
def tokenize_task(stage: Stage, machine: MachineSession) -> ArtifactRef:
    return make(stage, [stage], machine)
