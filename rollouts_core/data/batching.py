"""Which examples make up which batch: a pure function of seed and step, so that resuming needs no saved position."""

from collections.abc import Sequence

from rollouts_core.data.order import epoch_order


def batch_indices(
    sizes: Sequence[int], batch_size: int, seed: int, step: int, weights: Sequence[float] = ()
) -> list[int]:
    """The examples of optimizer step `step` (from 0); epochs follow one another, each in its own order.

    `sizes` are those of the sources, one or a mixture's with `weights`. The last batch of an epoch has what is left.
    """
    per_epoch = -(-sum(sizes) // batch_size)
    epoch, position = divmod(step, per_epoch)
    order = epoch_order(sizes, weights, seed, epoch)
    batch: list[int] = order[position * batch_size : (position + 1) * batch_size].tolist()
    return batch
