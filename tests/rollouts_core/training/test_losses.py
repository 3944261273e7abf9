"""Losses and advantages against sums written out in float64, and against TRL's own."""

import math
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollouts_core.config import algorithms as named
from rollouts_core.errors import BadInput
from rollouts_core.rewards.text import overlong_penalty
from rollouts_core.training.advantages import (
    batch_normalized,
    compute_advantages,
    generalized_advantages,
    leave_one_out_advantages,
    maxrl_advantages,
)
from rollouts_core.training.algorithms import Outcome, recipe_of
from rollouts_core.training.backend import TokenScores, TrainBatch
from rollouts_core.training.losses import dpo_loss, importance_weights, kl_divergence, ppo_loss, value_loss
from rollouts_core.training.objectives import Extras, create_cross_entropy_loss, create_rl_loss
from rollouts_core.types import Prompt, Sample, Status
from tests.rollouts_core.references import (
    ALGORITHMS,
    ENTROPY,
    KL,
    LONGEST,
    TRL,
    differences,
    make_case,
    ours,
    train_batch,
    trl_loss,
    written_out,
)

rewards_of_groups = st.lists(st.tuples(st.floats(0, 10), st.integers(0, 3)), min_size=1, max_size=16)


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_losses_and_gradients_are_those_of_the_references(name: str) -> None:
    found = differences(name)
    assert found.pop("central differences", 0.0) < 1e-8
    assert max(found.values()) < 1e-14


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_kl_and_entropy_terms_are_aggregated_with_the_loss(name: str) -> None:
    case = make_case(1)
    value, _ = ours(name, case, kl_coef=KL, entropy_coef=ENTROPY)
    assert value == pytest.approx(written_out(name, case, KL, ENTROPY), abs=1e-14)


@pytest.mark.parametrize("name", list(TRL))
def test_the_kl_term_is_trls(name: str) -> None:
    case = make_case(2)
    value, gradient = ours(name, case, kl_coef=KL)
    other, other_gradient = trl_loss(name, case, KL)
    assert value == pytest.approx(other, abs=1e-14)
    torch.testing.assert_close(gradient, other_gradient, atol=1e-14, rtol=0)


def test_the_entropy_bonus_is_trls_where_the_loss_is_a_mean_of_tokens() -> None:
    case = make_case(3)
    assert ours("dapo", case, entropy_coef=ENTROPY)[0] == pytest.approx(
        trl_loss("dapo", case, 0.0, ENTROPY)[0], abs=1e-14
    )


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_on_policy_gradient_is_that_of_reinforce(name: str) -> None:
    """With equal policies the ratio is 1, and d loss / d logprob = -A / divisor."""
    case = make_case()
    case = replace(case, logprobs_M=case.old_M)
    _, gradient = ours(name, case)
    recipe = recipe_of(ALGORITHMS[name], LONGEST)
    divisor = train_batch(case, recipe).normalizer
    sizes = torch.tensor([case.lengths[s] for s in case.sequence_M.tolist()]) if recipe.aggregation == "sequence" else 1
    torch.testing.assert_close(gradient, -case.advantages_M / divisor / sizes)


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_cutting_a_batch_changes_no_gradient(name: str) -> None:
    case = make_case()
    recipe = recipe_of(ALGORITHMS[name], LONGEST)
    whole, (_, expected) = train_batch(case, recipe), ours(name, case)
    parts = []
    for begin, end in ((0, 3), (3, 4), (4, 6)):
        tokens = slice(sum(case.lengths[:begin]), sum(case.lengths[:end]))
        cut = type(case)(case.lengths[begin:end], *(value[tokens].clone() for value in list(vars(case).values())[1:]))
        logprobs = cut.logprobs_M.requires_grad_()
        scores = TokenScores(logprobs, cut.entropy_M)
        create_rl_loss(recipe, Extras())(scores, train_batch(cut, recipe, whole.normalizer))[0].backward()
        parts.append(logprobs.grad)
    torch.testing.assert_close(torch.cat(parts), expected, atol=1e-16, rtol=1e-12)


