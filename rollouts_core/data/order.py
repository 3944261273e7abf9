"""In which order examples are taken: a pure function of seed and position, so that resuming needs a number alone.

Decision: a mixture takes from each source its share of every stretch of draws, not only on average: of the first t
draws, floor(t w1 / (w1 + ... + wk)) come from the first source, and the rest is shared by the others in the same way.
Each source goes through its own epochs, each in its own order; an epoch of the mixture is as many draws as it has
examples. So weights hold exactly, and no example of a source comes twice before all of it was seen.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Places = npt.NDArray[np.int64]


def epoch_order(sizes: Sequence[int], weights: Sequence[float], seed: int, epoch: int) -> Places:
    """The examples of an epoch, from 0, counted through all sources. `weights` are of a mixture; empty without one."""
    return _order(tuple(sizes), tuple(weights), seed, epoch)


@lru_cache(maxsize=4)
def _order(sizes: tuple[int, ...], weights: tuple[float, ...], seed: int, epoch: int) -> Places:
    examples = sum(sizes)
    if len(sizes) == 1 or not weights:
        return np.random.default_rng([seed, epoch]).permutation(examples)
    draws = np.arange(epoch * examples, (epoch + 1) * examples)
    found = np.empty(examples, np.int64)
    left, first = np.ones(examples, bool), 0
    for source, size in enumerate(sizes):
        share = weights[source] / sum(weights[source:])
        before, behind = _taken(draws, share), _taken(draws + 1, share)
        here = left & (behind > before)
        found[here] = first + _drawn(before[here], size, seed, source)
        left &= ~here
        draws, first = draws - before, first + size
    return found


def _taken(draws: Places, share: float) -> Places:
    """How many of so many draws come from a source with this share; all of them for the last source."""
    return np.floor(draws * share).astype(np.int64) if share < 1 else draws


def _drawn(numbers: Places, size: int, seed: int, source: int) -> Places:
    """The examples that a source's n-th draws take."""
    epochs = {int(epoch) for epoch in np.unique(numbers // size)}
    orders = {epoch: np.random.default_rng([seed, epoch, source + 1]).permutation(size) for epoch in epochs}
    return np.array([orders[number // size][number % size] for number in numbers.tolist()], np.int64)
