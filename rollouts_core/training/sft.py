"""The SFT loop: batches in, a trained backend out. Everything it needs is passed in.

Deviations from a textbook loop, on purpose: the batch of a step is a pure function of seed and step, so resuming
needs the step number alone; the loss is a mean over all learnt tokens of an optimizer step, however it is split.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rollouts_core.data.batching import batch_indices
from rollouts_core.data.packing import best_fit
from rollouts_core.data.tokenized import Example
from rollouts_core.metrics.timing import PhaseTimer
from rollouts_core.training.backend import TrainingBackend, TrainStep, optimizer_step
from rollouts_core.training.collate import learnt_tokens, pack_batch


@dataclass(frozen=True)
class SFTTrainingConfig:
    """Steps and batches of `run_sft_training`."""

    num_steps: int
    batch_size: int
    seed: int
    tokens_per_pass: int = 16384
    weights: tuple[float, ...] = ()
    """Weights of the sources of a mixture."""


def run_sft_training(
    backend: TrainingBackend,
    samples: Sequence[Example],
    config: SFTTrainingConfig,
    start: int = 0,
    sizes: Sequence[int] = (),
) -> Iterator[TrainStep]:
    """Steps `start` + 1 to `num_steps`, one at a time: the caller logs, saves and decides when to go on.

    `sizes` are of the sources of a mixture, which follow one another in `samples`. Raises `NonFiniteGradient` as the
    backend does.

    Examples:
        >>> config = rc.SFTTrainingConfig(num_steps=2, batch_size=2, seed=0)
        >>> [step.step for step in rc.run_sft_training(backend, examples, config)]
        [1, 2]
    """
    for step in range(start + 1, config.num_steps + 1):
        timer = PhaseTimer()
        with timer.phase("data"):
            indices = batch_indices(sizes or (len(samples),), config.batch_size, config.seed, step - 1, config.weights)
            batch = [samples[index] for index in indices]
            lengths = [len(sample.tokens) for sample in batch]
            passes = best_fit(lengths, min(config.tokens_per_pass, -(-sum(lengths) // backend.parallel_passes)))
            normalizer = float(max(1, learnt_tokens(batch)))
            packed = [pack_batch([batch[index] for index in chosen], normalizer) for chosen in passes]
        summed, optimizer_metrics = optimizer_step(backend, packed, timer)
        yield TrainStep(
            step,
            {
                "loss": summed["loss_sum"] / max(1.0, summed["tokens_sum"]),
                **optimizer_metrics,
                "num_tokens": summed["tokens_sum"],
                "epoch": step * config.batch_size / len(samples),
                "passes": float(len(passes)),
                "padding": summed["padding_sum"] / summed["attended_sum"],
                **timer.metrics(),
            },
        )
