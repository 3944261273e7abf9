"""Direct preference optimization: pairs of answers in, a trained backend out. Everything it needs is passed in.

Decision: there is no second model. The reference is the policy that training begins with. Its log-probabilities are
computed once, by the same backend, before the first step; a resumed training uses the saved ones.

Decision: both answers of a pair are in one pass, and their prompt is computed once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rollouts_core.data.batching import batch_indices
from rollouts_core.data.packing import best_fit
from rollouts_core.data.tokenized import Example, Floats, Pair
from rollouts_core.metrics.timing import PhaseTimer
from rollouts_core.training.backend import TrainingBackend, TrainStep, optimizer_step
from rollouts_core.training.collate import pack_batch
from rollouts_core.training.streams import scores_of


@dataclass(frozen=True)
class DPOTrainingConfig:
    num_steps: int
    batch_size: int
    """Pairs."""
    seed: int
    tokens_per_pass: int = 16384
    weights: tuple[float, ...] = ()
    """Weights of the sources of a mixture."""


def pairs_used(sizes: Sequence[int], config: DPOTrainingConfig) -> list[int]:
    """The pairs that training will see, ascending."""
    return sorted({index for step in range(config.num_steps) for index in _indices(sizes, config, step)})


def reference_logprobs(backend: TrainingBackend, pairs: Sequence[Pair], tokens_per_pass: int) -> list[Floats]:
    """Log-probabilities of each answer's learnt tokens under the current weights: chosen, rejected, chosen, ..."""
    answers = [answer for pair in pairs for answer in pair]
    passes = [[2 * pair + place for pair in chosen for place in (0, 1)] for chosen in _passes(pairs, tokens_per_pass)]
    return scores_of(answers, [passes], backend.score)[0]


def with_reference(pairs: Sequence[Pair], logprobs: Sequence[Floats]) -> list[Pair]:
    """The pairs with what `reference_logprobs` gave."""
    return [
        (_referring(chosen, logprobs[2 * place]), _referring(rejected, logprobs[2 * place + 1]))
        for place, (chosen, rejected) in enumerate(pairs)
    ]


def _referring(answer: Example, logprobs: Floats) -> Example:
    return replace(answer, streams={"reference_logprobs": logprobs})


def run_dpo_training(
    backend: TrainingBackend,
    pairs: Sequence[Pair],
    config: DPOTrainingConfig,
    start: int = 0,
    sizes: Sequence[int] = (),
) -> Iterator[TrainStep]:
    """Steps `start` + 1 to `num_steps`, one at a time: the caller logs, saves and decides when to go on.

    `pairs` carry the reference's log-probabilities; `sizes` are of the sources of a mixture, which follow one another.
    Raises `NonFiniteGradient` as the backend does.
    """
    sizes = sizes or (len(pairs),)
    for step in range(start + 1, config.num_steps + 1):
        timer = PhaseTimer()
        with timer.phase("data"):
            batch = [pairs[index] for index in _indices(sizes, config, step - 1)]
            total = sum(map(_size, batch))
            passes = _passes(batch, min(config.tokens_per_pass, -(-total // backend.parallel_passes)))
            packed = [
                pack_batch([answer for index in chosen for answer in batch[index]], float(len(batch)))
                for chosen in passes
            ]
        summed, optimizer_metrics = optimizer_step(backend, packed, timer)
        seen = summed["pairs_sum"]
        yield TrainStep(
            step,
            {
                "loss": summed["loss_sum"] / seen,
                **{name: summed[f"{name}_sum"] / seen for name in PER_PAIR},
                **optimizer_metrics,
                "num_tokens": float(sum(len(answer.tokens) for pair in batch for answer in pair)),
                "epoch": step * config.batch_size / len(pairs),
                "passes": float(len(passes)),
                "padding": summed["padding_sum"] / summed["attended_sum"],
                **timer.metrics(),
            },
        )


PER_PAIR = (
    "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen", "logps/rejected",
)  # fmt: skip


def _indices(sizes: Sequence[int], config: DPOTrainingConfig, step: int) -> list[int]:
    return batch_indices(sizes, config.batch_size, config.seed, step, config.weights)


def _passes(pairs: Sequence[Pair], tokens_per_pass: int) -> list[list[int]]:
    return best_fit([_size(pair) for pair in pairs], tokens_per_pass)


def _size(pair: Pair) -> int:
    chosen, rejected = pair
    return len(chosen.tokens) + len(rejected.tokens) - chosen.shared