def test_dual_clip_bounds_the_loss_of_bad_answers() -> None:
    ratio, advantages = torch.tensor([10.0, 10.0, 0.1]), torch.tensor([-1.0, 1.0, -1.0])
    losses = ppo_loss(ratio.log(), torch.zeros(3), advantages, dual_clip=3.0)
    torch.testing.assert_close(losses, torch.tensor([3.0, -1.2, 0.8]))


def test_kl_estimators_have_the_values_and_gradients_that_their_docstring_says() -> None:
    """Exact expectations over a small distribution, with gradients by the policy's logits."""
    torch.manual_seed(0)
    logits = torch.randn(6, dtype=torch.double, requires_grad=True)
    reference = torch.log_softmax(torch.randn(6, dtype=torch.double), -1)
    p = torch.log_softmax(logits, -1)
    exact = (p.exp() * (p - reference)).sum()
    reverse = (reference.exp() * (reference - p)).sum()
    wanted, wanted_reverse = (torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (exact, reverse))
    for kind in ("k1", "k2", "k3"):
        per_token = kl_divergence(p, reference, kind)  # type: ignore[arg-type]
        if kind != "k2":
            torch.testing.assert_close((p.exp() * per_token).sum(), exact)
        (gradient,) = torch.autograd.grad((p.exp().detach() * per_token).sum(), logits, retain_graph=True)
        expected = {"k1": torch.zeros(6, dtype=torch.double), "k2": wanted, "k3": wanted_reverse}[kind]
        torch.testing.assert_close(gradient, expected, atol=1e-12, rtol=1e-9)


def test_k3_is_never_negative() -> None:
    one, other = torch.randn(100), torch.randn(100)
    assert (kl_divergence(one, other, "k3") >= 0).all()


def test_cross_entropy_is_that_of_transformers() -> None:
    from transformers.loss.loss_utils import ForCausalLMLoss

    torch.manual_seed(1)
    logits, tokens, mask = torch.randn(5, 7, 11), torch.randint(11, (5, 7)), torch.rand(5, 7) < 0.5
    mask[:, 0] = False
    logp = torch.log_softmax(logits[:, :-1], -1).gather(2, tokens[:, 1:, None])[..., 0][mask[:, 1:]]
    nothing = torch.zeros(len(logp), dtype=torch.long)
    train = TrainBatch(nothing, nothing, (), nothing, nothing, nothing, 5, float(len(logp)))
    loss, metrics = create_cross_entropy_loss()(TokenScores(logp, logp), train)
    torch.testing.assert_close(loss, ForCausalLMLoss(logits, tokens.masked_fill(~mask, -100), vocab_size=11))
    assert metrics["loss_sum"] == pytest.approx(loss.item() * metrics["tokens_sum"], rel=1e-6)


def test_metrics_match_a_direct_count() -> None:
    case = make_case(2)
    recipe = recipe_of(named.GRPO(), LONGEST)
    _, metrics = create_rl_loss(recipe, Extras())(
        TokenScores(case.logprobs_M, case.entropy_M), train_batch(case, recipe)
    )
    difference = case.logprobs_M - case.old_M
    assert metrics["logp_difference_sum"] == pytest.approx(difference.abs().sum().item())
    assert metrics["logp_difference_max"] == difference.abs().max().item()
    assert metrics["entropy_sum"] == pytest.approx(case.entropy_M.sum().item())
    outside = (difference.exp() > 1.2) & (case.advantages_M > 0)
    assert metrics["clip_high_sum"] == outside.sum().item() > 0


@pytest.mark.parametrize("kind", ["truncate", "mask"])
def test_importance_weights_match_a_direct_count(kind: Literal["truncate", "mask"]) -> None:
    case = make_case(3)
    weights = importance_weights(case.logprobs_M, case.old_M, kind, 0.8, 1.2)
    assert weights is not None
    for weight, own, engine in zip(weights, case.logprobs_M, case.old_M, strict=True):
        ratio = math.exp(own - engine)
        expected = min(ratio, 1.2) if kind == "truncate" else ratio * (0.8 <= ratio <= 1.2)
        assert weight.item() == pytest.approx(expected, rel=1e-12)
    assert importance_weights(case.logprobs_M, case.old_M, "none", 0.5, 2.0) is None


