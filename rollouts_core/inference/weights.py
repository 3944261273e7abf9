"""Weights on their way to an engine: a mapping from names to tensors, all there, or made one at a time."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class LazyWeights(Mapping[str, "torch.Tensor"]):
    """Weights that are gathered from shards each time they are asked for, so that they are never whole in one memory.

    They are those of now: ask before the next optimizer step.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], gather: "Callable[[str], torch.Tensor]") -> None:
        self.shapes = dict(shapes)
        self._gather = gather

    def __getitem__(self, name: str) -> "torch.Tensor":
        if name not in self.shapes:
            raise KeyError(name)
        return self._gather(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def shapes_of(weights: "Mapping[str, torch.Tensor]") -> dict[str, tuple[int, ...]]:
    """Shapes by name. Nothing is gathered for this."""
    if isinstance(weights, LazyWeights):
        return weights.shapes
    return {name: tuple(tensor.shape) for name, tensor in weights.items()}


def checksum_of(weights: "Mapping[str, torch.Tensor]") -> str:
    """A checksum of names, types and values, in the order of the names."""
    import torch

    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def stored(model: Any) -> "dict[str, torch.Tensor]":
    """The weights that a model's files hold, by the model's own names: each parameter once, and the saved buffers.

    Adapters are left out.
    """
    kept = model.state_dict(keep_vars=True)
    named = [*model.named_parameters(), *((name, value) for name, value in model.named_buffers() if name in kept)]
    return {name.replace(".base_layer.", "."): value for name, value in named if "lora_" not in name}
