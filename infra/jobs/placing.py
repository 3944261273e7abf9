"""Whether what a run leased is enough for its ranks and servers, asked before anything is made."""

from collections.abc import Iterable

from infra.jobs.session import MachineSession
from rollouts_core.config import Placement, placement_of
from rollouts_core.config.placement import left_by_served
from rollouts_core.errors import BadInput
from rollouts_core.stages.ranks import processes_of
from rollouts_core.stages.specs import EvaluateSpec, servers_of
from rollouts_core.stages.stage import Stage


def refuse_unplaceable(stages: Iterable[Stage], session: MachineSession) -> None:
    """Raises `BadInput` with what each kind of stage lacks."""
    problems: list[str] = []
    for stage in stages:
        try:
            placement_for(stage, session)
        except BadInput as error:
            problems += [problem for problem in error.problems if problem not in problems]
    if problems:
        raise BadInput(problems)


def placement_for(stage: Stage, session: MachineSession) -> Placement:
    """The GPUs of the stage's ranks and servers, on the machine of rank 0. Raises `BadInput` if they do not fit."""
    engine = servers_of(stage.spec)
    alone = engine is not None and isinstance(stage.spec, EvaluateSpec)
    ranks = 0 if alone else processes_of(stage) // (1 + len(session.peers))
    if engine is not None and engine.machines:
        engine = None
    try:
        return placement_of(left_by_served(leased_gpus(session), session.served), ranks, engine)
    except ValueError as error:
        raise BadInput(f"machine.gpus: {error}") from None


def leased_gpus(session: MachineSession) -> int:
    """How many GPUs the run's jobs see there."""
    return 0 if session.settings.device == "cpu" else len(session.machine.gpus)
