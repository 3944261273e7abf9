"""The tree by which new weights reach machines: some get them from the trainer, the others from one another.

Decision: the trainer sends to at most `FANOUT` machines. If there are more, each machine passes weights on to at most
as many others. So the bytes that leave one machine do not grow with the pool, and the number of hops grows with the
logarithm of the number of machines.
"""

from collections.abc import Sequence

FANOUT = 4


def onward(names: Sequence[str]) -> dict[str, list[str]]:
    """For each machine, the machines that it passes weights on to. The order of the names decides."""
    return {name: list(names[FANOUT * (place + 1) : FANOUT * (place + 2)]) for place, name in enumerate(names)}
