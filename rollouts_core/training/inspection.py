"""A step that went wrong, kept for who looks into it."""

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import save_file

from rollouts_core.errors import BadInput, NonFiniteGradient

StepT = TypeVar("StepT")


def keeping_nonfinite(steps: Iterator[StepT], directory: Path) -> Iterator[StepT]:
    """The same steps. When a gradient is not finite, the step's passes are written as safetensors, one file each, and
    `BadInput` says where: the same batch would do it again."""
    try:
        yield from steps
    except NonFiniteGradient as error:
        directory.mkdir(parents=True, exist_ok=True)
        for number, batch in enumerate(error.passes, 1):
            named = {entry.name: getattr(batch, entry.name) for entry in fields(batch)}  # type: ignore[arg-type]
            tensors = {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}
            save_file(tensors, directory / f"pass-{number}.safetensors")
        raise BadInput(
            f"{error}; the batch is kept in {directory}. A lower learning rate or other data may help"
        ) from error
