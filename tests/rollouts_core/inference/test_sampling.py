import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollouts_core.inference.engine import Truncation
from rollouts_core.inference.sampling import kept_tokens, request_seed, sample_tokens, uniform_draws


def draws(count: int, seed: int = 1) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    return uniform_draws(np.full(count, seed, np.uint64), np.arange(count, dtype=np.uint64))


def test_draws_are_uniform_and_uncorrelated() -> None:
    values = draws(100_000)
    assert 0 <= values.min() < values.max() < 1
    counts, _ = np.histogram(values, bins=50, range=(0, 1))
    assert ((counts - 2000) ** 2 / 2000).sum() < 100  # chi-square with 49 degrees: p < 1e-4 above
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.015
    assert abs(np.corrcoef(values, draws(100_000, 2))[0, 1]) < 0.015


@given(st.lists(st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 10**6)), min_size=1, max_size=20))
def test_each_draw_is_a_function_of_its_own_seed_and_position(pairs: list[tuple[int, int]]) -> None:
    seeds, positions = (np.array(column, np.uint64) for column in zip(*pairs, strict=True))
    together = uniform_draws(seeds, positions)
    alone = [uniform_draws(seeds[i : i + 1], positions[i : i + 1])[0] for i in range(len(pairs))]
    assert together.tolist() == alone


def test_tokens_follow_the_distribution() -> None:
    logits = torch.tensor([0.5, -1.0, 2.0, 0.0, -30.0])
    count = 100_000
    tokens, log_probs = sample_tokens(
        logits.expand(count, -1), torch.full((count,), 0.8), torch.from_numpy(draws(count))
    )
    expected = torch.softmax(logits.double() / 0.8, -1)
    observed = torch.bincount(tokens, minlength=5).double() / count
    torch.testing.assert_close(observed, expected, atol=0.006, rtol=0)
    torch.testing.assert_close(log_probs.double(), expected.log()[tokens], atol=1e-6, rtol=0)


def kept_one_by_one(probs: list[float], truncation: Truncation) -> set[int]:
    """By the definition, a token at a time."""
    order = sorted(range(len(probs)), key=lambda token: -probs[token])
    order = order[: truncation.top_k or len(probs)]
    total, nucleus, share = sum(probs[token] for token in order), [], 0.0
    for token in order:
        if share >= truncation.top_p * total - 1e-12:
            break
        nucleus.append(token)
        share += probs[token]
    return {token for token in nucleus if probs[token] >= truncation.min_p * probs[order[0]]}


@given(
    st.lists(st.integers(-8, 8), min_size=1, max_size=12, unique=True),
    st.sampled_from([1.0, 0.9, 0.5, 0.01]), st.integers(0, 12), st.sampled_from([0.0, 0.05, 0.5]),
)  # fmt: skip
def test_what_a_truncation_keeps_is_what_its_definition_keeps(
    logits: list[int], top_p: float, top_k: int, min_p: float
) -> None:
    probs = torch.softmax(torch.tensor(logits, dtype=torch.double), -1)
    truncation = Truncation(top_p, top_k, min_p)
    kept = set(torch.nonzero(kept_tokens(probs, truncation))[:, 0].tolist())
    assert kept == kept_one_by_one(probs.tolist(), truncation)


def test_draws_follow_what_is_left_and_log_probabilities_are_of_all() -> None:
    logits = torch.tensor([0.5, -1.0, 2.0, 0.0, 1.9])
    count = 50_000
    tokens, log_probs = sample_tokens(
        logits.expand(count, -1),
        torch.full((count,), 0.8),
        torch.from_numpy(draws(count)),
        [Truncation(top_k=2)] * count,
    )
    left = torch.softmax(logits.double()[[2, 4]] / 0.8, -1)
    observed = torch.bincount(tokens, minlength=5).double() / count
    torch.testing.assert_close(observed[[2, 4]], left, atol=0.008, rtol=0)
    assert observed[[0, 1, 3]].sum() == 0
    torch.testing.assert_close(log_probs, torch.log_softmax(logits / 0.8, -1)[tokens], atol=1e-6, rtol=0)


def test_temperature_zero_is_greedy() -> None:
    tokens, log_probs = sample_tokens(
        torch.tensor([[1.0, 3.0, 2.0]] * 2), torch.tensor([0.0, 0.0]), torch.tensor([0.0, 0.999], dtype=torch.double)
    )
    assert tokens.tolist() == [1, 1]
    torch.testing.assert_close(log_probs, torch.log_softmax(torch.tensor([1.0, 3.0, 2.0]), -1)[1].expand(2))


def test_request_seeds_differ_in_every_part_and_in_their_order() -> None:
    seeds = {request_seed(a, b, c) for a in range(10) for b in range(10) for c in range(10)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**63 for seed in seeds)
