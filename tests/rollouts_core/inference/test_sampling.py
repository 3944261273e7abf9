import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollouts_core.inference.sampling import request_seed, sample_tokens, uniform_draws


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
