"""Losses against sums written out in float64, token by token."""

import math
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollouts_core.training.advantages import compute_advantages
from rollouts_core.training.backend import TrainBatch
from rollouts_core.training.losses import (
    create_cross_entropy_loss,
    create_grpo_loss,
    grpo_loss,
    importance_weights,
    kl_k3,
    token_logprobs,
)

B, T, V = 5, 7, 11


@pytest.fixture
def case() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    mask = (torch.rand(B, T, generator=random) < 0.6).long()
    mask[:, 0], mask[0], mask[0, 3:5] = 0, 0, 1
    mask[1] = 0
    old = -torch.rand(B, T, generator=random) * 3
    return {
        "logprobs_BT": (old + 0.4 * torch.randn(B, T, generator=random)).requires_grad_(),
        "old_logprobs_BT": old,
        "advantages_BT": torch.randn(B, 1, generator=random).expand(B, T),
        "loss_mask_BT": mask,
        "reference_logprobs_BT": old + 0.3 * torch.randn(B, T, generator=random),
    }


def written_out(case: dict[str, torch.Tensor], aggregation: str, low: float, high: float, kl: float) -> float:
    """The same objective with Python floats."""
    values: dict[str, Any] = {name: tensor.double().tolist() for name, tensor in case.items()}
    sequences, tokens = [], 0
    for b in range(B):
        losses = []
        for t in range(T):
            if not values["loss_mask_BT"][b][t]:
                continue
            logprob, advantage = values["logprobs_BT"][b][t], values["advantages_BT"][b][t]
            ratio = math.exp(logprob - values["old_logprobs_BT"][b][t])
            clipped = min(max(ratio, 1 - low), 1 + high)
            d = values["reference_logprobs_BT"][b][t] - logprob
            losses.append(-min(ratio * advantage, clipped * advantage) + kl * (math.exp(d) - 1 - d))
        tokens += len(losses)
        sequences.append(losses)
    if aggregation == "token":
        return sum(map(sum, sequences)) / tokens
    return sum(sum(losses) / len(losses) for losses in sequences if losses) / B


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.2, 0.28), (0.0, 0.0)])
@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_grpo_loss(
    case: dict[str, torch.Tensor], aggregation: Literal["token", "sequence"], low: float, high: float, kl: float
) -> None:
    loss = grpo_loss(
        **case,
        normalizer=float(case["loss_mask_BT"].sum()) if aggregation == "token" else float(B),
        aggregation=aggregation,
        clip_low=low,
        clip_high=high,
        kl_coef=kl,
    )
    assert loss.item() == pytest.approx(written_out(case, aggregation, low, high, kl), rel=1e-5, abs=1e-6)


def test_on_policy_gradient_is_that_of_reinforce(case: dict[str, torch.Tensor]) -> None:
    """With equal policies the ratio is 1, and d loss / d logprob = -A mask / tokens."""
    logprobs = case["old_logprobs_BT"].clone().requires_grad_()
    tokens = float(case["loss_mask_BT"].sum())
    grpo_loss(
        logprobs, case["old_logprobs_BT"], case["advantages_BT"], case["loss_mask_BT"], normalizer=tokens
    ).backward()
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, -case["advantages_BT"] * case["loss_mask_BT"] / tokens)


def test_k3_is_never_negative_and_zero_for_equal_policies() -> None:
    one, other = torch.randn(100), torch.randn(100)
    assert (kl_k3(one, other) >= 0).all()
    assert kl_k3(one, one).abs().max() == 0


def batch(normalizer: float | None = None) -> tuple[torch.Tensor, TrainBatch]:
    random = torch.Generator().manual_seed(1)
    logits = torch.randn(B, T, V, generator=random)
    tokens = torch.randint(V, (B, T), generator=random)
    mask = (torch.rand(B, T, generator=random) < 0.5).long()
    mask[:, 0] = 0
    return logits, TrainBatch(tokens, mask, torch.ones(B, T), normalizer or float(mask.sum()))


def test_cross_entropy_is_that_of_transformers() -> None:
    from transformers.loss.loss_utils import ForCausalLMLoss

    logits, train = batch()
    labels = train.tokens_BT.masked_fill(train.loss_mask_BT == 0, -100)
    loss, metrics = create_cross_entropy_loss()(logits, train)
    torch.testing.assert_close(loss, ForCausalLMLoss(logits, labels, vocab_size=V))
    assert metrics["loss_sum"] == pytest.approx(loss.item() * metrics["tokens_sum"], rel=1e-6)


def test_token_logprobs_are_shifted_and_scaled() -> None:
    logits, train = batch()
    logprobs = token_logprobs(logits, train.tokens_BT, temperature=0.5)
    expected = torch.log_softmax(logits.double() / 0.5, -1)
    assert (logprobs[:, 0] == 0).all()
    for b in range(B):
        for t in range(1, T):
            assert logprobs[b, t].item() == pytest.approx(expected[b, t - 1, train.tokens_BT[b, t]].item(), abs=1e-5)


