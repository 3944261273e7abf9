"""The backend that trains a stage, the same on every rank."""

from typing import Any

from rollouts_core.config import RLConfig
from rollouts_core.config.algorithms import PPO
from rollouts_core.stages.specs import DPOSpec, RLSpec, SFTSpec
from rollouts_core.stages.stage import Stage, stage_to_data
from rollouts_core.stages.workspace import Work
from rollouts_core.training.algorithms import Recipe, recipe_of
from rollouts_core.training.backend import LossFunction
from rollouts_core.training.fsdp import FSDPTrainingBackend, create_backend
from rollouts_core.training.objectives import Extras, create_cross_entropy_loss, create_dpo_loss, create_rl_loss
from rollouts_core.training.pytorch import Optimization, PyTorchTrainingBackend
from rollouts_core.training.schedule import Rate, create_scheduler
from rollouts_core.user_code import load_function

Backend = FSDPTrainingBackend | PyTorchTrainingBackend


def stage_backend(work: Work, model: Any) -> Backend:
    """The backend of the stage; the other ranks, where there are any, make theirs at the same time."""
    ranks = work.session.ranks
    if ranks:
        ranks.tell({"do": "build", "stage": stage_to_data(work.stage), "model": model.config.to_dict()})
    return backend_of(work.stage, model, ranks)


def backend_of(stage: Stage, model: Any, ranks: Any = None) -> Backend:
    match stage.spec:
        case SFTSpec(training=training) as spec:
            schedule = create_scheduler(training.schedule, training.warmup_steps, training.steps)
            return _backend(spec, model, create_cross_entropy_loss(), schedule, ranks)
        case DPOSpec(training=training) as spec:
            schedule = create_scheduler(training.schedule, training.warmup_steps, training.steps)
            return _backend(spec, model, create_dpo_loss(training.beta), schedule, ranks)
        case RLSpec(training=training) as spec:
            recipe = recipe_for(stage)
            schedule = create_scheduler("constant", training.warmup_steps, 0)
            options = {"temperature": training.temperature, "critic": recipe.critic}
            return _backend(spec, model, create_rl_loss(recipe, _extras(training)), schedule, ranks, **options)
        case _:
            raise AssertionError(f"{stage.name} does not train")


def recipe_for(stage: Stage) -> Recipe:
    spec, custom = stage.spec, stage.external.get("algorithm")
    assert isinstance(spec, RLSpec), "a segment is RL's"
    function = load_function(custom.location, {}, "algorithm") if custom else None
    return recipe_of(spec.training.algorithm, spec.training.max_new_tokens, function)


def _backend(
    spec: SFTSpec | DPOSpec | RLSpec, model: Any, loss: LossFunction, rate: Rate, ranks: Any, **options: Any
) -> Backend:
    training = spec.training
    decay, norm = training.weight_decay, training.max_grad_norm
    return create_backend(
        model,
        loss,
        Optimization(training.learning_rate, training.optimizer, decay, norm, rate),
        ranks,
        activation_checkpointing=spec.backend.activation_checkpointing,
        lora=spec.backend.lora,
        entropy=isinstance(spec, RLSpec),
        compiled=spec.backend.compile,
        **options,
    )


def _extras(training: RLConfig) -> Extras:
    rollouts, algorithm = training.rollouts, training.algorithm
    critic = algorithm if isinstance(algorithm, PPO) else PPO()
    return Extras(
        kl_coef=training.kl_coef if training.kl_as == "loss" else 0.0,
        kl_estimator=training.kl_estimator,
        entropy_coef=training.entropy_coef,
        correction=rollouts.correction,
        ratio_low=rollouts.ratio_low,
        ratio_high=rollouts.ratio_high,
        value_coef=critic.value_coef,
        value_clip=critic.value_clip,
    )
