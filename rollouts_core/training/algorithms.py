"""The parts of each algorithm: an advantage per token, a loss per token, and the aggregation of the losses.

Decision: an algorithm is data: three functions of `advantages.py` and `losses.py`, put together only here. Loops,
backends and engines don't know which algorithm they run.

Deviations from the papers, for all: the sampling policy is the engine's unless a correction is asked for; one
optimizer step per batch by default, so clipping is idle; the advantage's deviation is the unbiased one plus 1e-4.
RLOO and Dr. GRPO divide sums by (answers x longest answer), a constant factor that Adam does not see.

Legend: M learnt tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from rollouts_core.config import algorithms as named
from rollouts_core.errors import BadInput
from rollouts_core.rewards.text import overlong_penalty
from rollouts_core.training.advantages import (
    Floats,
    batch_normalized,
    compute_advantages,
    generalized_advantages,
    leave_one_out_advantages,
    maxrl_advantages,
)
from rollouts_core.training.losses import (
    Aggregation,
    by_sequence,
    cispo_loss,
    gspo_loss,
    lengths,
    ppo_loss,
    reinforce_loss,
)
from rollouts_core.types import Sample

CustomAdvantages = Callable[[Sequence[Sample]], Sequence[float] | Sequence[Sequence[float]]]
"""One's own: the scored samples of a step in, one number per sample, or one per learnt token of each, out."""


@dataclass(frozen=True)
class Outcome:
    """A step's answers, as advantages see them: whole episodes."""

    samples: Sequence[Sample]
    rewards: Sequence[float]
    token_rewards: Sequence[Floats]
    """Rewards of single tokens beside: those of the KL penalty, and of turns at the last token of each."""
    values: Sequence[Floats] | None = None
    """A critic's, of the state before each learnt token."""

    @property
    def groups(self) -> list[int]:
        return [sample.group_index for sample in self.samples]

    @property
    def totals(self) -> list[float]:
        """The sum of all rewards of each answer."""
        return [reward + float(tokens.sum()) for reward, tokens in zip(self.rewards, self.token_rewards, strict=True)]


@dataclass(frozen=True)
class Advantages:
    """Per answer, one number for each learnt token."""

    advantages: Sequence[Floats]
    returns: Sequence[Floats] | None = None
    """The targets of the critic."""


PolicyLoss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]
"""(logprobs_M, old_logprobs_M, advantages_M, sequence_M, sequences) -> losses_M"""


@dataclass(frozen=True)
class Recipe:
    """The parts of an algorithm: advantages, a loss per token, and the aggregation of the losses."""

    advantages: Callable[[Outcome], Advantages]
    losses: PolicyLoss
    aggregation: Aggregation
    clip: tuple[float, float] = (float("inf"), float("inf"))
    """Ratios below 1 - the first number or above 1 + the second are clipped; for the metrics."""
    by_sequence: bool = False
    """Whether each answer has one ratio for all its tokens."""
    critic: bool = False
    own_penalty: float = 0.0
    """Coefficient of the algorithm's own penalty of each token, which a teacher's log-probabilities give."""

    def ratios(
        self, logprobs_M: torch.Tensor, old_logprobs_M: torch.Tensor, sequence_M: torch.Tensor, sequences: int
    ) -> torch.Tensor:
        """The ratios that are clipped, M."""
        difference_M = logprobs_M - old_logprobs_M
        if self.by_sequence:
            mean_S = by_sequence(difference_M, sequence_M, sequences) / lengths(sequence_M, sequences)
            difference_M = mean_S[sequence_M]
        return difference_M.exp()


def recipe_of(algorithm: named.Algorithm, max_new_tokens: int, custom: CustomAdvantages | None = None) -> Recipe:
    """The functions that a config's algorithm names; `custom` is the loaded function of a custom one.

    Examples:
        >>> recipe = rc.recipe_of(rc.DAPO(), max_new_tokens=256)
        >>> recipe.aggregation
        'token'
    """
    match algorithm:
        case named.GRPO(clip_low=low, clip_high=high, normalize_std=normalize, aggregation=aggregation):
            advantages = partial(compute_advantages, normalize_std=normalize)
            return Recipe(_outcome(advantages), _clipped(low, high), aggregation, (low, high))
        case named.DrGRPO(clip_low=low, clip_high=high):
            advantages = partial(compute_advantages, normalize_std=False)
            return Recipe(_outcome(advantages), _clipped(low, high), "constant", (low, high))
        case named.DAPO(clip_low=low, clip_high=high, overlong_tokens=buffer):
            shaped = partial(_punish_length, longest=max_new_tokens, buffer=buffer)
            return Recipe(_outcome(compute_advantages, shaped), _clipped(low, high), "token", (low, high))
        case named.GSPO(clip_low=low, clip_high=high):
            per_answer = partial(gspo_loss, clip_low=low, clip_high=high)
            return Recipe(_outcome(compute_advantages), per_answer, "sequence", (low, high), by_sequence=True)
        case named.CISPO(weight_low=low, weight_high=high):
            losses = _tokenwise(partial(cispo_loss, weight_low=low, weight_high=high))
            return Recipe(_outcome(compute_advantages), losses, "token", (1 - low, high - 1))
        case named.RLOO():
            return Recipe(_outcome(leave_one_out_advantages), _tokenwise(reinforce_loss), "constant")
        case named.ReinforcePlusPlus(clip_low=low, clip_high=high, group_baseline=baseline):
            return Recipe(partial(_reinforce_plus_plus, baseline), _clipped(low, high), "token", (low, high))
        case named.MaxRL(clip_low=low, clip_high=high):
            return Recipe(_outcome(maxrl_advantages), _clipped(low, high), "token", (low, high))
        case named.PPO(clip_low=low, clip_high=high, gamma=gamma, lam=lam):
            advantages_of = partial(_critics, gamma, lam)
            return Recipe(advantages_of, _clipped(low, high), "token", (low, high), critic=True)
        case named.Distillation():
            return Recipe(_teachers, _tokenwise(reinforce_loss), "token", own_penalty=1.0)
        case named.CustomAlgorithm(clip_low=low, clip_high=high, aggregation=aggregation):
            assert custom is not None, "the stage loads the function"
            return Recipe(own_advantages(custom), _clipped(low, high), aggregation, (low, high))


