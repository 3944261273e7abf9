"""Objectives that a backend minimises: losses of `losses.py` on a pass's scores, with the metrics of the pass.

Legend: M learnt tokens, S sequences, P pairs.
"""

from dataclasses import dataclass

import torch

from rollouts_core.training.algorithms import Recipe
from rollouts_core.training.backend import LossFunction, TokenScores, TrainBatch
from rollouts_core.training.losses import (
    Correction,
    Estimator,
    aggregate,
    by_sequence,
    dpo_loss,
    importance_weights,
    kl_divergence,
    value_loss,
)
from rollouts_core.training.pending import Numbers

Found = dict[str, float | torch.Tensor]
"""Metrics, some of them still on their device."""


def create_cross_entropy_loss() -> LossFunction:
    """Token cross-entropy, a mean over all learnt tokens of the optimizer step.

    Examples:
        >>> loss = rc.create_cross_entropy_loss()
        >>> backend = rc.create_pytorch_backend(policy.model, loss, rc.Optimization(learning_rate=1e-4))
    """

    def cross_entropy(scores: TokenScores, batch: TrainBatch) -> tuple[torch.Tensor, Numbers]:
        total = -scores.logprobs_M.sum()
        return total / batch.normalizer, {"loss_sum": total, "tokens_sum": float(len(batch.targets_M))}

    return cross_entropy


def create_dpo_loss(beta: float) -> LossFunction:
    """`dpo_loss`, a mean over the pairs of the optimizer step.

    Of the batch's sequences, 2k and 2k + 1 are the chosen and the rejected answer of a pair. beta times an answer's
    log-ratio is its implicit reward (arXiv 2305.18290, eq. 5, without the prompt's constant).

    Examples:
        >>> loss = rc.create_dpo_loss(beta=0.1)
        >>> backend = rc.create_pytorch_backend(policy.model, loss, rc.Optimization(learning_rate=1e-6))
    """

    def preference(scores: TokenScores, batch: TrainBatch) -> tuple[torch.Tensor, Numbers]:
        assert batch.reference_logprobs_M is not None, "preferences carry the reference's log-probabilities"
        logprobs_S, reference_S = (
            by_sequence(values_M, batch.sequence_M, batch.sequences)
            for values_M in (scores.logprobs_M, batch.reference_logprobs_M)
        )
        chosen_P, rejected_P = logprobs_S[::2], logprobs_S[1::2]
        losses_P = dpo_loss(chosen_P, rejected_P, reference_S[::2], reference_S[1::2], beta)
        rewards_S = beta * (logprobs_S - reference_S).detach()
        margins_P = rewards_S[::2] - rewards_S[1::2]
        metrics: Found = {
            "loss_sum": losses_P.sum(),
            "pairs_sum": float(len(losses_P)),
            "rewards/chosen_sum": rewards_S[::2].sum(),
            "rewards/rejected_sum": rewards_S[1::2].sum(),
            "rewards/margins_sum": margins_P.sum(),
            "rewards/accuracies_sum": (margins_P > 0).sum(),
            "logps/chosen_sum": chosen_P.sum(),
            "logps/rejected_sum": rejected_P.sum(),
        }
        return losses_P.sum() / batch.normalizer, metrics

    return preference


@dataclass(frozen=True)
class Extras:
    """Terms that are added to an algorithm's loss, and the correction for tokens of other policies."""

    kl_coef: float = 0.0
    kl_estimator: Estimator = "k3"
    entropy_coef: float = 0.0
    """Weight of the entropy bonus, a mean over tokens like the loss itself."""
    correction: Correction = "none"
    ratio_low: float = 0.5
    ratio_high: float = 2.0
    value_coef: float = 0.1
    value_clip: float = 0.2


NOTHING_MORE = Extras()


