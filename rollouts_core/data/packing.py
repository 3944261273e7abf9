"""Which sequences share a pass: best-fit decreasing, which leaves little of a pass's tokens unused."""

from bisect import bisect_left, insort
from collections.abc import Sequence


def best_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of at most `capacity`, as indices in ascending order; what is larger has a bin of its own.

    Each, from the largest down, goes to the fullest bin that still has room (Johnson 1973: at most 11/9 of the fewest
    bins possible, and one more). Equal sizes keep their order, so the result is a function of the sizes alone.
    """
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []
    """Free tokens and number of each bin, ascending."""
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        place = bisect_left(room, (sizes[index], -1))
        if place == len(room):
            bins.append([])
            free, chosen = max(capacity, sizes[index]), len(bins) - 1
        else:
            free, chosen = room.pop(place)
        bins[chosen].append(index)
        insort(room, (free - sizes[index], chosen))
    return [sorted(chosen) for chosen in bins]
