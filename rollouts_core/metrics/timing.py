"""The time of a step, in named phases, and the rest that is in none of them."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class PhaseTimer:
    """Times the phases of one step, in seconds. Phases do not nest."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self.seconds: dict[str, float] = {}
        """Seconds by phase."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    def metrics(self) -> dict[str, float]:
        """`timing_s/<phase>`, `timing_s/step` for the whole, and `timing_s/unaccounted` for the rest."""
        whole = time.perf_counter() - self._began
        named = {f"timing_s/{name}": seconds for name, seconds in self.seconds.items()}
        return {**named, "timing_s/step": whole, "timing_s/unaccounted": whole - sum(self.seconds.values())}
