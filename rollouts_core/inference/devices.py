"""Tensors on their way to a device.

Decision: copies go through pinned memory and do not wait. A plain copy to a GPU waits until the GPU has done all its
earlier work.
"""

import torch
from torch import nn


def to_device(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor there; itself where it is there already."""
    if device.type == "cpu" or value.device == device:
        return value.to(device)
    return (value.pin_memory() if device.type == "cuda" else value).to(device, non_blocking=True)


def allocate(module: nn.Module, device: torch.device | str) -> None:
    """Give a module without weights memory for them, with whatever is in it; buffers keep their values."""
    buffers = {name: value.to(device) for name, value in module.named_buffers()}
    module.to_empty(device=device)
    for name, value in module.named_buffers():
        value.copy_(buffers[name])
