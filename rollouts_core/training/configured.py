"""Backends and loops as the parts of a config describe them. Stages and `rollouts_core.library` make theirs here."""

from functools import partial
from typing import Any

from rollouts_core.config import BackendConfig, DPOConfig, RLConfig, SFTConfig
from rollouts_core.config.algorithms import PPO
from rollouts_core.training.algorithms import Recipe
from rollouts_core.training.backend import LossFunction
from rollouts_core.training.fsdp import FSDPTrainingBackend, create_backend
from rollouts_core.training.objectives import Extras, create_cross_entropy_loss, create_dpo_loss, create_rl_loss
from rollouts_core.training.optimizers import OwnOptimizer
from rollouts_core.training.origins import Origin
from rollouts_core.training.pytorch import Optimization, PyTorchTrainingBackend
from rollouts_core.training.ranks import Ranks
from rollouts_core.training.rl import RLTrainingConfig
from rollouts_core.training.schedule import Rate, create_scheduler

Backend = FSDPTrainingBackend | PyTorchTrainingBackend


def backend_for(
    training: SFTConfig | DPOConfig | RLConfig,
    backend: BackendConfig,
    model: Any,
    recipe: Recipe | None = None,
    ranks: Ranks | None = None,
    origin: Origin | None = None,
    loss: LossFunction | None = None,
    optimizer: OwnOptimizer | None = None,
) -> Backend:
    """The backend that trains the model in place, or a rank's part of it. `recipe` is RL's; `origin` that of a blank
    model; `loss` and `optimizer` take the place of the config's own."""
    make = partial(_backend, training, backend, model, ranks, origin, optimizer)
    match training:
        case SFTConfig():
            rate = create_scheduler(training.schedule, training.warmup_steps, training.steps)
            return make(loss or create_cross_entropy_loss(), rate)
        case DPOConfig(beta=beta):
            rate = create_scheduler(training.schedule, training.warmup_steps, training.steps)
            return make(loss or create_dpo_loss(beta), rate)
        case RLConfig():
            assert recipe is not None, "RL's caller knows its algorithm"
            rate = create_scheduler("constant", training.warmup_steps, 0)
            own = loss or create_rl_loss(recipe, extras_of(training))
            return make(own, rate, temperature=training.temperature, critic=recipe.critic)


def rl_loop(training: RLConfig, recipe: Recipe, num_steps: int) -> RLTrainingConfig:
    """The loop's settings, up to a step."""
    return RLTrainingConfig(
        num_steps=num_steps,
        recipe=recipe,
        minibatches=training.minibatches,
        tokens_per_pass=training.tokens_per_pass,
        max_new_tokens=training.max_new_tokens,
        kl_in_reward=training.kl_coef if training.kl_as == "reward" else 0.0,
        recompute_old=training.rollouts.correction != "none",
        only_advantages=not training.entropy_coef and not (training.kl_coef and training.kl_as == "loss"),
    )


def extras_of(training: RLConfig) -> Extras:
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


def _backend(
    training: SFTConfig | DPOConfig | RLConfig,
    backend: BackendConfig,
    model: Any,
    ranks: Ranks | None,
    origin: Origin | None,
    optimizer: OwnOptimizer | None,
    loss: LossFunction,
    rate: Rate,
    **options: Any,
) -> Backend:
    decay, norm = training.weight_decay, training.max_grad_norm
    return create_backend(
        model,
        loss,
        Optimization(
            training.learning_rate, optimizer or training.optimizer, decay, norm, rate, backend.offload_optimizer
        ),
        ranks,
        origin,
        activation_checkpointing=backend.activation_checkpointing,
        lora=backend.lora,
        entropy=isinstance(training, RLConfig),
        compiled=backend.compile,
        balanced=backend.balance_experts,
        **options,
    )