def create_rl_loss(recipe: Recipe, extras: Extras = NOTHING_MORE) -> LossFunction:
    """The loss of an algorithm of RL, aggregated as its recipe says.

    Per token it is w l + kl_coef KL - entropy_coef H + value_coef L_V.

    l is the recipe's loss against the engine's log-probabilities (w = 1); with a correction it is against the
    trainer's before the step, and w is `importance_weights` of the two. With `kl_coef`, the batch has the reference's
    log-probabilities.

    Examples:
        >>> loss = rc.create_rl_loss(rc.recipe_of(rc.GRPO(), max_new_tokens=256))
        >>> backend = rc.create_pytorch_backend(policy.model, loss, rc.Optimization(learning_rate=1e-6))
    """

    def loss_of(scores: TokenScores, batch: TrainBatch) -> tuple[torch.Tensor, Numbers]:
        assert batch.advantages_M is not None and batch.rollout_logprobs_M is not None, "an RL batch has both"
        assert scores.entropy_M is not None, "RL's policy computes entropies"
        rollout_M, logprobs_M = batch.rollout_logprobs_M, scores.logprobs_M
        own_M = logprobs_M.detach() if batch.old_logprobs_M is None else batch.old_logprobs_M
        weights_M = importance_weights(own_M, rollout_M, extras.correction, extras.ratio_low, extras.ratio_high)
        old_M = rollout_M if weights_M is None else own_M
        losses_M = recipe.losses(logprobs_M, old_M, batch.advantages_M, batch.sequence_M, batch.sequences)
        metrics = _metrics(recipe, logprobs_M.detach(), old_M, batch)
        if weights_M is not None:
            losses_M = losses_M * weights_M
            metrics["corrected_sum"] = (weights_M != torch.exp(own_M - rollout_M)).sum()
        metrics["policy_loss_sum"] = _aggregated(losses_M, recipe, batch)
        if batch.reference_logprobs_M is not None and extras.kl_coef:
            losses_M = losses_M + extras.kl_coef * kl_divergence(
                logprobs_M, batch.reference_logprobs_M, extras.kl_estimator
            )
        if extras.entropy_coef:
            losses_M = losses_M - extras.entropy_coef * scores.entropy_M
        if scores.values_M is not None:
            assert batch.old_values_M is not None and batch.returns_M is not None, "a critic learns from returns"
            values_M = value_loss(scores.values_M, batch.old_values_M, batch.returns_M, extras.value_clip)
            losses_M = losses_M + extras.value_coef * values_M
            metrics["value_loss_sum"] = values_M.sum()
        metrics["entropy_sum"] = scores.entropy_M.sum()
        return _aggregated(losses_M, recipe, batch), metrics

    return loss_of


def _aggregated(losses_M: torch.Tensor, recipe: Recipe, batch: TrainBatch) -> torch.Tensor:
    return aggregate(losses_M, batch.sequence_M, batch.sequences, recipe.aggregation, batch.normalizer)


def _metrics(recipe: Recipe, logprobs_M: torch.Tensor, old_M: torch.Tensor, batch: TrainBatch) -> Found:
    assert batch.advantages_M is not None and batch.rollout_logprobs_M is not None
    difference_M = logprobs_M - batch.rollout_logprobs_M
    ratio_M = difference_M.exp()
    clipped_M = recipe.ratios(logprobs_M, old_M, batch.sequence_M, batch.sequences)
    low = (clipped_M < 1 - recipe.clip[0]) & (batch.advantages_M < 0)
    high = (clipped_M > 1 + recipe.clip[1]) & (batch.advantages_M > 0)
    some = len(ratio_M) > 0
    metrics: Found = {
        "tokens_sum": float(len(ratio_M)),
        "logp_difference_sum": difference_M.abs().sum(),
        "logp_difference_max": difference_M.abs().max() if some else 0.0,
        "ratio_sum": ratio_M.sum(),
        "ratio_max": ratio_M.max() if some else 1.0,
        "mismatch_kl_sum": (ratio_M - 1 - difference_M).sum(),
        "clip_low_sum": low.sum(),
        "clip_high_sum": high.sum(),
    }
    if batch.reference_logprobs_M is not None:
        metrics["kl_sum"] = kl_divergence(logprobs_M, batch.reference_logprobs_M, "k3").sum()
    return metrics
