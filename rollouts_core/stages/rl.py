"""One segment of an RL run.

The artifact holds `policy/` (a Hugging Face model directory), `state/` (all that the next segment needs to go on
exactly), `metrics.jsonl` and `rollouts.jsonl` (some samples of every step). Where the segment begins: at its own last
checkpoint; or warm, where this process made the segment before; or at the state of the artifact before. All three
give the same bits.
"""

import json
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from rollouts_core.data.prompts import DataBuffer, check_room
from rollouts_core.data.tokenized import read_prompts
from rollouts_core.data.tokenizers import load_tokenizer
from rollouts_core.inference.torch_engine import TorchEngine
from rollouts_core.observe.metrics import JSONLLogger, answer_record, keep_steps
from rollouts_core.rewards.functions import load_reward, score
from rollouts_core.rollout.generate import RolloutConfig
from rollouts_core.rollout.journal import RolloutJournal
from rollouts_core.stages.specs import RLSpec
from rollouts_core.stages.work import Work
from rollouts_core.training.backend import TrainingBackend
from rollouts_core.training.checkpoint import last_checkpoint, new_checkpoint
from rollouts_core.training.losses import create_grpo_loss
from rollouts_core.training.models import copy_of, initial_policy, load_hf_model, save_policy, seed_torch
from rollouts_core.training.pytorch import create_pytorch_backend
from rollouts_core.training.rl import RLTrainingConfig, run_rl_training
from rollouts_core.training.schedule import create_scheduler
from rollouts_core.training.weight_sync import sync_weights
from rollouts_core.types import Sample


@dataclass
class Trainer:
    """The live objects of an RL run, handed from segment to segment while the process lives."""

    model: Any
    tokenizer: Any
    backend: TrainingBackend
    engine: TorchEngine
    reference: nn.Module | None
    data_buffer: DataBuffer


def run(work: Work) -> dict[str, float]:
    spec = work.stage.spec
    assert isinstance(spec, RLSpec), "the planner pairs this stage with its spec"
    trainer, start = _resume(work, spec)
    work.log.covers(spec.start, spec.stop, start)
    keep_steps(work.scratch / "rollouts.jsonl", start)
    rollouts = JSONLLogger(work.scratch / "rollouts.jsonl")
    journal = RolloutJournal(work.scratch / "rollouts")
    location = work.stage.external["reward"].location
    metrics: dict[str, float] = {}
    for step in run_rl_training(
        trainer.backend,
        trainer.data_buffer,
        [trainer.engine],
        trainer.tokenizer,
        partial(score, reward=load_reward(location), name=location),
        _settings(spec),
        trainer.reference,
        start,
        journal,
    ):
        trainer.data_buffer = step.data_buffer
        metrics = step.metrics
        work.log.log(metrics, step.step)
        for sample in step.samples[: spec.training.log_samples]:
            rollouts.log(sample_record(sample), step.step)
        if (step.step - spec.start) % spec.training.checkpoint_every == 0 and step.step < spec.stop:
            with new_checkpoint(work.scratch / "checkpoints", step.step) as directory:
                _save(trainer, directory)
            journal.forget(step.step)
    save_policy(trainer.model, trainer.tokenizer, work.out / "policy")
    (work.out / "state").mkdir()
    _save(trainer, work.out / "state")
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        shutil.copyfile(work.scratch / name, work.out / name)
    work.session[work.stage.key] = trainer
    return {"reward": metrics["reward"], "weight_version": metrics["weight_version"]} if metrics else {}


def sample_record(sample: Sample) -> dict[str, Any]:
    """What rollouts.jsonl tells of a sample."""
    return {
        **answer_record(sample),
        "status": sample.status,
        "tokens": list(sample.tokens),
        "rollout_log_probs": list(sample.rollout_log_probs),
        "weight_versions": list(sample.weight_versions),
    }


def _resume(work: Work, spec: RLSpec) -> tuple[Trainer, int]:
    """The trainer as it was after the step it returns."""
    warm = work.session.pop(work.stage.inputs["policy"].key, None) if "policy" in work.stage.inputs else None
    trainer = warm if isinstance(warm, Trainer) else _create(work, spec)
    if found := last_checkpoint(work.scratch / "checkpoints"):
        start, directory = found
        print(f"resuming after step {start}")
        _load(trainer, directory)
        return trainer, start
    if warm is None and spec.start > 0:
        _load(trainer, work.inputs["policy"] / "state")
    return trainer, spec.start


def _create(work: Work, spec: RLSpec) -> Trainer:
    """A trainer with the policy's weights and everything else at its beginning."""
    seed_torch(spec.seed, "rl")
    tokenizer = load_tokenizer(str(work.inputs["data"] / "tokenizer"))
    if "policy" in work.inputs:
        model = load_hf_model(str(work.inputs["policy"] / "policy"), spec.dtype, work.device)
    else:
        model = _initial(work, spec, tokenizer)
    training = spec.training
    backend = create_pytorch_backend(
        model,
        create_grpo_loss(
            aggregation=training.aggregation,
            clip_low=training.clip_low,
            clip_high=training.clip_high,
            kl_coef=training.kl_coef,
            temperature=training.temperature,
        ),
        learning_rate=training.learning_rate,
        weight_decay=training.weight_decay,
        max_grad_norm=training.max_grad_norm,
        schedule=partial(create_scheduler, kind="constant", warmup_steps=training.warmup_steps, num_steps=0),
    )
    engine = TorchEngine(copy_of(model), spec.max_length, spec.engine.max_running_requests)
    prompts = read_prompts(work.inputs["data"] / "prompts")
    check_room(prompts, "rl.max_new_tokens", training.max_new_tokens, spec.max_length)
    return Trainer(model, tokenizer, backend, engine, _reference(work, spec, tokenizer), DataBuffer(prompts, spec.seed))


def _reference(work: Work, spec: RLSpec, tokenizer: Any) -> nn.Module | None:
    if not spec.training.kl_coef:
        return None
    if "reference" in work.inputs:
        frozen = load_hf_model(str(work.inputs["reference"] / "policy"), spec.dtype, work.device)
    else:
        frozen = _initial(work, spec, tokenizer)
    model: nn.Module = frozen.eval().requires_grad_(False)
    return model


def _initial(work: Work, spec: RLSpec, tokenizer: Any) -> Any:
    assert spec.model is not None, "the planner names the model where no artifact holds the policy"
    external = work.stage.external.get("model")
    return initial_policy(spec.model, external, tokenizer, spec.max_length, spec.seed, work.device)


def _settings(spec: RLSpec) -> RLTrainingConfig:
    training = spec.training
    rollout = RolloutConfig(
        batch_size=training.batch_size,
        n_samples_per_prompt=training.n_samples_per_prompt,
        max_new_tokens=training.max_new_tokens,
        temperature=training.temperature,
        seed=spec.seed,
    )
    return RLTrainingConfig(spec.stop, training.minibatches, training.aggregation, training.normalize_std, rollout)


def _save(trainer: Trainer, directory: Path) -> None:
    trainer.backend.save(directory)
    (directory / "data_buffer.json").write_text(json.dumps(trainer.data_buffer.position()))


def _load(trainer: Trainer, directory: Path) -> None:
    trainer.backend.load(directory)
    position = json.loads((directory / "data_buffer.json").read_text())
    trainer.data_buffer = DataBuffer(trainer.data_buffer.prompts, trainer.data_buffer.seed, **position)
    sync_weights(trainer.backend, [trainer.engine])