def own_advantages(custom: CustomAdvantages) -> Callable[[Outcome], Advantages]:
    """A recipe's advantages by a user's function. It raises `BadInput` if that returns anything but finite numbers."""
    return partial(_own, custom)


def _outcome(
    advantages: Callable[[Sequence[float], Sequence[int]], list[float]],
    shape: Callable[[Sequence[float], Sequence[Sample]], list[float]] | None = None,
) -> Callable[[Outcome], Advantages]:
    """Advantages that are one number per answer, for all its tokens."""

    def of(outcome: Outcome) -> Advantages:
        totals = outcome.totals if shape is None else shape(outcome.totals, outcome.samples)
        return _spread(advantages(totals, outcome.groups), outcome)

    return of


def _spread(numbers: Sequence[float], outcome: Outcome) -> Advantages:
    return Advantages([np.full(len(p), number) for number, p in zip(numbers, outcome.token_rewards, strict=True)])


def _punish_length(rewards: Sequence[float], samples: Sequence[Sample], longest: int, buffer: int) -> list[float]:
    return [
        reward + overlong_penalty(sample.response_length, longest, buffer)
        for reward, sample in zip(rewards, samples, strict=True)
    ]


def _reinforce_plus_plus(baseline: bool, outcome: Outcome) -> Advantages:
    """A_t = reward + what is still to come of the tokens' own, normalised over the step's tokens."""
    rewards = outcome.rewards
    if baseline:
        rewards = compute_advantages(rewards, outcome.groups, normalize_std=False)
    to_go = [
        reward + np.cumsum(tokens[::-1])[::-1] for reward, tokens in zip(rewards, outcome.token_rewards, strict=True)
    ]
    return Advantages(batch_normalized(to_go))


def _critics(gamma: float, lam: float, outcome: Outcome) -> Advantages:
    """GAE; the reward stands at the last token. Advantages are normalised over the step's tokens, as in verl."""
    assert outcome.values is not None, "PPO has a critic"
    answers = [
        generalized_advantages(_at_the_end(reward, tokens), values, gamma, lam)
        for reward, tokens, values in zip(outcome.rewards, outcome.token_rewards, outcome.values, strict=True)
    ]
    return Advantages(batch_normalized([advantages for advantages, _ in answers]), [returns for _, returns in answers])


def _teachers(outcome: Outcome) -> Advantages:
    """On-policy distillation: A_t = log p_teacher(y_t) - log p(y_t), each token by itself.

    The policy gradient of these is that of KL(p || p_teacher) of each next token, given the tokens before it; what a
    token does to the divergence of later ones is left out, as in Lu et al., On-Policy Distillation (Thinking Machines,
    2025), and unlike MiniLLM (arXiv 2306.08543).
    """
    return Advantages(outcome.token_rewards)


def _at_the_end(reward: float, tokens: Floats) -> Floats:
    rewards = tokens.copy()
    if len(rewards):
        rewards[-1] += reward
    return rewards


def _own(function: CustomAdvantages, outcome: Outcome) -> Advantages:
    """Raises `BadInput` when the function's answer does not fit the samples."""
    found = function(outcome.samples)
    if len(found) != len(outcome.samples):
        raise BadInput(f"rl.algorithm.function gave {len(found)} advantages for {len(outcome.samples)} samples")
    arrays = []
    for number, (value, tokens) in enumerate(zip(found, outcome.token_rewards, strict=True)):
        array = np.asarray(value, np.float64)
        if array.ndim and array.shape != tokens.shape:
            raise BadInput(
                f"rl.algorithm.function gave {array.shape[0]} advantages for sample {number}, "
                f"which has {len(tokens)} learnt tokens"
            )
        if not np.isfinite(array).all():
            raise BadInput(f"rl.algorithm.function gave an advantage that is not a finite number, for sample {number}")
        arrays.append(np.broadcast_to(array, tokens.shape).copy())
    return Advantages(arrays)


def _clipped(low: float, high: float) -> PolicyLoss:
    return _tokenwise(partial(ppo_loss, clip_low=low, clip_high=high))


def _tokenwise(losses: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]) -> PolicyLoss:
    """A loss that does not ask which sequence a token belongs to."""

    def of(
        logprobs_M: torch.Tensor, old_M: torch.Tensor, advantages_M: torch.Tensor, sequence_M: torch.Tensor, count: int
    ) -> torch.Tensor:
        return losses(logprobs_M, old_M, advantages_M)

    return of
