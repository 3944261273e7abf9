"""Servers of a model beside the policy: on the run's machine or a pool of their own, for all of RL and evaluation.

Decision: one job keeps them for all stages. It is named by the model and by the first job that asks it, so the same
command finds it again. The spec of every stage's job names it (`served`), and the stage asks the replica with the
fewest requests under way.
"""

from collections.abc import Iterator, Sequence

from infra.jobs.placing import leased_gpus
from infra.jobs.session import MachineSession
from infra.jobs.stage_job import start_leased
from infra.python_envs.engine import host_command
from infra.servers.job import serve_job
from infra.servers.model import model_of
from infra.servers.pool import end_pool, start_pool
from infra.servers.start import built, until_ready
from rollouts_core.config import Served
from rollouts_core.config.placement import placement_of_served
from rollouts_core.stages.plan import Plan
from rollouts_core.stages.specs import served_in
from rollouts_core.stages.stage import Stage


def start_beside(stage: Stage, plan: Plan, session: MachineSession) -> Iterator[str]:
    """Start the servers of `stage`; yields lines until they answer. Raises `JobFailed` when they do not come up."""
    served, machine, chain = served_in(stage.spec), session.machine, chain_beside(stage, plan)
    engine = served.engine
    session.beside[served.name] = chain
    if engine.machines is not None:
        yield from start_pool(engine, stage, chain, session, served.name)
        return
    yield from machine.supply([stage])
    own = machine.python if engine.kind == "embedded" else None
    python = own or engine.python or (yield from built(engine.kind, session))
    placement = placement_of_served(leased_gpus(session), session.served, served.name)
    model = model_of(stage.spec, machine.placed(stage).external["model"].location)
    job = serve_job(chain, host_command(session, "servers"), engine, model, python, placement, None)
    session.services[chain] = job
    session.expect(stage.name, job, machine)
    yield from start_leased(job, machine, [job.name])
    yield from until_ready(job, session, stage.name)


def end_beside(stage: Stage, session: MachineSession, went_well: bool) -> None:
    """End them, or keep those of a pool for another run; where there are none, nothing."""
    if (chain := session.beside.pop(served_in(stage.spec).name, None)) is None:
        return
    if not end_pool(chain, session, went_well) and (service := session.services.pop(chain, None)):
        session.end(service, session.machine)


def chain_beside(stage: Stage, plan: Plan) -> str:
    """The name that the servers' jobs begin with."""
    return f"{stage.name.removeprefix('serve-')}-{asking(stage, plan)[0][-1].artifact.directory}"


def served_by(plan: Plan) -> tuple[Served, ...]:
    """The models that the plan's stages ask."""
    return tuple(served_in(stage.spec) for stage in plan.served if asking(stage, plan))


def asking(stage: Stage, plan: Plan) -> list[Sequence[Stage]]:
    """The plan's chains with a stage that asks the model."""
    return [chain for chain in plan.chains if any(stage.name in link.external for link in chain)]
