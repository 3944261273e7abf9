"""The RL loop: generate, reward, advantages, forward and backward, step, sync. Everything it needs is passed in.

Deviations from GRPO's paper, on purpose:
- the engine's log-probabilities are the old policy's, unless a correction by importance sampling is asked for; how far
  the trainer's differ from them is measured at every step (`sampling/sampling_logp_difference`), before its first
  update;
- no KL term and no reference model unless `kl_coef` asks for them;
- one optimizer step per batch unless `minibatches` asks for more, so clipping is idle by default.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rollouts_core.data.tokenized import Example, Floats
from rollouts_core.metrics.timing import PhaseTimer
from rollouts_core.rollout.source import RolloutSource
from rollouts_core.training.algorithms import Outcome, Recipe
from rollouts_core.training.backend import Metrics, TrainingBackend, optimizer_step
from rollouts_core.training.collate import learnt_tokens, pack_batch
from rollouts_core.training.episodes import episodes_of, join, split, turn_rewards, whole
from rollouts_core.training.reference import Reference
from rollouts_core.training.rl_metrics import loss_metrics, reward_of, rollout_metrics, staleness_metrics
from rollouts_core.training.streams import (
    Cuts,
    minibatches_of,
    normalizer_of,
    passes_of,
    scores_of,
    to_streams,
    with_gradient,
    with_streams,
)
from rollouts_core.types import Sample


@dataclass(frozen=True)
class RLTrainingConfig:
    """Steps, batches and algorithm of `run_rl_training`."""

    num_steps: int
    recipe: Recipe
    minibatches: int = 1
    tokens_per_pass: int = 32768
    max_new_tokens: int = 256
    kl_in_reward: float = 0.0
    """Coefficient of the KL penalty (k1) that is taken off each token's reward."""
    recompute_old: bool = False
    """Take the trainer's log-probabilities before the step for the old policy's, as importance sampling needs."""
    only_advantages: bool = False
    """Nothing but advantages makes a gradient: the loss has no KL and no entropy term. Sequences whose advantages are
    all zero, of groups that are all right or all wrong, are then not computed; the gradient is the same."""

    @property
    def needs_old(self) -> bool:
        """Whether a pass for the old policy is needed. With one minibatch the update computes its log-probabilities
        anyway."""
        return self.recompute_old and self.minibatches > 1


@dataclass(frozen=True)
class RLStep:
    """The results of one step."""

    step: int
    """Counted from 1 over the whole RL run."""
    samples: Sequence[Sample]
    metrics: Metrics
    advantages: Sequence[Floats]
    """Advantages of each sample, one for each learnt token."""


def run_rl_training(
    backend: TrainingBackend,
    rollouts: RolloutSource,
    config: RLTrainingConfig,
    reference: Reference | None = None,
    start: int = 0,
) -> Iterator[RLStep]:
    """Steps `start` + 1 to `num_steps`, one at a time: the caller logs, saves and decides when to go on.

    The backend's weights are published before the first step and after each. `reference` scores tokens under the
    frozen policy of the KL term, or a teacher. Raises `NonFiniteGradient` as the backend does.
    """
    rollouts.publish(backend.get_weights().result(), backend.weight_version)
    for step in range(start + 1, config.num_steps + 1):
        timer = PhaseTimer()
        with timer.phase("gen"):
            generated = rollouts.next_batch(step)
        samples = generated.samples
        staleness = staleness_metrics(samples, backend.weight_version)
        examples = to_streams(samples)
        minibatches = minibatches_of(samples, config.minibatches)
        cuts = _cuts(samples, minibatches, backend, config)
        if reference is not None:
            with timer.phase("ref"):
                examples = with_streams(examples, "reference_logprobs", reference(examples, cuts))
        if config.recipe.critic:
            with timer.phase("old_log_prob"):
                examples = _with_old(examples, cuts, backend, config)
        with timer.phase("adv"):
            examples = with_advantages(examples, samples, config)
        if config.only_advantages and not config.recipe.critic:
            cuts = _cuts(samples, [with_gradient(examples, of) for of in minibatches], backend, config)
        if config.needs_old and not config.recipe.critic:
            with timer.phase("old_log_prob"):
                examples = _with_old(examples, cuts, backend, config)
        with timer.phase("update_actor"):
            results = [
                _update(backend, examples, passes, [examples[index] for index in of], config)
                for passes, of in zip(cuts, minibatches, strict=True)
            ]
        with timer.phase("update_weights"):
            published = rollouts.publish(backend.get_weights().result(), backend.weight_version)
        metrics = {
            **rollout_metrics(samples),
            **loss_metrics([losses for losses, _ in results]),
            **results[-1][1],
            **staleness,
            "frac_tokens_without_gradient": 1 - _learnt_in(examples, cuts) / learnt_tokens(examples),
            "weight_version": float(backend.weight_version),
            "num_tokens": float(sum(len(sample.tokens) for sample in samples)),
            **generated.metrics,
            **published,
            **timer.metrics(),
        }
        yield RLStep(step, samples, metrics, [example.streams["advantages"] for example in examples])


