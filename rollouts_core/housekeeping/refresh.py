"""Making a stage again on request: its artifact, and those of all stages that depend on it, are discarded."""

from collections.abc import Sequence

from rollouts_core.errors import BadInput
from rollouts_core.housekeeping.gc import artifacts_of, is_live
from rollouts_core.observe.run_list import all_runs
from rollouts_core.stages.plan import Plan, dependents
from rollouts_core.stages.stage import Stage
from rollouts_core.store.leases import live_leases
from rollouts_core.store.maker import drop_work
from rollouts_core.store.pins import pins
from rollouts_core.store.store import Store


def stages_to_refresh(plan: Plan, names: Sequence[str]) -> list[Stage]:
    """The stages of these names ('rl' means all its segments) and what is made from them.

    Raises `BadInput` for a name that is not a stage.
    """
    known = {stage.name for stage in plan.stages} | {stage.kind for stage in plan.stages}
    if unknown := [name for name in names if name not in known]:
        raise BadInput([f"no stage {name!r} to make again; there are {', '.join(sorted(known))}" for name in unknown])
    return dependents(plan, [stage for stage in plan.stages if stage.name in names or stage.kind in names])


def discard_stages(stages: Sequence[Stage], store: Store, run_id: str) -> None:
    """Raises `BadInput`, and discards nothing, when one of them is pinned, being made, or used by another live run."""
    pinned, making = {pin.name for pin in pins(store.objects)}, live_leases(store.objects)
    others = [run for run in all_runs(store) if run.run_id != run_id and is_live(run)]
    problems = []
    for stage in stages:
        name = stage.artifact.directory
        problems += [f"{name} is pinned: `rollouts pin --remove {name}` first"] if name in pinned else []
        problems += [f"{name} is being made by {making[name]}"] if name in making else []
        problems += [f"{name} is used by the live run {run.run_id}" for run in others if name in artifacts_of(run)]
    if problems:
        raise BadInput(problems, "stages to make again")
    for stage in stages:
        store.discard(stage.artifact)
        drop_work(store.home, stage.artifact)
