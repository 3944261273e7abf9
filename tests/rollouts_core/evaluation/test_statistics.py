"""pass@k against counting, intervals against coverage, and the paired test against all signs and exact binomials."""

from itertools import combinations, product
from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollouts_core.evaluation.statistics import bootstrap_interval, compare, pass_at_k


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.data())
def test_pass_at_k_is_the_share_of_draws_with_a_correct_sample(correct: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(correct)))
    draws = list(combinations(correct, k))
    assert pass_at_k(len(correct), sum(correct), k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_more_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="pass@5 needs at least 5 samples"):
        pass_at_k(4, 2, 5)


def test_an_interval_holds_the_mean_as_often_as_it_says() -> None:
    random = np.random.default_rng(0)
    held = 0
    for trial in range(100):
        found = bootstrap_interval(random.binomial(4, 0.3, 60) / 4, seed=trial)
        held += found.low <= 0.3 <= found.high
    assert 88 <= held <= 100


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=8))
def test_the_paired_test_counts_all_signs(pairs: list[tuple[int, int]]) -> None:
    ours, theirs = zip(*pairs, strict=True)
    differences = [one - other for one, other in pairs]
    flips = product((1, -1), repeat=len(pairs))
    flipped = [abs(sum(sign * value for sign, value in zip(signs, differences, strict=True))) for signs in flips]
    expected = sum(value >= abs(sum(differences)) for value in flipped) / len(flipped)
    found = compare(ours, theirs)
    assert found.p_value == pytest.approx(expected)
    assert found.difference.mean == pytest.approx(sum(differences) / len(pairs))
    assert (found.better, found.worse) == (sum(d > 0 for d in differences), sum(d < 0 for d in differences))


def test_of_right_and_wrong_it_is_mcnemar_s_exact_test() -> None:
    """30 prompts of 40 that differ, 22 for us: the binomial's two tails, drawn at random to within 2 points."""
    ours = [1.0] * 22 + [0.0] * 8 + [1.0] * 10
    theirs = [0.0] * 22 + [1.0] * 8 + [1.0] * 10
    exact = 2 * sum(comb(30, k) for k in range(9)) / 2**30
    assert compare(ours, theirs).p_value == pytest.approx(exact, abs=0.02)


def test_unlike_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match="3 and 2 scores"):
        compare([1, 2, 3], [1, 2])
