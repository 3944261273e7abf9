"""The parts of tokenization as one job array of the Slurm cluster that the run is on."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from infra.jobs.array import make_in_array
from infra.jobs.follow import LogLine
from infra.jobs.session import MachineSession
from infra.jobs.stage_job import make_in_job
from rollouts_core.stages.specs import TokenizeSpec
from rollouts_core.stages.stage import Stage
from rollouts_core.stages.tokenize_parts import parts_of
from tasks.events import StageProgress, announce
from tasks.stage_task import JOB_TASK, run_name, say


@task(name="tokenize-array", task_run_name=run_name, cache_policy=NO_CACHE, **JOB_TASK)
def tokenize_in_array(stage: Stage, here: MachineSession, machine: MachineSession) -> None:
    """The tokenizer is made here, the parts there; they come into the store here, where the stage takes them over."""
    assert isinstance(stage.spec, TokenizeSpec), "only this stage is made in parts"
    tokenizer, parts = parts_of(stage)
    if not here.store.has(tokenizer.artifact):
        for event in make_in_job(tokenizer, [tokenizer], here):
            if isinstance(event, LogLine):
                say(stage.name, event.text)
    todo = [part for part in parts if not here.store.has(part.artifact)]
    for told in make_in_array(stage.name, todo, machine, stage.spec.tokenization.at_once) if todo else ():
        if isinstance(told, LogLine):
            say(stage.name, told.text)
        else:
            announce(StageProgress(stage.name, told.done, told.total, {}))
