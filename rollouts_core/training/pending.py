"""Metrics that stay on their device until their values are needed.

Decision: reading a number from a GPU waits until the GPU has done all its work. So an optimizer step reads once: the
metrics of all its passes and the gradient's norm.
"""

from collections.abc import Mapping, Sequence

import torch

Metrics = dict[str, float]
Numbers = Mapping[str, float | torch.Tensor]
"""Numbers by name; a tensor holds one number."""


class PendingMetrics:
    """Metrics of one pass. Fits `TrainFuture`."""

    def __init__(self, numbers: Numbers) -> None:
        self.numbers: Numbers = {
            name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in numbers.items()
        }
        self.found: Metrics | None = None

    def result(self, timeout: float | None = None) -> Metrics:
        if self.found is None:
            fetch([self], [])
        assert self.found is not None, "it was fetched"
        return self.found


def fetch(passes: Sequence[PendingMetrics], further: Sequence[torch.Tensor]) -> list[float]:
    """Copy the numbers of these passes to the host, and return the further ones, with one wait for the device."""
    open_passes = [entry for entry in passes if entry.found is None]
    asked = [value for entry in open_passes for value in entry.numbers.values() if isinstance(value, torch.Tensor)]
    asked += further
    values = torch.stack([value.double() for value in asked]).tolist() if asked else []
    came = iter(values)
    for entry in open_passes:
        entry.found = {
            name: next(came) if isinstance(value, torch.Tensor) else value for name, value in entry.numbers.items()
        }
    return list(came)
