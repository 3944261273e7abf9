"""Losses as pure functions of logits and batch.

Legend: B examples, T tokens, V vocabulary. A `logprobs_BT[b, t]` is that of token t given those before it; column 0
is 0. Metrics ending in `_sum` are summed over passes and divided by the step's token count afterwards; `_max` and
`_min` are combined by maximum and minimum.
"""

from typing import Literal

import torch
import torch.nn.functional as F

from rollouts_core.training.backend import LossFunction, Metrics, TrainBatch


def token_logprobs(logits_BTV: torch.Tensor, tokens_BT: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """log softmax(logits / temperature) at each next token, in float32, of shape BT with column 0 zero."""
    scaled_BTV = logits_BTV[:, :-1].float() / temperature
    logprobs = -F.cross_entropy(scaled_BTV.flatten(0, 1), tokens_BT[:, 1:].flatten(), reduction="none")
    return F.pad(logprobs.view(len(tokens_BT), -1), (1, 0))


def create_cross_entropy_loss() -> LossFunction:
    """Token cross-entropy over the loss mask, a mean over all masked tokens of the optimizer step."""

    def cross_entropy(logits_BTV: torch.Tensor, batch: TrainBatch) -> tuple[torch.Tensor, Metrics]:
        losses_BT = -token_logprobs(logits_BTV, batch.tokens_BT) * batch.loss_mask_BT
        loss = losses_BT.sum() / batch.normalizer
        return loss, {"loss_sum": loss.item() * batch.normalizer, "tokens_sum": batch.loss_mask_BT.sum().item()}

    return cross_entropy


def grpo_loss(
    logprobs_BT: torch.Tensor,
    old_logprobs_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    loss_mask_BT: torch.Tensor,
    *,
    normalizer: float,
    aggregation: Literal["token", "sequence"] = "token",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    reference_logprobs_BT: torch.Tensor | None = None,
    kl_coef: float = 0.0,
    weights_BT: torch.Tensor | None = None,
) -> torch.Tensor:
    """The clipped surrogate of PPO (arXiv 1707.06347, eq. 7) with GRPO's KL term (arXiv 2402.03300, eq. 3 and 4).

    Per token, l = -w min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) + kl_coef k3, with rho = exp(logp - old
    logp) and k3 = exp(d) - 1 - d, d = reference - logp. The old policy is the engine's (w = 1) unless a correction is
    asked for: then it is the trainer's before the step, and w = `weights_BT` is `importance_weights` of the two.

    aggregation "token" is DAPO's (arXiv 2503.14476): the sum over masked tokens / normalizer, the step's masked
    tokens. "sequence" is GRPO's: each answer's mean over its tokens, summed / normalizer, the step's answers.
    Answers with no masked token add nothing.
    """
    ratio_BT = torch.exp(logprobs_BT - old_logprobs_BT)
    clipped_BT = ratio_BT.clamp(1 - clip_low, 1 + clip_high)
    losses_BT = -torch.minimum(ratio_BT * advantages_BT, clipped_BT * advantages_BT)
    if weights_BT is not None:
        losses_BT = losses_BT * weights_BT
    if reference_logprobs_BT is not None and kl_coef:
        losses_BT = losses_BT + kl_coef * kl_k3(logprobs_BT, reference_logprobs_BT)
    losses_BT = losses_BT * loss_mask_BT
    if aggregation == "sequence":
        losses_BT = losses_BT / loss_mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
    return losses_BT.sum() / normalizer


Correction = Literal["none", "truncate", "mask"]


def importance_weights(
    old_logprobs_BT: torch.Tensor, rollout_logprobs_BT: torch.Tensor, kind: Correction, low: float, high: float
) -> torch.Tensor | None:
    """How much each token counts that another policy sampled than the one it trains; no gradient flows through it.

    With r = exp(trainer's log-probability before the step - engine's): "truncate" is min(r, high), truncated importance
    sampling (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"; the weight of
    AReaL's decoupled objective, arXiv 2505.24298, eq. 5, capped). "mask" is r within [low, high] and 0 outside (IcePop,
    arXiv 2510.18855). r holds both causes: other kernels in the engine, and older weights. "none" gives None.
    """
    if kind == "none":
        return None
    ratio_BT = torch.exp(old_logprobs_BT.detach() - rollout_logprobs_BT)
    if kind == "truncate":
        return ratio_BT.clamp(max=high)
    return ratio_BT * ((ratio_BT >= low) & (ratio_BT <= high))


def kl_k3(logprobs_BT: torch.Tensor, reference_logprobs_BT: torch.Tensor) -> torch.Tensor:
    """Schulman's k3 estimate of KL(policy || reference) per token, from samples of the policy: never negative."""
    difference_BT = reference_logprobs_BT - logprobs_BT
    return torch.exp(difference_BT) - 1 - difference_BT


def create_grpo_loss(
    *,
    aggregation: Literal["token", "sequence"],
    clip_low: float,
    clip_high: float,
    kl_coef: float,
    temperature: float,
    correction: Correction = "none",
    ratio_low: float = 0.5,
    ratio_high: float = 2.0,
) -> LossFunction:
    """`grpo_loss` on logits, with the metrics of the step."""

    def loss_of(logits_BTV: torch.Tensor, batch: TrainBatch) -> tuple[torch.Tensor, Metrics]:
        assert batch.advantages_BT is not None and batch.rollout_logprobs_BT is not None, "an RL batch has both"
        logprobs_BT = token_logprobs(logits_BTV, batch.tokens_BT, temperature)
        old_BT = logprobs_BT.detach() if batch.old_logprobs_BT is None else batch.old_logprobs_BT
        weights_BT = importance_weights(old_BT, batch.rollout_logprobs_BT, correction, ratio_low, ratio_high)
        loss = grpo_loss(
            logprobs_BT,
            batch.rollout_logprobs_BT if correction == "none" else old_BT,
            batch.advantages_BT,
            batch.loss_mask_BT,
            normalizer=batch.normalizer,
            aggregation=aggregation,
            clip_low=clip_low,
            clip_high=clip_high,
            reference_logprobs_BT=batch.reference_logprobs_BT,
            kl_coef=kl_coef,
            weights_BT=weights_BT,
        )
        metrics = _grpo_metrics(logprobs_BT.detach(), batch, clip_low, clip_high)
        if weights_BT is not None:
            changed_BT = (weights_BT != torch.exp(old_BT - batch.rollout_logprobs_BT)) & batch.loss_mask_BT.bool()
            metrics["corrected_sum"] = changed_BT.sum().item()
        metrics["entropy_sum"] = _entropy_sum(logits_BTV.detach(), batch, temperature)
        return loss, {"policy_loss_total": loss.item(), **metrics}

    return loss_of


def _grpo_metrics(logprobs_BT: torch.Tensor, batch: TrainBatch, clip_low: float, clip_high: float) -> Metrics:
    assert batch.advantages_BT is not None and batch.rollout_logprobs_BT is not None
    mask = batch.loss_mask_BT.bool()
    difference = (logprobs_BT - batch.rollout_logprobs_BT)[mask]
    ratio, advantages = difference.exp(), batch.advantages_BT[mask]
    low = (ratio < 1 - clip_low) & (advantages < 0)
    high = (ratio > 1 + clip_high) & (advantages > 0)
    metrics = {
        "tokens_sum": float(mask.sum()),
        "logp_difference_sum": difference.abs().sum().item(),
        "logp_difference_max": difference.abs().max().item() if len(difference) else 0.0,
        "ratio_sum": ratio.sum().item(),
        "ratio_max": ratio.max().item() if len(ratio) else 1.0,
        "mismatch_kl_sum": (ratio - 1 - difference).sum().item(),
        "clip_low_sum": low.sum().item(),
        "clip_high_sum": high.sum().item(),
    }
    if batch.reference_logprobs_BT is not None:
        metrics["kl_sum"] = kl_k3(logprobs_BT, batch.reference_logprobs_BT)[mask].sum().item()
    return metrics


def _entropy_sum(logits_BTV: torch.Tensor, batch: TrainBatch, temperature: float) -> float:
    """Summed entropy of the distributions that the masked tokens were drawn from."""
    chosen_NV = logits_BTV[:, :-1][batch.loss_mask_BT[:, 1:].bool()].float() / temperature
    logprobs_NV = torch.log_softmax(chosen_NV, dim=-1)
    return -(logprobs_NV.exp() * logprobs_NV).sum().item()