def _cuts(
    samples: Sequence[Sample], minibatches: Sequence[Sequence[int]], backend: TrainingBackend, config: RLTrainingConfig
) -> Cuts:
    return [passes_of(samples, of, config.tokens_per_pass, backend.parallel_passes) for of in minibatches]


def _learnt_in(examples: Sequence[Example], cuts: Cuts) -> int:
    return learnt_tokens([examples[index] for passes in cuts for indices in passes for index in indices])


def _with_old(
    examples: Sequence[Example], cuts: Cuts, backend: TrainingBackend, config: RLTrainingConfig
) -> list[Example]:
    logprobs, values = scores_of(examples, cuts, backend.score)
    if config.needs_old:
        examples = with_streams(examples, "old_logprobs", logprobs)
    return list(examples) if values is None else with_streams(examples, "old_values", values)


def with_advantages(examples: Sequence[Example], samples: Sequence[Sample], config: RLTrainingConfig) -> list[Example]:
    """The sequences of scored samples with each learnt token's advantage, and for a critic its return."""
    lengths = [len(example.streams["rollout_logprobs"]) for example in examples]
    tokens = [np.zeros(length) for length in lengths]
    if penalty := config.kl_in_reward or config.recipe.own_penalty:
        tokens = [-penalty * (e.streams["rollout_logprobs"] - e.streams["reference_logprobs"]) for e in examples]
    places = episodes_of(samples)
    episodes = [whole([samples[place] for place in of]) for of in places]
    joined = join(tokens, places)
    found = config.recipe.advantages(
        Outcome(
            samples=episodes,
            rewards=[reward_of(episode) - sum(episode.turn_rewards) for episode in episodes],
            token_rewards=[of + turn_rewards(episode, len(of)) for of, episode in zip(joined, episodes, strict=True)],
            values=join([e.streams["old_values"] for e in examples], places) if config.recipe.critic else None,
        )
    )
    examples = with_streams(examples, "advantages", split(found.advantages, lengths, places))
    return (
        examples if found.returns is None else with_streams(examples, "returns", split(found.returns, lengths, places))
    )


def _update(
    backend: TrainingBackend,
    examples: Sequence[Example],
    passes: Sequence[Sequence[int]],
    minibatch: Sequence[Example],
    config: RLTrainingConfig,
) -> tuple[Metrics, Metrics]:
    """Take an optimizer step over a minibatch, in one or more passes. Sequences that are in no pass count, too."""
    normalizer = normalizer_of(minibatch, config.recipe.aggregation, config.max_new_tokens)
    batches = (pack_batch([examples[index] for index in indices], normalizer) for indices in passes)
    return optimizer_step(backend, batches, PhaseTimer())