def test_a_corrected_loss_is_the_clipped_one_weighted_token_by_token() -> None:
    """AReaL's decoupled objective: the ratio is to the trainer's own old policy, the weight is old over behaviour."""
    case = make_case(4)
    random = torch.Generator().manual_seed(4)
    rollout = case.old_M + 0.8 * torch.randn(len(case.old_M), generator=random, dtype=torch.double)
    recipe = recipe_of(named.GRPO(), LONGEST)
    train = replace(train_batch(case, recipe), rollout_logprobs_M=rollout, old_logprobs_M=case.old_M)
    extras = Extras(correction="truncate", ratio_high=1.5)
    loss, metrics = create_rl_loss(recipe, extras)(TokenScores(case.logprobs_M, case.entropy_M), train)
    total, cut = 0.0, 0
    for own, old, engine, advantage in zip(
        case.logprobs_M, case.old_M, rollout, case.advantages_M.tolist(), strict=True
    ):
        weight, ratio = math.exp(old - engine), math.exp(own - old)
        total -= min(weight, 1.5) * min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
        cut += weight > 1.5
    assert loss.item() == pytest.approx(total / train.normalizer, rel=1e-12)
    assert metrics["corrected_sum"] == cut > 0


def test_value_loss_takes_the_larger_error() -> None:
    values, old, returns = torch.tensor([1.0, 0.1, -3.0]), torch.zeros(3), torch.tensor([1.0, 1.0, 0.5])
    torch.testing.assert_close(value_loss(values, old, returns, 0.2), torch.tensor([0.32, 0.405, 6.125]))
    torch.testing.assert_close(value_loss(values, old, returns, None), torch.tensor([0.0, 0.405, 6.125]))


def test_dpo_loss_is_the_paper_s() -> None:
    numbers = torch.randn(4, 6, dtype=torch.double)
    for chosen, rejected, ref_chosen, ref_rejected, loss in zip(*numbers, dpo_loss(*numbers, beta=0.3), strict=True):
        margin = 0.3 * ((chosen - ref_chosen) - (rejected - ref_rejected)).item()
        assert loss.item() == pytest.approx(-math.log(1 / (1 + math.exp(-margin))), rel=1e-12)


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


@settings(max_examples=50)
@given(rewards_of_groups)
def test_leave_one_out_is_the_mean_of_the_others(pairs: list[tuple[float, int]]) -> None:
    rewards, groups = [reward for reward, _ in pairs], [group for _, group in pairs]
    for index, advantage in enumerate(leave_one_out_advantages(rewards, groups)):
        others = [r for i, (r, g) in enumerate(pairs) if g == groups[index] and i != index]
        expected = rewards[index] - sum(others) / len(others) if others else 0.0
        assert advantage == pytest.approx(expected, abs=1e-9)


@settings(max_examples=50)
@given(rewards_of_groups)
def test_maxrl_divides_by_the_mean(pairs: list[tuple[float, int]]) -> None:
    rewards, groups = [reward for reward, _ in pairs], [group for _, group in pairs]
    for index, advantage in enumerate(maxrl_advantages(rewards, groups)):
        group = [r for r, g in pairs if g == groups[index]]
        mean = sum(group) / len(group)
        assert advantage == pytest.approx((rewards[index] - mean) / mean if mean else 0.0, rel=1e-6, abs=1e-9)
    with pytest.raises(BadInput, match="gave -1"):
        maxrl_advantages([-1.0, 1.0], [0, 0])


@settings(max_examples=50)
@given(st.lists(st.tuples(st.floats(-3, 3), st.floats(-3, 3)), max_size=8), st.floats(0.5, 1), st.floats(0, 1))
def test_generalized_advantages_are_the_discounted_sum_of_errors(
    pairs: list[tuple[float, float]], gamma: float, lam: float
) -> None:
    rewards, values = (np.array([pair[i] for pair in pairs], np.float64) for i in (0, 1))
    advantages, returns = generalized_advantages(rewards, values, gamma, lam)
    following = np.append(values, 0.0)
    errors = [rewards[t] + gamma * following[t + 1] - values[t] for t in range(len(values))]
    for t, advantage in enumerate(advantages):
        direct = sum((gamma * lam) ** (k - t) * errors[k] for k in range(t, len(errors)))
        assert advantage == pytest.approx(direct, abs=1e-9)
    np.testing.assert_allclose(returns, advantages + values)


