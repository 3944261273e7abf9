"""In which order examples come: epochs, weights that hold at every moment, and positions that need no history."""

from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollouts_core.data.batching import batch_indices
from rollouts_core.data.order import epoch_order
from rollouts_core.data.prompts import DataBuffer
from rollouts_core.types import Prompt

MIXTURES = st.lists(st.tuples(st.integers(1, 30), st.floats(0.01, 50)), min_size=2, max_size=4)


def drawn(sizes: list[int], weights: list[float], seed: int, count: int) -> list[tuple[int, int]]:
    """The first draws, as source and example within it."""
    starts = np.cumsum([0, *sizes])
    flat = [index for epoch in range(count // sum(sizes) + 1) for index in epoch_order(sizes, weights, seed, epoch)]
    sources = np.searchsorted(starts, flat, side="right") - 1
    return [
        (int(source), int(index - starts[source])) for source, index in islice(zip(sources, flat, strict=True), count)
    ]


@settings(max_examples=60, deadline=None)
@given(MIXTURES, st.integers(0, 5))
def test_every_source_has_its_share_of_every_beginning(mixture: list[tuple[int, float]], seed: int) -> None:
    sizes, weights = [size for size, _ in mixture], [weight for _, weight in mixture]
    taken = np.zeros(len(sizes))
    for draw, (source, _) in enumerate(drawn(sizes, weights, seed, 200), 1):
        taken[source] += 1
        assert np.abs(taken - draw * np.array(weights) / sum(weights)).max() <= len(sizes)


@settings(max_examples=60, deadline=None)
@given(MIXTURES, st.integers(0, 5))
def test_no_example_of_a_source_comes_twice_before_all_of_it_was_seen(
    mixture: list[tuple[int, float]], seed: int
) -> None:
    sizes, weights = [size for size, _ in mixture], [weight for _, weight in mixture]
    order = drawn(sizes, weights, seed, 200)
    for source, size in enumerate(sizes):
        own = [example for which, example in order if which == source]
        for start in range(0, len(own), size):
            epoch = own[start : start + size]
            assert len(set(epoch)) == len(epoch)


def test_a_mixture_of_one_is_its_source_whatever_its_weight() -> None:
    assert epoch_order([50], [7.0], 3, 2).tolist() == epoch_order([50], (), 3, 2).tolist()


def test_batches_of_a_mixture_are_a_function_of_the_step() -> None:
    steps = [batch_indices([30, 10], 8, 0, step, [1.0, 3.0]) for step in range(10)]
    assert steps == [batch_indices([30, 10], 8, 0, step, [1.0, 3.0]) for step in reversed(range(10))][::-1]
    assert [sum(index >= 30 for index in step) for step in steps] == [6] * 10


@pytest.mark.parametrize("taken", [0, 1, 17, 40, 95])
def test_a_buffer_of_a_mixture_goes_on_from_its_position_alone(taken: int) -> None:
    prompts = [Prompt((), (index,), {}, index) for index in range(40)]
    whole = DataBuffer(prompts, 1, sizes=(30, 10), weights=(1.0, 1.0))
    _, behind = whole.get_prompts(taken)
    at_once, _ = whole.get_prompts(taken + 20)
    assert whole.at(behind.position()).get_prompts(20)[0] == at_once[taken:]
