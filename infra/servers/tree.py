"""The tree by which new weights reach machines: some get them from the trainer, the others from one another.

Decision: up to `FANOUT` machines are sent to by the trainer. Of more, each passes on to at most as many others. So what
leaves one machine does not grow with the pool, and the way to the last is as long as the logarithm of their number.
"""

from collections.abc import Sequence

FANOUT = 4


def onward(names: Sequence[str]) -> dict[str, list[str]]:
    """For each machine, the machines that it passes weights on to. The order of the names decides."""
    return {name: list(names[FANOUT * (place + 1) : FANOUT * (place + 2)]) for place, name in enumerate(names)}
