"""All losses, as pure functions of per-token streams. They don't depend on models, shapes of batches or devices.

A policy loss gives one number per learnt token. `aggregate` makes one number of them, divided by a normalizer of the
whole optimizer step, so that a step may be split into passes and ranks in any way. In all of them rho = exp(logp - old
logp) is the ratio of the trained policy to the one that sampled, and A the token's advantage.

Legend: M learnt tokens, sequence by sequence; S sequences; `sequence_M` names the sequence of each token.
"""

from typing import Literal

import torch

Aggregation = Literal["token", "sequence", "constant"]
Correction = Literal["none", "truncate", "mask"]
Estimator = Literal["k1", "k2", "k3"]


def aggregate(
    losses_M: torch.Tensor, sequence_M: torch.Tensor, sequences: int, kind: Aggregation, normalizer: float
) -> torch.Tensor:
    """Aggregate the losses of tokens into one number.

    token: sum / learnt tokens of the step (DAPO, arXiv 2503.14476, eq. 8; TRL's "dapo").
    sequence: each sequence's mean, summed / sequences of the step (GRPO, arXiv 2402.03300, eq. 3; TRL's "grpo").
    constant: sum / (sequences of the step x longest answer allowed) (Dr. GRPO, arXiv 2503.20783; TRL's "dr_grpo").
    The divisor comes in as `normalizer`. A sequence without learnt tokens adds nothing.
    """
    if kind == "sequence":
        losses_M = losses_M / lengths(sequence_M, sequences)[sequence_M]
    return losses_M.sum() / normalizer


