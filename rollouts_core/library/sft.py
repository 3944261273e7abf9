"""Supervised fine-tuning in one call."""

from pathlib import Path
from typing import Any

from rollouts_core.config import BackendConfig, SFTConfig
from rollouts_core.config.schema import identity_of
from rollouts_core.data.prompts import check_tokens
from rollouts_core.library.checks import make_deterministic, refuse_ranks, refuse_unresumable
from rollouts_core.library.models import as_language_model
from rollouts_core.library.rows import Rows, examples_from
from rollouts_core.library.training import Training, begin, digest_of, model_digest, with_checkpoints
from rollouts_core.training.backend import LossFunction, TrainStep
from rollouts_core.training.configured import backend_for
from rollouts_core.training.models import seed_torch
from rollouts_core.training.optimizers import OwnOptimizer
from rollouts_core.training.sft import SFTTrainingConfig, run_sft_training

DEFAULT, DEFAULT_BACKEND = SFTConfig(), BackendConfig()


def sft(
    model: Any,
    data: Rows,
    config: SFTConfig = DEFAULT,
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
    """Train a model on demonstrations; its steps come one after another.

    `model`: a name, a directory, a `LanguageModel` or a transformers model with its `tokenizer`. `data`: see
    `data.sources`. `loss`, `optimizer`: functions that take the place of cross entropy and of the config's optimizer.
    `directory`: where checkpoints go; the same call goes on from there. `deterministic`: torch's deterministic
    algorithms. Raises `BadInput`, naming the argument.

    Examples:
        >>> training = rc.sft("Qwen/Qwen2.5-0.5B-Instruct", "demonstrations.jsonl", rc.SFTConfig(steps=100))
        >>> print(training.run()["loss"])
        >>> training.save("policy")
    """
    refuse_ranks(backend)
    refuse_unresumable(optimizer, directory)
    make_deterministic(deterministic)
    policy = as_language_model(model, tokenizer)
    examples = examples_from(data, policy)
    check_tokens((example.tokens for example in examples), policy.model.config.vocab_size)
    place = Path(directory) if directory is not None else None
    told = {"sft": identity_of(config), "seed": seed, "data": digest_of(example.tokens for example in examples)}
    start, checkpoint = begin(place, {**told, "model": model_digest(policy.model)})
    trainer = backend_for(config, backend, policy.model, loss=loss, optimizer=optimizer)
    seed_torch(seed, "sft")
    if checkpoint is not None:
        trainer.load(checkpoint)
    settings = SFTTrainingConfig(config.steps, config.batch_size, seed, config.tokens_per_pass)
    loop = run_sft_training(trainer, examples, settings, start)
    steps = with_checkpoints(loop, place, config.checkpoint_every, config.steps, trainer.save)
    return Training(policy, trainer, steps, config.steps, "loss" if progress else "")
