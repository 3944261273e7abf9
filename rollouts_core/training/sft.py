"""The SFT loop: batches in, a trained backend out. Everything it needs is passed in.

Deviations from a textbook loop, on purpose: the batch of a step is a pure function of seed and step, so resuming
needs the step number alone; the loss is a mean over all learnt tokens of an optimizer step, however it is split.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rollouts_core.data.batching import batch_indices, padding_fraction
from rollouts_core.data.collate import collate_batch, learnt_tokens
from rollouts_core.data.tokenized import Example
from rollouts_core.observe.metrics import MetricsLogger
from rollouts_core.observe.timing import PhaseTimer
from rollouts_core.training.backend import Metrics, TrainingBackend


@dataclass(frozen=True)
class SFTTrainingConfig:
    num_steps: int
    batch_size: int
    gradient_accumulation: int
    seed: int
    log_every: int
    checkpoint_every: int


def run_sft_training(
    backend: TrainingBackend,
    samples: Sequence[Example],
    config: SFTTrainingConfig,
    metrics_logger: MetricsLogger,
    checkpoint: Callable[[int], None] = lambda step: None,
    start: int = 0,
) -> Metrics:
    """Train from step `start` to `num_steps`; `checkpoint(step)` is called every so often, not after the last.

    Returns the last step's metrics.
    """
    lengths = tuple(len(sample.tokens) for sample in samples)
    trained_tokens = 0
    metrics: Metrics = {}
    for step in range(start + 1, config.num_steps + 1):
        timer = PhaseTimer()
        with timer.phase("data"):
            batch = [samples[index] for index in batch_indices(lengths, config.batch_size, config.seed, step - 1)]
        with timer.phase("forward_backward"):
            summed = _accumulate(backend, batch, config.gradient_accumulation)
        with timer.phase("optim"):
            optimizer_metrics = backend.optim_step().result()
        trained_tokens += int(summed["tokens_sum"])
        if step % config.checkpoint_every == 0 and step < config.num_steps:
            with timer.phase("save_checkpoint"):
                checkpoint(step)
        metrics = {
            "loss": summed["loss_sum"] / max(1.0, summed["tokens_sum"]),
            **optimizer_metrics,
            "num_tokens": float(trained_tokens),
            "epoch": step * config.batch_size / len(samples),
            "padding_fraction": padding_fraction([len(sample.tokens) for sample in batch]),
            **timer.metrics(),
        }
        if step % config.log_every == 0 or step == config.num_steps:
            metrics_logger.log(metrics, step)
    return metrics


def _accumulate(backend: TrainingBackend, batch: Sequence[Example], passes: int) -> Metrics:
    """Forward and backward over a step's batch in `passes` parts; metrics summed."""
    normalizer = float(max(1, learnt_tokens(batch)))
    size = -(-len(batch) // passes)
    parts = [batch[begin : begin + size] for begin in range(0, len(batch), size)]
    futures = [backend.forward_backward(collate_batch(part, normalizer)) for part in parts]
    results = [future.result() for future in futures]
    return {name: sum(result[name] for result in results) for name in results[0]}