def ppo_loss(
    logprobs_M: torch.Tensor,
    old_logprobs_M: torch.Tensor,
    advantages_M: torch.Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> torch.Tensor:
    """The clipped surrogate, -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) (arXiv 1707.06347, eq. 7).

    clip_high above clip_low is DAPO's clip-higher. With `dual_clip` c > 1, where A < 0 it is at most -c A
    (arXiv 1912.09729, eq. 5).

    Examples:
        >>> rc.ppo_loss(torch.tensor([0.5]), torch.tensor([0.0]), torch.tensor([1.0])).tolist()  # clipped at 1.2
        [-1.2000000476837158]
    """
    ratio_M = torch.exp(logprobs_M - old_logprobs_M)
    clipped_M = ratio_M.clamp(1 - clip_low, 1 + clip_high)
    losses_M = -torch.minimum(ratio_M * advantages_M, clipped_M * advantages_M)
    if dual_clip is None:
        return losses_M
    return torch.where(advantages_M < 0, torch.minimum(losses_M, -dual_clip * advantages_M), losses_M)


def gspo_loss(
    logprobs_M: torch.Tensor,
    old_logprobs_M: torch.Tensor,
    advantages_M: torch.Tensor,
    sequence_M: torch.Tensor,
    sequences: int,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> torch.Tensor:
    """`ppo_loss` with one ratio per sequence, s = exp(mean over its tokens of log rho) (GSPO, arXiv 2507.18071, eq. 7).

    Each token carries its sequence's ratio; aggregated by sequence it is the paper's objective (eq. 5), gradient and
    all: the mean of s over a sequence's tokens is s.

    Examples:
        >>> zeros, sequence = torch.zeros(3), torch.tensor([0, 0, 1])
        >>> rc.gspo_loss(zeros, zeros, torch.tensor([1.0, 1.0, -1.0]), sequence, 2).tolist()
        [-1.0, -1.0, 1.0]
    """
    mean_S = by_sequence(logprobs_M - old_logprobs_M, sequence_M, sequences) / lengths(sequence_M, sequences)
    sequence_ratio_M = mean_S[sequence_M]
    return ppo_loss(sequence_ratio_M, torch.zeros_like(sequence_ratio_M), advantages_M, clip_low, clip_high)


def cispo_loss(
    logprobs_M: torch.Tensor,
    old_logprobs_M: torch.Tensor,
    advantages_M: torch.Tensor,
    weight_low: float = 0.0,
    weight_high: float = 5.0,
) -> torch.Tensor:
    """-sg[clip(rho, weight_low, weight_high)] A logp: every token keeps its gradient (CISPO, arXiv 2506.13585, eq. 4).

    The bounds are absolute. The paper writes them as 1 - eps_low and 1 + eps_high and leaves the lower one open; TRL
    reads its epsilon_high as the absolute upper bound, which is `weight_high` (5 is ScaleRL's, arXiv 2510.13786).

    Examples:
        >>> rc.cispo_loss(torch.tensor([-1.0]), torch.tensor([-1.0]), torch.tensor([2.0])).tolist()
        [2.0]
    """
    weight_M = torch.exp(logprobs_M.detach() - old_logprobs_M).clamp(weight_low, weight_high)
    return -weight_M * advantages_M * logprobs_M


def reinforce_loss(logprobs_M: torch.Tensor, old_logprobs_M: torch.Tensor, advantages_M: torch.Tensor) -> torch.Tensor:
    """-rho A, whose gradient at the sampling policy is that of -A logp (Williams 1992); unbiased behind it, too.

    Examples:
        >>> rc.reinforce_loss(torch.zeros(2), torch.zeros(2), torch.tensor([1.0, -0.5])).tolist()
        [-1.0, 0.5]
    """
    return -torch.exp(logprobs_M - old_logprobs_M) * advantages_M


def kl_divergence(logprobs_M: torch.Tensor, reference_logprobs_M: torch.Tensor, estimator: Estimator) -> torch.Tensor:
    """Estimates of KL(policy || reference) per token, from samples of the policy (joschu.net/blog/kl-approx.html).

    With d = reference - logp: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d. As a value, k1 and k3 are unbiased. As a loss
    on samples of the policy itself, the gradient of k2 is the one wanted, that of KL(policy || reference); that of k3
    is KL(reference || policy)'s, and that of k1 is zero on average.
    """
    difference_M = reference_logprobs_M - logprobs_M
    if estimator == "k1":
        return -difference_M
    if estimator == "k2":
        return difference_M.square() / 2
    return torch.exp(difference_M) - 1 - difference_M


def importance_weights(
    old_logprobs_M: torch.Tensor, rollout_logprobs_M: torch.Tensor, kind: Correction, low: float, high: float
) -> torch.Tensor | None:
    """How much each token counts that another policy sampled than the one it trains; no gradient flows through it.

    With r = exp(trainer's log-probability before the step - engine's): "truncate" is min(r, high), truncated importance
    sampling (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"; the weight of
    AReaL's decoupled objective, arXiv 2505.24298, eq. 5, capped). "mask" is r within [low, high] and 0 outside (IcePop,
    arXiv 2510.18855). r holds both causes: other kernels in the engine, and older weights. "none" gives None.
    """
    if kind == "none":
        return None
    ratio_M = torch.exp(old_logprobs_M.detach() - rollout_logprobs_M)
    if kind == "truncate":
        return ratio_M.clamp(max=high)
    return ratio_M * ((ratio_M >= low) & (ratio_M <= high))


def value_loss(
    values_M: torch.Tensor, old_values_M: torch.Tensor, returns_M: torch.Tensor, clip: float | None = 0.2
) -> torch.Tensor:
    """Half the squared error, the larger of the plain one and that of values held within `clip` of the old ones.

    As in verl, OpenRLHF and TRL; their clip is 0.5, 0.5 and 0.2. None clips nothing.
    """
    plain_M = (values_M - returns_M).square()
    if clip is None:
        return plain_M / 2
    held_M = old_values_M + (values_M - old_values_M).clamp(-clip, clip)
    return torch.maximum(plain_M, (held_M - returns_M).square()) / 2


def dpo_loss(
    chosen_S: torch.Tensor,
    rejected_S: torch.Tensor,
    reference_chosen_S: torch.Tensor,
    reference_rejected_S: torch.Tensor,
    beta: float = 0.1,
) -> torch.Tensor:
    """-log sigmoid(beta (log-ratio of the chosen - of the rejected)) per pair (DPO, arXiv 2305.18290, eq. 7).

    Takes summed log-probabilities of whole answers.

    Examples:
        >>> zero = torch.zeros(1)
        >>> round(rc.dpo_loss(zero, zero, zero, zero).item(), 4)  # log 2: no preference yet
        0.6931
    """
    margin_S = (chosen_S - reference_chosen_S) - (rejected_S - reference_rejected_S)
    return -torch.nn.functional.logsigmoid(beta * margin_S)


def by_sequence(values_M: torch.Tensor, sequence_M: torch.Tensor, sequences: int) -> torch.Tensor:
    """Sums S over each sequence's tokens."""
    return values_M.new_zeros(sequences).index_add(0, sequence_M, values_M)


def lengths(sequence_M: torch.Tensor, sequences: int) -> torch.Tensor:
    """Learnt tokens S of each sequence, at least 1."""
    # bincount would look for its largest number first, and so wait for a GPU
    return by_sequence(torch.ones_like(sequence_M), sequence_M, sequences).clamp(min=1)
