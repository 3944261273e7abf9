"""The SFT loop: batches in, a trained backend out. Everything it needs is passed in.

Deviations from a textbook loop, on purpose: the batch of a step is a pure function of seed and step, so resuming
needs the step number alone; the loss is a mean over all learnt tokens of an optimizer step, however it is split.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rollouts_core.data.batching import batch_indices, padding_fraction
from rollouts_core.data.collate import collate_batch, learnt_tokens
from rollouts_core.data.tokenized import Example
from rollouts_core.observe.timing import PhaseTimer
from rollouts_core.training.backend import Metrics, TrainingBackend


@dataclass(frozen=True)
class SFTTrainingConfig:
    num_steps: int
    batch_size: int
    gradient_accumulation: int
    seed: int


@dataclass(frozen=True)
class SFTStep:
    step: int
    """Counted from 1."""
    metrics: Metrics


def run_sft_training(
    backend: TrainingBackend, samples: Sequence[Example], config: SFTTrainingConfig, start: int = 0
) -> Iterator[SFTStep]:
    """Steps `start` + 1 to `num_steps`, one at a time: the caller logs, saves and decides when to go on."""
    lengths = tuple(len(sample.tokens) for sample in samples)
    for step in range(start + 1, config.num_steps + 1):
        timer = PhaseTimer()
        with timer.phase("data"):
            batch = [samples[index] for index in batch_indices(lengths, config.batch_size, config.seed, step - 1)]
        with timer.phase("forward_backward"):
            summed = _accumulate(backend, batch, config.gradient_accumulation)
        with timer.phase("optim"):
            optimizer_metrics = backend.optim_step().result()
        metrics = {
            "loss": summed["loss_sum"] / max(1.0, summed["tokens_sum"]),
            **optimizer_metrics,
            "num_tokens": summed["tokens_sum"],
            "epoch": step * config.batch_size / len(samples),
            "padding_fraction": padding_fraction([len(sample.tokens) for sample in batch]),
            **timer.metrics(),
        }
        yield SFTStep(step, metrics)


def _accumulate(backend: TrainingBackend, batch: Sequence[Example], passes: int) -> Metrics:
    """Forward and backward over a step's batch in `passes` parts; metrics summed."""
    normalizer = float(max(1, learnt_tokens(batch)))
    size = -(-len(batch) // passes)
    parts = [batch[begin : begin + size] for begin in range(0, len(batch), size)]
    futures = [backend.forward_backward(collate_batch(part, normalizer)) for part in parts]
    results = [future.result() for future in futures]
    return {name: sum(result[name] for result in results) for name in results[0]}
