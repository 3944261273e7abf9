"""The RL loop: generate, reward, advantages, forward and backward, step, sync. Everything it needs is passed in.

Deviations from GRPO's paper, on purpose:
- the engine's log-probabilities are the old policy's, unless a correction by importance sampling is asked for; how far
  the trainer's differ from them is measured at every step (`sampling/sampling_logp_difference`), before its first
  update;
- no KL term and no reference model unless `kl_coef` asks for them;
- one optimizer step per batch unless `minibatches` asks for more, so clipping is idle by default.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from rollouts_core.observe.timing import PhaseTimer
from rollouts_core.rollout.source import RolloutSource
from rollouts_core.training.backend import Metrics, TrainBatch, TrainingBackend
from rollouts_core.training.grpo import (
    loss_metrics,
    prepare_grpo_batch,
    rollout_metrics,
    split,
    staleness_metrics,
    to_train_batch,
)
from rollouts_core.training.losses import token_logprobs
from rollouts_core.types import Sample


@dataclass(frozen=True)
class RLTrainingConfig:
    num_steps: int
    minibatches: int
    aggregation: Literal["token", "sequence"]
    normalize_std: bool
    temperature: float
    recompute_old: bool = False
    """Take the trainer's log-probabilities before the step for the old policy's, as importance sampling needs."""


@dataclass(frozen=True)
class RLStep:
    """What one step leaves behind."""

    step: int
    """Counted from 1 over the whole RL run."""
    samples: Sequence[Sample]
    metrics: Metrics


def run_rl_training(
    backend: TrainingBackend,
    rollouts: RolloutSource,
    config: RLTrainingConfig,
    reference: nn.Module | None = None,
    start: int = 0,
) -> Iterator[RLStep]:
    """Steps `start` + 1 to `num_steps`, one at a time: the caller logs, saves and decides when to go on.

    The backend's weights are published before the first step and after each. `reference` is the frozen policy of the KL
    term.
    """
    rollouts.publish(backend.get_weights().result(), backend.weight_version)
    for step in range(start + 1, config.num_steps + 1):
        timer = PhaseTimer()
        with timer.phase("gen"):
            generated = rollouts.next_batch(step)
        with timer.phase("adv"):
            staleness = staleness_metrics(generated.samples, backend.weight_version)
            batch = prepare_grpo_batch(generated.samples, config.normalize_std)
            parts = [to_train_batch(part, config.aggregation) for part in split(batch, config.minibatches)]
        if config.recompute_old and config.minibatches > 1:
            with timer.phase("old_log_prob"):
                parts = [_with_old(part, backend, config.temperature) for part in parts]
        if reference is not None:
            with timer.phase("ref"):
                parts = [_with_reference(part, reference, config.temperature) for part in parts]
        with timer.phase("update_actor"):
            results = [_update(backend, part) for part in parts]
        with timer.phase("update_weights"):
            published = rollouts.publish(backend.get_weights().result(), backend.weight_version)
        metrics = {
            **rollout_metrics(batch),
            **loss_metrics([losses for losses, _ in results]),
            **results[-1][1],
            **staleness,
            "weight_version": float(backend.weight_version),
            "num_tokens": float(sum(len(sample.tokens) for sample in generated.samples)),
            **generated.metrics,
            **published,
            **timer.metrics(),
        }
        yield RLStep(step, generated.samples, metrics)


def _with_old(batch: TrainBatch, backend: TrainingBackend, temperature: float) -> TrainBatch:
    return replace(batch, old_logprobs_BT=backend.logprobs(batch, temperature).result())


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
