"""Which examples make up which batch: a pure function of seed and step, so that resuming needs no saved position."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

WINDOW_BATCHES = 16
"""Batches that are sorted by length together: little padding, and still a random order over the epoch."""


def batch_indices(lengths: tuple[int, ...], batch_size: int, seed: int, step: int) -> list[int]:
    """The examples of optimizer step `step` (from 0); epochs follow one another, each in its own order."""
    per_epoch = -(-len(lengths) // batch_size)
    epoch, position = divmod(step, per_epoch)
    return epoch_batches(lengths, batch_size, seed, epoch)[position]


@lru_cache(maxsize=2)
def epoch_batches(lengths: tuple[int, ...], batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """One epoch as batches of examples of similar length; every example stands in exactly one."""
    random = np.random.default_rng([seed, epoch])
    order = random.permutation(len(lengths))
    window = batch_size * WINDOW_BATCHES
    batches: list[list[int]] = []
    for start in range(0, len(order), window):
        chosen = sorted(order[start : start + window].tolist(), key=lambda index: lengths[index])
        batches += [chosen[begin : begin + batch_size] for begin in range(0, len(chosen), batch_size)]
    return [batches[index] for index in random.permutation(len(batches))]


def padding_fraction(lengths: Sequence[int]) -> float:
    """The share of a padded batch that is padding."""
    return 1 - sum(lengths) / (max(lengths) * len(lengths))
