"""The backend that trains a stage, the same on every rank."""

from dataclasses import asdict, replace
from typing import Any

from rollouts_core.stages.specs import DPOSpec, RLSpec, SFTSpec
from rollouts_core.stages.stage import Stage, stage_to_data
from rollouts_core.stages.workspace import Work
from rollouts_core.training.algorithms import Recipe, recipe_of
from rollouts_core.training.configured import Backend, backend_for
from rollouts_core.training.origins import Origin
from rollouts_core.training.ranks import Ranks, check_alike
from rollouts_core.training.sharding import check_layout
from rollouts_core.user_code import load_function


def stage_backend(work: Work, model: Any, origin: Origin) -> Backend:
    """The backend of the stage; the other ranks, where there are any, make theirs at the same time."""
    ranks = work.session.ranks
    if not ranks:
        return backend_of(work.stage, model)
    ranks = laid_out(ranks, work.stage)
    check_layout(model, ranks)
    ranks.tell({"do": "build", "stage": stage_to_data(work.stage), "origin": asdict(origin)})
    check_alike(ranks.memories())
    return backend_of(work.stage, model, ranks, origin)


def laid_out(ranks: Ranks, stage: Stage) -> Ranks:
    """The ranks as the stage's config has them share passes."""
    assert isinstance(stage.spec, SFTSpec | DPOSpec | RLSpec), f"{stage.name} does not train"
    parallel = stage.spec.backend.parallel
    return replace(ranks, context=parallel.context, tensor=parallel.tensor, expert=parallel.expert)


def backend_of(stage: Stage, model: Any, ranks: Ranks | None = None, origin: Origin | None = None) -> Backend:
    """`origin`: of a model that is blank."""
    spec = stage.spec
    assert isinstance(spec, SFTSpec | DPOSpec | RLSpec), f"{stage.name} does not train"
    recipe = recipe_for(stage) if isinstance(spec, RLSpec) else None
    return backend_for(spec.training, spec.backend, model, recipe, ranks, origin)


def recipe_for(stage: Stage) -> Recipe:
    spec, custom = stage.spec, stage.external.get("algorithm")
    assert isinstance(spec, RLSpec), "a segment is RL's"
    function = load_function(custom.location, {}, "algorithm") if custom else None
    return recipe_of(spec.training.algorithm, spec.training.max_new_tokens, function)
