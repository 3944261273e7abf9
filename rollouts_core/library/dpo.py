"""Direct preference optimization in one call."""

from itertools import chain
from pathlib import Path
from typing import Any

from rollouts_core.config import BackendConfig, DPOConfig
from rollouts_core.config.schema import identity_of
from rollouts_core.data.prompts import check_tokens
from rollouts_core.library.checks import make_deterministic, refuse_ranks, refuse_unresumable
from rollouts_core.library.models import as_language_model
from rollouts_core.library.rows import Rows, preferences_from
from rollouts_core.library.training import Training, begin, digest_of, model_digest, with_checkpoints
from rollouts_core.training.backend import LossFunction, TrainStep
from rollouts_core.training.configured import backend_for
from rollouts_core.training.dpo import (
    DPOTrainingConfig,
    pairs_used,
    reference_logprobs,
    run_dpo_training,
    with_reference,
)
from rollouts_core.training.models import seed_torch
from rollouts_core.training.optimizers import OwnOptimizer

DEFAULT, DEFAULT_BACKEND = DPOConfig(), BackendConfig()


def dpo(
    model: Any,
    data: Rows,
    config: DPOConfig = DEFAULT,
    *,
    tokenizer: Any = None,
    backend: BackendConfig = DEFAULT_BACKEND,
    loss: LossFunction | None = None,
    optimizer: OwnOptimizer | None = None,
    directory: str | Path | None = None,
    seed: int = 0,
    deterministic: bool = False,
    progress: bool = True,
) -> Training[TrainStep]:
    """Train a model on pairs of a chosen and a rejected answer; its steps come one after another.

    The reference is the model as it is given. Arguments are those of `sft`; rows have `chosen` and `rejected`, behind
    a `prompt` or beginning with it. Raises `BadInput`, naming the argument.

    Examples:
        >>> rows = [{"prompt": "2+2=", "chosen": "4", "rejected": "5"}]
        >>> rc.dpo("Qwen/Qwen2.5-0.5B-Instruct", rows, rc.DPOConfig(steps=50)).run()
    """
    refuse_ranks(backend)
    refuse_unresumable(optimizer, directory)
    make_deterministic(deterministic)
    policy = as_language_model(model, tokenizer)
    pairs = preferences_from(data, policy)
    check_tokens((answer.tokens for answer in chain(*pairs)), policy.model.config.vocab_size)
    place = Path(directory) if directory is not None else None
    told = {"dpo": identity_of(config), "seed": seed, "data": digest_of(answer.tokens for answer in chain(*pairs))}
    start, checkpoint = begin(place, {**told, "model": model_digest(policy.model, weights=place is not None)})
    trainer = backend_for(config, backend, policy.model, loss=loss, optimizer=optimizer)
    settings = DPOTrainingConfig(config.steps, config.batch_size, seed, config.tokens_per_pass)
    used = pairs_used([len(pairs)], settings)
    chosen = [pairs[index] for index in used]
    scored = with_reference(chosen, reference_logprobs(trainer, chosen, config.tokens_per_pass))
    for index, pair in zip(used, scored, strict=True):
        pairs[index] = pair
    seed_torch(seed, "dpo")
    if checkpoint is not None:
        trainer.load(checkpoint)
    loop = run_dpo_training(trainer, pairs, settings, start)
    steps = with_checkpoints(loop, place, config.checkpoint_every, config.steps, trainer.save)
    return Training(policy, trainer, steps, config.steps, "rewards/accuracies" if progress else "")
