"""The RL loop: generate, reward, advantages, forward and backward, step, sync. Everything it needs is passed in.

Deviations from GRPO's paper, on purpose:
- the engine's log-probabilities are the old policy's; none are recomputed, and how far the trainer's differ from them
  is measured at every step (`sampling/sampling_logp_difference`), before the step's first update;
- no KL term and no reference model unless `kl_coef` asks for them;
- one optimizer step per batch unless `minibatches` asks for more, so clipping is idle by default.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from rollouts_core.data.prompts import DataBuffer
from rollouts_core.inference.engine import InferenceEngine
from rollouts_core.observe.timing import PhaseTimer
from rollouts_core.rollout.generate import RolloutConfig, generate_samples
from rollouts_core.rollout.journal import RolloutJournal
from rollouts_core.training.backend import Metrics, TrainBatch, TrainingBackend
from rollouts_core.training.grpo import loss_metrics, prepare_grpo_batch, rollout_metrics, split, to_train_batch
from rollouts_core.training.losses import token_logprobs
from rollouts_core.training.weight_sync import sync_weights
from rollouts_core.types import Sample

Score = Callable[[list[Sample]], list[Sample]]


@dataclass(frozen=True)
class RLTrainingConfig:
    num_steps: int
    minibatches: int
    aggregation: Literal["token", "sequence"]
    normalize_std: bool
    rollout: RolloutConfig


@dataclass(frozen=True)
class RLStep:
    """What one step leaves behind."""

    step: int
    """Counted from 1 over the whole RL run."""
    samples: Sequence[Sample]
    metrics: Metrics
    data_buffer: DataBuffer
    """The prompts still to come."""


def run_rl_training(
    backend: TrainingBackend,
    data_buffer: DataBuffer,
    engines: Sequence[InferenceEngine],
    tokenizer: Any,
    score: Score,
    config: RLTrainingConfig,
    reference: nn.Module | None = None,
    start: int = 0,
    journal: RolloutJournal | None = None,
) -> Iterator[RLStep]:
    """Steps `start` + 1 to `num_steps`, one at a time: the caller logs, saves and decides when to go on.

    The engines must hold the backend's weights at the start; they hold them again after each step. Rollouts come from
    the first engine. `reference` is the frozen policy of the KL term. `journal` keeps finished rollouts over a kill.
    """
    for step in range(start + 1, config.num_steps + 1):
        timer = PhaseTimer()
        with timer.phase("gen"):
            prompts, data_buffer = data_buffer.get_prompts(config.rollout.batch_size)
            samples = generate_samples(engines[0], tokenizer, prompts, config.rollout, step, journal)
        with timer.phase("reward"):
            samples = score(samples)
        with timer.phase("adv"):
            batch = prepare_grpo_batch(samples, config.normalize_std)
            parts = [to_train_batch(part, config.aggregation) for part in split(batch, config.minibatches)]
        if reference is not None:
            with timer.phase("ref"):
                parts = [_with_reference(part, reference, config.rollout.temperature) for part in parts]
        with timer.phase("update_actor"):
            results = [_update(backend, part) for part in parts]
        with timer.phase("update_weights"):
            sync_weights(backend, engines)
        metrics = {
            **rollout_metrics(batch),
            **loss_metrics([losses for losses, _ in results]),
            **results[-1][1],
            "weight_version": float(backend.weight_version),
            "num_tokens": float(sum(len(sample.tokens) for sample in samples)),
            **timer.metrics(),
        }
        yield RLStep(step, samples, metrics, data_buffer)


def _update(backend: TrainingBackend, batch: TrainBatch) -> tuple[Metrics, Metrics]:
    losses = backend.forward_backward(batch)
    optimizer = backend.optim_step()
    return losses.result(), optimizer.result()


@torch.no_grad()
def _with_reference(batch: TrainBatch, reference: nn.Module, temperature: float) -> TrainBatch:
    device = next(reference.parameters()).device
    moved = batch.to(device)
    logits_BTV = reference(input_ids=moved.tokens_BT, attention_mask=moved.attention_mask_BT, use_cache=False).logits
    return replace(batch, reference_logprobs_BT=token_logprobs(logits_BTV, moved.tokens_BT, temperature).cpu())
