"""Which examples make up which batch: a pure function of seed and step, so that resuming needs no saved position."""

from functools import lru_cache

import numpy as np


def batch_indices(examples: int, batch_size: int, seed: int, step: int) -> list[int]:
    """The examples of optimizer step `step` (from 0); epochs follow one another, each in its own order.

    The last batch of an epoch has what is left.
    """
    per_epoch = -(-examples // batch_size)
    epoch, position = divmod(step, per_epoch)
    return _order(examples, seed, epoch)[position * batch_size : (position + 1) * batch_size]


@lru_cache(maxsize=2)
def _order(examples: int, seed: int, epoch: int) -> list[int]:
    order: list[int] = np.random.default_rng([seed, epoch]).permutation(examples).tolist()
    return order