def test_grpo_metrics_match_a_direct_count() -> None:
    logits, train = batch()
    logprobs = token_logprobs(logits, train.tokens_BT)
    random = torch.Generator().manual_seed(2)
    rollout = logprobs + 0.5 * torch.randn(B, T, generator=random)
    advantages = torch.randn(B, 1, generator=random).expand(B, T)
    loss_of = create_grpo_loss(aggregation="token", clip_low=0.2, clip_high=0.2, kl_coef=0.0, temperature=1.0)
    _, metrics = loss_of(logits, replace(train, advantages_BT=advantages, rollout_logprobs_BT=rollout))
    chosen = train.loss_mask_BT.bool()
    difference = (logprobs - rollout)[chosen].double()
    assert metrics["logp_difference_sum"] == pytest.approx(difference.abs().sum().item(), rel=1e-5)
    assert metrics["logp_difference_max"] == pytest.approx(difference.abs().max().item(), rel=1e-5)
    outside = (difference.exp() > 1.2) & (advantages[chosen] > 0)
    assert metrics["clip_high_sum"] == outside.sum().item()
    assert outside.any()
    probs = torch.softmax(logits[:, :-1][train.loss_mask_BT[:, 1:].bool()].double(), -1)
    assert metrics["entropy_sum"] == pytest.approx(-(probs * probs.log()).sum().item(), rel=1e-5)


@pytest.mark.parametrize("kind", ["truncate", "mask"])
def test_importance_weights_match_a_direct_count(kind: Literal["truncate", "mask"]) -> None:
    random = torch.Generator().manual_seed(3)
    old, rollout = (torch.randn(B, T, generator=random, dtype=torch.double) for _ in range(2))
    weights = importance_weights(old, rollout, kind, 0.5, 2.0)
    assert weights is not None
    for b in range(B):
        for t in range(T):
            ratio = math.exp(old[b, t].item() - rollout[b, t].item())
            expected = min(ratio, 2.0) if kind == "truncate" else ratio * (0.5 <= ratio <= 2.0)
            assert weights[b, t].item() == pytest.approx(expected, rel=1e-12)
    assert importance_weights(old, rollout, "none", 0.5, 2.0) is None


def test_a_corrected_loss_is_the_clipped_one_weighted_token_by_token() -> None:
    """AReaL's decoupled objective: the ratio is to the trainer's own old policy, the weight is old over behaviour."""
    logits, train = batch()
    current = token_logprobs(logits, train.tokens_BT)
    random = torch.Generator().manual_seed(4)
    old = current + 0.3 * torch.randn(B, T, generator=random)
    rollout = old + 0.8 * torch.randn(B, T, generator=random)
    advantages = torch.randn(B, 1, generator=random).expand(B, T)
    loss_of = create_grpo_loss(
        aggregation="token", clip_low=0.2, clip_high=0.2, kl_coef=0.0, temperature=1.0, correction="truncate",
        ratio_high=1.5,
    )  # fmt: skip
    streams = {"advantages_BT": advantages, "rollout_logprobs_BT": rollout, "old_logprobs_BT": old}
    loss, metrics = loss_of(logits, replace(train, **streams))
    total, cut = 0.0, 0
    for b in range(B):
        for t in range(T):
            if train.loss_mask_BT[b, t]:
                weight = math.exp(float(old[b, t] - rollout[b, t]))
                ratio, advantage = math.exp(float(current[b, t] - old[b, t])), float(advantages[b, t])
                clipped = min(max(ratio, 0.8), 1.2)
                total -= min(weight, 1.5) * min(ratio * advantage, clipped * advantage)
                cut += weight > 1.5
    assert loss.item() == pytest.approx(total / train.normalizer, rel=1e-5)
    assert metrics["corrected_sum"] == cut > 0


@settings(max_examples=50)
@given(st.lists(st.floats(-10, 10), min_size=2, max_size=12), st.booleans())
def test_advantages_of_a_group(rewards: list[float], normalize: bool) -> None:
    tensor = torch.tensor(rewards, dtype=torch.double)
    expected = tensor - tensor.mean()
    if normalize:
        expected = expected / (tensor.std(unbiased=True) + 1e-4)
    advantages = compute_advantages([*rewards, 99.0], [4] * len(rewards) + [5], normalize)
    torch.testing.assert_close(torch.tensor(advantages[:-1], dtype=torch.double), expected, atol=1e-9, rtol=1e-9)
    assert advantages[-1] == 0


def test_equal_rewards_give_no_advantage() -> None:
    assert compute_advantages([1.0] * 4, [0] * 4) == [0.0] * 4
