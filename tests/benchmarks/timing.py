"""How the benchmarks time: two things in turn, so that both see the same machine."""

import statistics
import time
from collections.abc import Callable

REPEATS = 5


def alternately(
    one: Callable[[], object],
    other: Callable[[], object],
    before: Callable[[], object] = lambda: None,
    repeats: int = REPEATS,
) -> tuple[float, float]:
    """Median seconds of each; `before` runs ahead of each and is not timed, and the first turn does not count."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(repeats + 1):
        for function, measured in zip((one, other), times, strict=True):
            before()
            began = time.perf_counter()
            function()
            if turn:
                measured.append(time.perf_counter() - began)
    return statistics.median(times[0]), statistics.median(times[1])


def report(name: str, seconds: float, beside: str, other: float) -> None:
    print(f"\n{name} {seconds:.2f} s, {beside} {other:.2f} s, ratio {seconds / other:.2f}")
