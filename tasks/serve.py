"""serve: the engine that generates. The embedded one shares the trainer's process, so there is nothing to launch.

Servers are started before RL, kept alive beside it, and ended after it. Those of other models than the policy are kept
until all is evaluated.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed

from infra.jobs.session import MachineSession
from infra.servers.beside import asking, end_beside, start_beside
from infra.servers.start import end_servers, start_servers
from rollouts_core.config import EngineConfig
from rollouts_core.stages.plan import Plan
from rollouts_core.stages.stage import Stage
from rollouts_core.store.manifest import ArtifactId
from tasks.stage_task import WAITING_TASK, recorded, run_name, say

EVALUATION = "serve-evaluation"


@contextmanager
def serve(config: EngineConfig, segments: Sequence[Stage], machine: MachineSession) -> Iterator[None]:
    serve_task(config, segments, machine, "serve")
    if not config.has_servers or not segments:
        yield
        return
    with _then(partial(end_servers, segments, machine)):
        yield


@contextmanager
def serve_evaluation(config: EngineConfig | None, points: Sequence[Stage], machine: MachineSession) -> Iterator[None]:
    """Start the servers of the evaluation, if it has its own."""
    if config is None or not config.has_servers or not points:
        yield
        return
    serve_task(config, points, machine, EVALUATION)
    with _then(partial(end_servers, points, machine)):
        yield


@contextmanager
def serve_beside(stages: Plan, machine: MachineSession) -> Iterator[None]:
    """The models that RL and evaluation ask beside the policy, where something that asks them is still to be made."""
    with ExitStack() as ending:
        for stage in stages.served:
            ending.enter_context(_then(partial(end_beside, stage, machine)))
        started = [serve_beside_task.submit(stage, stages, machine, stage.name) for stage in stages.served]
        for answering in started:
            answering.result()
        yield


@contextmanager
def _then(end: Callable[[bool], None]) -> Iterator[None]:
    """End servers, whatever happens; `end` is told whether all went well."""
    went_well = False
    try:
        yield
        went_well = True
    finally:
        end(went_well)


def _askers(stage: Stage, stages: Plan) -> list[ArtifactId]:
    return [link.artifact for chain in asking(stage, stages) for link in chain if stage.name in link.external]


@task(name="serve-beside", task_run_name=run_name, cache_policy=NO_CACHE, **WAITING_TASK)
def serve_beside_task(stage: Stage, stages: Plan, machine: MachineSession, name: str) -> State[Any]:
    with recorded(machine.run, name):
        if all(map(machine.has, _askers(stage, stages))):
            return Completed(name="NotNeeded", message="what would ask it is in the store")
        for line in start_beside(stage, stages, machine):
            say(name, line)
        return Completed(name="Serving", message=f"{stage.name.removeprefix('serve-')} answers")


@task(name="serve", task_run_name=run_name, cache_policy=NO_CACHE, **WAITING_TASK)
def serve_task(config: EngineConfig, segments: Sequence[Stage], machine: MachineSession, name: str) -> State[Any]:
    with recorded(machine.run, name):
        if not config.has_servers:
            return Completed(name="Embedded", message="the embedded engine runs inside the RL job")
        if all(machine.has(segment.artifact) for segment in segments):
            return Completed(name="NotNeeded", message="nothing is to be generated: all of it is in the store")
        for line in start_servers(config, segments, machine):
            say(name, line)
        return Completed(name="Serving", message=f"{config.replicas} {config.kind} server(s) answer")
