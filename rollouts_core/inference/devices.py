"""Tensors on their way to a device.

Decision: through pinned memory and without waiting. A plain copy to a GPU waits until all that the GPU was asked to do
before is done.
"""

import torch


def to_device(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor there; itself where it is there already."""
    if device.type == "cpu" or value.device == device:
        return value.to(device)
    return (value.pin_memory() if device.type == "cuda" else value).to(device, non_blocking=True)