def test_batch_normalisation_is_over_all_tokens() -> None:
    parts = [np.array([1.0, 2.0]), np.array([]), np.array([6.0])]
    joined = np.concatenate(batch_normalized(parts))
    np.testing.assert_allclose(joined, (np.array([1, 2, 6]) - 3) / (np.std([1, 2, 6], ddof=1) + 1e-4))


@pytest.mark.parametrize(
    ("length", "expected"), [(10, 0.0), (16, 0.0), (17, -0.25), (18, -0.5), (20, -1.0), (30, -1.0)]
)
def test_overlong_answers_are_punished_in_a_straight_line(length: int, expected: float) -> None:
    assert overlong_penalty(length, longest=20, buffer=4) == expected
    assert overlong_penalty(length, longest=20, buffer=0) == 0


def outcome(rewards: list[float], lengths: list[int], penalty: float = 0.0) -> Outcome:
    prompt = Prompt((), (1,), {}, 0)
    samples = [
        Sample(prompt, "", (1,) * (1 + n), (0,) + (1,) * n, (0.0,) * n, (0,) * n, index // 2, Status.COMPLETED)
        for index, n in enumerate(lengths)
    ]
    return Outcome(samples, rewards, [np.full(n, -penalty) for n in lengths])


@pytest.mark.parametrize("name", ["grpo (token)", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "maxrl"])
def test_group_algorithms_spread_one_number_over_an_answer(name: str) -> None:
    found = recipe_of(ALGORITHMS[name], LONGEST).advantages(outcome([1.0, 0.0, 1.0, 1.0], [2, 3, 1, 4])).advantages
    assert [len(advantages) for advantages in found] == [2, 3, 1, 4]
    assert all(len(set(advantages.tolist())) == 1 for advantages in found)
    assert found[0][0] > 0 > found[1][0]
    assert found[2][0] == found[3][0] == 0


def test_penalties_of_tokens_count_into_a_group_s_reward() -> None:
    found = recipe_of(named.DrGRPO(), LONGEST).advantages(outcome([1.0, 1.0], [2, 4], penalty=0.1)).advantages
    assert found[0][0] == pytest.approx(0.1)
    assert found[1][0] == pytest.approx(-0.1)


def test_reinforce_plus_plus_charges_each_token_with_what_follows() -> None:
    found = (
        recipe_of(named.ReinforcePlusPlus(), LONGEST).advantages(outcome([1.0, 0.0], [3, 1], penalty=0.1)).advantages
    )
    to_go = np.array([1 - 0.3, 1 - 0.2, 1 - 0.1, -0.1])
    np.testing.assert_allclose(np.concatenate(found), (to_go - to_go.mean()) / (to_go.std(ddof=1) + 1e-4))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([1.0], "1 advantages for 2"),
        ([[1.0], [1.0]], "sample 0, which has 2"),
        ([math.nan, 0.0], "not a finite number, for sample 0"),
    ],
)
def test_a_custom_algorithm_that_answers_nonsense_is_named(answer: Any, message: str) -> None:
    recipe = recipe_of(named.CustomAlgorithm(function="mine.py:f"), LONGEST, lambda samples: answer)
    with pytest.raises(BadInput, match=message):
        recipe.advantages(outcome([1.0, 0.0], [2, 3]))


def test_a_custom_algorithm_may_speak_of_samples_or_of_tokens() -> None:
    recipe = recipe_of(named.CustomAlgorithm(function="mine.py:f"), LONGEST, lambda samples: [2.0, [1.0, 2.0, 3.0]])  # type: ignore[list-item]
    found = recipe.advantages(outcome([1.0, 0.0], [2, 3])).advantages
    assert [advantages.tolist() for advantages in found] == [[2.0, 2.0], [1.0, 2.0, 3.0]]
